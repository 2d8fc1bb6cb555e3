"""The environment contract and the registry of environments.

An environment has Gymnasium's methods, asynchronous and with messages. An instance is one episode
of one task. Registration is lazy: an id maps to "module:Class", and nothing is imported until an
environment of that id is made.

An installed package adds its environments by entry points, and needs no import to be listed:

    [project.entry-points."agentenv.envs"]
    "acme/Dice-v0" = "acme_envs.dice:DiceEnv"

`check_reset`, `check_step`, `check_finish` and `check_observation` validate results of
environments; invalid ones raise CrashError.
"""

from __future__ import annotations

import copy
import difflib
import inspect
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from importlib import metadata
from math import isfinite
from numbers import Real
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar, cast

from msgspec import Struct

from agentenv.base.deadline import doing, uncancelled
from agentenv.base.errors import (
    ConfigError,
    CrashError,
    GraderError,
    OutageError,
    guarded,
    place_of,
)
from agentenv.base.registry import loaded
from agentenv.base.types import Info, Limit, Message, Task

ForkMode = Literal["pure", "replay", "snapshot", "none"]
StepResult = tuple[list[Message], float, bool, bool, Info]  # see Env.step

ENTRY_POINT_GROUP = "agentenv.envs"


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
        ...

    async def step(self, action: Message) -> StepResult:
        """Observation messages, reward, terminated, truncated, info. Raises EnvError, also before
        `reset`, after the end of the episode and after `close`."""
        ...

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        """Grade the policy's text so far: reward and info. Called when a limit of the actor ends a
        leaf, and again after an InfraError or `limits.env_timeout_s`.

        `action` is a last, possibly unfinished action that `step` never saw.
        """
        ...

    async def fork(self) -> Self:
        """An independent copy of the state: acting in one never changes the other."""
        ...

    async def close(self) -> None:
        """Free all resources; called once for each env and each fork; idempotent."""
        ...


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


class EnvSpec(NamedTuple):
    """A registered id: the path of its class, or the class or function itself, and its keyword
    arguments. `source` names the registering package, for error messages.
    """

    entry_point: str | Callable[..., Env]
    kwargs: dict[str, Any]
    source: str = "agentenv.register"

    def load(self) -> Any:
        """The class. Raises ConfigError with the import error and the registering package."""
        if not isinstance(self.entry_point, str):
            return self.entry_point
        try:
            return loaded(self.entry_point)
        except ConfigError as error:
            raise ConfigError(
                f"{self.entry_point!r}, registered by {self.source}, cannot be loaded: {error}"
            ) from error


_registry: dict[str, EnvSpec] = {}
_listeners: list[Callable[[str], None]] = []
_installed: dict[str, list[EnvSpec]] | None = None


def register(env_id: str, entry_point: str, **kwargs: Any) -> None:
    """Register `env_id`, e.g. register("me/Dice-v0", "my_envs.dice:DiceEnv", sides=6).

    The class is called as Class(task, **kwargs). Registering an id again replaces it.
    """
    if entry_point.count(":") != 1:
        raise ConfigError(
            f"register({env_id!r}): entry point {entry_point!r} is not of the form 'module:Class'"
        )
    _registry[env_id] = EnvSpec(entry_point, kwargs)
    for listener in _listeners:
        listener(env_id)


@contextmanager
def registered(env_id: str, maker: Callable[..., Env]) -> Iterator[None]:
    """Within the block, register `env_id` for this class or function, which need not be importable:
    the registration applies to this process only."""
    before = _registry.get(env_id)
    _registry[env_id] = EnvSpec(maker, {}, "the caller")
    try:
        yield
    finally:
        _registry.pop(env_id)
        _registry.update({} if before is None else {env_id: before})


def on_register(listener: Callable[[str], None]) -> None:
    """Call `listener` with every known id now, and with each id registered later."""
    _listeners.append(listener)
    for env_id in env_ids():
        listener(env_id)


def env_ids() -> list[str]:
    """All known ids, registered or installed, sorted. Imports none of the environments."""
    return sorted({*_registry, *installed_envs()})


def spec(env_id: str) -> EnvSpec:
    """The registration of `env_id`, which takes precedence over installed packages; an id of the
    form "module:Class" needs none. Raises ConfigError with the nearest ids if there is none, and
    with both packages if two register the id.
    """
    if env_id in _registry:
        return _registry[env_id]
    if ":" in env_id:
        return EnvSpec(env_id, {}, "the configuration")
    claims = installed_envs().get(env_id)
    if claims is None:
        known = env_ids()
        near = difflib.get_close_matches(env_id, known, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}"
        raise ConfigError(f"no environment is registered as {env_id!r}; {hint}")
    if len(claims) > 1:
        packages = " and ".join(claim.source for claim in claims)
        raise ConfigError(
            f"several packages register {env_id!r}: {packages}; uninstall one of them"
        )
    return claims[0]


def installed_envs() -> dict[str, list[EnvSpec]]:
    """Entry points of installed packages in the group "agentenv.envs"; read once per process."""
    global _installed
    if _installed is None:
        _installed = {}
        for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
            source = f"the package {point.dist.name}" if point.dist else "an installed package"
            claims = _installed.setdefault(point.name, [])
            if point.value not in [claim.entry_point for claim in claims]:
                claims.append(EnvSpec(point.value, {}, source))
    return _installed


def make(env_id: str, task: Task, **kwargs: Any) -> Env:
    """A new environment for one episode of `task`; `kwargs` override those of the registration."""
    found = spec(env_id)
    made = found.load()
    try:
        return made(task, **{**found.kwargs, **kwargs})  # type: ignore[no-any-return]
    except TypeError as error:
        where = place_of(error) or f" (in {made.__module__})"
        hint = "'grader'" in str(error) and (
            "; pass one to ToolEnv, such as grader=ExactMatch() of agentenv.envs.grading.reward"
        )
        raise ConfigError(
            f"{env_id} cannot be made with {sorted(kwargs)}: {error}{where}{hint or ''}"
        ) from error


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
    try:
        messages, info = result
        if isinstance(info, dict) and all(map(_is_message, messages)):
            return list(messages), info
    except (TypeError, ValueError):
        pass
    raise _wrong("reset", "(messages, info)", result)


def check_finish(result: tuple[float, Info]) -> tuple[float, Info]:
    """The validated result of an env's `finish`."""
    try:
        reward, info = result
        if isinstance(info, dict) and isfinite(reward):
            return float(reward), info
    except (TypeError, ValueError):
        pass
    raise _wrong("finish", "(reward, info)", result)


def check_step(result: StepResult) -> StepResult:
    """The validated result of an env's `step`."""
    try:
        given, reward, terminated, truncated, info = result
        messages = list(given)
        if all(map(_is_message, messages)) and isinstance(info, dict) and isfinite(reward):
            return messages, float(reward), bool(terminated), bool(truncated), info
    except (TypeError, ValueError):
        pass
    raise _wrong("step", "(messages, reward, terminated, truncated, info)", result)


def check_observation(messages: Sequence[Message]) -> None:
    """Reject messages of a step that no renderer can render in a continuing episode: an observation
    consists of tool results, then user messages.
    """
    for place, message in enumerate(messages):
        if message.role not in ("tool", "user"):
            raise CrashError(
                f"an observation consists of tool results or user messages, not {message.role!r}"
            )
        if message.role == "tool" and place and messages[place - 1].role == "user":
            raise CrashError("an observation must list its tool results before its user messages")


def _is_message(one: object) -> bool:
    return isinstance(one, Message)


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
        ...


async def start_grader(grader: Grader) -> None:
    """Prepare a grader that has a `start`. Raises ConfigError if the grader cannot work."""
    start = getattr(grader, "start", None)
    if start is not None:
        await start()


async def graded(
    grader: Grader, task: Task, written: Sequence[Message], calls: Mapping[str, int]
) -> Grade:
    """The grader's result. Raises GraderError, InfraError, and CrashError for its bugs."""
    who = f"the grader {type(grader).__name__}"

    async def grade() -> Grade:
        return await grader.grade(task, written, calls)

    with doing(who):
        found: Any = await guarded(grade(), who)
    reward: Any = getattr(found, "reward", None)
    if isinstance(found, Grade) and isinstance(reward, Real):
        return found
    raise CrashError(f"{who} must return a Grade with a numeric reward, got {repr(found)[:200]}")
