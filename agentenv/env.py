"""The environment contract and the registry of environments.

An environment speaks Gymnasium's words, asynchronously and in messages. One instance is one
episode of one task. Registration is lazy: an id maps to "module:Class", and nothing is imported
until an environment of that id is made.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any, Literal, Protocol, Self

from agentenv.errors import ConfigError
from agentenv.types import Info, Limit, Message, Task

ForkMode = Literal["pure", "replay", "snapshot", "none"]


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

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        """Observation messages, reward, terminated, truncated, info. Raises EnvError."""
        ...

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        """Grade what the policy wrote so far; called once when a limit of the actor ends a leaf.

        `action` is a last, possibly unfinished action that `step` never saw.
        """
        ...

    async def fork(self) -> Self:
        """An independent copy of the state: acting in one never changes the other."""
        ...

    async def close(self) -> None:
        """Free everything; called once for each env and each fork; idempotent."""
        ...


class EnvSpec:
    """A registered id: where its class is, and the keyword arguments it is made with."""

    def __init__(self, entry_point: str, kwargs: dict[str, Any]) -> None:
        self.entry_point = entry_point
        self.kwargs = kwargs

    def load(self) -> Any:
        module, _, name = self.entry_point.partition(":")
        return getattr(importlib.import_module(module), name)


_registry: dict[str, EnvSpec] = {}


def register(env_id: str, entry_point: str, **kwargs: Any) -> None:
    """Make `env_id` known, e.g. register("me/Dice-v0", "my_envs.dice:DiceEnv", sides=6).

    The class is called as Class(task, **kwargs). Registering an id again replaces it.
    """
    if entry_point.count(":") != 1:
        raise ConfigError(
            f"register({env_id!r}): entry point {entry_point!r} is not of the form 'module:Class'"
        )
    _registry[env_id] = EnvSpec(entry_point, kwargs)


def envs() -> list[str]:
    """All registered ids, sorted. Imports none of the environments."""
    return sorted(_registry)


def spec(env_id: str) -> EnvSpec:
    """The registration of `env_id`; a ConfigError names the nearest ids when there is none."""
    if env_id not in _registry:
        near = difflib.get_close_matches(env_id, _registry, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(envs())}"
        raise ConfigError(f"no environment is registered as {env_id!r}; {hint}")
    return _registry[env_id]


def make(env_id: str, task: Task, **kwargs: Any) -> Env:
    """A new environment for one episode of `task`; `kwargs` override those of the registration."""
    found = spec(env_id)
    try:
        return found.load()(task, **{**found.kwargs, **kwargs})  # type: ignore[no-any-return]
    except TypeError as error:
        raise ConfigError(f"{env_id} cannot be made with {sorted(kwargs)}: {error}") from error
