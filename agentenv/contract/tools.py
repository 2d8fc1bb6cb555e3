"""Tools: their form, limits, and the selection for an episode.

All episodes share a tool object; its `state` belongs to one episode.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Protocol, cast, runtime_checkable

from msgspec import Meta, Struct

from agentenv.base.config import about
from agentenv.base.crashes import guarded
from agentenv.base.errors import AgentEnvError, ConfigError, InfraError, ToolError, named
from agentenv.base.types import ToolResult
from agentenv.contract.env import ForkMode, shared

RELEASE_TIMEOUT_S = 10.0


class Tool(Protocol):
    """One tool. `schema` is the JSON schema of its arguments. In the tag protocol, the text between
    the tags is the single argument, or a JSON object with several arguments.

    A tool may have a method `async def prepare(self)`, awaited before each episode, that prepares
    shared resources once and raises ConfigError if the tool cannot work, and a method `async def
    release(self)` that frees them: called once when shared resources are closed, at the end of each
    command and of each of its event loops. A tool with an attribute `state_of`, the name of another
    tool, is called with the state of that tool, and has none itself.
    """

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def schema(self) -> dict[str, Any]: ...
    @property
    def fork_mode(self) -> ForkMode: ...

    def start(self, seed: int | None) -> Any:
        """The state of a new episode; must be cheap, since many episodes do not call the tool."""

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        """Run one call. Raises ToolError (the policy reads it) or InfraError (retried)."""

    async def fork(self, state: Any) -> Any:
        """An independent copy of the state."""

    async def close(self, state: Any) -> None:
        """Free the state; idempotent."""


@runtime_checkable
class ToolSource(Protocol):
    """A source of tools that are known only after a request, such as a tool server."""

    async def load(self) -> Sequence[Tool]:
        """The tools; each call returns the same objects. Raises ConfigError if loading fails."""


class StatelessTool:
    """Base of stateless tools."""

    name: str
    description: str
    schema: dict[str, Any]
    fork_mode: ForkMode = "pure"

    def start(self, seed: int | None) -> Any:
        return None

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        raise NotImplementedError

    async def fork(self, state: Any) -> Any:
        return None

    async def close(self, state: Any) -> None:
        return None


def state_of(tool: Tool) -> str:
    """The tool whose state this one uses; "" for its own."""
    return str(getattr(tool, "state_of", ""))


def has_close(tool: Tool) -> bool:
    """Whether an episode has resources to free at its end."""
    return getattr(type(tool), "close", None) is not StatelessTool.close


async def prepare_tool(tool: Tool) -> None:
    """Prepare a tool that has a `prepare`; its `release` frees the resources. Raises ConfigError if
    the tool cannot work.
    """
    prepare, release = getattr(tool, "prepare", None), getattr(tool, "release", None)
    try:
        if prepare is not None:
            await prepare()
    except ToolError as error:
        raise ConfigError(f"the tool {tool.name!r} cannot be prepared: {error}") from error
    except InfraError as error:
        found = named(f"the tool {tool.name!r} cannot be prepared", error)
        found.args = (f"{found}; check that the service runs and that its address is right",)
        raise found from error
    except ConfigError as error:
        raise named(f"the tool {tool.name!r} cannot be prepared", error) from error
    finally:  # registered after the resources of `prepare`, and so closed before them
        if release is not None:
            # `release` keeps the tool alive, since its id is the key
            closing = SimpleNamespace(close=partial(_released, tool.name, release))
            shared(("release", id(tool)), lambda: closing)


async def _released(name: str, release: Callable[[], Awaitable[None]]) -> None:
    """Release a tool. Errors and hangs do not prevent other resources from being closed."""
    who = f"the release of the tool {name!r}"
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_S):
            await guarded(release(), who)
    except TimeoutError:
        logger.warning("%s did not end within %g s", who, RELEASE_TIMEOUT_S)
    except AgentEnvError as error:
        logger.warning("%s: %s", who, error)


class ToolLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tool; None means the environment's setting."""

    max_calls: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        about("calls of the tool in one episode; none: only the limit of all calls applies"),
    ] = None
    timeout_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        about("deadline of one call; none: that of the environment"),
    ] = None
    max_concurrency: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        about("concurrent calls of the tool in this process; none: unlimited"),
    ] = None
    num_retries: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        about("retries after an infrastructure failure; none: the environment's setting"),
    ] = None
    required: Annotated[
        bool,
        about(
            "false: a tool that cannot be loaded is skipped with a warning, and one "
            "that fails permanently is reported to the policy as unavailable"
        ),
    ] = True


OnLimit = Literal["end", "result"]  # of a call beyond a limit: end the episode, or return a result


class CallBudget:
    """Used and remaining calls of an episode; `num_of` counts them by tool."""

    def __init__(self, max_tool_calls: int | None) -> None:
        self.max_tool_calls = max_tool_calls
        self.num_calls = 0
        self.num_of: Counter[str] = Counter()

    def copy(self) -> CallBudget:
        """An independent copy of the counts, for a fork of the episode."""
        other = CallBudget(self.max_tool_calls)
        other.num_calls, other.num_of = self.num_calls, self.num_of.copy()
        return other

    def use(self, name: str, limits: ToolLimits) -> None:
        """Count a call of a tool, already included in `num_calls`. Raises ToolError if no call of
        the tool, or of all tools, is left.
        """
        if self.max_tool_calls is not None and self.num_calls > self.max_tool_calls:
            raise ToolError(
                f"No tool can be called any more: all {self.max_tool_calls} calls are used. Answer "
                "with what you know.",
                {"limit": "max_tool_calls"},
            )
        most = limits.max_calls
        if most is not None and self.num_of[name] >= most:
            raise ToolError(
                f"{name} cannot be called any more: all {most} calls of it are used.",
                {"limit": f"max_calls of {name}"},
            )
        self.num_of[name] += 1

    def beyond(self, names: Sequence[str], limits: Mapping[str, ToolLimits]) -> str:
        """The limit that calls of these tools would exceed, as text; "" for none."""
        total = self.max_tool_calls
        if total is not None and self.num_calls + len(names) > total:
            return "max_tool_calls"
        for name in names:
            most = limits[name].max_calls if name in limits else None
            if most is not None and self.num_of[name] + names.count(name) > most:
                return f"max_calls of {name}"
        return ""


logger = logging.getLogger(__name__)

ChosenTool = tuple[Tool | ToolSource | str, ToolLimits]

_WEAKEST_FIRST: tuple[ForkMode, ...] = ("none", "snapshot", "replay", "pure")


class Toolbox:
    """The tools of an episode: `tools` and their `limits` by name, and the sources that `load`
    queries."""

    def __init__(
        self,
        tools: Sequence[Tool | ToolSource] = (),
        limits: Mapping[str, ToolLimits] | None = None,
    ) -> None:
        self.tools: dict[str, Tool] = {}
        self.limits = dict(limits or {})
        self._sources: list[tuple[ToolSource, ToolLimits]] = []
        for tool in tools:
            self.add(tool)
        unknown = sorted(self.limits.keys() - self.tools.keys())
        if unknown and not self._sources:
            raise ConfigError(f"tool_limits: unknown tools {unknown}; known: {sorted(self.tools)}")

    @property
    def fork_mode(self) -> ForkMode:
        """The weakest fork mode of the tools."""
        modes = {tool.fork_mode for tool in self.tools.values()}
        return next((mode for mode in _WEAKEST_FIRST if mode in modes), "pure")

    def add(self, tool: Tool | ToolSource, limits: ToolLimits | None = None) -> None:
        """Add a tool, or a source of tools. Raises ConfigError for a duplicate name."""
        if hasattr(tool, "load"):  # faster than isinstance with protocols, for each episode
            self._sources.append((cast(ToolSource, tool), limits or ToolLimits()))
            return
        if tool.name in self.tools:
            raise ConfigError(f"two tools share a name: {tool.name!r}")
        self.tools[tool.name] = tool
        if limits is not None:
            self.limits[tool.name] = limits

    def chosen(self, tools: Sequence[ChosenTool], owner: str) -> Toolbox:
        """A toolbox of these tools only; names refer to tools of this toolbox, which belongs to
        `owner`.
        """
        other = Toolbox()
        for one, limits in tools:
            if isinstance(one, str):
                if one not in self.tools:
                    raise ConfigError(
                        f"env.tools: {owner} has no tool {one!r}; it has {sorted(self.tools)}; "
                        "name any other tool as 'module:name'"
                    )
                one = self.tools[one]
            other.add(one, limits)
        return other

    async def load(self) -> None:
        """Load the tools of all sources and prepare all tools; later calls are free."""
        for source, limits in self._sources:
            for tool in await source.load():
                self.add(tool, limits)
        self._sources = []
        for tool in self.tools.values():
            mode = getattr(tool, "fork_mode", None)
            if mode not in _WEAKEST_FIRST:
                known = f"expected one of {_WEAKEST_FIRST}"
                raise ConfigError(f"the tool {tool.name!r} has fork_mode = {mode!r}; {known}")
            of = state_of(tool)
            if of and (of not in self.tools or state_of(self.tools[of])):
                raise ConfigError(
                    f"the tool {tool.name!r} has state_of = {of!r}; expected one of the stateful "
                    f"tools: {[name for name, _ in self.owners()]}"
                )
            await prepare_tool(tool)

    def owners(self) -> list[tuple[str, Tool]]:
        """The stateful tools, by name."""
        return [(name, tool) for name, tool in self.tools.items() if not state_of(tool)]

    def share(self, states: dict[str, Any]) -> None:
        """Give tools with `state_of` the state of the other tool."""
        for name, tool in self.tools.items():
            if of := state_of(tool):
                states[name] = states[of]

    def schemas(self) -> list[dict[str, Any]]:
        """Name, description and parameters of each tool."""
        return [
            {"name": tool.name, "description": tool.description, "parameters": tool.schema}
            for tool in self.tools.values()
        ]
