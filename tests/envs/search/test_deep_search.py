"""The ARPO setting: search and Python for one question, with a bonus for both."""

from __future__ import annotations

import pytest

import agentenv
import envs
from agentenv.base.types import Message, Task, ToolCall
from agentenv.text.prompt import preset

pytestmark = pytest.mark.usefixtures("services")

TASK = Task("t", "agentenv/DeepSearch-v0", "How many points are 24 and 10?", ("34",))
ANSWER = Message("assistant", r"<think>.</think><answer>\boxed{34}</answer>")


def call(tool: str, **arguments: str) -> Message:
    return Message("assistant", f"<think>.</think><{tool}>", (ToolCall(tool, dict(arguments)),))


async def test_the_bonus_requires_both_tools() -> None:
    assert envs.__name__ == "envs"
    env = agentenv.make("agentenv/DeepSearch-v0", TASK)
    prompt, info = await env.reset(seed=1)
    assert prompt == [Message("system", preset("search+python")), Message("user", TASK.question)]
    assert [schema["name"] for schema in info["tools"]] == ["search", "python"]
    assert env.fork_mode == "replay"
    observation, *_ = await env.step(call("search", query="Super Bowl 50"))
    assert "Super Bowl" in observation[0].content
    child = await env.fork()
    observation, *_ = await env.step(call("python", code="24 + 10"))
    assert observation[0].content == "34"
    _, reward, *_ = await env.step(ANSWER)
    _, without_python, *_ = await child.step(ANSWER)
    assert (reward, without_python) == (1.1, 1.0)
    await child.close()
    await env.close()


async def test_a_page_tool_and_the_released_reward_can_be_configured() -> None:
    grader = {"compat": "reference"}
    env = agentenv.make("agentenv/DeepSearch-v0", TASK, open_page=True, grader=grader)
    _, info = await env.reset(seed=1)
    assert [schema["name"] for schema in info["tools"]] == ["search", "open_page", "python"]
    _, reward, *_ = await env.step(ANSWER)
    assert reward == 1.0
    await env.close()
