"""One failure of a rollout, and the log of failures: each distinct message is logged once, with its
location, and counted."""

from __future__ import annotations

import json
import logging
import re
from functools import partial
from traceback import format_exception

from msgspec import Struct

from agentenv.base.crashes import origin_of
from agentenv.base.errors import SHOWN, CancelledRolloutError, CrashError, GraderError, OutageError
from agentenv.base.tree import CANCELLED
from agentenv.base.types import Message, Task

MAX_TEXT, MAX_ACTION = 600, 300  # logged characters
MAX_TEXTS = 100  # messages that are counted separately; the others are counted by kind
NUM_SHOWN = 10  # messages on the terminal at the end

# Parts that differ between failures of one cause: numbers, addresses, digests.
VARIES = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}(?:-[0-9a-f]{4,})*\b|\d+(?:[.,:]\d+)*")

logger = logging.getLogger(__name__)


class Failure(Struct, array_like=True, frozen=True):
    """The failure of a rollout: `kind` and `text` of its error, its location (or the environment),
    and the last action of the policy. `same` is equal for failures of one cause. `counts`: whether
    it counts toward limits.max_failed_share (outages do not); `is_bug`: a CrashError, which
    limits.strict does not tolerate."""

    task_id: str
    kind: str
    text: str
    place: str
    action: str
    same: str
    counts: bool
    is_bug: bool

    def __str__(self) -> str:
        known = "called with" in self.text  # the arguments
        action = f"; the last action: {self.action}" if self.action and not known else ""
        place = "" if self.place in self.text else f" ({self.place})"
        return f"task {self.task_id}: {self.kind}: {self.text}{place}{action}"


def kind_of(error: Exception) -> str:
    """The name of a failure in trees, rows and metrics."""
    if isinstance(error, CancelledRolloutError):
        return CANCELLED
    # after any GraderError the episode can be graded again
    return GraderError.__name__ if isinstance(error, GraderError) else type(error).__name__


def failure_of(error: Exception, task: Task, action: Message | None = None) -> Failure:
    """The failure of a rollout of `task` by `error`; `action` is the policy's last action."""
    kind = kind_of(error)
    summary = error.summary if isinstance(error, CrashError) and error.summary else str(error)
    return Failure(
        task_id=task.id,
        kind=kind,
        text=bounded(str(error), MAX_TEXT),
        place=origin_of(error) or f"the environment {task.env_id}",
        action=bounded(_described(action), MAX_ACTION),
        same=f"{kind}: {VARIES.sub('#', bounded(summary.replace(task.id, '#'), MAX_TEXT))}",
        counts=not isinstance(error, OutageError | CancelledRolloutError),
        is_bug=isinstance(error, CrashError),
    )


def _described(action: Message | None) -> str:
    """The calls of an action; without calls, the end of its text."""
    if action is None:
        return ""
    if not action.tool_calls:
        return repr(action.content[-MAX_ACTION // 2 :])
    written = partial(json.dumps, ensure_ascii=False, default=repr)
    return ", ".join(f"{one.name}({written(one.arguments)})" for one in action.tool_calls)


def bounded(text: str, size: int) -> str:
    """The text as one line of at most `size` characters."""
    text = " ".join(text.split())
    return text if len(text) <= size else f"{text[: size - 3]}..."


class _Seen(Struct):
    first: Failure
    count: int = 1


class FailureLog:
    """Logs the first failure of each cause, with its traceback in the log, and counts the rest.
    Several actors may share one log."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def add(self, failure: Failure, error: BaseException | None, who: str) -> None:
        """Count a failure; `who` names the process in which it happened."""
        same = failure.same if len(self._seen) < MAX_TEXTS else failure.kind
        known = self._seen.get(failure.same) or self._seen.get(same)
        if known is not None:
            known.count += 1
            return
        self._seen[same] = _Seen(failure)
        if failure.kind == CANCELLED:  # a person knows
            return
        text = f"{failure}{f' (in {who})' if who else ''}; its rollout fails"
        if failure.is_bug:
            logger.error("%s", text, exc_info=error)
            return
        lines = [] if error is None else format_exception(error)  # its frames refer to the tree
        logger.warning("%s", "".join([f"{text}\n", *lines]).rstrip(), extra=SHOWN)

    def named(self, same: str, count: int) -> str:
        """A cause with its count."""
        seen = self._seen.get(same) or self._seen.get(same.partition(":")[0])
        if seen is None:
            return f"{count} x {same}"
        first = seen.first
        place = "" if first.place in first.text else f" ({first.place})"
        return f"{count} x {first.kind}: {first.text}{place}, first in task {first.task_id}"

    def lines(self) -> list[str]:
        """Each cause with its count, the most frequent first."""
        found = sorted(self._seen.items(), key=lambda pair: -pair[1].count)
        return [self.named(same, seen.count) for same, seen in found]

    def report(self, what: str = "failed rollouts") -> None:
        """Log each cause with its count, the most frequent ones also on the terminal."""
        lines = self.lines()
        for number, line in enumerate(lines):
            logger.warning("%s: %s", what, line, extra=SHOWN if number < NUM_SHOWN else {})
        if len(lines) > NUM_SHOWN:
            left = len(lines) - NUM_SHOWN
            logger.warning("%s: %d other messages, see the log", what, left, extra=SHOWN)
