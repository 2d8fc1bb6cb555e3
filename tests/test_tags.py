"""Calls of the tag protocol: one parameter is a text, several are an object of JSON."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct

from agentenv import Message, Task, ToolEnv, ToolError, tool
from agentenv.adapters.testing import check_tool_env
from agentenv.base.errors import ConfigError
from agentenv.base.types import MALFORMED_CALL, Completion
from agentenv.contract.function_tool import FunctionTool
from agentenv.envs.grading.reward import ExactMatch
from agentenv.text.renderer import TagRenderer
from agentenv.text.tags import (
    check_tags,
    form,
    tag_calls,
    takes_object,
    with_tools,
    written_arguments,
)
from tests.support.toy import CharTokenizer

STOCK = {"bolts": 1240, "nuts": 310}


@tool
def stock(item: str) -> str:
    """How many pieces of an item there are."""
    return str(STOCK[item])


@tool
def order(
    item: Annotated[str, Meta(description="what to order")],
    count: int,
    speed: Literal["slow", "fast"] = "slow",
) -> str:
    """Order pieces of an item."""
    if item not in STOCK:
        raise ToolError(f"there is no {item!r}")
    return f"{count} {item} ordered, {speed}"


@tool
def weather(city: str, days: int = 1) -> str:
    """Forecast for a city."""
    return f"{city}, {days} days"


@tool
def total(numbers: list[float]) -> str:
    """The sum of numbers."""
    return f"{sum(numbers):g}"


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


@tool
def sized(size: Size) -> str:
    """An object with a size."""
    return size.value


class Place(Struct):
    street: str
    number: int


@tool
def deliver(place: Place) -> str:
    """Deliver to a place."""
    return f"{place.street} {place.number}"


def schema(one: FunctionTool) -> dict[str, Any]:
    return {"name": one.name, "description": one.description, "parameters": one.schema}


class ShopEnv(ToolEnv):
    def __init__(self, task: Task) -> None:
        tools = [stock, order, weather, total, sized, deliver]
        super().__init__(task, tools=tools, grader=ExactMatch())


TASK = Task("t", "me/Shop-v0", "How many?", ("3",))


async def result(text: str) -> str:
    """The observation of the policy after a turn with this text."""
    env = ShopEnv(TASK)
    _, info = await env.reset(seed=0)
    messages, *_ = await env.step(Message("assistant", text, tag_calls(text, info["tools"])))
    await env.close()
    return messages[0].content if messages else ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>..</think><stock>bolts</stock>", "1240"),
        ('<order>{"item": "bolts", "count": 3}</order>', "3 bolts ordered, slow"),
        ('<order>{"count": "3", "item": "nuts"}\n</order>', "3 nuts ordered, slow"),
        ("<weather>Lima</weather>", "Lima, 1 days"),
        ('<weather>{"city": "Lima", "days": 3}</weather>', "Lima, 3 days"),
        ('<total>{"numbers": [1, 2.5]}</total>', "3.5"),
        ("<sized>large</sized>", "large"),
        ('<deliver>{"place": {"street": "Hill", "number": 4}}</deliver>', "Hill 4"),
    ],
)
async def test_a_call_is_a_text_or_an_object(text: str, expected: str) -> None:
    assert await result(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<order>bolts</order>", "not valid JSON"),
        ('<order>{"item": "bolts", "count": }</order>', "not valid JSON"),
        ("<order>[1, 2]</order>", "not a JSON object"),
        ("<order></order>", "not valid JSON"),
        ("<total>1, 2</total>", "not valid JSON"),
    ],
)
async def test_the_error_of_an_unreadable_object_shows_the_expected_form(
    text: str, problem: str
) -> None:
    said = await result(text)
    assert "tool call cannot" in said
    assert problem in said
    if text.startswith("<order>"):
        assert '"count": integer, "speed"' in said


async def test_a_missing_argument_is_an_error_of_the_tool() -> None:
    assert "count" in await result('<order>{"item": "bolts"}</order>')
    assert await result('<order>{"item": "nails", "count": 1}</order>') == "there is no 'nails'"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<think>no <stock>x</stock> yet</think><stock>nuts</stock>", {"item": "nuts"}),
        ("<think>a</think><think><stock></think><stock>nuts</stock>", {"item": "nuts"}),
        ("<stock>a</think>b</stock>", {"item": "a</think>b"}),
        ("<think>I look <stock>nuts</stock>", {"item": "nuts"}),
        ("<stock>nuts and <stock>bolts</stock>", None),
        ("I use <stock>: <stock>bolts</stock>", None),
        ("<weather>Lima <weather>Rome</weather>", None),
        ('<order>{"item": "<order>", "count": 1}</order>', {"item": "<order>", "count": 1}),
        ('<order>{"item": "a<\\/order>b", "count": 1}</order>', {"item": "a</order>b", "count": 1}),
        ('<order>{"item": "</think>", "count": 1}</order>', {"item": "</think>", "count": 1}),
        ('<order>{"item": <order>{"item": "nuts", "count": 1}</order>', None),
    ],
)
def test_a_call_begins_after_the_thoughts_and_is_opened_once(
    text: str, arguments: dict[str, Any] | None
) -> None:
    (call,) = tag_calls(text, [schema(one) for one in (stock, order, weather)])
    assert call.name == MALFORMED_CALL if arguments is None else call.arguments == arguments


def test_a_closing_tag_within_an_argument_is_reported_with_its_escaped_form() -> None:
    """Engines stop at the first closing tag; so do the turns that demonstrations show."""
    tools, tokenizer = [schema(order)], CharTokenizer()
    arguments = {"item": "a</order>b", "count": 1}
    renderer = TagRenderer(tokenizer)
    for body, is_read in (
        (json.dumps(arguments), False),
        (written_arguments(arguments, tools[0]), True),
    ):
        whole = f"<order>{body}</order>"
        (stop,) = renderer.stop(tools)
        sampled = whole[: whole.index(stop) + len(stop)]
        ids = tokenizer.encode(sampled)
        logprobs = [0.0] * len(ids)
        completion = Completion(ids, logprobs, logprobs, "stop", [], stop=stop)
        (call,) = renderer.parse(completion, tools).tool_calls
        assert (call.arguments == arguments) == is_read
        if not is_read:
            assert r"is written <\/order>" in call.arguments["problem"]


def test_written_arguments_are_read_back_unchanged() -> None:
    for one, arguments in (
        (stock, {"item": "bolts"}),
        (order, {"item": "bölts", "count": 3}),
        (weather, {"city": "Lima"}),
        (total, {"numbers": [1, 2]}),
    ):
        text = written_arguments(arguments, schema(one))
        (call,) = tag_calls(f"<{one.name}>{text}</{one.name}>", [schema(one)])
        assert (call.name, call.arguments) == (one.name, arguments)
    assert written_arguments({"a": 1, "b": 2}, None) == '{"a": 1, "b": 2}'
    assert written_arguments({"code": "1"}, None) == "1"


def test_a_prompt_describes_all_tools_if_any_call_form_is_not_obvious() -> None:
    """All tools that it does not show yet: a list without `stock` would imply that it does not
    exist."""
    tools = [schema(stock), schema(order)]
    system, question = Message("system", "Be brief."), Message("user", "How many?")
    told = with_tools([system, question], tools, "several")
    assert told[1] == question
    assert told[0].content.startswith("Be brief.\n\n")
    assert (
        f"{form(schema(order))}: Order pieces of an item.\n  item: what to order" in told[0].content
    )
    assert "<stock>item</stock>: How many" in told[0].content
    shown = Message("system", "Write <stock>item</stock>.")
    assert "<stock>item</stock>: " not in with_tools([shown, question], tools, "several")[0].content
    (alone,) = with_tools([question], tools, "all")
    assert alone.content.endswith("\n\nHow many?")
    assert "<stock>item</stock>: How many" in alone.content
    assert with_tools([system, question], tools, "none") == [system, question]
    shown = Message("system", 'Write <order>{"item": .., "count": ..}</order>.')
    told = with_tools([shown, question], [schema(order)], "several")
    assert told == [shown, question]
    assert with_tools([shown, question], tools, "several") == [shown, question], "one parameter"
    assert with_tools([question], [schema(stock)], "several") == [question]


def named(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "description": "", "parameters": {"type": "object", **parameters}}


@pytest.mark.parametrize(
    ("one", "remedy"),
    [
        (named("answer"), "rename the tool"),
        (named("think"), "renderer.name = 'native'"),
        (named("a b"), "without spaces"),
        (named("", properties={}), "without spaces"),
        (
            named("find", properties={"a": {}}, required=["a", "b"]),
            "which properties lacks; add them there",
        ),
    ],
)
def test_a_tool_that_cannot_be_called_is_refused(one: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match="protocol cannot call") as caught:
        check_tags([one])
    assert remedy in str(caught.value)
    with pytest.raises(ConfigError, match=remedy.split()[0]):
        TagRenderer(CharTokenizer()).check_tools([one])


def test_schemas_of_foreign_servers() -> None:
    assert not takes_object(named("ping"))
    assert takes_object(named("ping", required=["a"]))
    (call,) = tag_calls("<ping></ping>", [named("ping")])
    assert call.arguments == {}
    (call,) = tag_calls("<find></find>", [named("find", required=["a"])])
    assert call.name == MALFORMED_CALL


async def test_the_conformance_kit_accepts_texts_and_refuses_uncallable_tools() -> None:
    await check_tool_env(
        ShopEnv, TASK, ["<stock>nuts</stock>", '<order>{"item": "nuts", "count": 1}</order>', "3"]
    )

    @tool
    def answer(text: str) -> str:
        """A tag of the protocol."""
        return text

    class BadEnv(ToolEnv):
        def __init__(self, task: Task) -> None:
            super().__init__(task, tools=[answer], grader=ExactMatch())

    with pytest.raises(AssertionError, match="'answer'"):
        await check_tool_env(BadEnv, TASK, ["3"])
    await check_tool_env(BadEnv, TASK, [Message("assistant", "3")], renderer="native")
