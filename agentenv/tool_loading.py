"""The tools that a configuration names: loaded, or still the name of one that the environment has.

[[env.tools]]
name = "search"                  # a tool that the environment has
max_calls = 10

[[env.tools]]
name = "my_tools:weather"        # a @tool function, or a class or function that makes a tool
kwargs = { units = "metric" }
required = false
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from agentenv.errors import AgentEnvError, ConfigError
from agentenv.tool import FunctionTool, Tool, ToolSource
from agentenv.tool_limits import ToolConfig
from agentenv.toolbox import ChosenTool

logger = logging.getLogger(__name__)


def load_tools(
    configs: Sequence[ToolConfig], resolve: Callable[[str], Any] = str
) -> list[ChosenTool]:
    """The tools of a configuration: made, or still the name of one that the environment has.

    `resolve` turns text arguments that hold "{run}" into paths.
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
            chosen.append((config.name, config.limits))
            continue
        kwargs = {
            name: str(resolve(value)) if isinstance(value, str) and "{run}" in value else value
            for name, value in config.kwargs.items()
        }
        try:
            chosen.append((_load(config.name, kwargs, key), config.limits))
        except AgentEnvError as error:
            if config.required:
                raise
            logger.warning("%s: %s is left out: %s", key, config.name, error)
    return chosen


def _load(path: str, kwargs: dict[str, Any], key: str) -> Tool | ToolSource:
    module, _, name = path.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}.name: {path!r} cannot be loaded: {error}") from error
    if not isinstance(made, FunctionTool):
        try:
            made = made(**kwargs)
        except TypeError as error:
            raise ConfigError(
                f"{key}: {path} cannot be made with {sorted(kwargs)}: {error}"
            ) from error
    elif kwargs:
        raise ConfigError(f"{key}.kwargs: {path} is a @tool function, it takes none")
    missing = [part for part in ("name", "schema", "start", "call") if not hasattr(made, part)]
    if missing and not isinstance(made, ToolSource):
        raise ConfigError(f"{key}.name: {path} makes no tool: it has no {', '.join(missing)}")
    tool: Tool | ToolSource = made
    return tool
