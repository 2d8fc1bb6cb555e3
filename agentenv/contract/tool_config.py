"""Tools that a configuration names: those of the environment, or others to load.

[[env.tools]]
name = "search"                  # a tool of the environment
max_calls = 10

[[env.tools]]
name = "my_tools:weather"        # a @tool function, or a class or function that makes a tool
kwargs = { units = "metric" }
required = false
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Struct, field

from agentenv.base.config import about, build_config, substituted
from agentenv.base.errors import AgentEnvError, ConfigError, reported_as
from agentenv.base.registry import loaded
from agentenv.contract.env import shared
from agentenv.contract.function_tool import FunctionTool
from agentenv.contract.tools import ChosenTool, Tool, ToolLimits, ToolSource

C = TypeVar("C", bound=Struct)
logger = logging.getLogger(__name__)


def shared_config(kind: type[C], key: str, values: Mapping[str, Any] | C | None = None) -> C:
    """The settings of the table `key`, checked once per process. Raises ConfigError."""
    if isinstance(values, kind):
        return values
    table = cast(Mapping[str, Any], values or {})
    text = msgspec.json.encode(table)
    return shared(("keys", key, text), lambda: build_config(kind, dict(table), key))


class ToolConfig(ToolLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool of an episode and its limits. A list of these replaces the environment's list."""

    name: Annotated[str, about("name of a tool of the environment, or 'module:name'")]
    kwargs: Annotated[dict[str, Any], about("keyword arguments of the class or function named")] = (
        field(default_factory=dict)
    )


def load_tools(
    configs: Sequence[ToolConfig], resolve: Callable[[str], Any] = str
) -> list[ChosenTool]:
    """The tools of a configuration: an object, or the name of a tool of the environment. `resolve`
    expands "{run}" in text arguments.
    """
    chosen: list[ChosenTool] = []
    for number, config in enumerate(configs):
        key = f"env.tools[{number}]"
        if ":" not in config.name:
            if config.kwargs:
                raise ConfigError(
                    f"{key}.kwargs: {config.name!r} is a tool of the environment, made with "
                    "env.kwargs; only 'module:name' takes keyword arguments"
                )
            chosen.append((config.name, config))
            continue
        kwargs = {name: substituted(value, resolve) for name, value in config.kwargs.items()}
        try:
            chosen.append((_load(config.name, kwargs, key), config))
        except AgentEnvError as error:
            if config.required:
                raise
            logger.warning("%s: %s is skipped: %s", key, config.name, error)
    return chosen


def _load(path: str, kwargs: dict[str, Any], key: str) -> Tool | ToolSource:
    with reported_as(ConfigError, f"{key}.name: {path!r} cannot be loaded", ConfigError):
        made = loaded(path)
    if not isinstance(made, FunctionTool):
        problem = f"{key}: {path} cannot be made with {sorted(kwargs)}"
        with reported_as(ConfigError, problem, TypeError):
            made = made(**kwargs)
    elif kwargs:
        raise ConfigError(
            f"{key}.kwargs: {path} is a @tool function, which has no keyword arguments"
        )
    missing = [part for part in ("name", "schema", "start", "call") if not hasattr(made, part)]
    if missing and not isinstance(made, ToolSource):
        raise ConfigError(
            f"{key}.name: {path} does not create a tool: it lacks {', '.join(missing)}"
        )
    return cast(Tool | ToolSource, made)
