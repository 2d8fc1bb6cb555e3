"""Thousands of environments in one process: in step, restarted, and one that fails alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentenv.errors import ConfigError, EnvError
from agentenv.gym import VectorEnv
from agentenv.types import Message, Task, ToolCall
from tests.support.toy import CountingEnv
from tests.support.virtual_clock import run_virtual

TASKS = [Task(f"t{number}", "toy", f"question {number}", ("x",)) for number in range(3)]
CALL = Message("assistant", "", (ToolCall("search", {"query": "q"}),))
ANSWER = Message("assistant", "done")


async def test_two_thousand_environments_in_one_process() -> None:
    async with VectorEnv(CountingEnv, TASKS, num_envs=2000) as vector:
        observations, infos = await vector.reset(seed=1)
        assert [o[0].content for o in observations[:4]] == [
            "question 0", "question 1", "question 2", "question 0"
        ]  # fmt: skip
        assert all(info["tools"] for info in infos)
        observations, *_ = await vector.step([CALL] * 2000)
        assert {o[0].content for o in observations} == {"1:q"}
        actions = [ANSWER if place % 2 else CALL for place in range(2000)]
        _, rewards, terminated, truncated, _ = await vector.step(actions)
        assert terminated == [bool(place % 2) for place in range(2000)]
        assert set(rewards[1::2]) == {1.0}
        assert not any(truncated)
        assert CountingEnv.num_open == 2000
    assert CountingEnv.num_open == 0


async def test_an_ended_environment_starts_the_next_task() -> None:
    async with VectorEnv(CountingEnv, TASKS, num_envs=2) as vector:
        await vector.reset()
        await vector.step([ANSWER, CALL])
        observations, rewards, terminated, *_ = await vector.step([CALL, CALL])
        assert [o[0].content for o in observations] == ["question 2", "2:q"]
        assert (rewards, terminated) == ([0.0, 0.0], [False, False])


class SeededEnv(CountingEnv):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        messages, info = await super().reset()
        return messages, {**info, "seed": seed}


async def test_equal_seeds_give_equal_episodes() -> None:
    async def seeds(seed: int | None) -> list[Any]:
        async with VectorEnv(SeededEnv, TASKS, num_envs=3) as vector:
            return [info["seed"] for info in (await vector.reset(seed=seed))[1]]

    assert await seeds(7) == await seeds(7) != await seeds(8)
    assert len(set(await seeds(7))) == 3
    assert await seeds(None) == [None] * 3


class FragileEnv(CountingEnv):
    async def step(self, action: Message) -> Any:
        if self.task.id == "t1":
            raise EnvError("broken")
        if self.task.id == "t2":
            await asyncio.sleep(1000)
        return await super().step(action)


def test_one_that_fails_or_hangs_ends_alone() -> None:
    async def main() -> None:
        async with VectorEnv(FragileEnv, TASKS, num_envs=3, timeout_s=5) as vector:
            await vector.reset()
            observations, _, _, truncated, infos = await vector.step([CALL] * 3)
            assert observations[0][0].content == "1:q"
            assert truncated == [False, True, True]
            assert infos[1]["error"] == "EnvError: broken"
            assert "no answer within 5 s" in infos[2]["error"]
            observations, *_ = await vector.step([CALL] * 3)
            assert [o[0].content for o in observations] == ["2:q", "question 0", "question 1"]
        assert CountingEnv.num_open == 0

    run_virtual(main())


def test_at_most_so_many_are_at_work() -> None:
    async def main() -> float:
        def make(task: Task) -> CountingEnv:
            return SleepingEnv(task)

        async with VectorEnv(make, TASKS, num_envs=12, max_concurrency=4) as vector:
            await vector.reset()
            start = asyncio.get_running_loop().time()
            await vector.step([CALL] * 12)
            return asyncio.get_running_loop().time() - start

    assert run_virtual(main()) == pytest.approx(3.0)


class SleepingEnv(CountingEnv):
    async def step(self, action: Message) -> Any:
        await asyncio.sleep(1)
        return await super().step(action)


async def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one env and one task"):
        VectorEnv(CountingEnv, [], num_envs=1)
    async with VectorEnv(CountingEnv, TASKS, num_envs=2) as vector:
        await vector.reset()
        with pytest.raises(ConfigError, match="1 actions for 2 envs"):
            await vector.step([CALL])
