"""The replay queue: start order, an exact staleness bound, and nothing lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from statistics import fmean
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.base.errors import EnvError
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Task
from agentenv.rollout.queue import ReplayQueue
from tests.support.virtual_clock import on_virtual_clock, run_virtual

TASK = Task("t", "toy", "q", ("a",))


class Ran(NamedTuple):
    """Of a loop: indices and staleness of trees by step, and how long starts were held back."""

    seconds: float
    steps: list[list[int]]
    staleness: list[list[int]]
    early_s: float
    refused: list[int]

    @property
    def means(self) -> list[float]:
        return [fmean(step) for step in self.staleness]


async def run_loop(
    queue: ReplayQueue,
    num_steps: int,
    grow: Callable[[int], Awaitable[None]],
    learner_s: Callable[[int], float],
    refuse: Callable[[int], bool] = lambda index: False,
) -> Ran:
    """A feeder, trees that `grow`, and a learner that takes `learner_s` for each step."""
    version, early_s = 0, 0.0
    refused: list[int] = []
    steps: list[list[int]] = []
    staleness: list[list[int]] = []

    async def rollout(index: int) -> TrajectoryTree:
        tree = TrajectoryTree(TASK, index=index, policy_version=version)
        await grow(index)
        return tree

    async def feed(group: asyncio.TaskGroup) -> None:
        index = 0
        while True:
            await queue.reserve()
            queue.put(group.create_task(rollout(index)))
            index += 1

    def keep(tree: TrajectoryTree) -> bool:
        if refuse(tree.index):
            refused.append(tree.index)
            return False
        return True

    async with asyncio.TaskGroup() as group:
        feeder = group.create_task(feed(group))
        for step in range(num_steps):
            trees = await queue.get(keep)
            staleness.append([version - tree.policy_version for tree in trees])
            steps.append([tree.index for tree in trees])
            await asyncio.sleep(learner_s(step))
            version += 1
            queue.release(len(trees))
            early_s += queue.flow.take()["flow/producer_early_s"]
        feeder.cancel()
        for rest in queue.drain():
            rest.cancel()
    seconds = asyncio.get_running_loop().time()
    return Ran(seconds, steps, staleness, early_s, refused)


async def fill(queue: ReplayQueue, *seconds: float) -> None:
    """With rollouts that take so long."""

    async def rollout(index: int, seconds: float) -> TrajectoryTree:
        await asyncio.sleep(seconds)
        return TrajectoryTree(TASK, index=index)

    for index, one in enumerate(seconds):
        await queue.reserve()
        queue.put(asyncio.ensure_future(rollout(index, one)))


def heavy_tailed(queue: ReplayQueue, num_steps: int, rng: Random, share: float = 0.0) -> Ran:
    """Rollouts of heavy-tailed times; a share of them is refused."""
    work = run_loop(
        queue,
        num_steps,
        lambda index: asyncio.sleep(rng.paretovariate(1.1)),
        lambda step: rng.expovariate(1.0),
        lambda index: Random(f"{index}").random() < share,
    )
    return run_virtual(work)


@given(
    groups=st.integers(1, 5),
    bound=st.integers(0, 4),
    seed=st.integers(0, 10**6),
    refuse=st.sampled_from([0.0, 0.3]),
)
def test_staleness_never_exceeds_its_bound_and_order_is_that_of_starting(
    groups: int, bound: int, seed: int, refuse: float
) -> None:
    queue = ReplayQueue(groups, bound)
    _, steps, staleness, _, refused = heavy_tailed(queue, 12, Random(seed), refuse)
    assert max(map(max, staleness)) <= bound
    trained = [index for step in steps for index in step]
    assert sorted(trained + refused) == list(range(len(trained) + len(refused)))
    assert trained == sorted(trained)
    assert queue.num_reserved == 0


def test_an_asynchronous_run_uses_its_whole_staleness_bound() -> None:
    assert max(map(max, heavy_tailed(ReplayQueue(4, 3), 30, Random(1)).staleness)) == 3


@on_virtual_clock
async def test_a_cancelled_get_requeues_its_trees() -> None:
    queue = ReplayQueue(2, 0)
    await fill(queue, 0.0, 100.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.get(), 5)
    assert [tree.index for tree in await queue.get()] == [0, 1]


@on_virtual_clock
async def test_get_requeues_its_trees_when_the_queue_finishes() -> None:
    queue = ReplayQueue(3, 0)

    def keep(tree: TrajectoryTree) -> bool:
        if tree.index == 2:
            raise EnvError("nothing is trained")
        return tree.index > 0

    await fill(queue, 0.0, 0.0, 0.0)
    with pytest.raises(EnvError):
        await queue.get(keep)
    queue.finish()
    assert [tree.index for tree in await queue.get()] == [1, 2], "the first was refused"


@on_virtual_clock
async def test_a_finished_queue_delivers_the_remaining_trees_and_then_nothing() -> None:
    queue = ReplayQueue(2, 1)
    await fill(queue, 0.0, 0.0, 0.0)
    queue.finish()
    assert [len(await queue.get()) for _ in range(3)] == [2, 1, 0]


@on_virtual_clock
async def test_a_bug_in_a_rollout_reaches_the_learner() -> None:
    queue = ReplayQueue(1, 0)

    async def rollout() -> TrajectoryTree:
        raise ZeroDivisionError

    await queue.reserve()
    queue.put(asyncio.ensure_future(rollout()))
    with pytest.raises(ZeroDivisionError):
        await queue.get()


@on_virtual_clock
async def test_waits_between_feeder_and_learner_are_measured() -> None:
    """Trees end after 2, 1 and 7 s in a queue of two slots; the learner takes both at 5 s."""
    queue = ReplayQueue(2, 0)

    async def feed() -> None:
        await fill(queue, 2.0, 1.0, 7.0)
        queue.finish()

    feeding = asyncio.ensure_future(feed())
    await asyncio.sleep(5)
    await queue.get()
    queue.release(2)
    await feeding
    figures = queue.flow.take()
    assert figures == {
        "flow/producer_blocked_s": 5.0,
        "flow/producer_early_s": 0.0,
        "flow/age_s": (3.0 + 4.0) / 2,
        "flow/age_max_s": 4.0,
    }
    await queue.get()
    assert queue.flow.take() == {
        "flow/producer_blocked_s": 0.0,
        "flow/producer_early_s": 0.0,
        "flow/age_s": 0.0,
        "flow/age_max_s": 0.0,
    }
