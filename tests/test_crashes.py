"""A bug of a user's tool, environment or grader costs a rollout."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from agentenv.base.errors import ConfigError
from agentenv.base.types import Limits, Task
from agentenv.contract.env import Grade
from agentenv.contract.env_registry import make
from agentenv.contract.function_tool import tool
from agentenv.contract.plan import Independent
from agentenv.contract.tool_env import ToolEnv
from tests.support.toy import CountingEnv
from tests.test_actor import make_actor, rollout

MANY = Limits(max_failures=2, max_failed_share=1.0)


def boom(*_: Any) -> Any:
    raise KeyError("price")


def leave(*_: Any) -> Any:
    sys.exit("no such file")


def cancel(*_: Any) -> Any:
    raise asyncio.CancelledError


def nothing(*_: Any) -> Any:
    return None


def a_number(*_: Any) -> Any:
    return 3


def well(*_: Any) -> Any:
    return "fine"


class Grading:
    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    async def grade(self, *_: Any) -> Any:
        found = self.act()
        return Grade(1.0, True) if found == "fine" else found


def tools_env(act: Callable[[], Any], grading: Callable[[], Any]) -> Callable[[Task], ToolEnv]:
    @tool
    def search(query: str) -> str:
        """Search."""
        return act()  # type: ignore[no-any-return]

    return lambda task: ToolEnv(task, tools=[search], grader=Grading(grading))


class Broken(CountingEnv):
    """One method calls `act`."""

    method, act = "step", staticmethod(boom)

    async def reset(self, **keys: Any) -> Any:
        return self.act() if self.method == "reset" else await super().reset(**keys)

    async def step(self, action: Any) -> Any:
        return self.act() if self.method == "step" else await super().step(action)

    async def close(self) -> None:
        await super().close()
        if self.method == "close":
            self.act()


def broken(method: str, act: Callable[..., Any]) -> Callable[[Task], Any]:
    return lambda task: type("One", (Broken,), {"method": method, "act": staticmethod(act)})(task)


CASES: dict[str, tuple[Callable[[Task], Any], str]] = {
    "tool": (tools_env(boom, well), "the tool 'search', called with {'query': .*KeyError: 'price'"),
    "tool-exits": (tools_env(leave, well), "the tool 'search', .*SystemExit: no such file"),
    "tool-cancels": (tools_env(cancel, well), "the tool 'search', .*CancelledError"),
    "tool-none": (
        tools_env(nothing, well),
        r"search. .test_crashes.py, line \d+. returned None; expected the text",
    ),
    "tool-number": (tools_env(a_number, well), "returned a value of type int; expected the text"),
    "grader": (tools_env(well, boom), r"the grader Grading raised KeyError.*test_crashes.py, line"),
    "grade": (
        tools_env(well, nothing),
        "the grader Grading must return a Grade with finite numbers, got None",
    ),
    "bare": (
        tools_env(well, a_number),
        "the grader Grading must return a Grade with finite numbers, got 3",
    ),
    "making": (boom, "making the environment raised KeyError"),
    "reset": (broken("reset", boom), "the environment's reset raised KeyError"),
    "step": (broken("step", boom), "the environment's step raised KeyError"),
    "result": (broken("step", nothing), "the environment's step must return .*, got None"),
}


class Ungraded(ToolEnv):
    def __init__(self, task: Task) -> None:
        super().__init__(task, tools=[])


def test_an_environment_without_a_grader_is_refused_with_the_remedy() -> None:
    says = "Ungraded has neither a grader nor a `judge`; pass one to ToolEnv, .* or override"
    with pytest.raises(ConfigError, match=says):
        make("tests.test_crashes:Ungraded", Task("t", "e", "q", ("7",)))


def test_non_text_results_are_one_failure_in_the_file_of_the_tool(
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor, numbers = make_actor(limits=MANY), count()
    actor.make_env = tools_env(lambda: {"price": f"{'ab' * next(numbers)}"}, well)
    rollout(actor, Independent(3))
    (line,) = actor.failures.log.lines()
    assert "value of type" in line
    assert "agentenv/contract/function_tool.py" not in line


@pytest.mark.parametrize("case", CASES)
def test_a_bug_fails_its_rollouts_and_is_logged_once(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_env, text = CASES[case]
    actor = make_actor(limits=MANY, make_env=make_env)
    tree = rollout(actor, Independent(2))
    assert (number := len(tree.failures())) == 2 + MANY.max_failures
    assert [line.partition(" x ")[0] for line in actor.failures.log.lines()] == [str(number)]
    assert {str(leaf.error).partition(":")[0] for leaf in tree.failures()} == {"CrashError"}
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    (record,) = told
    assert record.exc_info is not None
    assert f"task {tree.task.id}: CrashError: " in record.getMessage()
    assert re.search(text, record.getMessage()), record.getMessage()


def test_an_env_that_cannot_be_closed_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    actor = make_actor(limits=MANY, make_env=broken("close", boom))
    tree = rollout(actor, Independent(2))
    assert not tree.failures()
    assert "closing an env" in caplog.text
    assert actor.envs.count == 0
