"""The registry of environments.

Registration is lazy: an id maps to "module:Class", and nothing is imported until an environment of
that id is made. An installed package adds its environments by entry points, and needs no import to
be listed:

    [project.entry-points."agentenv.envs"]
    "acme/Dice-v0" = "acme_envs.dice:DiceEnv"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from agentenv.base.crashes import place_of
from agentenv.base.errors import ConfigError, reported_as
from agentenv.base.registry import installed, loaded, meant
from agentenv.base.types import Task
from agentenv.contract.env import Env
from agentenv.contract.tool_env import grades_state

ENTRY_POINT_GROUP = "agentenv.envs"


class EnvSpec(NamedTuple):
    """A registered id: the path of its class, or the class or function itself, and its keyword
    arguments. `source` names the registering package, for error messages.
    """

    entry_point: str | Callable[..., Env]
    kwargs: dict[str, Any]
    source: str = "agentenv.register"

    def load(self) -> Any:
        """The class or function. Raises ConfigError with the import error, or for something else,
        and the registering package."""
        if not isinstance(self.entry_point, str):
            return self.entry_point
        problem = f"{self.entry_point!r}, registered by {self.source}, cannot be loaded"
        with reported_as(ConfigError, problem, ConfigError):
            found = loaded(self.entry_point)
            if not callable(found):
                raise ConfigError(f"it is {found!r:.80}, not a class or function of (task, ...)")
            return found


_registry: dict[str, EnvSpec] = {}

_listeners: list[Callable[[str], None]] = []


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
        hint = meant(env_id, known, f"known: {', '.join(known)}", most=3)
        raise ConfigError(f"no environment is registered as {env_id!r}; {hint}")
    if len(claims) > 1:
        packages = " and ".join(claim.source for claim in claims)
        raise ConfigError(
            f"several packages register {env_id!r}: {packages}; uninstall one of them"
        )
    return claims[0]


@cache
def installed_envs() -> dict[str, list[EnvSpec]]:
    """Entry points of installed packages in the group "agentenv.envs"; read once per process."""
    found: dict[str, list[EnvSpec]] = {}
    for point in installed(ENTRY_POINT_GROUP):
        source = f"the package {point.dist.name}" if point.dist else "an installed package"
        claims = found.setdefault(point.name, [])
        if point.value not in [claim.entry_point for claim in claims]:
            claims.append(EnvSpec(point.value, {}, source))
    return found


def make(env_id: str, task: Task, **kwargs: Any) -> Env:
    """A new environment for one episode of `task`; `kwargs` override those of the registration."""
    found = spec(env_id)
    made = found.load()
    try:
        return made(task, **{**found.kwargs, **kwargs})  # type: ignore[no-any-return]
    except TypeError as error:
        where = place_of(error) or f" (in {made.__module__})"
        raise ConfigError(
            f"{env_id} cannot be made with {sorted(kwargs)}: {error}{where}"
        ) from error


def needs_answer(env_id: str) -> bool:
    """Whether rows of this environment need an answer: not if a `judge` of its own grades it by its
    state. False for an unknown id, such as the name of a variant."""
    try:
        return not grades_state(spec(env_id).load())
    except ConfigError:  # the check of environments reports it
        return False
