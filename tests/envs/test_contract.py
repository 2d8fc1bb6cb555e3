"""Every registered environment keeps the contract: an env without a case here fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import envs
from agentenv.adapters.testing import check_tool_env
from agentenv.base.types import Message, Task, ToolCall
from agentenv.contract.env_registry import env_ids, make
from tests.envs.sandbox.test_program_env import keys

pytestmark = pytest.mark.usefixtures("services")


class Case(NamedTuple):
    """An episode of an env: keyword arguments, given a directory to write to, and actions."""

    kwargs: Callable[[Path], dict[str, Any]]
    actions: list[Message]


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", f"<think>.</think><{name}>", (ToolCall(name, arguments),))


def answer(text: str) -> Message:
    return Message("assistant", rf"<think>.</think><answer>\boxed{{{text}}}</answer>")


def knowledge_base(directory: Path) -> dict[str, Any]:
    row = {"id": "price", "title": "Zorvex", "text": "The price of Zorvex Labs is 4837."}
    (directory / "kb.jsonl").write_text(json.dumps(row))
    return {"corpus": str(directory / "kb.jsonl"), "python_timeout_s": 20.0}


QUESTION, ANSWER = "How much do 57 shares of Zorvex Labs cost?", answer("275709")
PYTHON = [
    call("python", code="import random; x = [random.random()]; x"),
    call("python", code="x.append(1 / 0)"),
    call("python", code="x.append(4837 * 57); x"),
]
SEARCH = call("search", query="Which team won Super Bowl 50?")
PAGE = call("open_page", url="corpus:xquad-0", query="points")
PRIVATE = call("open_page", url="http://127.0.0.1/admin")
LAKE = {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"]}
CASES = {
    "agentenv/CodeInterpreter-v0": Case(
        lambda directory: {"python": {"preload": (), "timeout_s": 20.0}}, [*PYTHON, ANSWER]
    ),
    "agentenv/DeepSearch-v0": Case(
        lambda directory: {"python": {"timeout_s": 20.0}}, [SEARCH, *PYTHON, ANSWER]
    ),
    "agentenv/WebSearch-v0": Case(lambda directory: {}, [SEARCH, PAGE, PRIVATE, ANSWER]),
    "agentenv/Quickstart-v0": Case(
        knowledge_base,
        [call("search", query="price of Zorvex Labs"), *PYTHON, call("bing", query="?"), ANSWER],
    ),
    "agentenv/Gymnasium-v0": Case(
        lambda directory: {**LAKE, "options": {"max_episode_steps": 3}},
        [call("step", action="right"), call("step", action="down"), call("step", action="left")],
    ),
    "agentenv/QAGrader-v0": Case(lambda directory: {}, [ANSWER]),
    "agentenv/Program-v0": Case(
        lambda directory: {"program": keys()}, [call("search", query="q"), ANSWER]
    ),
}


def ours() -> list[str]:
    """The environments of this project; those of other packages have their own cases in
    test_verifiers.py and test_openenv.py."""
    ids = set(env_ids()) - {"agentenv/Verifiers-v0", "agentenv/OpenEnv-v0"}
    return [env_id for env_id in sorted(ids) if env_id.startswith("agentenv/")]


@pytest.mark.parametrize("env_id", ours())
async def test_an_env_keeps_the_contract(env_id: str, tmp_path: Path) -> None:
    case = CASES[env_id]
    kwargs = case.kwargs(tmp_path)
    task = Task("t", env_id, QUESTION, ("275709",))
    await check_tool_env(lambda one: make(env_id, one, **kwargs), task, case.actions)


async def test_the_quick_start_rewards_the_right_answer(tmp_path: Path) -> None:
    env_id = "agentenv/Quickstart-v0"
    case = CASES[env_id]
    task = Task("t", env_id, QUESTION, ("275709",))
    env = make(env_id, task, **case.kwargs(tmp_path))
    prompt, info = await env.reset(seed=1)
    assert prompt == [Message("user", task.question)]
    assert [tool["name"] for tool in info["tools"]] == ["search", "python"]
    assert env.fork_mode == "replay"
    observation, *_ = await env.step(case.actions[0])
    assert observation[0].content == "The price of Zorvex Labs is 4837."
    observation, *_ = await env.step(call("python", code="4837 * 57"))
    assert observation[0].content == "275709"
    _, reward, terminated, _, info = await env.step(answer("275,709"))
    assert (reward, terminated, info["success"]) == (1.1, True, True)
    await env.close()


def test_importing_envs_imports_no_environment() -> None:
    assert envs.__file__ is not None
    text = Path(envs.__file__).read_text()
    assert [line for line in text.splitlines() if "import" in line.split()] == [
        "import tomllib",
        "from agentenv.base.installation import CLONE",
        "from agentenv.contract.env_registry import ENTRY_POINT_GROUP, register",
    ]
