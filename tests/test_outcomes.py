"""An environment's outcomes that a rollout refuses are refused by every earlier stage, with one
text."""

from __future__ import annotations

import json
from math import nan
from pathlib import Path
from typing import Any

import pytest

from agentenv import Message, Task, ToolEnv, demonstrate, register, tool
from agentenv.adapters.testing import check_tool_env
from agentenv.assembly.checks.start_checks import try_turn
from agentenv.base.errors import ConfigError, CrashError, DataError
from agentenv.base.types import Limits
from agentenv.contract.env import check_finish, check_observation, check_reset, check_step
from agentenv.contract.plan import Independent
from agentenv.envs.grading.reward import ExactMatch
from agentenv.text.renderer import TagRenderer
from agentenv.training.supervised.data import load_demonstrations
from tests.support.toy import CharTokenizer
from tests.test_actor import make_actor, rollout

TASK = Task("t", "me/Talk-v0", "What does it cost?", ("7",))


@tool
def price(item: str) -> str:
    """Price."""
    return "7"


class TalkEnv(ToolEnv):
    """Replies with `said` to any turn without a call or an answer."""

    said: Any = Message("user", "red")

    def __init__(self, task: Task) -> None:
        super().__init__(task, tools=[price], grader=ExactMatch())
        self.is_over = True

    async def reset(self, **keys: Any) -> Any:
        self.is_over = False
        return await super().reset(**keys)

    async def close(self) -> None:
        self.is_over = True
        await super().close()

    async def step(self, action: Message) -> Any:
        if self.is_over or action.tool_calls or "<answer>" in action.content:
            found = await super().step(action)
            self.is_over = found[2] or self.is_over
            return found
        return [self.said], 0.0, False, False, {}


class SystemEnv(TalkEnv):
    said = Message("system", "red")


class PlainEnv(TalkEnv):
    said = "red"


ACTIONS = ["Which color?", "<price>red</price>", "<answer>7</answer>"]
TEXTS = {
    SystemEnv: "an observation consists of tool results or user messages, not 'system'",
    PlainEnv: "the environment's step must return (messages, reward, "
    "terminated, truncated, info), got ",
}
BAD = pytest.mark.parametrize("env", TEXTS)


def solve(task: Task, results: Any) -> str:
    return ACTIONS[len(results)]


async def refusals(env: type[TalkEnv]) -> dict[str, str]:
    found = {}
    with pytest.raises(AssertionError) as kit:
        await check_tool_env(env, TASK, ACTIONS)
    found["kit"] = str(kit.value)
    with pytest.raises(ConfigError) as dry:
        await try_turn(env, TASK)
    found["dry run"] = str(dry.value).removeprefix("me/Talk-v0, task t: ")
    return found


@BAD
async def test_the_conformance_kit_and_a_dry_run_refuse_an_invalid_outcome(
    env: type[TalkEnv],
) -> None:
    for stage, text in (await refusals(env)).items():
        assert text.startswith(TEXTS[env]), stage


@BAD
def test_demonstrations_refuse_an_invalid_outcome(env: type[TalkEnv]) -> None:
    with pytest.raises(CrashError) as raised:
        demonstrate(env, [TASK], solve)
    assert str(raised.value).startswith(TEXTS[env])


@BAD
def test_a_rollout_with_an_invalid_outcome_fails_with_the_same_text(env: type[TalkEnv]) -> None:
    actor = make_actor(lambda *_: "Which color?", limits=Limits(max_failures=0), make_env=env)
    (leaf,) = rollout(actor, Independent(1)).failures()
    assert str(leaf.error).startswith(f"CrashError: {TEXTS[env]}")


def test_a_cold_start_refuses_dialogues_that_no_rollout_can_produce(tmp_path: Path) -> None:
    roles = ["user", "assistant", "system", "assistant"]
    row = {"messages": [{"role": role, "content": "x"} for role in roles]}
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError) as raised:
        load_demonstrations(path, TagRenderer(CharTokenizer()), [])
    assert str(raised.value).startswith(f"{path}, row 1: ")


async def test_an_exception_of_the_probe_or_an_unreached_outcome_is_not_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Strict(TalkEnv):
        async def step(self, action: Message) -> Any:
            raise KeyError("no call")

    assert await try_turn(Strict, TASK) == []
    assert await try_turn(TalkEnv, TASK) == [TalkEnv.said]


async def test_an_env_that_only_runs_tools_is_not_probed() -> None:
    def make(task: Task) -> ToolEnv:
        class Grading:
            async def grade(self, *_: Any) -> Any:
                raise AssertionError("a judge would be asked")

        return ToolEnv(task, tools=[price], grader=Grading())

    assert await try_turn(make, TASK) == []


def test_observations_hold_results_and_users() -> None:
    check_observation([Message("tool", "7"), Message("user", "red")])
    with pytest.raises(CrashError, match="'system'"):
        check_observation([Message("system", "7")])


@pytest.mark.parametrize("reward", [nan, float("inf"), None, "1"])
def test_a_reward_is_a_finite_number(reward: Any) -> None:
    with pytest.raises(CrashError, match=r"step must.*finite"):
        check_step(([], reward, False, False, {}))
    with pytest.raises(CrashError, match=r"finish must.*finite"):
        check_finish((reward, {}))


def test_messages_may_be_any_kind_of_sequence() -> None:
    message = Message("tool", "7")
    assert check_step(((message,), 1, 0, 1, {})) == ([message], 1.0, False, True, {})  # type: ignore[arg-type]
    assert check_reset(((message,), {})) == ([message], {})  # type: ignore[arg-type]


register("outcomes/Talk-v0", "tests.test_outcomes:SystemEnv")
