"""What one tool may be asked, and the running of one call within it.

[[env.tools]]
name = "search"                  # a tool that the environment has
max_calls = 10

[[env.tools]]
name = "my_tools:weather"        # a @tool function, or a class or function that makes a tool
kwargs = { units = "metric" }
required = false
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from agentenv.errors import AgentEnvError, ConfigError, EnvError, InfraError, ToolError
from agentenv.shared import shared
from agentenv.tool import FunctionTool, Tool
from agentenv.types import ToolResult

FIRST_DELAY_S = 0.1  # before the first retry; doubles with each, up to MAX_DELAY_S
MAX_DELAY_S = 5.0

OnLimit = Literal["end", "result"]

logger = logging.getLogger(__name__)

# shared keywords of the two structs below
_MaxCalls = Annotated[
    Annotated[int, Meta(ge=0)] | None,
    Meta(description="calls of the tool in one episode; none: only the total counts"),
]
_Timeout = Annotated[
    Annotated[float, Meta(gt=0)] | None,
    Meta(description="deadline of one call; none: that of the environment"),
]
_Concurrency = Annotated[
    Annotated[int, Meta(ge=1)] | None,
    Meta(description="calls of the tool in flight in this process; none: no bound"),
]
_Retries = Annotated[
    Annotated[int, Meta(ge=0)] | None,
    Meta(description="retries after a failure of machinery; none: as the environment does"),
]
_Required = Annotated[
    bool,
    Meta(
        description="false: a tool that cannot be loaded is left out with a warning, and one that "
        "fails for good is reported to the policy as not available"
    ),
]


class ToolLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one tool; what is None is left to the environment."""

    max_calls: _MaxCalls = None
    timeout_s: _Timeout = None
    max_concurrency: _Concurrency = None
    num_retries: _Retries = None
    required: _Required = True

    def filled(self, timeout_s: float, num_retries: int) -> ToolLimits:
        """With what the environment says where this says nothing."""
        return replace(
            self,
            timeout_s=timeout_s if self.timeout_s is None else self.timeout_s,
            num_retries=num_retries if self.num_retries is None else self.num_retries,
        )


class ToolConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tool of an episode. A list of them replaces the environment's own list."""

    name: Annotated[
        str, Meta(description="a tool that the environment has, by its name, or 'module:name'")
    ]
    kwargs: Annotated[
        dict[str, Any], Meta(description="keyword arguments of the class or function named")
    ] = field(default_factory=dict)
    max_calls: _MaxCalls = None
    timeout_s: _Timeout = None
    max_concurrency: _Concurrency = None
    num_retries: _Retries = None
    required: _Required = True

    @property
    def limits(self) -> ToolLimits:
        return ToolLimits(
            max_calls=self.max_calls,
            timeout_s=self.timeout_s,
            max_concurrency=self.max_concurrency,
            num_retries=self.num_retries,
            required=self.required,
        )


@runtime_checkable
class ToolSource(Protocol):
    """Where several tools come from, known only once it is asked, such as a tool server."""

    async def load(self) -> Sequence[Tool]:
        """The tools, the same ones each time. Raises ConfigError when there is no way."""
        ...


ChosenTool = tuple[Tool | ToolSource | str, ToolLimits]


class CallBudget:
    """How many calls of an episode are used, and what is left of its limits."""

    def __init__(self, max_tool_calls: int | None) -> None:
        self.max_tool_calls = max_tool_calls
        self.num_calls = 0
        self._num_of: Counter[str] = Counter()

    def copy(self) -> CallBudget:
        """An independent copy, for a fork."""
        other = CallBudget(self.max_tool_calls)
        other.num_calls, other._num_of = self.num_calls, self._num_of.copy()
        return other

    def use(self, name: str, limits: ToolLimits) -> None:
        """Count a call of a tool, which `num_calls` holds already; ToolError when none is left."""
        if self.max_tool_calls is not None and self.num_calls > self.max_tool_calls:
            raise ToolError(
                f"No tool can be called any more: all {self.max_tool_calls} calls are used. "
                "Answer with what you know.",
                {"limit": "max_tool_calls"},
            )
        most = limits.max_calls
        if most is not None and self._num_of[name] >= most:
            raise ToolError(
                f"{name} cannot be called any more: all {most} calls of it are used.",
                {"limit": f"max_calls of {name}"},
            )
        self._num_of[name] += 1

    def beyond(self, names: Sequence[str], limits: Mapping[str, ToolLimits]) -> str:
        """The limit that calls of these tools would break, in words; "" for none."""
        total = self.max_tool_calls
        if total is not None and self.num_calls + len(names) > total:
            return "max_tool_calls"
        for name, count in Counter(names).items():
            most = limits[name].max_calls if name in limits else None
            if most is not None and self._num_of[name] + count > most:
                return f"max_calls of {name}"
        return ""


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


async def run_call(
    tool: Tool, arguments: dict[str, Any], state: Any, limits: ToolLimits, rng: Random
) -> ToolResult:
    """One call within its limits, failures of machinery retried with jittered delays.

    `timeout_s` and `num_retries` must be given. The wait for a free place is not part of the
    deadline. Raises ToolError, and EnvError when the retries are used up.
    """
    assert limits.timeout_s is not None
    assert limits.num_retries is not None
    problem = ""
    for attempt in range(limits.num_retries + 1):
        if attempt:
            delay = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (attempt - 1))
            await asyncio.sleep(delay * rng.uniform(0.5, 1.5))
        try:
            return await _within(tool, arguments, state, limits)
        except InfraError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"no result within {limits.timeout_s:g} s"
    text = f"tool {tool.name} failed {limits.num_retries + 1} times, the last time: {problem}"
    if limits.required:
        raise EnvError(text)
    logger.warning("%s; the policy reads that it is not available", text)
    raise ToolError(f"The tool {tool.name!r} is not available at the moment.")


async def _within(
    tool: Tool, arguments: dict[str, Any], state: Any, limits: ToolLimits
) -> ToolResult:
    if limits.max_concurrency is None:
        async with asyncio.timeout(limits.timeout_s):
            return await tool.call(arguments, state)
    size = limits.max_concurrency
    places = shared(("tool places", tool.name, size), lambda: asyncio.Semaphore(size))
    async with places, asyncio.timeout(limits.timeout_s):
        return await tool.call(arguments, state)
