"""The environment contract, and resources that environments share.

An environment has Gymnasium's methods, asynchronous and with messages. An instance is one episode
of one task. `check_reset`, `check_step`, `check_finish` and `check_observation` validate results of
environments, and remove secrets from them; invalid ones raise CrashError.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from math import isfinite
from typing import Any, Literal, Protocol, Self, TypeVar, cast

from msgspec import Struct

from agentenv.base.crashes import guarded
from agentenv.base.deadline import doing, uncancelled
from agentenv.base.errors import SHOWN, CrashError, GraderError, OutageError
from agentenv.base.secrets import SECRETS
from agentenv.base.types import Info, Limit, Message, Role, Task

logger = logging.getLogger(__name__)

ForkMode = Literal["pure", "replay", "snapshot", "none"]
StepResult = tuple[list[Message], float, bool, bool, Info]  # see Env.step


class Env(Protocol):
    """One episode of one task.

    `fork_mode` declares how `fork` copies the state: "pure" (nothing outside the object),
    "replay" (earlier tool calls are run again), "snapshot" (the state itself is copied) or
    "none" (cannot fork; such an env gets from-scratch trajectories only).
    """

    @property
    def fork_mode(self) -> ForkMode: ...

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """Start the episode; the messages are the prompt. Equal seeds give equal prompts."""

    async def step(self, action: Message) -> StepResult:
        """Observation messages, reward, terminated, truncated, info. Raises EnvError, also before
        `reset`, after the end of the episode and after `close`."""

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        """Grade the policy's text so far: reward and info. Called when a limit of the actor ends a
        leaf, and again after an InfraError or `limits.env_timeout_s`.

        `action` is a last, possibly unfinished action that `step` never saw.
        """

    async def fork(self) -> Self:
        """An independent copy of the state: acting in one never changes the other."""

    async def close(self) -> None:
        """Free all resources; called once for each env and each fork; idempotent."""


class EnvWrapper:
    """An env that delegates every call to another one; subclasses override some methods. A fork is
    a wrapper of the same class and attributes around a fork of `env`.
    """

    def __init__(self, env: Env) -> None:
        self.env = env

    @property
    def fork_mode(self) -> ForkMode:
        return self.env.fork_mode

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        return await self.env.reset(seed=seed, options=options)

    async def step(self, action: Message) -> StepResult:
        return await self.env.step(action)

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        return await self.env.finish(reason, action)

    async def fork(self) -> Self:
        other = copy.copy(self)
        other.env = await self.env.fork()
        return other

    async def close(self) -> None:
        await self.env.close()


# Resources that all episodes of a process share: search indexes, sandboxes, HTTP sessions.
# An env class requests one by key in its constructor; the first request builds it. The run closes
# all of them when it ends, so that envs need no factories and no globals:
#
#     index = shared(("bm25", corpus), lambda: BM25Index.load(corpus))
# A resource reports its counters by `stats() -> dict[str, float]`, with names such as
# "sandbox/num_calls"; training and evaluation report the sums.

T = TypeVar("T")

_resources: dict[Hashable, Any] = {}


def shared(key: Hashable, build: Callable[[], T]) -> T:
    """The live resource of `key`, built on first use. `build` may raise ConfigError."""
    if key not in _resources:
        _resources[key] = build()
    return cast(T, _resources[key])


class Tally:
    """A shared number of events, a metric of this name; the first event is reported."""

    def __init__(self, name: str) -> None:
        self.name, self.number = name, 0

    def add(self, number: int, text: str) -> None:
        """Count events."""
        if number and not self.number:
            logger.warning("%s (env/%s)", text, self.name, extra=SHOWN)
        self.number += number

    def stats(self) -> dict[str, float]:
        """The number as a metric."""
        return {self.name: float(self.number)}


def tally(name: str) -> Tally:
    """The live number of this name."""
    return shared(("tally", name), lambda: Tally(name))


def shared_stats() -> dict[str, float]:
    """Counters of all shared resources since each was built; equal names are added up."""
    return summed_stats(_resources.values())


def summed_stats(resources: Iterable[Any]) -> dict[str, float]:
    """The `stats()` of all resources with this method; equal names are added up."""
    total: Counter[str] = Counter()
    for resource in resources:
        if hasattr(resource, "stats"):
            total.update(resource.stats())
    return dict(total)


def forget_shared() -> None:
    """Drop every shared resource without closing it: in a forked child they are the parent's."""
    _resources.clear()


@asynccontextmanager
async def isolated_shared() -> AsyncIterator[None]:
    """Isolate the shared resources of a block with its own event loop; they are closed after it."""
    kept = dict(_resources)
    _resources.clear()
    try:
        yield
    finally:
        try:
            await close_shared()
        finally:
            _resources.update(kept)


async def close_shared() -> None:
    """Close every shared resource in reverse order of creation, despite cancellations; those
    without `close` are just dropped."""
    await uncancelled(_close_shared())


async def _close_shared() -> None:
    while _resources:
        _, resource = _resources.popitem()
        close = getattr(resource, "close", None)
        if close is not None:
            outcome = close()
            if inspect.isawaitable(outcome):
                await outcome


MAX_SHOWN = 200  # characters of an invalid result


def check_reset(result: tuple[list[Message], Info]) -> tuple[list[Message], Info]:
    """The validated result of an env's `reset`."""
    with suppress(TypeError, ValueError):
        messages, info = result
        if isinstance(info, dict) and all(map(_is_message, messages)):
            return SECRETS.tree((list(messages), info), only_known=True)
    raise _wrong("reset", "(messages, info)", result)


def check_finish(result: tuple[float, Info]) -> tuple[float, Info]:
    """The validated result of an env's `finish`."""
    with suppress(TypeError, ValueError):
        reward, info = result
        if isinstance(info, dict):
            return _finite("finish", reward), SECRETS.tree(info, only_known=True)
    raise _wrong("finish", "(reward, info)", result)


def check_step(result: StepResult) -> StepResult:
    """The validated result of an env's `step`."""
    with suppress(TypeError, ValueError):
        given, reward, terminated, truncated, info = result
        messages = list(given)
        if all(map(_is_message, messages)) and isinstance(info, dict):
            messages, info = SECRETS.tree((messages, info), only_known=True)
            return messages, _finite("step", reward), bool(terminated), bool(truncated), info
    raise _wrong("step", "(messages, reward, terminated, truncated, info)", result)


def check_observation(messages: Sequence[Message], others: Sequence[Role] = ("user",)) -> None:
    """Reject messages of a step that no renderer can render in a continuing episode: an observation
    consists of tool results, then messages of `others`.
    """
    for place, message in enumerate(messages):
        if message.role not in ("tool", *others):
            raise CrashError(
                f"an observation consists of tool results or user messages, not {message.role!r}"
            )
        if message.role == "tool" and place and messages[place - 1].role != "tool":
            raise CrashError("an observation must list its tool results before its user messages")


def _is_message(one: object) -> bool:
    return isinstance(one, Message)


def _finite(method: str, reward: Any) -> float:
    """The reward. Raises CrashError unless it is a finite number."""
    with suppress(TypeError, ValueError, OverflowError):
        if isfinite(reward):
            return float(reward)
    raise _wrong(method, "a finite number as reward", reward)


def _wrong(method: str, form: str, result: Any) -> CrashError:
    return CrashError(
        f"the environment's {method} must return {form}, got {repr(result)[:MAX_SHOWN]}"
    )


class Grade(Struct, frozen=True):
    """A grader's result: the reward, whether the answer counts as correct, the parts of the reward
    (metric name -> value), and the reason.
    """

    reward: float
    success: bool
    parts: dict[str, float] = {}
    reason: str = ""


class GraderOutageError(OutageError, GraderError):
    """A service of a grader was down beyond its deadline."""


class Grader(Protocol):
    """Grades a finished or truncated episode. Must be fast or work off the event loop.

    A grader may have a method `async def start(self)`, awaited before each episode, that prepares
    it once and raises ConfigError if it cannot work.
    """

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """`written` has only the policy's own messages; `calls` counts the successful calls by
        tool. Raises GraderError, and InfraError if its service is down: the grader is then retried.
        """


async def start_grader(grader: Grader | None) -> None:
    """Prepare a grader that has a `start`. Raises ConfigError if the grader cannot work."""
    start = getattr(grader, "start", None)
    if start is not None:
        await start()


async def graded(
    grader: Grader, task: Task, written: Sequence[Message], calls: Mapping[str, int]
) -> Grade:
    """The grader's result. Raises GraderError, InfraError, and CrashError for its bugs."""
    return await judged(f"the grader {type(grader).__name__}", grader.grade, task, written, calls)


async def judged(who: str, grade: Callable[..., Any], *given: Any) -> Grade:
    """The result of `grade`, which is `who` in messages. Raises as `graded` does."""

    async def result() -> Any:
        return await grade(*given)

    with doing(who):
        found: Any = await guarded(result(), who)
    with suppress(AttributeError, TypeError, ValueError, OverflowError):
        if isinstance(found, Grade) and all(map(isfinite, (found.reward, *found.parts.values()))):
            return found
    raise CrashError(f"{who} must return a Grade with finite numbers, got {repr(found)[:200]}")
