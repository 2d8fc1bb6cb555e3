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


@pytest.mark.parametrize("result", [Iterator[str], AsyncIterator[str], int, str | None, list[str]])
def test_a_function_whose_result_is_no_text_is_refused_at_its_decoration(result: Any) -> None:
    def find():  # type: ignore[no-untyped-def]
        return "a"

    find.__annotations__["return"] = result
    with pytest.raises(ConfigError, match=r"@tool find \(test_tool.py, line \d+\)"):
        tool(find)


@pytest.mark.parametrize("result", [str | ToolResult, Awaitable[str], Any, None])
async def test_a_function_may_leave_its_result_open_and_must_have_a_text(result: Any) -> None:
    def find():  # type: ignore[no-untyped-def]
        return ToolResult(None)  # type: ignore[arg-type]

    find.__annotations__.update({"return": result} if result else {})
    with pytest.raises(CrashError, match="NoneType"):
        await tool(find).call({}, None)
