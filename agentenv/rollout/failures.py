"""Failures of rollouts: each distinct message is logged once, with its location, and counted; too
many failures end the run. `Redactor` removes secrets from logs and other outputs of a run.

    failures.add(None)                                 when a rollout succeeds
    failures.add(failure_of(error, task, action))      when it fails
    failures.log.report()                              at the end: each message with its count

An occasional failure only loses a rollout. The same message on every fourth rollout is a bug: then
training and metrics cover only the others, and the policy may learn to select them.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from traceback import format_exception
from typing import Any, NamedTuple

from msgspec import Struct

from agentenv.base.errors import (
    SHOWN,
    CancelledRolloutError,
    CrashError,
    GraderError,
    OutageError,
    TooManyFailuresError,
    origin_of,
)
from agentenv.base.tree import CANCELLED
from agentenv.base.types import MALFORMED_CALL, UNKNOWN_TOOL, Info, Message, Task

REDACTED = "[redacted]"
MIN_CHARS = 8  # of a secret; shorter values occur in ordinary text

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_NAMED = re.compile(r"(?i)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)")
_SECRET_KEY = re.compile(
    r"(?i)(.*[_-])?(api[_-]?key|secret|password|passwd|authorization|cookie|"
    r"(access|auth|refresh|bearer|private)[_-]?token)"
)
_FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    # a bearer token has a digit, or is too long for a word
    (re.compile(r"(?i)\b(bearer\s+)(?=[\w.~+/=-]*\d|[\w.~+/=-]{32})[\w.~+/=-]{8,}"), r"\1"),
    (re.compile(r"(?i)\b(authorization[\"']?\s*[:=]\s*[\"']?basic\s+)[\w+/=-]+"), r"\1"),
    # https://user:password@host, also without a password
    (re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s@\"'<>?#]+(?=@)"), r"\1"),
    (
        re.compile(
            r"(?i)([?&;](?:[\w-]*(?:key|token|secret|password|passwd|signature)|sig)=)"
            r"[^&;\s\"'<>#]+"
        ),
        r"\1",
    ),
    (
        re.compile(
            r"(?i)((?:api[_-]?key|secret|password|passwd|access[_-]?token|auth[_-]?token)"
            r"[\"']?\s*[:=]\s*[\"']?)(?!\[redacted)[^\s\"',;<>&]{8,}"
        ),
        r"\1",
    ),
    (
        re.compile(
            r"\b(?:sk-|pk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|tvly-|AKIA|AIza|wandb_v1_)"
            r"[\w-]{16,}"
        ),
        "",
    ),
)


class Redactor:
    """Removes secrets (keys, tokens, passwords) from texts and JSON values.

    It recognizes them by value: the environment variables with names such as SERPER_API_KEY, and
    those that the configuration names in a key that ends in `_env` or as "${NAME}". And by form:
    bearer tokens, user and password of a URL, keys in its query, keys of known providers. Texts of
    policies and web pages are redacted too, since a tool may have revealed a key.
    """

    def __init__(
        self, settings: Mapping[str, Any], environment: Mapping[str, str] = os.environ
    ) -> None:
        """`settings` is the configuration, which names the variables that hold keys."""
        names = {name for name in environment if _NAMED.search(name)} | set(_variables(settings))
        values = {environment.get(name, "").strip() for name in names}
        known = sorted((one for one in values if len(one) >= MIN_CHARS), key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def text(self, text: str) -> str:
        """The text with each secret replaced by "[redacted]"."""
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        for form, kept in _FORMS:
            text = form.sub(kept + REDACTED, text)
        return text

    def tree(self, value: Any) -> Any:
        """As `text`, for all texts of lists and dicts; the value of a key such as api_key is
        replaced as a whole. The value of a key that ends in `_env` is not a secret."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                (self.text(key) if isinstance(key, str) else key): REDACTED
                if isinstance(key, str)
                and isinstance(one, str)
                and one
                and _SECRET_KEY.fullmatch(key)
                else self.tree(one)
                for key, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.tree(one) for one in value]
        return value


def _variables(settings: Any) -> Iterator[str]:
    """The names of environment variables, in keys such as api_key_env or as ${NAME}."""
    if isinstance(settings, str):
        yield from _VARIABLE.findall(settings)
    elif isinstance(settings, Mapping):
        for key, value in settings.items():
            if isinstance(value, str) and str(key).endswith("_env"):
                yield value
            else:
                yield from _variables(value)
    elif isinstance(settings, list | tuple):
        for one in settings:
            yield from _variables(one)


WINDOW = 200  # rollouts for the share of failures
LEAST = 20  # minimum number of rollouts for a meaningful share
MAX_TEXT, MAX_ACTION = 600, 300  # logged characters
MAX_TEXTS = 100  # messages that are counted separately; the others are counted by kind
NUM_NAMED = 3  # messages in the error that ends a run
NUM_SHOWN = 10  # messages on the terminal at the end

# Parts that differ between failures of one cause: numbers, addresses, digests.
_VARIES = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}(?:-[0-9a-f]{4,})*\b|\d+(?:[.,:]\d+)*")

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
    if isinstance(error, GraderError):  # any subclass: the episode can be graded again
        return GraderError.__name__
    return type(error).__name__


def failure_of(error: Exception, task: Task, action: Message | None = None) -> Failure:
    """The failure of a rollout of `task` by `error`; `action` is the policy's last action."""
    kind = kind_of(error)
    summary = error.summary if isinstance(error, CrashError) and error.summary else str(error)
    return Failure(
        task_id=task.id,
        kind=kind,
        text=_bounded(str(error), MAX_TEXT),
        place=origin_of(error) or f"the environment {task.env_id}",
        action=_bounded(_described(action), MAX_ACTION),
        same=f"{kind}: {_VARIES.sub('#', _bounded(summary.replace(task.id, '#'), MAX_TEXT))}",
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


def _bounded(text: str, size: int) -> str:
    """The text as one line of at most `size` characters."""
    text = " ".join(text.split())
    return text if len(text) <= size else f"{text[: size - 3]}..."


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
        return _bounded(self.text, MAX_TEXT)


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
            same = _VARIES.sub("#", text)
            texts.setdefault(name, Counter())[same] += 1
            firsts.setdefault((name, same), text)
    found = {name: ToolFaults(count, 0, 0, "") for name, count in num_calls.items()}
    for name, counts in texts.items():
        ((same, count),) = counts.most_common(1)
        found[name] = ToolFaults(num_calls[name], counts.total(), count, firsts[name, same])
    return found


class _Seen(Struct):
    first: Failure
    count: int = 1


class FailureLog:
    """Logs the first failure of each cause, with its traceback in the log, and counts the rest.
    `redactor` removes secrets from the log. Several actors may share one log."""

    def __init__(self, redactor: Redactor | None = None) -> None:
        self.redactor = redactor or Redactor({})
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
        text = self.redactor.text(f"{failure}{f' (in {who})' if who else ''}; its rollout fails")
        if failure.is_bug:
            logger.error("%s", text, exc_info=error)
            return
        lines = [] if error is None else format_exception(error)  # its frames refer to the tree
        trace = self.redactor.text("".join(lines)).rstrip()
        logger.warning("%s", f"{text}\n{trace}".rstrip(), extra=SHOWN)

    def named(self, same: str, count: int) -> str:
        """A cause with its count."""
        seen = self._seen.get(same) or self._seen.get(same.partition(":")[0])
        if seen is None:
            return f"{count} x {same}"
        first = seen.first
        place = "" if first.place in first.text else f" ({first.place})"
        line = f"{count} x {first.kind}: {first.text}{place}, first in task {first.task_id}"
        return self.redactor.text(line)

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


class Failures:
    """The failures of an actor's rollouts. Raises TooManyFailuresError above `max_share` of the
    last WINDOW ended ones, and with `strict` at the first bug."""

    def __init__(self, max_share: float, *, strict: bool) -> None:
        self.num = 0
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
        self.num += 1
        self.log.add(failure, error, who)
        if self._strict and failure.is_bug:
            raise TooManyFailuresError(
                f"limits.strict: the first bug ends the run: {self.log.redactor.text(str(failure))}"
                "; fix it and continue with --resume"
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
        error = TooManyFailuresError(
            f"{causes.total()} of the last {len(self._recent)} rollouts failed, {what} "
            f"(limits.max_failed_share = {self._max_share:g}{of}): {named}; a repeated failure is "
            "a bug: fix it and continue (--resume; for an evaluation, the same command), or raise "
            "the limit"
        )
        error.is_of_engine = all(one.startswith("Engine") for one in causes)
        return error
