"""Tools: definition, limits, and the selection for an episode.

    @tool
    async def weather(city: str, days: int = 1) -> str:
        '''Forecast for a city.'''

All episodes share a tool object; its `state` belongs to one episode. A configuration names tools of
the environment, or others to load:

    [[env.tools]]
    name = "search"                  # a tool of the environment
    max_calls = 10

    [[env.tools]]
    name = "my_tools:weather"        # a @tool function, or a class or function that makes a tool
    kwargs = { units = "metric" }
    required = false
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeVar,
    cast,
    get_type_hints,
    runtime_checkable,
)

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from agentenv.base.config import substituted
from agentenv.base.crashes import guarded, not_a_text
from agentenv.base.errors import (
    AgentEnvError,
    ConfigError,
    ForeignError,
    InfraError,
    ToolError,
    named,
)
from agentenv.base.registry import loaded
from agentenv.base.types import ToolResult
from agentenv.base.untrusted import convert
from agentenv.contract.env import ForkMode, shared

RELEASE_TIMEOUT_S = 10.0

T = TypeVar("T")


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
        ...

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        """Run one call. Raises ToolError (the policy reads it) or InfraError (retried)."""
        ...

    async def fork(self, state: Any) -> Any:
        """An independent copy of the state."""
        ...

    async def close(self, state: Any) -> None:
        """Free the state; idempotent."""
        ...


@runtime_checkable
class ToolSource(Protocol):
    """A source of tools that are known only after a request, such as a tool server."""

    async def load(self) -> Sequence[Tool]:
        """The tools; each call returns the same objects. Raises ConfigError if loading fails."""
        ...


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


class FunctionTool(StatelessTool):
    """A tool from a function; arguments are checked and converted by their annotations."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self.description = inspect.cleandoc(function.__doc__ or "")
        self._function = function
        self._arguments = _arguments_struct(function)
        self.schema = argument_schema(self._arguments)

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        checked = read_arguments(self.name, arguments, self._arguments, strict=False)
        outcome = self._function(**msgspec.structs.asdict(checked))
        if inspect.isawaitable(outcome):
            outcome = await outcome
        if isinstance(outcome, ToolResult):
            return outcome
        if not isinstance(outcome, str):
            raise not_a_text(self.name, outcome, self._function)
        return ToolResult(outcome)


def tool(function: Callable[..., Any]) -> FunctionTool:
    """A tool from a sync or async function, with its name, docstring and annotations.

    Every parameter needs a type annotation. The function returns text (or a ToolResult) and
    raises ToolError for invalid calls of the policy. A sync function must be fast: it runs on the
    event loop.
    """
    return FunctionTool(function)


def read_arguments(name: str, arguments: dict[str, Any], kind: type[T], strict: bool = True) -> T:
    """The arguments of a call of the tool `name` as a struct. Raises ToolError."""
    try:
        return convert(arguments, kind, strict=strict)
    except ForeignError as error:
        raise ToolError(f"{name}: {error}") from error


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
            shared(("release", id(tool)), lambda: _Release(tool.name, release))


class _Release:
    """Releases a tool when shared resources are closed. Keeps the tool alive, since its id is the
    key."""

    def __init__(self, name: str, release: Callable[[], Awaitable[None]]) -> None:
        self._name = name
        self._release = release

    async def close(self) -> None:
        """Errors and hangs of the release do not prevent other resources from being closed."""
        who = f"the release of the tool {self._name!r}"
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await guarded(self._release(), who)
        except TimeoutError:
            logger.warning("%s did not end within %g s", who, RELEASE_TIMEOUT_S)
        except AgentEnvError as error:
            logger.warning("%s: %s", who, error)


def argument_schema(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """JSON schema of an arguments struct, without the references that msgspec adds."""
    schema = msgspec.json.schema(arguments)
    definitions = schema["$defs"]
    definition: dict[str, Any] = inlined(definitions[arguments.__name__], definitions, ())
    definition.pop("title", None)
    return definition


def inlined(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...]) -> Any:
    """A schema with its references inlined; a recursive reference becomes an open schema."""
    if isinstance(schema, list):
        return [inlined(one, definitions, within) for one in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if name in definitions:
        return {} if name in within else inlined(definitions[name], definitions, (*within, name))
    return {key: inlined(value, definitions, within) for key, value in schema.items()}


def _arguments_struct(function: Callable[..., Any]) -> type[msgspec.Struct]:
    hints = get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise ConfigError(
                f"@tool {function.__name__}: parameter {parameter.name!r} must be an ordinary "
                "parameter with a type annotation"
            )
        hint = hints[parameter.name]
        if parameter.default is parameter.empty:
            fields.append((parameter.name, hint))
        else:
            fields.append((parameter.name, hint, parameter.default))
    return msgspec.defstruct(
        f"{function.__name__}_arguments", fields, forbid_unknown_fields=True, kw_only=True
    )


class ToolLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tool; None means the environment's setting."""

    max_calls: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="calls of the tool in one episode; none: only the limit of all calls "
            "applies"
        ),
    ] = None
    timeout_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="deadline of one call; none: that of the environment"),
    ] = None
    max_concurrency: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="concurrent calls of the tool in this process; none: unlimited"),
    ] = None
    num_retries: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="retries after an infrastructure failure; none: the environment's setting"
        ),
    ] = None
    required: Annotated[
        bool,
        Meta(
            description="false: a tool that cannot be loaded is skipped with a warning, and one "
            "that fails permanently is reported to the policy as unavailable"
        ),
    ] = True

    def filled(self, timeout_s: float, num_retries: int) -> ToolLimits:
        """These limits, with unset ones from the environment."""
        return replace(
            self,
            timeout_s=timeout_s if self.timeout_s is None else self.timeout_s,
            num_retries=num_retries if self.num_retries is None else self.num_retries,
        )


class ToolConfig(ToolLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool of an episode and its limits. A list of these replaces the environment's list."""

    name: Annotated[str, Meta(description="name of a tool of the environment, or 'module:name'")]
    kwargs: Annotated[
        dict[str, Any], Meta(description="keyword arguments of the class or function named")
    ] = field(default_factory=dict)


OnLimit = Literal["end", "result"]  # of a call beyond a limit: end the episode, or return a result


class CallBudget:
    """Used and remaining calls of an episode."""

    def __init__(self, max_tool_calls: int | None) -> None:
        self.max_tool_calls = max_tool_calls
        self.num_calls = 0
        self._num_of: Counter[str] = Counter()

    def copy(self) -> CallBudget:
        """An independent copy of the counts, for a fork of the episode."""
        other = CallBudget(self.max_tool_calls)
        other.num_calls, other._num_of = self.num_calls, self._num_of.copy()
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
        if most is not None and self._num_of[name] >= most:
            raise ToolError(
                f"{name} cannot be called any more: all {most} calls of it are used.",
                {"limit": f"max_calls of {name}"},
            )
        self._num_of[name] += 1

    def beyond(self, names: Sequence[str], limits: Mapping[str, ToolLimits]) -> str:
        """The limit that calls of these tools would exceed, as text; "" for none."""
        total = self.max_tool_calls
        if total is not None and self.num_calls + len(names) > total:
            return "max_tool_calls"
        for name in names:
            most = limits[name].max_calls if name in limits else None
            if most is not None and self._num_of[name] + names.count(name) > most:
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
    try:
        made = loaded(path)
    except ConfigError as error:
        raise ConfigError(f"{key}.name: {path!r} cannot be loaded: {error}") from error
    if not isinstance(made, FunctionTool):
        try:
            made = made(**kwargs)
        except TypeError as error:
            raise ConfigError(
                f"{key}: {path} cannot be made with {sorted(kwargs)}: {error}"
            ) from error
    elif kwargs:
        raise ConfigError(
            f"{key}.kwargs: {path} is a @tool function, which has no keyword arguments"
        )
    missing = [part for part in ("name", "schema", "start", "call") if not hasattr(made, part)]
    if missing and not isinstance(made, ToolSource):
        raise ConfigError(
            f"{key}.name: {path} does not create a tool: it lacks {', '.join(missing)}"
        )
    tool: Tool | ToolSource = made
    return tool
