"""The endpoint over HTTP: the three APIs have the same content, streams add up to replies, and a
damaged request of any kind gets the right error in the form of its API."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, NamedTuple

import aiohttp
import pytest

from agentenv.base.errors import EngineDeadError, EngineError
from agentenv.base.types import Chunk, SamplingParams
from agentenv.endpoint.messages import ERRORS
from agentenv.endpoint.policy import PolicyHandler
from agentenv.endpoint.server import ApiServer
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.text.native import NativeRenderer
from agentenv.text.renderer import ContextRenderer, TagRenderer
from tests.support.chat_models import QWEN3, make_tokenizer

Json = dict[str, Any]
KEY = "a-key"
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}
SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}}
FUNCTION = {"name": "search", "description": "Looks.", "parameters": SCHEMA}
MAX_LENGTH = 4000


def turn(prompt: str, rng: Random) -> str:
    """Thinks and calls, then answers."""
    if "<tool_response>" in prompt or "<result>\n" in prompt:
        return "<think>\nseen\n</think>\n\nThe answer is é 42."
    if "<search>" in prompt:
        return "<think>\nlook\n</think>\n\nI look.<search>lima</search>"
    call = '{"name": "search", "arguments": {"query": "lima"}}'
    return f"<think>\nlook\n</think>\n\nI look.\n<tool_call>\n{call}\n</tool_call>"


class Client(NamedTuple):
    http: aiohttp.ClientSession
    url: str

    async def post(self, path: str, body: Any, key: str = KEY) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}"}
        async with self.http.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.read()

    async def ask(self, path: str, body: Json) -> Json:
        status, data = await self.post(path, body)
        assert status == 200, data
        return dict(json.loads(data))


@asynccontextmanager
async def serving(
    renderer: ContextRenderer | None = None,
    script: Any = turn,
    engine: type[ScriptedEngine] = ScriptedEngine,
    **more: Any,
) -> Any:
    tokenizer = make_tokenizer(QWEN3)
    started = engine(ScriptedConfig(max_model_len=MAX_LENGTH), tokenizer, script=script)
    renderer = renderer or NativeRenderer(tokenizer)
    params = SamplingParams(max_tokens=1)
    handler = PolicyHandler(started, renderer, params, MAX_LENGTH, ["policy"], 200, **more)
    server = ApiServer(lambda _: handler, lambda: [{"id": "policy"}], key=KEY)
    await server.start()
    async with aiohttp.ClientSession() as http:
        yield Client(http, f"http://127.0.0.1:{server.port}")
    await server.close()


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving() as one:
        yield one


def request(api: str, *, stream: bool = False) -> Json:
    """The same question by each API."""
    body: Json = {"model": "policy", "stream": stream}
    messages = [{"role": "user", "content": "Where is it?"}]
    if api == "chat":
        return body | {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
    if api == "responses":
        return body | {"input": messages, "tools": [{"type": "function", **FUNCTION}]}
    tool = {"name": "search", "description": "Looks.", "input_schema": SCHEMA}
    return body | {"messages": messages, "max_tokens": 200, "tools": [tool]}


def answered(api: str, body: Json, reply: Json) -> Json:
    """The next request: the unchanged reply, and a result."""
    body = copy.deepcopy(body)
    if api == "chat":
        message = reply["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
        body["messages"] += [message, result]
    elif api == "responses":
        id = reply["output"][-1]["call_id"]
        result = {"type": "function_call_output", "call_id": id, "output": "ok"}
        body["input"] += [*reply["output"], result]
    else:
        block = {"type": "tool_result", "tool_use_id": reply["content"][-1]["id"], "content": "ok"}
        body["messages"] += [{"role": "assistant", "content": reply["content"]}]
        body["messages"] += [{"role": "user", "content": [block]}]
    return body


def parts(api: str, reply: Json) -> tuple[str, str, list[Any], Any]:
    """Thoughts, text, calls and the end of a reply."""
    if api == "chat":
        message = reply["choices"][0]["message"]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [(one["name"], json.loads(one["arguments"])) for one in functions]
        end = reply["choices"][0]["finish_reason"]
        return message.get("reasoning_content", ""), message["content"] or "", calls, end
    items = reply["output"] if api == "responses" else reply["content"]
    thoughts = text = ""
    calls = []
    for item in items:
        if item["type"] in ("reasoning", "message"):
            (part,) = item["content"]
            thoughts += part["text"] if item["type"] == "reasoning" else ""
            text += part["text"] if item["type"] == "message" else ""
        elif item["type"] == "function_call":
            calls.append((item["name"], json.loads(item["arguments"])))
        elif item["type"] == "tool_use":
            calls.append((item["name"], item["input"]))
        else:
            thoughts += item.get("thinking", "")
            text += item.get("text", "")
    return thoughts, text, calls, reply["status" if api == "responses" else "stop_reason"]


ENDS = {"chat": ("tool_calls", "stop"), "responses": ("completed", "completed"),
        "anthropic": ("tool_use", "end_turn")}  # fmt: skip


@pytest.mark.parametrize("protocol", ["native", "tags"])
@pytest.mark.parametrize("api", PATHS)
async def test_a_call_and_its_result(api: str, protocol: str) -> None:
    tags = TagRenderer(make_tokenizer(QWEN3), tools_in_prompt="all")
    async with serving(tags if protocol == "tags" else None) as client:
        body = request(api)
        first = await client.ask(PATHS[api], body)
        look = [("search", {"query": "lima"})]
        assert parts(api, first) == ("look", "I look.", look, ENDS[api][0])
        second = await client.ask(PATHS[api], answered(api, body, first))
        assert parts(api, second) == ("seen", "The answer is é 42.", [], ENDS[api][1])


def events(data: bytes) -> Iterator[Json]:
    for block in data.decode().split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def joined(api: str, data: bytes) -> tuple[str, str, str]:
    """Thoughts, text and arguments of a stream, by its deltas."""
    found = {"thoughts": "", "text": "", "calls": ""}
    for event in events(data):
        if api == "chat":
            for choice in event["choices"]:
                delta = choice["delta"]
                found["thoughts"] += delta.get("reasoning_content") or ""
                found["text"] += delta.get("content") or ""
                for call in delta.get("tool_calls", ()):
                    found["calls"] += call["function"]["arguments"]
        elif api == "responses":
            names = {"reasoning_text": "thoughts", "output_text": "text",
                     "function_call_arguments": "calls"}  # fmt: skip
            for name, place in names.items():
                if event["type"] == f"response.{name}.delta":
                    found[place] += event["delta"]
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            found["thoughts"] += delta.get("thinking", "")
            found["text"] += delta.get("text", "")
            found["calls"] += delta.get("partial_json", "")
    return found["thoughts"], found["text"], found["calls"]


@pytest.mark.parametrize("api", PATHS)
async def test_a_stream_adds_up_to_the_reply(client: Client, api: str) -> None:
    body = request(api)
    first = await client.ask(PATHS[api], body)
    status, data = await client.post(PATHS[api], request(api, stream=True))
    assert status == 200
    assert joined(api, data) == ("look", "I look.", '{"query": "lima"}')
    going_on = answered(api, body, first) | {"stream": True}
    _, data = await client.post(PATHS[api], going_on)
    assert joined(api, data) == ("seen", "The answer is é 42.", "")
    assert (data.endswith(b"data: [DONE]\n\n")) == (api == "chat")


async def test_an_unchanged_conversation_keeps_its_tokens() -> None:
    """A turn whose text other tokens could also spell is not encoded again."""
    prompts: list[str] = []

    def spelled(prompt: str, rng: Random) -> str:
        prompts.append(prompt)
        return "<think>\n\n x \n</think>\n\n\n  said  "

    async with serving(script=spelled) as client:
        messages: list[Json] = [{"role": "user", "content": "one"}]
        for number in range(3):
            body = {"model": "policy", "messages": messages}
            reply = await client.ask(PATHS["chat"], body)
            message = reply["choices"][0]["message"]
            assert message["content"] == "said"
            if number < 2:
                messages += [message, {"role": "user", "content": "go on"}]
        assert prompts[2].count("<think>\n\n x \n</think>\n\n\n  said  <|im_end|>") == 2
        trimmed = [{**m, "content": m["content"] + "!"} for m in messages]
        await client.ask(PATHS["chat"], {"model": "policy", "messages": trimmed})
        assert "  said" not in prompts[3], "an altered one is rendered"


async def test_choices_stops_limits_and_logprobs(client: Client) -> None:
    path, body = PATHS["chat"], {**request("chat"), "tools": []}
    found = await client.ask(path, {**body, "n": 3, "seed": 1, "logprobs": True})
    assert [one["index"] for one in found["choices"]] == [0, 1, 2]
    tokens = found["choices"][0]["logprobs"]["content"]
    assert len(tokens) * 3 == found["usage"]["completion_tokens"]
    assert "".join(one["token"] for one in tokens).endswith("<|im_end|>")
    found = await client.ask(path, {**body, "stop": ["look."]})
    assert found["choices"][0]["message"]["content"] == "I"
    assert found["choices"][0]["stop_reason"] == "look."
    found = await client.ask(path, {**body, "max_tokens": 3})
    assert found["choices"][0]["finish_reason"] == "length"
    stopped = {**request("anthropic"), "stop_sequences": ["look."], "tools": []}
    found = await client.ask(PATHS["anthropic"], stopped)
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "look.")
    found = await client.ask(f"{PATHS['anthropic']}/count_tokens", request("anthropic"))
    assert found["input_tokens"] > 10


class Failing(ScriptedEngine):
    """Raises `error` after some tokens of a stream."""

    error: Exception | None = None
    begun: asyncio.Event
    over: asyncio.Event

    async def generate(self, *given: Any, **keys: Any) -> Any:
        try:
            if self.error is None:
                Failing.begun.set()
                await asyncio.sleep(60)
            if keys.get("on_tokens"):
                ids = self.tokenizer.encode("<think>a thought that is long</think>text")
                keys["on_tokens"](Chunk(ids, [0.0] * len(ids), [0.0] * len(ids)))
            assert self.error is not None
            raise self.error
        finally:
            Failing.over.set()


FAILURES = {"engine": EngineError("it failed"), "engine_dead": EngineDeadError("it is gone")}


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("name", FAILURES)
async def test_an_engine_error_is_named_in_a_reply_and_in_a_stream(name: str, api: str) -> None:
    async with serving(engine=Failing) as client:
        Failing.error, Failing.over = FAILURES[name], asyncio.Event()
        status, data = await client.post(PATHS[api], request(api))
        assert (status, name_of(api, PATHS[api], status, data)) == (ERRORS[name][0], name)
        status, data = await client.post(PATHS[api], request(api, stream=True))
        assert status == 200, "it had begun"
        last = list(events(data))[-1]
        kind = {"chat": 1, "responses": 2, "anthropic": 3}[api]
        said = last if api == "responses" else last["error"]
        assert said["message"] == str(FAILURES[name])
        assert ERRORS[name][kind] in (said.get("code"), said.get("type"))


async def test_a_client_that_disconnects_stops_its_turn() -> None:
    async with serving(engine=Failing) as client:
        Failing.error, Failing.begun, Failing.over = None, asyncio.Event(), asyncio.Event()
        asking = asyncio.create_task(client.post(PATHS["chat"], request("chat")))
        await Failing.begun.wait()
        asking.cancel()
        await Failing.over.wait()


# Damage. Each kind lists the allowed errors of a request; no other status may occur.

FINE = "fine"
WRONG: tuple[Any, ...] = (None, True, -1, 3.5, "x", [], {}, [[]], [{}], {"a": 1}, "\ud800", 10**30,
                          [None], ["x"], [{"type": "x"}], "")  # fmt: skip
BY_VALUE = {FINE, "invalid", "unsupported", "no_model", "too_long"}


def paths_of(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, one in items:
        yield (*above, key)
        yield from paths_of(one, (*above, key))


def damaged(api: str, rng: Random, whole: Json) -> tuple[str, bytes, str, set[str]]:
    """Path, body and key of a damaged request, and the names that it may end with."""
    path, body, key = PATHS[api], copy.deepcopy(whole), KEY
    kind = rng.choice(["cut", "bytes", "value", "value", "value", "key", "route", "drop", "deep"])
    if kind == "value":
        *above, last = rng.choice(list(paths_of(body)))
        place: Any = body
        for one in above:
            place = place[one]
        place[last] = rng.choice(WRONG)
        return path, json.dumps(body).encode(), key, BY_VALUE
    if kind == "drop":
        body.pop(rng.choice(list(body)))
        return path, json.dumps(body).encode(), key, {FINE, "invalid", "no_model"}
    if kind == "deep":
        body["metadata"] = json.loads("[" * 600 + "]" * 600)
        return path, json.dumps(body).encode(), key, {"malformed"}
    if kind == "key":
        wrong = rng.choice(["", "x", KEY + "x", KEY.upper(), "é"])
        return path, json.dumps(body).encode(), wrong, {"no_key"}
    if kind == "route":
        return rng.choice(["/v1/nothing", "/v1/models", "/"]), b"{}", key, {"no_route", "no_method"}
    data = json.dumps(body).encode()
    if kind == "cut":
        return path, data[: rng.randrange(len(data))], key, {"malformed"}
    place, size = rng.randrange(len(data)), rng.randrange(1, 4)
    spoiled = data[:place] + rng.randbytes(size) + data[place + size :]
    return path, spoiled, key, BY_VALUE | {"malformed"}


def name_of(api: str, path: str, status: int, data: bytes) -> str:
    """The name that a reply ends with, and whether it has the form of the API."""
    if status == 200:
        return FINE
    error = json.loads(data)["error"]
    kinds = {name: row for name, row in ERRORS.items() if row[0] == status}
    if path.startswith(PATHS["anthropic"]):
        assert json.loads(data)["type"] == "error"
        found = [name for name, row in kinds.items() if row[3] == error["type"]]
    else:
        assert set(error) == {"message", "type", "param", "code"}
        said = (error["type"], error["code"])
        found = [name for name, row in kinds.items() if row[1:3] == said]
    assert found, data
    assert error["message"]
    return "|".join(found)


NUM_DAMAGED = 3000


async def test_a_damaged_request_is_answered_with_the_right_error(client: Client) -> None:
    rng, seen = Random(3), Counter[str]()
    wholes = {}
    for api in PATHS:
        body = request(api)
        first = await client.ask(PATHS[api], body)
        wholes[api] = [body, answered(api, body, first)]
    for number in range(NUM_DAMAGED):
        api = rng.choice(list(PATHS))
        path, data, key, allowed = damaged(api, rng, rng.choice(wholes[api]))
        try:
            status, reply = await client.post(path, data, key)
        except ValueError:  # a key that no header takes
            continue
        name = name_of(api, path, status, reply)
        assert set(name.split("|")) & allowed, (number, api, data, status, reply)
        seen[name] += 1
    assert seen[FINE] > 100
    assert len(seen) >= 5
    for api in PATHS:  # and the server continues
        await client.ask(PATHS[api], request(api))
