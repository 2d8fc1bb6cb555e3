"""Tools: what the policy can call. `@tool` makes one from a typed function.

    @tool
    async def weather(city: str, days: int = 1) -> str:
        '''Forecast for a city.'''

A tool object is shared by all episodes; what belongs to one episode is its `state`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, get_type_hints, runtime_checkable

import msgspec

from agentenv.env import ForkMode
from agentenv.errors import ConfigError, ToolError
from agentenv.types import ToolResult


class Tool(Protocol):
    """One tool. `schema` is the JSON schema of its arguments; the first is the one that the tag
    protocol fills with the text between the tags."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def schema(self) -> dict[str, Any]: ...
    @property
    def fork_mode(self) -> ForkMode: ...

    def start(self, seed: int | None) -> Any:
        """The state of a new episode; cheap, since many episodes never call the tool."""
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
    """Where several tools come from, known only once it is asked, such as a tool server."""

    async def load(self) -> Sequence[Tool]:
        """The tools, the same ones each time. Raises ConfigError when there is no way."""
        ...


class StatelessTool:
    """Base of tools that keep nothing between calls."""

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


class FunctionTool(StatelessTool):
    """A tool made from a function; arguments are checked and converted by their annotations."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self.description = inspect.cleandoc(function.__doc__ or "")
        self._function = function
        self._arguments = _arguments_struct(function)
        self.schema = argument_schema(self._arguments)

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        try:
            checked = msgspec.convert(arguments, self._arguments, strict=False)
        except msgspec.ValidationError as error:
            raise ToolError(f"{self.name}: {error}") from error
        outcome = self._function(**msgspec.structs.asdict(checked))
        if inspect.isawaitable(outcome):
            outcome = await outcome
        return outcome if isinstance(outcome, ToolResult) else ToolResult(str(outcome))


def tool(function: Callable[..., Any]) -> FunctionTool:
    """Make a tool of a sync or async function; name, description and schema come from it.

    Every parameter needs a type annotation. The function returns text (or a ToolResult) and
    raises ToolError for a call that is the policy's fault. A sync function must be quick: it
    runs on the event loop.
    """
    return FunctionTool(function)


def argument_schema(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """JSON schema of an arguments struct, without the references that msgspec adds."""
    schema = msgspec.json.schema(arguments)
    definition = dict(schema["$defs"][arguments.__name__])
    definition.pop("title", None)
    return definition


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
