"""Rollouts that a host grows are those of its actor, and nothing of them is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.actor import Actor
from agentenv.errors import DataError, EngineDeadError
from agentenv.hosts import Host, HostedActor, Link, linked
from agentenv.types import Limits
from tests.support.toy import CountingEnv
from tests.support.virtual_clock import run_virtual
from tests.test_actor import TASK, AlwaysFork, make_actor

T = TypeVar("T")
PLAN = AlwaysFork(group_size=4)


def hosted(actor: Actor, work: Callable[[HostedActor], Awaitable[T]]) -> T:
    """What `work` gives with a host of the actor, which ends behind it."""

    async def main() -> T:
        ours, theirs = linked()
        rollouts = HostedActor(ours)
        receiving = asyncio.create_task(rollouts.run())
        serving = asyncio.create_task(Host(actor, PLAN, theirs).serve())
        try:
            return await work(rollouts)
        finally:
            rollouts.close()
            await serving
            theirs.close()
            await receiving

    CountingEnv.num_open = 0
    found = run_virtual(main())
    assert CountingEnv.num_open == 0
    return found


def test_trees_of_a_host_are_those_of_its_actor() -> None:
    async def three(rollouts: HostedActor) -> list[object]:
        return await asyncio.gather(*(rollouts.rollout(TASK, index=i) for i in range(3)))

    expected = [run_virtual(make_actor().rollout(TASK, PLAN, index=i)) for i in range(3)]
    assert hosted(make_actor(), three) == expected
    assert len(list(expected[0].trajectories())) == 4


def test_a_rollout_that_is_cancelled_is_dropped_at_the_host() -> None:
    async def drop(rollouts: HostedActor) -> int:
        dropped = asyncio.create_task(rollouts.rollout(TASK, index=0))
        await asyncio.sleep(1.0)
        is_open = CountingEnv.num_open
        dropped.cancel()
        await asyncio.sleep(1.0)
        assert dropped.cancelled()
        assert CountingEnv.num_open == 0
        return is_open

    assert hosted(make_actor(latency_s=100.0), drop) == 1


def test_what_a_rollout_raises_is_raised_at_the_controller() -> None:
    async def ask(rollouts: HostedActor) -> None:
        with pytest.raises(DataError, match=r"its prompt has 10 tokens"):
            await rollouts.rollout(TASK, index=0)

    hosted(make_actor(limits=Limits(max_prompt_tokens=3)), ask)


def test_a_host_that_is_gone_ends_its_rollouts() -> None:
    async def main() -> None:
        ours, theirs = linked()
        rollouts = HostedActor(ours)
        waiting = asyncio.create_task(rollouts.rollout(TASK, index=0))
        receiving = asyncio.create_task(rollouts.run())
        await asyncio.sleep(0)
        theirs.close()
        with pytest.raises(EngineDeadError, match="host of the rollouts is gone"):
            await waiting
        await receiving

    run_virtual(main())


class Doubling:
    """An end of a link that carries some frames twice, as one does that sends again what was not
    confirmed."""

    def __init__(self, link: Link, rng: Random) -> None:
        self._link, self._rng = link, rng

    def send(self, frame: bytes) -> None:
        for _ in range(self._rng.choice([1, 1, 2])):
            self._link.send(frame)

    async def receive(self) -> bytes:
        return await self._link.receive()

    def close(self) -> None:
        self._link.close()


@settings(max_examples=settings.default.max_examples // 4)  # type: ignore[attr-defined]
@given(
    seed=st.integers(0, 10**6),
    asked=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.4, 2.0, 99.0])), max_size=6
    ),
)
def test_frames_that_come_twice_and_trees_that_are_asked_for_again(
    seed: int, asked: list[tuple[int, float]]
) -> None:
    """Each tree is asked for, cancelled after some seconds, and at last asked for to its end."""
    rng = Random(seed)

    async def main() -> dict[int, object]:
        ours, theirs = (Doubling(link, rng) for link in linked())
        rollouts = HostedActor(ours)
        receiving = asyncio.create_task(rollouts.run())
        serving = asyncio.create_task(Host(make_actor(latency_s=1.0), PLAN, theirs).serve())
        for index, seconds in asked:
            dropped = asyncio.create_task(rollouts.rollout(TASK, index=index))
            await asyncio.sleep(seconds)
            dropped.cancel()
        indices = sorted({index for index, _ in asked})
        trees = await asyncio.gather(*(rollouts.rollout(TASK, index=i) for i in indices))
        rollouts.close()
        await serving
        theirs.close()
        await receiving
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return dict(zip(indices, trees, strict=True))

    CountingEnv.num_open = 0
    for index, tree in run_virtual(main()).items():
        assert tree == run_virtual(make_actor(latency_s=1.0).rollout(TASK, PLAN, index=index))
    assert CountingEnv.num_open == 0
