"""@tool makes a tool from a typed function."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import pytest

from agentenv.base.errors import ConfigError, CrashError, ToolError
from agentenv.base.types import ToolResult
from agentenv.contract.function_tool import tool


@tool
async def weather(city: str, days: int = 1) -> str:
    """Forecast for a city.

    As seen from the window.
    """
    return f"{city}: {days} days of rain"


@tool
def add(first: float, second: float) -> ToolResult:
    """Add two numbers."""
    return ToolResult(str(first + second), {"quick": True})


def test_name_description_and_schema_come_from_the_function() -> None:
    assert weather.name == "weather"
    assert weather.description == "Forecast for a city.\n\nAs seen from the window."
    assert weather.schema == {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
        "required": ["city"],
        "additionalProperties": False,
    }
    assert weather.fork_mode == "pure"


async def test_async_and_sync_functions_are_called_with_converted_arguments() -> None:
    assert (await weather.call({"city": "Lima", "days": "3"}, None)).text == "Lima: 3 days of rain"
    assert (await add.call({"first": 1, "second": 2.5}, None)) == ToolResult("3.5", {"quick": True})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "city"),
        ({"city": 3}, "city"),
        ({"city": "Lima", "days": "many"}, "days"),
        ({"city": "Lima", "when": "now"}, "when"),
    ],
)
async def test_wrong_arguments_are_a_tool_error_of_the_policy(
    arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(ToolError, match=says) as raised:
        await weather.call(arguments, None)
    assert "weather" in str(raised.value)


def test_a_parameter_without_annotation_is_refused() -> None:
    def untyped(city) -> str:  # type: ignore[no-untyped-def]
        return str(city)

    def variadic(*cities: str) -> str:
        return str(cities)

    for function in (untyped, variadic):
        with pytest.raises(ConfigError, match="type annotation"):
            tool(function)


def yields() -> Iterator[str]:
    yield "a"


async def yields_later() -> AsyncIterator[str]:
    yield "a"


def counts() -> int:
    return 1


def tells() -> str | None:
    return None


def lists() -> list[str]:
    return ["a"]


@pytest.mark.parametrize("function", [yields, yields_later, counts, tells, lists])
def test_a_function_whose_result_is_no_text_is_refused_at_its_decoration(function: Any) -> None:
    with pytest.raises(ConfigError, match=rf"@tool {function.__name__} \(test_tool.py, line \d+\)"):
        tool(function)


def test_a_function_may_return_either_or_leave_it_open() -> None:
    def either() -> str | ToolResult:
        return "a"

    def later() -> Awaitable[str]:
        raise NotImplementedError

    def anything() -> Any:
        return "a"

    def open_ended():  # type: ignore[no-untyped-def]
        return "a"

    for function in (either, later, anything, open_ended):
        assert tool(function).name == function.__name__


async def test_a_result_without_a_text_is_named() -> None:
    @tool
    def find() -> ToolResult:
        return ToolResult(None)  # type: ignore[arg-type]

    with pytest.raises(CrashError, match="NoneType"):
        await find.call({}, None)
