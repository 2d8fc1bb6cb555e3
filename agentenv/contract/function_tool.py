"""Tools from functions, and schemas and values of arguments.

@tool
async def weather(city: str, days: int = 1) -> str:
    '''Forecast for a city.'''
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from agentenv.base.crashes import A_TEXT, code_place, not_a_text
from agentenv.base.errors import ConfigError, ForeignError, ToolError, reported_as
from agentenv.base.types import ToolResult
from agentenv.base.untrusted import convert
from agentenv.contract.tools import StatelessTool

T = TypeVar("T")


class FunctionTool(StatelessTool):
    """A tool from a function; arguments are checked and converted by their annotations."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        _check_result(function)
        self.description = inspect.cleandoc(function.__doc__ or "")
        self.function = function
        self._arguments = _arguments_struct(function)
        self.schema = argument_schema(self._arguments)

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        checked = read_arguments(self.name, arguments, self._arguments, strict=False)
        outcome = self.function(**msgspec.structs.asdict(checked))
        if inspect.isawaitable(outcome):
            outcome = await outcome
        found = outcome if isinstance(outcome, ToolResult) else ToolResult(outcome)
        if not isinstance(found.text, str):
            raise not_a_text(self.name, outcome, self.function)
        return found


def tool(function: Callable[..., Any]) -> FunctionTool:
    """A tool from a sync or async function, with its name, docstring and annotations.

    Every parameter needs a type annotation. The function returns text (or a ToolResult) and
    raises ToolError for invalid calls of the policy. A sync function must be fast: it runs on the
    event loop.
    """
    return FunctionTool(function)


def read_arguments(name: str, arguments: dict[str, Any], kind: type[T], strict: bool = True) -> T:
    """The arguments of a call of the tool `name` as a struct. Raises ToolError."""
    with reported_as(ToolError, name, ForeignError):
        return convert(arguments, kind, strict=strict)


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


def _check_result(function: Callable[..., Any]) -> None:
    """Raises ConfigError for an annotated result that is not a text."""
    hint = get_type_hints(function).get("return", Any)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in [get_origin(one) or one for one in parts if one is not Any]:
        if isinstance(kind, type) and not issubclass(kind, str | ToolResult | Awaitable):
            name = f"@tool {function.__name__}{code_place(function)}"
            raise ConfigError(f"{name} returns {kind.__name__}; {A_TEXT}")


def _arguments_struct(function: Callable[..., Any]) -> type[msgspec.Struct]:
    hints = get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise ConfigError(
                f"@tool {function.__name__}: parameter {parameter.name!r} must be an ordinary "
                "parameter with a type annotation"
            )
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, hints[parameter.name], *default))
    return msgspec.defstruct(
        f"{function.__name__}_arguments", fields, forbid_unknown_fields=True, kw_only=True
    )
