"""A failure that repeats is logged once with its place, counted, and ends the run above a share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from agentenv.base.errors import (
    CancelledRolloutError,
    CrashError,
    EngineError,
    EnvError,
    GraderError,
    OutageError,
    TooManyFailuresError,
)
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Limits, Message, Task
from agentenv.contract.plan import Independent
from agentenv.rollout.actor import Actor
from agentenv.rollout.failure_log import MAX_TEXTS, FailureLog, failure_of
from agentenv.rollout.failures import WINDOW, Failures
from tests.support.toy import CountingEnv
from tests.test_actor import make_actor, rollout

TASK = Task("t7", "me/Shop-v0", "?", ())


def failing(actor: Actor, every: int, error: Callable[[], Exception]) -> Callable[[], Any]:
    """Rollouts of one trajectory, of which one in so many fails."""
    fine, numbers, indices = actor.make_env, count(1), count()

    def make_env(task: Task) -> Any:
        if next(numbers) % every == 0:
            raise error()
        return fine(task)

    actor.make_env = make_env
    return lambda: rollout(actor, Independent(1), next(indices))


class Odd(CountingEnv):
    """Refuses each second step."""

    steps = count(1)

    async def step(self, action: Message) -> Any:
        if next(self.steps) % 2 == 0:
            raise EnvError(f"order {next(self.steps)} is closed")
        return await super().step(action)


KINDS: dict[str, Callable[[], Exception]] = {
    "EnvError": lambda: EnvError("the shop is closed"),
    "EngineError": lambda: EngineError("refused"),
    "GraderError": lambda: GraderError("no verdict"),
    "CrashError": lambda: KeyError("price"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_the_share_of_any_kind_ends_the_run(kind: str) -> None:
    rare, often = (make_actor(limits=Limits(max_failures=0)) for _ in range(2))
    one_of_6 = failing(rare, 6, KINDS[kind])
    for _ in range(WINDOW):
        one_of_6()
    assert rare.failures.log.lines()
    each = failing(often, 1, KINDS[kind])
    for _ in range(WINDOW // 4):
        each()
    with pytest.raises(ExceptionGroup) as raised:
        each()
    says = rf"51 of the last 51 rollouts failed.*max_failed_share = 0.25 of 200.*51 x {kind}: "
    assert raised.group_contains(TooManyFailuresError, match=says)


def test_kinds_are_counted_together_and_the_most_frequent_named() -> None:
    failures = Failures(0.1, strict=False)
    errors = [EnvError("a"), *[EngineError("b")] * 2, *[GraderError("c")] * 17]
    for error in errors:
        failures.add(failure_of(error, TASK))
        failures.add(None)
    with pytest.raises(TooManyFailuresError, match=r"21.*41.*18") as one:
        failures.add(failure_of(GraderError("c"), TASK))
    assert "2 x EngineError" in str(one.value)


def test_outages_and_manual_cancellations_do_not_count() -> None:
    failures = Failures(0.0, strict=True)
    for error in (OutageError("gone for 300 s"), CancelledRolloutError("by hand")):
        failures.add(failure_of(error, TASK))
    assert len(failures.log.lines()) == 2
    failures.check_share()
    with pytest.raises(TooManyFailuresError):
        failures.add(failure_of(EnvError("down"), TASK))


def test_strict_ends_only_at_the_first_bug() -> None:
    failures = Failures(1.0, strict=True)
    failures.add(None)
    failures.add(failure_of(EnvError("down"), TASK))
    with pytest.raises(TooManyFailuresError, match="task t7: CrashError"):
        failures.add(failure_of(CrashError("the tool 'x' raised KeyError"), TASK))


def test_a_retried_attempt_is_logged_but_is_not_a_failed_rollout() -> None:
    failures = Failures(0.0, strict=False)
    failures.add(failure_of(EnvError("down"), TASK), again=True)
    failures.add(None)
    failures.check_share()
    (line,) = failures.log.lines()
    assert line.startswith("1 x EnvError: down")


def test_a_short_run_is_judged_at_its_end() -> None:
    failures = Failures(0.25, strict=False)
    for _ in range(5):
        failures.add(failure_of(EnvError("closed"), TASK))
    failures.check_share()  # of five, a share means little
    for _ in range(15):
        failures.add(None)
    failures.check_share()  # a quarter is allowed
    failures.add(failure_of(EnvError("closed"), TASK))
    with pytest.raises(TooManyFailuresError, match="21 rollouts failed"):
        failures.check_share()


def shown(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        one.getMessage().partition("\n")[0]  # the rest is a traceback, for the log
        for one in caplog.records
        if one.levelno >= logging.ERROR or getattr(one, "shown", False)
    ]


def test_each_text_is_logged_once_with_its_place_and_again_with_its_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor = make_actor(limits=Limits(max_turn_retries=0, max_failures=20), make_env=Odd)
    tree: TrajectoryTree = rollout(actor, Independent(4))
    number = len(tree.failures())
    assert number > 1
    (first,) = shown(caplog)
    assert first.startswith("task t: EnvError")
    assert "(test_failures.py, line " in first
    assert 'last action: search({"query"' in first
    caplog.clear()
    actor.failures.log.report()
    (last,) = shown(caplog)
    assert f"{number} x EnvError: order " in last


def test_the_environment_is_named_if_no_user_code_raised(caplog: pytest.LogCaptureFixture) -> None:
    FailureLog().add(failure_of(EnvError("lost" + 9000 * "x"), TASK), None, "worker-3")
    (line,) = shown(caplog)
    assert len(line) < 1200
    assert [part in line for part in ("t7: EnvError: lost", "me/Shop-v0", "worker-3")] == [True] * 3


def test_texts_that_differ_in_numbers_ids_or_arguments_are_one_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = FailureLog()
    for number in range(3):
        task = Task(f"row-{'abc'[number]}", "e", "?", ())
        text = (
            f"task {task.id}: 0x7f{number}e after {number}.5 s, id 3fa85f64-5717-4562-b3fc-{number}"
        )
        log.add(failure_of(EnvError(text), task), None, "")
        crash = CrashError(f"the tool 'x', called with {{'n': 'word {task.id}'}}, raised KeyError")
        crash.said = "the tool 'x' raised KeyError"
        log.add(failure_of(crash, task), None, "")
    assert len(shown(caplog)) == 2
    assert [line.partition(" x ")[0] for line in log.lines()] == ["3", "3"]


def test_too_many_different_texts_are_counted_by_kind(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for number in range(2 * MAX_TEXTS):
        text = "".join("ghijklmnop"[int(digit)] for digit in str(number))
        log.add(failure_of(EnvError(text), TASK), None, "")
    assert len(shown(caplog)) == MAX_TEXTS + 1
    assert log.lines()[0].startswith(f"{MAX_TEXTS} x EnvError")
    caplog.clear()
    log.report()
    assert len(shown(caplog)) == 11
