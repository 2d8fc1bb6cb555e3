"""Forks and closes of ToolEnv: independent, whole, and nothing left open."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.base.errors import EnvError, InfraError
from agentenv.contract.env import ForkMode
from agentenv.contract.tool_env import ToolEnv
from tests.support.begun import begun
from tests.support.counting_tools import ANSWER, Counter, call, make


async def test_a_fork_is_independent() -> None:
    counter = Counter()
    async with begun(make(counter)) as env:
        await env.step(call())
        child = await env.fork()
        assert (await child.step(call(by=10)))[0][0].content == "11"
        assert (await env.step(call()))[0][0].content == "2"
        assert (await child.step(ANSWER))[4]["parts"] == {"calls": 2.0}
        await child.close()
        assert len(counter.open) == 1
    assert not counter.open


@pytest.mark.parametrize(
    ("modes", "weakest"),
    [
        ([], "pure"),
        (["pure"], "pure"),
        (["pure", "replay"], "replay"),
        (["replay", "snapshot", "pure"], "snapshot"),
        (["replay", "none", "pure"], "none"),
    ],
)
def test_fork_mode_is_the_weakest(modes: list[ForkMode], weakest: str) -> None:
    tools = [Counter(name=f"tool{number}") for number in range(len(modes))]
    for one, mode in zip(tools, modes, strict=True):
        one.fork_mode = mode
    assert make(*tools).fork_mode == weakest


async def test_a_failed_fork_closes_its_partial_copies() -> None:
    first, second = Counter(name="first"), Counter(name="second")
    second.fork_fault = InfraError("full")
    async with begun(make(first, second)) as env:
        with pytest.raises(EnvError, match="fork failed: full"):
            await env.fork()
        assert (len(first.open), len(second.open)) == (1, 1)


@pytest.mark.parametrize("num_steps", range(1, 9))
async def test_a_cancellation_at_any_point_leaves_nothing_open(num_steps: int) -> None:
    """A fork, a step or a close, cancelled after so many turns of the loop."""
    tools = [Counter(), Counter(name="second"), Counter(name="third")]

    async def use(env: ToolEnv) -> None:
        child = await env.fork()
        try:
            await child.step(call())
        finally:
            await child.close()

    env = make(*tools)
    await env.reset()
    for action in (use(env), env.step(call()), env.close()):
        task = asyncio.ensure_future(action)
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
    await env.close()
    assert [one.open for one in tools] == [[], [], []]


async def test_a_tool_that_fails_to_close_does_not_keep_the_others_open() -> None:
    class Bad(Counter):
        async def close(self, state: list[int]) -> None:
            raise InfraError("stuck")

    good = Counter()
    env = make(Bad(name="bad"), good)
    await env.reset()
    with pytest.raises(EnvError, match="bad: stuck"):
        await env.close()
    assert not good.open
