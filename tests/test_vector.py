"""Thousands of environments in one process, as one Gymnasium vector env."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics

import agentenv.adapters.gym
from agentenv import register
from agentenv.base.errors import ConfigError, EnvError
from agentenv.base.types import Message
from tests.support.toy import CountingEnv
from tests.test_gym import ENV_ID, TASKS

CALL = "<search>q</search>"
ANSWER = "done"


@pytest.fixture(autouse=True)
def _no_env_left_open() -> Iterator[None]:
    CountingEnv.num_open = 0
    yield
    assert CountingEnv.num_open == 0
    assert agentenv.adapters.gym.LoopThread._current is None


def make(num_envs: int, env_id: str = ENV_ID, **kwargs: Any) -> Any:
    return gymnasium.make_vec(env_id, num_envs=num_envs, **{"tasks": TASKS, **kwargs})


def test_our_vector_env_is_a_gymnasium_vector_env() -> None:
    vector = make(3)
    assert isinstance(vector, VectorEnv)
    assert type(vector) is agentenv.adapters.gym.VectorEnv
    assert vector.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert (vector.num_envs, vector.spec.id) == (3, ENV_ID)
    observations, infos = vector.reset(seed=1)
    assert vector.observation_space.contains(observations)
    assert vector.single_observation_space.contains(observations[0])
    assert vector.action_space.contains((CALL, ANSWER, "\N{CJK UNIFIED IDEOGRAPH-4E2D}"))
    assert infos["_task"].tolist() == [True] * 3
    step = vector.step(vector.action_space.sample())
    for array, dtype in zip(step[1:4], (np.float64, np.bool_, np.bool_), strict=True):
        assert (array.shape, array.dtype) == ((3,), dtype)
    vector.close()
    vector.close()
    assert vector.closed


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_results_equal_those_of_the_vector_envs_of_gymnasium(mode: str) -> None:
    """The same episodes for one seed, through an end and the reset that follows it; also of
    processes forked while the event loop of others runs in a thread of this one."""
    ours = make(2)
    ours.reset()
    own = {"shared_memory": False} if mode == "async" else {}
    theirs = make(2, vectorization_mode=mode, vector_kwargs=own)
    for seed in (5, [1, None]):
        (shown, infos), (expected, expected_infos) = ours.reset(seed=seed), theirs.reset(seed=seed)
        if seed == 5:
            assert shown == expected
            assert infos["task"].tolist() == expected_infos["task"].tolist()
        assert shown[0] == expected[0]
    ours.reset(seed=7)
    theirs.reset(seed=7)
    for actions in [(CALL, CALL), (ANSWER, CALL), (CALL, ANSWER), (CALL, "")]:
        *found, infos = ours.step(actions)
        *expected, expected_infos = theirs.step(actions)
        for one, other in zip(found, expected, strict=True):
            assert list(one) == list(other)
        assert infos.keys() == expected_infos.keys()
    theirs.close()
    ours.close()


def test_two_thousand_environments_in_one_process() -> None:
    vector = make(2000)
    observations, _ = vector.reset(seed=1)
    assert set(observations) == {task.question for task in TASKS}
    observations, *_ = vector.step([CALL] * 2000)
    assert set(observations) == {" <result>\n1:q\n</result>"}
    actions = [ANSWER if place % 2 else CALL for place in range(2000)]
    _, rewards, terminated, truncated, _ = vector.step(actions)
    assert terminated.tolist() == [bool(place % 2) for place in range(2000)]
    assert set(rewards[1::2]) == {1.0}
    assert not truncated.any()
    assert CountingEnv.num_open == 2000
    vector.close()


def test_an_ended_environment_is_reset_by_the_next_step() -> None:
    vector = make(2)
    vector.reset(seed=1)
    vector.step([ANSWER, CALL])
    observations, rewards, terminated, _, infos = vector.step([CALL, CALL])
    assert observations[0].startswith("question ")
    assert observations[1] == " <result>\n2:q\n</result>"
    assert infos["_task"].tolist() == [True, False]
    assert (rewards.tolist(), terminated.tolist()) == ([0.0, 0.0], [False, False])
    vector.close()


def test_a_reset_mask_resets_only_its_environments() -> None:
    vector = make(2, render_mode="ansi")
    vector.reset(seed=1)
    vector.step([CALL, CALL])
    observations, infos = vector.reset(options={"task": 3, "reset_mask": np.array([True, False])})
    assert observations == ("question 3", " <result>\n1:q\n</result>")
    assert infos["task"].tolist() == ["t3", None]
    assert [text.count("<search>") for text in vector.render()] == [0, 1]
    vector.close()


def test_gymnasiums_vector_wrappers_work() -> None:
    vector = DictInfoToList(RecordEpisodeStatistics(make(2)))
    vector.reset(seed=1)
    vector.step([CALL, CALL])
    *_, infos = vector.step([ANSWER, CALL])
    assert (infos[0]["episode"]["l"], infos[0]["episode"]["r"]) == (2, 1.0)
    assert "episode" not in infos[1]
    vector.close()


class FragileEnv(CountingEnv):
    async def step(self, action: Message) -> Any:
        if self.task.id == "t1":
            raise EnvError("broken")
        if self.task.id == "t2":
            await asyncio.sleep(1000)
        return await super().step(action)


register("toy/Fragile-v0", "tests.test_vector:FragileEnv")


def test_only_the_environment_that_fails_or_hangs_ends() -> None:
    vector = make(3, "toy/Fragile-v0", timeout_s=0.3)
    for place in range(3):
        mask = np.arange(3) == place
        vector.reset(options={"task": place, "reset_mask": mask})
    observations, _, _, truncated, infos = vector.step([CALL] * 3)
    assert observations[0] == " <result>\n1:q\n</result>"
    assert truncated.tolist() == [False, True, True]
    assert infos["error"][1] == "EnvError: broken"
    assert "no answer within 0.3 s" in infos["error"][2]
    observations, *_ = vector.step([CALL] * 3)
    assert [text.startswith("question") for text in observations] == [False, True, True]
    vector.close()


class BusyEnv(CountingEnv):
    num_busy = 0
    most_busy = 0

    async def step(self, action: Message) -> Any:
        BusyEnv.num_busy += 1
        BusyEnv.most_busy = max(BusyEnv.most_busy, BusyEnv.num_busy)
        await asyncio.sleep(0.01)
        BusyEnv.num_busy -= 1
        return await super().step(action)


register("toy/Busy-v0", "tests.test_vector:BusyEnv")


def test_the_concurrency_of_environments_is_bounded() -> None:
    vector = make(12, "toy/Busy-v0", max_concurrency=4)
    vector.reset()
    vector.step([CALL] * 12)
    vector.close()
    assert BusyEnv.most_busy == 4


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_envs must be at least 1, not 0"):
        make(0)
    vector = make(2)
    vector.reset()
    with pytest.raises(ConfigError, match="1 actions for 2 envs"):
        vector.step([CALL])
    with pytest.raises(ConfigError, match="3 seeds for 2 envs"):
        vector.reset(seed=[1, 2, 3])
    vector.close()
