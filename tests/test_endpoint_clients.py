"""The endpoint with the stock clients: each key of their types is in the table, and each turn that
the policy may sample comes back as it was served, with the same tokens."""

from __future__ import annotations

import asyncio
import json
import typing
from collections.abc import Iterator
from random import Random
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import beta_content_block_param, beta_message_param, beta_tool_union_param
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types.chat import chat_completion_message_param, completion_create_params
from openai.types.responses import response_create_params, response_input_item_param, tool_param

from agentenv.endpoint.messages import keys, read_body
from agentenv.text.native import NativeRenderer
from tests.support.chat_models import QWEN3, make_tokenizer
from tests.test_endpoint import KEY, SCHEMA, Json, serving


def members(kind: Any) -> Iterator[Any]:
    """The members of a union, without annotations."""
    origin = typing.get_origin(kind)
    if origin is typing.Union or str(origin) == "<class 'types.UnionType'>":
        for one in typing.get_args(kind):
            yield from members(one)
    elif origin is typing.Annotated:
        yield from members(typing.get_args(kind)[0])
    else:
        yield kind


def keys_of(kind: Any) -> set[str]:
    return {key for one in kind.__mro__ for key in getattr(one, "__annotations__", ())}


BODIES = {
    "chat": [completion_create_params.CompletionCreateParamsBase],
    "responses": [response_create_params.ResponseCreateParamsBase],
    "messages": [
        message_create_params.MessageCreateParamsBase,
        beta_create_params.MessageCreateParamsBase,
    ],
}


@pytest.mark.parametrize("api", BODIES)
def test_each_key_of_a_stock_client_is_in_the_table(api: str) -> None:
    table = keys()[api]
    listed = table.done | table.neutral | table.sampling | table.refused.keys()
    for kind in BODIES[api]:
        assert keys_of(kind) - listed == set()
    groups = [table.done, table.neutral, table.sampling, table.refused.keys()]
    assert sum(map(len, groups)) == len(listed), "each key is in one group"
    assert table.usual.keys() <= table.refused.keys()


def test_each_key_of_a_message_that_the_policy_can_read_is_in_the_table() -> None:
    table = keys()
    known = {name: one.done | one.neutral | one.refused.keys() for name, one in table.items()}
    for kind in members(chat_completion_message_param.ChatCompletionMessageParam):
        assert keys_of(kind) <= known["message"], kind
    for kind in members(beta_message_param.BetaMessageParam):
        assert keys_of(kind) <= known["message"], kind
    read = {"BetaTextBlockParam", "BetaThinkingBlockParam", "BetaRedactedThinkingBlockParam",
            "BetaToolUseBlockParam", "BetaToolResultBlockParam"}  # fmt: skip
    for kind in members(beta_content_block_param.BetaContentBlockParam):
        if kind.__name__ in read:
            assert keys_of(kind) <= known["part"], kind
    items = {"EasyInputMessageParam", "Message", "ResponseOutputMessageParam", "ItemReference",
             "ResponseFunctionToolCallParam", "FunctionCallOutput", "ResponseReasoningItemParam",
             "ResponseCustomToolCallOutputParam", "ResponseCustomToolCallParam"}  # fmt: skip
    for kind in members(response_input_item_param.ResponseInputItemParam):
        if kind.__name__ in items:
            assert keys_of(kind) <= known["item"], kind
    tools = {"FunctionToolParam", "CustomToolParam", "NamespaceToolParam", "BetaToolParam"}
    every = (tool_param.ToolParam, beta_tool_union_param.BetaToolUnionParam)
    for kind in (one for union in every for one in members(union)):
        if kind.__name__ in tools:
            assert keys_of(kind) <= known["tool"], kind


# Turns of the policy, each returned by the stock clients, streamed and not.

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "lima"}}\n</tool_call>'
TURNS = {
    "text": "It is Lima.",
    "empty": "",
    "thought": "<think>\nI look.\n</think>\n\nIt is Lima.",
    "call": f"<think>\nlook\n</think>\n\nI look.\n{CALL}",
    "two calls": f"I look.\n{CALL}\n{CALL}",
    "text after a call": f"Before.\n{CALL}\nAfter.",
    "text between calls": f"{CALL}\nBetween.\n{CALL}",
    "malformed": "Hm <tool_call>\n{bad}\n</tool_call>",
    "malformed beside a good one": f"{CALL}\n<tool_call>\n{{bad}}\n</tool_call>",
    "good after malformed": f"<tool_call>\n{{bad}}\n</tool_call>\n{CALL}",
    "unclosed": 'I look. <tool_call>\n{"name": "search"',
    "not offered": CALL.replace('"search"', '"order"'),
    "not offered beside": CALL + "\n" + CALL.replace('"search"', '"order"'),
    "no name": CALL.replace('"search"', '""'),
    "blank name": CALL.replace('"search"', '" "'),
    "name of a line": CALL.replace('"search"', '"a\\nb"'),
    "null arguments": CALL.replace('{"query": "lima"}', "null"),
    "no arguments": '<tool_call>\n{"name": "search"}\n</tool_call>',
    "arguments as text": CALL.replace('{"query": "lima"}', '"{}"'),
    "list of arguments": CALL.replace('{"query": "lima"}', "[1]"),
    "a thought's end in an argument": CALL.replace("lima", "a</think>b"),
    "a call's end in an argument": CALL.replace("lima", "a</tool_call>b"),
    "half of a surrogate pair": CALL.replace("lima", "\\ud83d"),
    "a surrogate pair": CALL.replace("lima", "\\ud83d\\ude00"),
    "escapes": CALL.replace("lima", "\\u0000\\u2028\\n\\t\\\\"),
    "numbers": CALL.replace('"lima"', "[1e3, 12345678901234567890123, -0.0, 1.0]"),
    "nested": CALL.replace('"lima"', "[" * 40 + "]" * 40),
    "accents": CALL.replace("lima", "é 漢字 \U0001f600"),
    "equal keys": CALL.replace('"query": "lima"', '"query": 1, "query": 2'),
    "blanks": "  \n It is. \n ",
    "empty thought": "<think>\n\n</think>\n\nIt is.",
    "open thought": "<think>\nI look",
    "quoted mark": "It writes `<tool_call>` here.",
}  # fmt: skip


def random_turn(rng: Random) -> str:
    parts = ["Fine. ", "\n", " ", CALL, "<think>", "</think>", "<tool_call>", "</tool_call>", "{",
             '{"name": "search", "arguments": {}}', '"', "\\", "é", "[1]", "null", ":"]  # fmt: skip
    return "".join(rng.choice(parts) for _ in range(rng.randrange(1, 9)))


class Seen:
    """The prompts of an engine, and its next turns."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.turns: list[str] = []

    def __call__(self, prompt: str, rng: Random) -> str:
        self.prompts.append(prompt)
        return self.turns.pop() if self.turns else "The end."


Openai, Anthropic = openai.AsyncOpenAI, anthropic.AsyncAnthropic


async def chat(client: Openai, *, streamed: bool, offered: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": "search", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": "Where?"}]
    more: Any = {"tools": tools} if offered else {}
    for _ in range(2):
        asked: Any = {"model": "policy", "messages": messages, "max_tokens": 150, **more}
        if streamed:
            async with client.chat.completions.stream(**asked) as stream:
                found = await stream.get_final_completion()
        else:
            found = await client.chat.completions.create(**asked)
        message = found.choices[0].message
        messages.append(message.model_dump(exclude_unset=True, exclude={"parsed"}))
        for call in messages[-1].get("tool_calls") or ():
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "ok"}
            for call in message.tool_calls or ()
        ]
        messages += results or [{"role": "user", "content": "Go on."}]


async def responses(client: Openai, *, streamed: bool, offered: bool) -> None:
    tools: Any = [{"type": "function", "name": "search", "parameters": SCHEMA, "strict": False}]
    items: list[Any] = [{"role": "user", "content": "Where?"}]
    more: Any = {"tools": tools} if offered else {}
    for _ in range(2):
        asked: Any = {"model": "policy", "input": items, "max_output_tokens": 150, **more}
        if streamed:
            async with client.responses.stream(**asked) as stream:
                found = await stream.get_final_response()
        else:
            found = await client.responses.create(**asked)
        calls = [item for item in found.output if item.type == "function_call"]
        items += [item.model_dump(exclude_unset=True) for item in found.output]
        for item in items:
            item.pop("parsed_arguments", None)
            for part in item.get("content") or () if item.get("type") == "message" else ():
                part.pop("parsed", None)
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}
            for call in calls
        ]
        items += results or [{"role": "user", "content": "Go on."}]


async def messages(client: Anthropic, *, streamed: bool, offered: bool) -> None:
    tools: Any = [{"name": "search", "input_schema": SCHEMA}]
    turns: list[Any] = [{"role": "user", "content": "Where?"}]
    more: Any = {"tools": tools} if offered else {}
    for _ in range(2):
        asked: Any = {"model": "policy", "messages": turns, "max_tokens": 150, **more}
        if streamed:
            async with client.messages.stream(**asked) as stream:
                found = await stream.get_final_message()
        else:
            found = await client.messages.create(**asked)
        turns.append({"role": "assistant", "content": found.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "ok"}
            for block in found.content
            if block.type == "tool_use"
        ]
        turns.append({"role": "user", "content": results or "Go on."})


CLIENTS: dict[str, Any] = {"chat": chat, "responses": responses, "messages": messages}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", CLIENTS)
def test_whatever_is_served_is_accepted_when_it_returns(api: str, streamed: bool) -> None:
    seen, rng = Seen(), Random(11)
    turns = [*TURNS.values(), *(random_turn(rng) for _ in range(20))]

    async def work() -> None:
        renderer = NativeRenderer(make_tokenizer(QWEN3))
        async with serving(renderer, seen) as to, connected(api, to.url) as client:
            for turn in turns:
                for offered in (True, False):
                    seen.turns, seen.prompts = [turn], []
                    await CLIENTS[api](client, streamed=streamed, offered=offered)
                    sampled = f"<|im_start|>assistant\n{turn}<|im_end|>"
                    assert sampled in seen.prompts[1], (turn, seen.prompts[1])

    asyncio.run(work())


def connected(api: str, url: str) -> Any:
    if api == "messages":
        return Anthropic(base_url=url, api_key=KEY, max_retries=0)
    return Openai(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


@pytest.mark.parametrize("streamed", [False, True])
def test_without_tools_a_call_is_a_text(streamed: bool) -> None:
    seen = Seen()
    turn = f"I look.\n{CALL}"

    async def work() -> None:
        async with serving(NativeRenderer(make_tokenizer(QWEN3)), seen) as client:
            for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
                seen.turns = [turn]
                body = {"model": "policy", "messages": [{"role": "user", "content": "q"}], **more}
                reply = await client.ask("/v1/chat/completions", body)
                message = reply["choices"][0]["message"]
                assert message["content"] == turn
                assert "tool_calls" not in message

    asyncio.run(work())


TOOL: Json = {"type": "function", "function": {"name": "search", "parameters": SCHEMA}}


def test_half_of_a_surrogate_pair_in_a_body_is_replaced() -> None:
    body = read_body(rb'{"a": "\ud83d", "b": "\ud83d\ude00", "c": "\\ud83d", "d": "\udE00x"}')
    assert body == {"a": "�", "b": "\U0001f600", "c": "\\ud83d", "d": "�x"}
    assert json.dumps(body)
