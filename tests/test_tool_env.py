"""ToolEnv: calls, retries, grading, forks, and states closed exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from agentenv.env import ForkMode
from agentenv.errors import ConfigError, EnvError, InfraError, ToolError
from agentenv.grader import Grade
from agentenv.testing import check_tool_env
from agentenv.tool import argument_schema, tool
from agentenv.tool_env import ToolEnv
from agentenv.types import Limit, Message, Task, ToolCall, ToolResult
from tests.support.virtual_clock import run_virtual

TASK = Task("t", "test", "how many?", ("2",))
ANSWER = Message("assistant", "2")


def call(name: str = "counter", **arguments: Any) -> Message:
    return Message("assistant", f"<{name}>", (ToolCall(name, arguments),))


class LastMessage:
    """Right when the last message is the answer; remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[Message] = []

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        self.seen = list(written)
        right = written[-1].content == task.answers[0]
        return Grade(float(right), right, {"calls": float(sum(calls.values()))}, "looked")


class Counter:
    """Counts the calls of an episode. `faults` are raised by the first calls, one each."""

    name = "counter"
    description = "Counts."
    schema: ClassVar = {"type": "object", "properties": {"by": {"type": "integer"}}}
    fork_mode: ForkMode = "snapshot"

    def __init__(self, name: str = "counter", latency_s: float = 0.0) -> None:
        self.name = name
        self.latency_s = latency_s
        self.faults: list[BaseException] = []
        self.fork_fault: Exception | None = None
        self.open: list[list[int]] = []

    def start(self, seed: int | None) -> list[int]:
        state = [0]
        self.open.append(state)
        return state

    async def call(self, arguments: dict[str, Any], state: list[int]) -> ToolResult:
        await asyncio.sleep(self.latency_s)
        if self.faults:
            raise self.faults.pop(0)
        state[0] += arguments.get("by", 1)
        return ToolResult(str(state[0]), {"seen": state[0]})

    async def fork(self, state: list[int]) -> list[int]:
        await asyncio.sleep(self.latency_s)
        if self.fork_fault:
            raise self.fork_fault
        copy = list(state)
        self.open.append(copy)
        return copy

    async def close(self, state: list[int]) -> None:
        await asyncio.sleep(self.latency_s)
        (place,) = [i for i, other in enumerate(self.open) if other is state]  # once only
        del self.open[place]


def make(*tools: Any, **options: Any) -> ToolEnv:
    return ToolEnv(TASK, tools, LastMessage(), **options)


async def test_an_episode() -> None:
    counter = Counter()
    env = make(counter, prompt="Count.")
    messages, info = await env.reset(seed=1)
    assert messages == [Message("system", "Count."), Message("user", "how many?")]
    assert info["tools"] == [
        {"name": "counter", "description": "Counts.", "parameters": Counter.schema}
    ]
    observation, reward, terminated, truncated, info = await env.step(call(by=2))
    assert observation == [Message("tool", "2", name="counter")]
    assert (reward, terminated, truncated) == (0.0, False, False)
    (record,) = info["tool_calls"]
    assert record.pop("duration_s") >= 0
    assert record == {
        "name": "counter", "arguments": {"by": 2}, "ok": True, "error": None, "info": {"seen": 2}
    }  # fmt: skip
    observation, reward, terminated, truncated, info = await env.step(ANSWER)
    assert (observation, reward, terminated, truncated) == ([], 1.0, True, False)
    assert info == {
        "tool_calls": [], "success": True, "parts": {"calls": 1.0}, "reason": "looked"
    }  # fmt: skip
    await env.close()
    assert not counter.open


async def test_several_calls_run_in_order() -> None:
    env = make(Counter(), Counter("other"))
    await env.reset()
    calls = (ToolCall("counter", {}), ToolCall("other", {"by": 5}), ToolCall("counter", {}))
    observation, *_ = await env.step(Message("assistant", "", calls))
    assert [(message.name, message.content) for message in observation] == [
        ("counter", "1"), ("other", "5"), ("counter", "2")
    ]  # fmt: skip
    await env.close()


async def test_the_policy_reads_tool_errors_and_they_do_not_count() -> None:
    counter = Counter()
    counter.faults = [ToolError("count what?")]
    env = make(counter)
    await env.reset()
    observation, *_, info = await env.step(call())
    assert observation[0].content == "count what?"
    assert (info["tool_calls"][0]["ok"], info["tool_calls"][0]["error"]) == (False, "count what?")
    observation, *_ = await env.step(call("bing"))
    assert observation[0].content == "There is no tool 'bing'. Known tools: counter."
    *_, info = await env.step(ANSWER)
    assert info["parts"] == {"calls": 0.0}
    await env.close()


def test_infrastructure_is_retried_and_never_shown() -> None:
    async def main() -> None:
        counter = Counter()
        counter.faults = [InfraError("gone"), InfraError("gone")]
        env = make(counter)
        await env.reset(seed=4)
        loop = asyncio.get_running_loop()
        start = loop.time()
        observation, *_ = await env.step(call())
        assert observation[0].content == "1"
        assert 0.15 <= loop.time() - start <= 0.45  # 0.1 and 0.2 s, jittered
        counter.faults = [InfraError(f"gone {i}") for i in range(3)]
        with pytest.raises(EnvError, match="counter failed 3 times, the last time: gone 2"):
            await env.step(call())
        await env.close()

    run_virtual(main())


def test_a_tool_that_hangs_is_stopped() -> None:
    async def main() -> None:
        counter = Counter(latency_s=1000)
        env = make(counter, tool_timeout_s=2, num_retries=1)
        await env.reset()
        start = asyncio.get_running_loop().time()
        with pytest.raises(EnvError, match="no result within 2 s"):
            await env.step(call())
        assert asyncio.get_running_loop().time() - start < 5
        with pytest.raises(EnvError, match="not closed within"):
            await env.close()

    run_virtual(main())


async def test_a_bug_in_a_tool_is_not_swallowed() -> None:
    counter = Counter()
    counter.faults = [ZeroDivisionError()]
    env = make(counter)
    await env.reset()
    with pytest.raises(ZeroDivisionError):
        await env.step(call())
    await env.close()


async def test_finish_grades_what_is_there() -> None:
    env = make(Counter())
    await env.reset()
    await env.step(call())
    reward, info = await env.finish(Limit.TURN_TOKENS, ANSWER)
    assert (reward, info["success"]) == (1.0, True)
    grader = env.grader
    assert isinstance(grader, LastMessage)
    assert grader.seen == [call(), ANSWER]
    await env.close()


async def test_a_fork_is_independent() -> None:
    counter = Counter()
    env = make(counter)
    await env.reset()
    await env.step(call())
    child = await env.fork()
    assert (await child.step(call(by=10)))[0][0].content == "11"
    assert (await env.step(call()))[0][0].content == "2"
    assert (await child.step(ANSWER))[4]["parts"] == {"calls": 2.0}
    await child.close()
    assert len(counter.open) == 1
    await env.close()
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
    tools = [Counter(f"tool{number}") for number in range(len(modes))]
    for one, mode in zip(tools, modes, strict=True):
        one.fork_mode = mode
    assert make(*tools).fork_mode == weakest


async def test_a_failed_fork_closes_what_it_made() -> None:
    first, second = Counter("first"), Counter("second")
    second.fork_fault = InfraError("full")
    env = make(first, second)
    await env.reset()
    with pytest.raises(EnvError, match="fork failed: full"):
        await env.fork()
    assert (len(first.open), len(second.open)) == (1, 1)
    await env.close()


@pytest.mark.parametrize("num_steps", range(1, 9))
async def test_cancelled_anywhere_nothing_stays_open(num_steps: int) -> None:
    """A fork, a step or a close, cancelled after so many turns of the loop."""
    tools = [Counter("counter"), Counter("second"), Counter("third")]

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


async def test_closing_one_tool_badly_closes_the_others() -> None:
    class Bad(Counter):
        async def close(self, state: list[int]) -> None:
            raise InfraError("stuck")

    good = Counter()
    env = make(Bad("bad"), good)
    await env.reset()
    with pytest.raises(EnvError, match="bad: stuck"):
        await env.close()
    assert not good.open


async def test_an_env_is_used_between_reset_and_close() -> None:
    env = make(Counter())
    with pytest.raises(EnvError, match="step before reset"):
        await env.step(call())
    await env.close()
    await env.reset()
    await env.close()
    with pytest.raises(EnvError, match="fork before reset or after close"):
        await env.fork()


async def test_a_second_reset_starts_afresh() -> None:
    counter = Counter()
    env = make(counter)
    await env.reset()
    await env.step(call())
    await env.reset()
    assert (await env.step(call()))[0][0].content == "1"
    assert len(counter.open) == 1
    await env.close()


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="share a name"):
        make(Counter(), Counter())


async def test_the_prompt_may_be_a_function() -> None:
    env = make(prompt=lambda task: [Message("user", f"{task.id}: {task.question}")])
    assert (await env.reset())[0] == [Message("user", "t: how many?")]


@tool
def shout(text: str) -> str:
    """Louder."""
    return text.upper()


class ShoutingEnv(ToolEnv):
    def __init__(self, task: Task) -> None:
        super().__init__(task, tools=[shout, Counter()], grader=LastMessage())


async def test_an_env_of_ones_own_is_tiny_and_conforms() -> None:
    actions = [call("shout", text="hi"), call(), call("shout"), call("no"), call(), ANSWER]
    await check_tool_env(ShoutingEnv, TASK, actions)


class TallyEnv(ShoutingEnv):
    """Answers a call with a number; the tally is where a mistake lies."""

    def tally(self) -> int:
        raise NotImplementedError

    async def step(self, action: Message) -> Any:
        if not action.tool_calls:
            return await super().step(action)
        await asyncio.sleep(0)
        return [Message("tool", str(self.tally()))], 0.0, False, False, {}


class SharingEnv(TallyEnv):
    """Its forks count in the same list as their parent."""

    async def reset(self, **options: Any) -> Any:
        self.counts = [0]
        return await super().reset(**options)

    def tally(self) -> int:
        self.counts[0] += 1
        return self.counts[0]


class RandomEnv(TallyEnv):
    num_made = 0

    def tally(self) -> int:
        RandomEnv.num_made += 1
        return RandomEnv.num_made


class GlobalRandomEnv(TallyEnv):
    def tally(self) -> int:
        random.seed(3)
        return random.randint(0, 9)


class StickyEnv(TallyEnv):
    """Its second episode goes on counting where the first one ended."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.count = 0

    def tally(self) -> int:
        self.count += 1
        return self.count


class CrowdedEnv(TallyEnv):
    """Episodes at the same time read each other's number."""

    alive: ClassVar[set[int]] = set()

    async def reset(self, **options: Any) -> Any:
        self.alive.add(id(self))
        await asyncio.sleep(0)
        return await super().reset(**options)

    async def close(self) -> None:
        self.alive.discard(id(self))
        await super().close()

    def tally(self) -> int:
        return len(self.alive)


class StubbornEnv(ShoutingEnv):
    """Swallows the cancellation by which a deadline ends a step."""

    async def step(self, action: Message) -> Any:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        return await super().step(action)


class EndlessEnv(ShoutingEnv):
    async def step(self, action: Message) -> Any:
        return [], 0.0, False, False, {}


class EagerEnv(ShoutingEnv):
    async def step(self, action: Message) -> Any:
        return [], 0.0, True, False, {}


class LeakyEnv(ShoutingEnv):
    tasks: ClassVar[list[asyncio.Task[None]]] = []

    async def step(self, action: Message) -> Any:
        self._open_states("step")
        self.tasks.append(asyncio.ensure_future(asyncio.sleep(60)))
        await asyncio.sleep(0)
        return await super().step(action)


class WordyEnv(ShoutingEnv):
    async def step(self, action: Message) -> Any:
        return "observation", *(await super().step(action))[1:]


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (SharingEnv, "after its fork at 0 steps"),
        (RandomEnv, "two episodes with one seed differ"),
        (GlobalRandomEnv, "changed the state of the global random generator"),
        (StickyEnv, "an episode and the next one of the same env"),
        (CrowdedEnv, "an episode alone and one of several at the same time"),
        (StubbornEnv, "went on: no deadline could end it"),
        (EndlessEnv, "the last action does not end the episode"),
        (EagerEnv, "action 0 already ends the episode"),
        (LeakyEnv, "asyncio tasks left"),
        (WordyEnv, "not a list"),
    ],
)
async def test_the_kit_finds_envs_that_do_not_conform(
    env: type[ToolEnv], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.testing.SETTLE_S", 0.2)
    with pytest.raises(AssertionError, match=says):
        await check_tool_env(env, TASK, [call(), call(), ANSWER])
    for task in LeakyEnv.tasks:
        task.cancel()
    LeakyEnv.tasks.clear()


def test_schema_of_arguments_is_plain_json() -> None:
    assert "$ref" not in str(argument_schema(shout._arguments))
