"""Tools by configuration: which ones an episode has, and how often, how long, how many at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.keys.rl import EnvConfig
from agentenv.assembly.parts.environments import EnvMaker, EnvSettings
from agentenv.base.config import build_config
from agentenv.base.deadline import WorkClock, working
from agentenv.base.errors import ConfigError, EnvError, InfraError
from agentenv.base.types import Limits, Message, Task, ToolCall, ToolResult
from agentenv.contract.env import Grade, close_shared
from agentenv.contract.env_registry import register
from agentenv.contract.function_tool import tool
from agentenv.contract.tool_config import ToolConfig, load_tools
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import StatelessTool, ToolLimits
from agentenv.text.prompt import PromptConfig, preset
from tests.support.begun import begun
from tests.support.virtual_clock import on_virtual_clock

TASK = Task("t", "test/Tools-v0", "how many?", ("2",))


@tool
def echo(text: str) -> str:
    """The same text."""
    return text


@tool
def shout(text: str) -> str:
    """Louder."""
    return text.upper()


class Slow(StatelessTool):
    """Takes a while; returns the number of its calls in flight. Broken, it always fails."""

    name = "slow"
    description = ""
    schema: dict[str, Any] = {"type": "object", "properties": {}}  # noqa: RUF012

    def __init__(self, latency_s: float = 1.0, broken: bool = False) -> None:
        self.latency_s = latency_s
        self.broken = broken
        self.num_running = 0
        self.num_calls = 0

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        self.num_running += 1
        self.num_calls += 1
        try:
            most = self.num_running
            await asyncio.sleep(self.latency_s)
            if self.broken:
                raise InfraError("no connection")
            return ToolResult(str(most))
        finally:
            self.num_running -= 1


class Anything:
    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        return Grade(float(len(written)), True)


class SomeToolsEnv(ToolEnv):
    def __init__(self, task: Task) -> None:
        super().__init__(task, tools=[echo, shout], grader=Anything(), prompt="The class's own.")


register("test/Tools-v0", "tests.test_tool_limits:SomeToolsEnv")


pytestmark = pytest.mark.usefixtures("services")


def call(*names: str) -> Message:
    return Message("assistant", "", tuple(ToolCall(name, {"text": "a"}) for name in names))


async def texts(env: ToolEnv, *actions: Message) -> list[str]:
    shown = []
    for action in actions:
        observation, *_ = await env.step(action)
        shown += [message.content for message in observation]
    return shown


async def test_a_tool_beyond_its_limit_replies_that_all_calls_are_used() -> None:
    async with begun(
        ToolEnv(TASK, [echo, shout], Anything(), tool_limits={"echo": ToolLimits(max_calls=1)})
    ) as env:
        first, refused, other = await texts(env, call("echo"), call("echo"), call("shout"))
        assert (first, other) == ("a", "A")
        assert "all 1 calls" in refused
        child = await env.fork()
        assert "all 1 calls" in (await texts(child, call("echo")))[0]
        await child.close()
        await env.reset()
        assert await texts(env, call("echo")) == ["a"]


async def test_the_total_counts_every_call() -> None:
    async with begun(ToolEnv(TASK, [echo], Anything(), max_tool_calls=2)) as env:
        shown = await texts(env, call("bing"), call("echo", "echo"))
        assert shown[1] == "a"
        assert "all 2 calls" in shown[2]


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"max_tool_calls": 2}, "max_tool_calls"),
        ({"tool_limits": {"echo": ToolLimits(max_calls=2)}}, "max_calls of echo"),
    ],
)
async def test_on_limit_end_ends_the_episode_with_a_grade(
    options: dict[str, Any], limit: str
) -> None:
    async with begun(ToolEnv(TASK, [echo], Anything(), on_limit="end", **options)) as env:
        await env.step(call("echo"))
        observation, reward, terminated, truncated, info = await env.step(call("echo", "echo"))
        assert (observation, reward, terminated, truncated) == ([], 2.0, False, True)
        assert info["limit"] == limit


@on_virtual_clock
async def test_the_concurrency_of_a_tool_is_bounded() -> None:
    slow = Slow()
    limits = {"slow": ToolLimits(max_concurrency=3, timeout_s=1.5, num_retries=0)}
    envs = [ToolEnv(TASK, [slow], Anything(), tool_limits=limits) for _ in range(10)]
    for env in envs:
        await env.reset()
    shown = await asyncio.gather(*(texts(env, call("slow")) for env in envs))
    for env in envs:
        await env.close()
    await close_shared()
    shown = [text for (text,) in shown]
    assert (len(shown), max(shown)) == (10, "3")


@on_virtual_clock
async def test_a_record_separates_the_wait_for_a_slot_from_the_work() -> None:
    async def seconds(env: ToolEnv) -> tuple[float, float]:
        with working(WorkClock()):  # as in a rollout
            *_, info = await env.step(call("slow"))
        (record,) = info["tool_calls"]
        return record["duration_s"], record.get("waited_s", 0.0)

    limits = {"slow": ToolLimits(max_concurrency=1)}
    envs = [ToolEnv(TASK, [Slow()], Anything(), tool_limits=limits) for _ in range(3)]
    for env in envs:
        await env.reset()
    found = await asyncio.gather(*map(seconds, envs))
    for env in envs:
        await env.close()
    await close_shared()
    assert found == [(1.0, 0.0), (2.0, 1.0), (3.0, 2.0)]


@on_virtual_clock
async def test_each_tool_has_its_own_deadline_and_retries() -> None:
    slow = Slow(latency_s=5)
    limits = {"slow": ToolLimits(timeout_s=2, num_retries=0)}
    async with begun(ToolEnv(TASK, [slow], Anything(), tool_limits=limits)) as env:
        with pytest.raises(EnvError, match=r"'slow'.*1"):
            await env.step(call("slow"))
        assert slow.num_calls == 1


@on_virtual_clock
async def test_a_tool_that_is_not_required_may_be_unavailable() -> None:
    limits = {"slow": ToolLimits(required=False, num_retries=1)}
    async with begun(ToolEnv(TASK, [Slow(broken=True)], Anything(), tool_limits=limits)) as env:
        *_, info = await env.step(call("slow"))
        assert [one["ok"] for one in info["tool_calls"]] == [False]


def maker(toml: dict[str, Any], limits: Limits, prompt: PromptConfig) -> ToolEnv:
    raw = {"id": "test/Tools-v0", "module": "tests.test_tool_limits", **toml}
    config = build_config(EnvConfig, raw, "test")
    env = EnvMaker(EnvSettings(env=config, limits=limits, prompt=prompt), Path)(TASK)
    assert isinstance(env, ToolEnv)
    return env


async def test_a_configuration_lists_the_tools_and_their_limits() -> None:
    tools = [
        {"name": "shout", "max_calls": 1},
        {"name": "tests.test_tool_limits:Slow", "kwargs": {"latency_s": 0.0}, "timeout_s": 3},
    ]
    limits = Limits(max_tool_calls=3, on_limit="result")
    env = maker({"tools": tools}, limits, PromptConfig(template="direct"))
    prompt, info = await env.reset()
    assert [schema["name"] for schema in info["tools"]] == ["shout", "slow"]
    assert prompt[0].content == preset("direct")
    shown = await texts(env, call("shout", "shout"), call("slow", "slow"))
    assert shown[::2] == ["A", "1"]
    assert ["1 calls" in shown[1], "3 calls" in shown[3]] == [True, True]
    await env.close()


async def test_without_keys_an_environment_has_the_defaults_of_its_class() -> None:
    env = maker({}, Limits(), PromptConfig())
    prompt, info = await env.reset()
    assert [schema["name"] for schema in info["tools"]] == ["echo", "shout"]
    assert prompt[0] == Message("system", "The class's own.")
    assert (env.max_tool_calls, env.on_limit) == (None, "end")
    await env.close()


def test_an_optional_tool_that_is_unavailable_is_omitted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_tools([ToolConfig(name="nowhere:tool", required=False)]) == []
    assert "nowhere:tool is skipped" in caplog.text


async def test_limits_of_an_unknown_tool_are_refused() -> None:
    with pytest.raises(ConfigError, match="tool_limits"):
        ToolEnv(TASK, [echo], Anything(), tool_limits={"ehco": ToolLimits()})
