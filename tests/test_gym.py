"""Environments through the real Gymnasium: its checker, its wrappers, no warning."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

import agentenv.adapters.gym
from agentenv import register
from agentenv.base.errors import ConfigError, EnvError
from agentenv.base.types import Task
from agentenv.contract import env_registry as registry
from tests.support.toy import CountingEnv

TASKS = [Task(f"t{n}", "toy/Counting-v0", f"question {n}", ("x",)) for n in range(5)]
ENV_ID = "toy/Counting-v0"


class PatientEnv(CountingEnv):
    """Closing twice is allowed."""

    async def close(self) -> None:
        if not self.closed:
            await super().close()


register(ENV_ID, "tests.test_gym:PatientEnv")


@pytest.fixture
def env() -> Any:
    env = gymnasium.make(ENV_ID, tasks=TASKS)
    yield env
    env.close()
    assert CountingEnv.num_open == 0
    assert agentenv.adapters.gym.LoopThread._current is None


def test_gymnasiums_checker_finds_nothing(env: Any) -> None:
    check_env(env.unwrapped)


def test_an_episode(env: Any) -> None:
    prompt, info = env.reset(seed=3, options={"task": 2})
    assert prompt == "question 2"
    assert info["task"] == "t2"
    shown, reward, terminated, truncated, info = env.step("<think>.</think><search> q </search>")
    assert shown == " <result>\n1:q\n</result>"
    assert (reward, terminated, truncated) == (0.0, False, False)
    shown, reward, terminated, *_ = env.step("<answer>x</answer>")
    assert (shown, reward, terminated) == ("", 1.0, True)


def test_the_seed_draws_the_task(env: Any) -> None:
    drawn = [env.reset(seed=seed)[0] for seed in (1, 2, 3, 4, 5, 1, 2, 3, 4, 5)]
    assert drawn[:5] == drawn[5:]
    assert len(set(drawn)) > 1


def test_gymnasiums_wrappers_work(env: Any) -> None:
    wrapped = RecordEpisodeStatistics(TimeLimit(env, max_episode_steps=2))
    wrapped.reset(seed=1)
    wrapped.step("<search>a</search>")
    *_, terminated, truncated, info = wrapped.step("<search>b</search>")
    assert (terminated, truncated) == (False, True)
    assert (info["episode"]["l"], info["episode"]["r"]) == (2, 0.0)
    wrapped.reset(seed=1)
    wrapped.step("<search>a</search>")
    *_, info = wrapped.step("done")
    assert (info["episode"]["l"], info["episode"]["r"]) == (2, 1.0)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_limit_of_steps_holds_in_vector_environments(mode: str) -> None:
    own = {"vectorization_mode": mode, "max_episode_steps": 2, "tasks": TASKS}
    if mode == "async":
        with pytest.raises(ValueError, match="shared_memory=False"):
            gymnasium.make_vec(ENV_ID, num_envs=2, **own)
        own["vector_kwargs"] = {"shared_memory": False}
    many = gymnasium.make_vec(ENV_ID, num_envs=2, **own)
    many.reset(seed=1)
    ends = [list(many.step(["<search>a</search>"] * 2)[3]) for _ in range(2)]
    assert ends == [[False, False], [True, True]]
    many.close()


def test_a_deep_copy_is_a_fork(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env.reset(seed=1)
    env.step("<search>a</search>")
    fork = copy.deepcopy(env)
    assert env.step("<search>b</search>")[0] == fork.step("<search>b</search>")[0]
    assert env.step("<search>c</search>")[0] == " <result>\n3:c\n</result>"
    assert fork.step("<search>d</search>")[0] == " <result>\n3:d\n</result>"
    assert env.unwrapped.np_random.random() == fork.unwrapped.np_random.random()
    fork.close()
    monkeypatch.setattr(env.unwrapped._env, "fork_mode", "none")
    with pytest.raises(EnvError, match=f"{ENV_ID}.*cannot fork"):
        copy.deepcopy(env)


def test_any_characters_are_in_the_space_up_to_its_length() -> None:
    env = gymnasium.make(ENV_ID, tasks=TASKS, max_chars=20, render_mode="ansi")
    assert env.observation_space.contains("\N{CJK UNIFIED IDEOGRAPH-4E2D}\n<|x|>")
    assert not env.observation_space.contains("x" * 21)
    env.reset(seed=0)
    shown, *_ = env.step("<search>" + "abcde" * 4 + "</search>")
    assert len(shown) == 20
    assert " ... " in shown
    assert str(env.render()).startswith("question ")
    env.close()


def test_an_env_that_hangs_times_out() -> None:
    env = gymnasium.make(ENV_ID, tasks=TASKS, latency_s=1e6, timeout_s=0.05)
    with pytest.raises(EnvError, match=r"answer within 0\.05"):
        env.reset(seed=0)
    env.close()
    CountingEnv.num_open = 0


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({}, "pass either tasks"),
        ({"tasks": []}, "pass either tasks"),
        ({"tasks": TASKS, "data": "x.jsonl"}, "pass either tasks"),
    ],
)
def test_an_env_needs_tasks(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        gymnasium.make(ENV_ID, **kwargs)


def test_an_unknown_task_is_refused(env: Any) -> None:
    with pytest.raises(ConfigError, match="5, got 9"):
        env.reset(options={"task": 9})


def test_tasks_can_be_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"question": "Why?", "answer": "x"}))
    env = gymnasium.make(ENV_ID, data=str(tmp_path / "data.jsonl"))
    assert env.reset()[0] == "Why?"
    env.close()


def test_ids_registered_later_are_known_to_gymnasium_too() -> None:
    assert "toy/Later-v0" not in gymnasium.registry
    register("toy/Later-v0", "tests.test_gym:PatientEnv")
    assert gymnasium.make("toy/Later-v0", tasks=TASKS) is not None
    del registry._registry["toy/Later-v0"]
    del gymnasium.registry["toy/Later-v0"]


def test_an_id_that_gymnasium_rejects_is_registered_only_with_us() -> None:
    register("toy/many/parts", "tests.test_gym:PatientEnv")
    assert "toy/many/parts" in registry.env_ids()
    assert "toy/many/parts" not in gymnasium.registry
    del registry._registry["toy/many/parts"]


@pytest.mark.parametrize("make", [gymnasium.make, gymnasium.make_vec])
def test_unknown_keywords_are_refused_when_an_environment_is_created(make: Any) -> None:
    with pytest.raises(ConfigError, match=f"{ENV_ID}.*colors"):
        make(ENV_ID, tasks=TASKS, colors="red")


@pytest.mark.parametrize("action", [3, None, b"done", ["done"], {"a": 1}, 0.5, ("done",)])
def test_a_non_text_action_is_refused_without_a_step(env: Any, action: Any) -> None:
    env.reset(seed=1)
    with pytest.raises(ConfigError, match="the policy writes"):
        env.step(action)
    assert env.step("<search>a</search>")[0] == " <result>\n1:a\n</result>"


def test_texts_of_numpy_are_actions() -> None:
    many = gymnasium.make_vec(ENV_ID, num_envs=2, tasks=TASKS)
    many.reset(seed=1)
    shown, _, terminated, *_ = many.step(np.array(["<answer>x</answer>", "<search>a</search>"]))
    assert (shown[1], list(terminated)) == (" <result>\n1:a\n</result>", [True, False])
    many.close()
