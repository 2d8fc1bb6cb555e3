"""The registered code interpreter: its keys, its limits as the policy sees them, its reward."""

from __future__ import annotations

import pytest

from agentenv.base.config import read_toml
from agentenv.base.types import Message, Task, ToolCall
from agentenv.contract.env import shared_stats
from agentenv.contract.env_registry import make
from agentenv.envs.code_interpreter import python_tool, shared_sandbox
from agentenv.envs.sandbox.keys import PythonConfig
from agentenv.envs.sandbox.sandbox import Sandbox
from tests.support.warehouse import ROOT

pytestmark = pytest.mark.usefixtures("services")

ENV_ID = "agentenv/CodeInterpreter-v0"
TASK = Task("t", ENV_ID, "How much is 57 times 4837?", ("275709",))


def run(code: str) -> Message:
    return Message("assistant", "<think>.</think>", (ToolCall("python", {"code": code}),))


async def test_an_episode_uses_numpy_and_sympy() -> None:
    env = make(ENV_ID, TASK, grader={"reward": "tools"})
    prompt, info = await env.reset(seed=1)
    assert prompt == [Message("user", TASK.question)]
    assert [tool["name"] for tool in info["tools"]] == ["python"]
    code = "import numpy as np, sympy\nx = int(np.int64(57) * 4837)\nsympy.factorint(x)"
    observation, *_ = await env.step(run(code))
    assert observation[0].content == "{3: 1, 7: 1, 19: 1, 691: 1}"
    observation, *_ = await env.step(run("print(x)"))
    assert observation[0].content == "275709"
    answer = Message("assistant", r"<think>.</think><answer>\boxed{275709}</answer>")
    _, reward, terminated, _, info = await env.step(answer)
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    await env.close()


async def test_the_time_limit_of_a_call_is_a_key() -> None:
    env = make(ENV_ID, TASK, python={"timeout_s": 0.3, "preload": []})
    await env.reset(seed=1)
    observation, _, _, _, info = await env.step(run("while True: pass"))
    assert observation[0].content == "TimeoutError: stopped after 0.3 s"
    assert info["tool_calls"][0]["ok"] is False
    await env.close()


async def test_names_of_a_prelude_are_there_first_after_a_restart_and_in_forks() -> None:
    """Those of Tool-Star's executor, without an import."""
    names = ("tool_star_rl_3b", "eval_tool_star", "synthesize_tools")
    python, *others = [read_toml(ROOT / "configs" / f"{name}.toml")["python"] for name in names]
    assert [one["prelude"] for one in others] == [python["prelude"]] * 2
    env = make(ENV_ID, TASK, python={**python, "timeout_s": 3.0})
    await env.reset(seed=1)
    used = "solve(Eq(symbols('t') ** 2, math.comb(4, 1))), sympy.diff(x * y * z, x), np.int64(7)"
    for code, expected in (
        (used, "([-2, 2], y*z, np.int64(7))"), ("x = 5; import os; os._exit(1)", "The interpreter"),
        (used, "([-2, 2], y*z, np.int64(7))"), ("x = 5; x", "5"),
    ):  # fmt: skip
        observation, *_ = await env.step(run(code))
        assert expected in observation[0].content
    child = await env.fork()
    assert (await child.step(run("x, y")))[0][0].content == "(5, y)"
    assert shared_stats()["sandbox/num_live_forks"] == 1
    await child.close()
    await env.close()


async def test_episodes_with_equal_settings_share_one_sandbox() -> None:
    one = shared_sandbox(PythonConfig())
    assert isinstance(one, Sandbox)
    assert shared_sandbox(PythonConfig()) is one
    assert shared_sandbox(PythonConfig(allow_unsafe=True)) is not one
    tool = python_tool(timeout_s=3.0)
    assert (tool.sandbox, tool.timeout_s) == (one, 3.0)
