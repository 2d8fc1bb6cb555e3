"""Shipped environments through `gymnasium.make`: the checker, without a warning."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import agentenv.gym
import envs
from agentenv.types import Task

TASK = Task("t", "", "How much is 24 and 10?", ("34",))


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("agentenv/QAGrader-v0", {"grader": {"kind": "exact"}}),
        ("agentenv/DeepSearch-v0", {"python": {"timeout_s": 20.0}}),
    ],
)
def test_gymnasiums_checker_finds_nothing(env_id: str, kwargs: dict[str, Any]) -> None:
    assert envs.__name__ in agentenv.env.spec(env_id).entry_point
    env = gymnasium.make(env_id, tasks=[TASK], **kwargs)
    check_env(env.unwrapped)
    env.close()


def test_an_episode_with_tools_through_gymnasium() -> None:
    env = gymnasium.make("agentenv/DeepSearch-v0", tasks=[TASK], python={"timeout_s": 20.0})
    prompt, info = env.reset(seed=1)
    assert str(prompt).endswith(TASK.question)
    assert [tool["name"] for tool in info["tools"]] == ["search", "python"]
    shown, *_ = env.step("<think>.</think><python>24 + 10</python>")
    assert shown == " <result>\n34\n</result>"
    _, reward, terminated, *_ = env.step(r"<think>.</think><answer>\boxed{34}</answer>")
    assert (reward, terminated) == (1.0, True)
    env.close()
