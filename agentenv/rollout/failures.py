"""Failures of rollouts, which are logged and counted (`failure_log.py`): too many end the run.

    failures.add(None)                                 when a rollout succeeds
    failures.add(failure_of(error, task, action))      when it fails
    failures.log.report()                              at the end: each message with its count

An occasional failure only loses a rollout. The same message on every fourth rollout is a bug: then
training and metrics cover only the others, and the policy may learn to select them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from agentenv.base.errors import TooManyFailuresError
from agentenv.base.types import MALFORMED_CALL, UNKNOWN_TOOL, Info
from agentenv.rollout.failure_log import MAX_TEXT, VARIES, Failure, FailureLog, bounded

WINDOW = 200  # rollouts for the share of failures
LEAST = 20  # minimum number of rollouts for a meaningful share
NUM_NAMED = 3  # messages in the error that ends a run


class ToolFaults(NamedTuple):
    """The calls of one tool: their number, the number of failures, and the number with the most
    frequent error message (numbers in it ignored), of which `text` is the first."""

    num_calls: int
    num_failed: int
    num_same: int
    text: str

    @property
    def is_total(self) -> bool:
        """Whether every call failed, with one message."""
        return self.num_same == self.num_calls

    def named(self, tool: str) -> str:
        count = "all" if self.is_total else f"{self.num_same} of"
        return f"{count} {self.num_calls} calls of the tool {tool!r} failed with one error: {self}"

    def __str__(self) -> str:
        return bounded(self.text, MAX_TEXT)


def faults_of(calls: Iterable[Info]) -> dict[str, ToolFaults]:
    """The faults by tool, from the records of `ToolEnv.step`. Calls beyond a limit and calls of
    unknown tools are not counted."""
    num_calls: Counter[str] = Counter()
    texts: dict[str, Counter[str]] = {}
    firsts: dict[tuple[str, str], str] = {}
    for call in calls:
        name = str(call["name"])
        if name in (UNKNOWN_TOOL, MALFORMED_CALL) or "limit" in (call.get("info") or ()):
            continue
        num_calls[name] += 1
        if not call.get("ok", True):
            text = str(call.get("error"))
            same = VARIES.sub("#", text)
            texts.setdefault(name, Counter())[same] += 1
            firsts.setdefault((name, same), text)
    found = {name: ToolFaults(count, 0, 0, "") for name, count in num_calls.items()}
    for name, counts in texts.items():
        ((same, count),) = counts.most_common(1)
        found[name] = ToolFaults(num_calls[name], counts.total(), count, firsts[name, same])
    return found


class Failures:
    """The failures of an actor's rollouts. Raises TooManyFailuresError above `max_share` of the
    last WINDOW ended ones, and with `strict` at the first bug."""

    def __init__(self, max_share: float, *, strict: bool) -> None:
        self.log = FailureLog()
        self._max_share = max_share
        self._strict = strict
        self._recent: deque[str | None] = deque(maxlen=WINDOW)  # causes of counted failures

    def add(
        self,
        failure: Failure | None,
        error: BaseException | None = None,
        who: str = "",
        *,
        again: bool = False,
    ) -> None:
        """Count an ended rollout, with or without a failure. A failure after which the rollout is
        retried (`again`) is only logged. Raises TooManyFailuresError."""
        counts = failure is not None and failure.counts and not again
        if not again:
            self._recent.append(failure.same if failure is not None and counts else None)
        if failure is None:
            return
        self.log.add(failure, error, who)
        if self._strict and failure.is_bug:
            raise TooManyFailuresError(
                f"limits.strict: the first bug ends the run: {failure}; fix it and continue with "
                "--resume"
            ) from error
        if counts and self._num_recent > self._max_share * WINDOW:
            raise self._too_many(f"more than {self._max_share * WINDOW:g}", f" of {WINDOW}")

    @property
    def _num_recent(self) -> int:
        return sum(one is not None for one in self._recent)

    def check_share(self) -> None:
        """Check the share at the end, if there were at least LEAST but fewer than WINDOW rollouts.
        Raises TooManyFailuresError."""
        num = len(self._recent)
        if num >= LEAST and self._num_recent > self._max_share * num:
            raise self._too_many("too many", "")

    def _too_many(self, what: str, of: str) -> TooManyFailuresError:
        causes = Counter(one for one in self._recent if one is not None)
        named = "; ".join(self.log.named(*pair) for pair in causes.most_common(NUM_NAMED))
        return TooManyFailuresError(
            f"{causes.total()} of the last {len(self._recent)} rollouts failed, {what} "
            f"(limits.max_failed_share = {self._max_share:g}{of}): {named}; a repeated failure is "
            "a bug: fix it and continue (--resume; for an evaluation, the same command), or raise "
            "the limit"
        )
