"""The conformance kit passes an env of one's own and finds those that break a rule."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from typing import Any, ClassVar

import pytest

from agentenv.adapters import testing
from agentenv.adapters.testing import check_tool_env
from agentenv.base.types import Message, Task
from agentenv.contract.env import EnvWrapper, StepResult
from agentenv.contract.function_tool import argument_schema, tool
from agentenv.contract.tool_env import ToolEnv
from tests.support.counting_tools import ANSWER, TASK, Counter, LastMessage, call


@tool
def shout(text: str) -> str:
    """Louder."""
    return text.upper()


class ShoutingEnv(ToolEnv):
    def __init__(self, task: Task) -> None:
        super().__init__(task, tools=[shout, Counter()], grader=LastMessage())


async def test_a_small_custom_env_conforms() -> None:
    actions = [call("shout", text="hi"), call(), call("shout"), call("no"), call(), ANSWER]
    await check_tool_env(ShoutingEnv, TASK, actions)


class Echoing(EnvWrapper):
    """Repeats every answer of the env inside."""

    async def step(self, action: Message) -> StepResult:
        messages, *rest = await super().step(action)
        return ([*messages, *messages], *rest)  # type: ignore[return-value]


async def test_a_wrapped_env_conforms_and_its_forks_are_wrapped_too() -> None:
    await check_tool_env(lambda task: Echoing(ShoutingEnv(task)), TASK, [call(), call(), ANSWER])
    env = Echoing(ShoutingEnv(TASK))
    await env.reset(seed=1)
    fork = await env.fork()
    for one in (env, fork):
        messages, *_ = await one.step(call("shout", text="hi"))
        assert [message.content for message in messages] == ["HI", "HI"]
        await one.close()
    assert fork.env is not env.env


class TallyEnv(ShoutingEnv):
    """Answers a call with a number; the tally is where a mistake lies."""

    def tally(self) -> int:
        raise NotImplementedError

    async def step(self, action: Message) -> Any:
        if not action.tool_calls:
            return await super().step(action)
        await asyncio.sleep(0)
        return [Message("tool", str(self.tally()))], 0.0, False, False, {}


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
    """Its second episode continues the count of the first one."""

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
    files: ClassVar[list[int]] = []

    async def step(self, action: Message) -> Any:
        self._open_states("step")
        self.files.append(os.dup(1))
        await asyncio.sleep(0)
        return await super().step(action)


class WordyEnv(ShoutingEnv):
    async def step(self, action: Message) -> Any:
        return "observation", *(await super().step(action))[1:]


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (RandomEnv, "two episodes with the same seed differ"),
        (GlobalRandomEnv, "changed the global random generator"),
        (StickyEnv, "(?s)an episode and the next one of the same env .* let `reset` replace"),
        (CrowdedEnv, "differ at step 0, the tool"),
        (StubbornEnv, "went on: a deadline could not stop it"),
        (EndlessEnv, "the last action does not end the episode"),
        (EagerEnv, "action 0 already ends the episode"),
        (LeakyEnv, "file descriptor .* left"),
        (WordyEnv, "the environment's step must return .*, got"),
    ],
)
async def test_the_kit_finds_envs_that_do_not_conform(
    env: type[ToolEnv], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.adapters.testing.SETTLE_S", 0.2)
    with pytest.raises(AssertionError, match=says):
        await check_tool_env(env, TASK, [call(), call(), ANSWER])
    while LeakyEnv.files:
        os.close(LeakyEnv.files.pop())


def test_schema_of_arguments_is_plain_json() -> None:
    assert "$ref" not in str(argument_schema(shout._arguments))


class Sleepy(EnvWrapper):
    """Its steps hold up the event loop."""

    async def step(self, action: Message) -> Any:
        time.sleep(0.1)  # noqa: ASYNC251 - the mistake
        return await super().step(action)


async def test_a_step_that_blocks_the_loop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "HELD_S", 0.05)
    with pytest.raises(AssertionError, match="step 0 blocked"):
        await check_tool_env(lambda task: Sleepy(ShoutingEnv(task)), TASK, [call(), ANSWER])
