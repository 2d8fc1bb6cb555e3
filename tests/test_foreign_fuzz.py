"""For any reply bytes, a call ends with a result or with the right error.

3,000 damaged replies and frames in `make test`, 300,000 in `make long`. An error that is none of
those a target may raise fails its test: it would end a run, or be booked on the wrong account.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.base.errors import (
    ConfigError,
    EngineError,
    ForeignError,
    GraderError,
    InfraError,
    ToolError,
)
from agentenv.base.result_cache import ResultCache
from agentenv.base.retries import Backoff
from agentenv.base.types import Message, SamplingParams, Task, ToolCall, VersionSpan
from agentenv.base.untrusted import decode, packed
from agentenv.contract.function_tool import tool
from agentenv.contract.http_client import ServerClient
from agentenv.contract.request import ForeignWeightsError, ServerRequest
from agentenv.contract.tool_env import ToolEnv
from agentenv.endpoint.messages import ApiError
from agentenv.engines.chat import ChatEngine, ChatRenderer, Pieces, native_call
from agentenv.engines.openai import OpenAIConfig
from agentenv.engines.remote.vllm_answer import VLLMAnswer
from agentenv.engines.sglang import SGLangAnswer
from agentenv.envs.bridges.mcp_tools import MCPTools
from agentenv.envs.grading.judge import Judge
from agentenv.envs.grading.keys import JudgeConfig
from agentenv.envs.sandbox.process import SessionProcess
from agentenv.envs.sandbox.sandbox import Sandbox
from agentenv.envs.search import providers
from agentenv.envs.search.corpus import Hit, Query
from agentenv.envs.search.keys import FetchConfig, SummarizerConfig, TrafficConfig
from agentenv.envs.search.pages import PageReader
from agentenv.envs.search.service import Episode, Summarizer
from agentenv.envs.search.upstream import Reply
from agentenv.launchers.retriever import Retriever, RetrieverConfig
from agentenv.processes.link import Link, frame_of
from agentenv.processes.worker_pool import _Worker
from agentenv.text.call_syntax import PARSERS
from tests.support.hostile import (
    PAGE,
    RawServer,
    damaged,
    damaged_json,
    damaged_stream,
    http_replies,
    raw_server,
)
from tests.test_tool_limits import Anything

TARGETS = 12
IN_ALL = 300_000 if settings.default is not None and settings.default.max_examples > 50 else 3_000
numbers = count()
outcomes: Counter[tuple[str, str]] = Counter()


def fuzzed(weight: float = 1.0) -> Any:
    """How often a target is tried; the weights add up to the number of TARGETS."""
    return settings(
        max_examples=round(weight * IN_ALL / TARGETS),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True, scope="module")
def _print_outcomes() -> Iterator[None]:
    yield
    for target in sorted({target for target, _ in outcomes}):
        ends = {end: number for (one, end), number in outcomes.items() if one == target}
        line = f"{target:12}{sum(ends.values()):9,}  {dict(sorted(ends.items()))}"
        sys.stdout.write(line + "\n")
    sys.stdout.write(f"{'in all':12}{outcomes.total():9,}\n")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.base.retries.REQUESTS", Backoff(0.0, 0.002))
    monkeypatch.setattr("agentenv.envs.search.upstream.MAX_PAUSE_S", 0.002)


@contextmanager
def counted(target: str, *allowed: type[Exception]) -> Iterator[None]:
    """Counts an end, by a result or an allowed error."""
    try:
        yield
    except allowed as error:
        str(error).encode()  # the message is encodable
        outcomes[target, type(error).__name__] += 1
    else:
        outcomes[target, "result"] += 1


def ended(target: str, call: Callable[[], Any], *allowed: type[Exception]) -> Any:
    """The result of a call, None for an allowed error."""
    with counted(target, *allowed):
        return call()


async def ended_async(target: str, call: Awaitable[Any], *allowed: type[Exception]) -> Any:
    with counted(target, *allowed):
        return await call


def written(value: Any) -> None:
    """The uses of results: a journal, a record, a tokenizer."""
    msgspec.json.encode(value)
    repr(value).encode("utf-8", "backslashreplace")


class Point(msgspec.Struct):
    x: float
    rest: Any = None


@fuzzed()
@given(damaged_json({"x": 1.5, "rest": [{"a": "b"}, 2]}), st.booleans())
def test_decoding(data: bytes, packed: bool) -> None:
    for kind in (Any, Point, list[Point]):
        written(ended("decode", lambda kind=kind: decode(data, kind, packed=packed), ForeignError))


HIT = {"title": "Lima", "description": "a", "snippet": "b", "content": "c", "link": "http://x/",
       "url": "http://y/"}  # fmt: skip
PROVIDER = {"organic": [HIT], "organic_results": [HIT], "results": [HIT], "web": {"results": [HIT]},
            "error": "x", "unresponsive_engines": [["a", "b"]]}  # fmt: skip
DOCUMENT = {"id": 1, "title": "t", "contents": '"t"\nx', "url": "u"}
RETRIEVED = {"result": [[{"document": DOCUMENT, "score": 0.5}]]}
FLAT = {"result": [DOCUMENT, {"document": DOCUMENT}]}
BATCH = [[[{"id": "1", "contents": "x"}]], [[0.5]]]


@fuzzed()
@given(damaged_json(PROVIDER, RETRIEVED, FLAT, BATCH), st.sampled_from(sorted(providers.PROVIDERS)))
def test_replies_of_providers(body: bytes, name: providers.ProviderName) -> None:
    config, reply = providers.WebConfig(provider=name, url="http://x"), Reply(200, body)
    known = (InfraError, ToolError, ConfigError)
    written(ended("providers", lambda: providers.provider_hits(config, reply, 5), *known))
    written(ended("retrievers", lambda: providers.retrieved_hits(reply, "u"), InfraError))
    written(ended("retrievers", lambda: providers.batch_hits(reply, "u"), InfraError))


CALL = {"id": "c", "type": "function", "index": 0,
        "function": {"name": "search", "arguments": '{"query": "x"}'}}  # fmt: skip
SAID = {"role": "assistant", "content": "<think>a</think> CORRECT", "reasoning_content": "hm",
        "tool_calls": [CALL]}  # fmt: skip
CHAT = {
    "choices": [{"message": SAID, "finish_reason": "tool_calls", "stop_reason": None}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
}
SAMPLING = SamplingParams(max_tokens=8)


def chat_engine() -> tuple[ChatEngine, ChatRenderer]:
    pieces = Pieces()
    config = OpenAIConfig(url="http://x", model="m", num_retries=0)
    return ChatEngine(config, pieces, native=True), ChatRenderer(pieces, native=True)


async def one_turn(engine: ChatEngine, renderer: ChatRenderer) -> None:
    """A turn, its action, and the request of the next one."""
    ids = renderer.prompt([Message("user", "?")], [])
    call = engine.generate(ids, SAMPLING, session="s")
    done = await ended_async("chat", call, EngineError)
    if done is not None:
        action = renderer.parse(done, [])
        written(action)
        results = [Message("tool", "x") for _ in action.tool_calls]
        ids += [*done.token_ids, *renderer.observation(results, [], 10)]
        written(engine._body(engine.pieces.read(ids), SAMPLING))


@fuzzed()
@given(damaged_json(CHAT))
async def test_chat_replies(body: bytes) -> None:
    engine, renderer = chat_engine()
    engine.endpoint.api.call = answering(body)  # type: ignore[method-assign]
    await one_turn(engine, renderer)


def answering(body: bytes) -> Any:
    async def call(*args: Any, **keys: Any) -> bytes:
        return body

    return call


@fuzzed(0.4)
@given(damaged_json(CHAT))
async def test_replies_of_helper_models(body: bytes) -> None:
    config = {"url": "http://x/v1", "model": "m", "num_retries": 0}
    judge = Judge(JudgeConfig(**config))
    summarizer = Summarizer(SummarizerConfig(**config), ResultCache())
    for model in (judge._model, summarizer._model):
        model.endpoint.api.call = answering(body)  # type: ignore[method-assign]
    written(await ended_async("judge", judge.verdict("q", "a", ["b"]), GraderError))
    asked = summarizer.summarize(Episode("q", ["r"]), "s", "p")
    written(await ended_async("summary", asked, InfraError))


def name_span(label: str, start: int, end: int) -> VersionSpan:
    if label != "7-a":
        raise ForeignWeightsError(label)
    return VersionSpan(7, start, end)


VERSIONS = [{"version": "7-a", "start": 0, "end": 2}]
POSITION = {"logprob": -0.5, "top_logprobs": [{"logprob": -0.5}, {"logprob": -1.0}]}
VLLM = (
    {"choices": [{"token_ids": [3], "logprobs": {"content": [POSITION]}}]},
    {"choices": [{"token_ids": [4], "logprobs": {"content": [POSITION]}, "finish_reason": "stop",
                  "stop_reason": "x", "weight_versions": VERSIONS}],
     "usage": {"prompt_tokens_details": {"cached_tokens": 3}}},
    {"error": {"message": "x", "code": 500}},
)  # fmt: skip
META = {
    "completion_tokens": 2, "output_token_logprobs": [[-0.5, 3, None], [-0.5, 4, "x"]],
    "output_top_logprobs": [[[-0.5, 3, None]], None], "weight_versions": VERSIONS,
    "output_token_sampling_mask": [[3, 4], [4]], "cached_tokens": 1,
    "output_token_sampling_logprobs": [[-0.5, -1.0], [0.0]],
    "finish_reason": {"type": "stop", "matched": 4},
}  # fmt: skip
SGLANG = (
    {"output_ids": [3], "meta_info": {**META, "completion_tokens": 1, "finish_reason": None}},
    {"output_ids": [3, 4], "meta_info": META},
    {"error": {"message": "x", "code": 429}},
)


@fuzzed()
@given(damaged_stream(VLLM[:2], VLLM))
def test_events_of_vllm(events: list[bytes]) -> None:
    answer = VLLMAnswer("s", "top_k", name_span, 9)
    written(ended("vllm", partial(turn_of, answer, events), EngineError))


def turn_of(answer: VLLMAnswer | SGLangAnswer, events: list[bytes]) -> Any:
    """The end of a turn whose chunks add up."""
    chunks = [chunk for event in events if (chunk := answer.add(event)) is not None]
    end = answer.finish()
    assert end.num_tokens == sum(len(chunk.token_ids) for chunk in chunks)
    for chunk in chunks:
        assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.entropies)
        assert len(chunk.kept) in (0, len(chunk.token_ids))
    return end


@fuzzed()
@given(damaged_stream(SGLANG[:2], SGLANG), st.sampled_from([1.0, 0.5]))
def test_events_of_sglang(events: list[bytes], top_p: float) -> None:
    request = ServerRequest("r", [1], SamplingParams(8, top_p=top_p, returns_kept=True))
    answer = SGLangAnswer("s", request, 20, name_span, 9)
    written(ended("sglang", partial(turn_of, answer, events), EngineError))


def framed(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


NUMBER = 424_242
ANSWER = {"ready": False, "error": "", "output": "42", "problem": "", "lost": False,
          "number": NUMBER}  # fmt: skip
FRAME = framed(json.dumps(ANSWER).encode())


@cache
def of_an_ended_process() -> int:
    with subprocess.Popen(["true"]) as process:
        return os.pidfd_open(process.pid)


@fuzzed()
@given(damaged_json(ANSWER), st.none() | damaged(FRAME, FRAME * 2) | st.binary(max_size=9))
async def test_frames_of_a_session(body: bytes, raw: bytes | None) -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    async def answer() -> None:
        loop = asyncio.get_running_loop()
        request = await loop.sock_recv(theirs, 1 << 16)
        number = b"%d" % json.loads(request[4:])["number"]
        said = framed(body.replace(b"%d" % NUMBER, number)) if raw is None else raw
        await loop.sock_sendall(theirs, said)
        theirs.shutdown(socket.SHUT_WR)

    zygote: Any = SimpleNamespace(alive=lambda: True)
    process = SessionProcess(zygote, 1, ours)
    process.pidfd = os.dup(of_an_ended_process())
    sandbox = Sandbox()
    session = sandbox.session(1)
    session._live = process
    sandbox._holding[session] = None
    ran, _ = await asyncio.gather(session.run("6 * 7", 5.0), answer())
    outcomes["frames", ran.end] += 1
    written(ran)
    session.close()
    theirs.close()


NONE: Any = ()


@tool
def look_up(
    query: str, count: int = 1, ratio: float = 1.0, names: list[str] = NONE, more: Any = None
) -> str:
    """Look up."""
    return f"{query} {count} {ratio} {names} {more}"


ARGUMENTS = {"query": "a", "count": 2, "ratio": 0.5, "names": ["b"], "more": {"c": [1]}}
FORMS = (
    "<tool_call>{}</tool_call>",
    '<tool_call>{"name": "<malformed>", "arguments": {}}</tool_call>',
    " to=functions.look_up<|message|>{}<|call|>",
    "<|tool_call>call:look_up{}<tool_call|>",
    "<tool_call><function=look_up><parameter=more>{}</parameter></function></tool_call>",
    "<tool_call>look_up<arg_key>more</arg_key><arg_value>{}</arg_value></tool_call>",
    '<atem:invoke name="look_up"><atem:parameter name="more">{}</atem:parameter></atem:invoke>',
    "<|tool_call_start|>[look_up(query='a', more={})]<|tool_call_end|>",
)


@fuzzed()
@given(
    damaged_json(ARGUMENTS, {"name": "look_up", "arguments": ARGUMENTS}),
    st.sampled_from([*FORMS, ""]),
)
async def test_arguments_of_a_call(data: bytes, form: str) -> None:
    text = data.decode("utf-8", "replace")
    schema = {"name": "look_up", "parameters": look_up.schema}
    calls: list[ToolCall] = []
    if form:
        for parse in PARSERS.values():
            calls += parse(form.replace("{}", text), [schema])
    else:
        calls.append(native_call({"function": {"name": "look_up", "arguments": text}}))
    env = ToolEnv(Task("t", "test", "?", ("5",)), [look_up], Anything())
    await env.reset()
    messages, *_, info = await env.step(Message("assistant", "", tuple(calls)))
    for message, record in zip(messages, info["tool_calls"], strict=True):
        message.content.encode()
        outcomes["arguments", "result" if record["ok"] else "ToolError"] += 1
    written(info)
    packed({"payload": info})
    await env.close()


PAGE_BODIES = (PAGE, b"", b"\x1f\x8b\x08", b"x" * 50, b"\xff\xfe" + PAGE, b'{"a": 1}')


SERVED = (*PAGE_BODIES, *map(msgspec.json.encode, (PROVIDER, CHAT)),
          b"data: " + msgspec.json.encode(VLLM[0]) + b"\n\ndata: [DONE]\n\n")  # fmt: skip


@pytest.fixture
async def server() -> AsyncIterator[RawServer]:
    async with raw_server() as raw:
        yield raw


@pytest.fixture
async def reader() -> AsyncIterator[PageReader]:
    fetch = FetchConfig(allow_networks=("127.0.0.1/32",), timeout_s=5.0)
    one = PageReader(fetch, ResultCache())
    yield one
    await one.close()


@fuzzed(0.6)
@given(reply=http_replies(SERVED))
async def test_pages(reply: bytes, server: RawServer, reader: PageReader) -> None:
    server.answer = reply
    url = f"{server.url}/{next(numbers)}"
    written(await ended_async("pages", reader.text(url), ToolError, InfraError))


@fuzzed(0.7)
@given(reply=http_replies(SERVED))
async def test_services(reply: bytes, server: RawServer) -> None:
    server.answer = reply
    traffic = TrafficConfig(rate_per_s=0, num_retries=1, timeout_s=5.0)
    backend = providers.WebBackend(
        providers.WebConfig(provider="searxng", url=server.url, traffic=traffic)
    )
    known = (InfraError, ToolError, ConfigError)
    written(await ended_async("searches", backend.search(Query("a")), *known))
    await backend.close()
    http = ServerClient(server.url, call_s=5.0, wait_s=5.0)
    written(await ended_async("engines", http.call_json("GET", "/x"), EngineError))
    await ended_async("engines", events_of(http), EngineError)
    await http.close()


async def events_of(http: ServerClient) -> None:
    answer = VLLMAnswer("s", "top_k", name_span, 9)
    async with http.stream("/x", {}) as events:
        async for event in events:
            answer.add(event)


SEARCHES = (
    {"queries": ["a"], "topk": 3, "return_scores": True},
    {"query": "a"},
    {"query": ["a"], "top_n": 3, "return_score": True},
)


@fuzzed(0.8)
@given(damaged_json(*SEARCHES))
async def test_requests_to_the_retriever(body: bytes) -> None:
    async def search(query: Query) -> list[Any]:
        return []

    retriever = Retriever(RetrieverConfig(), SimpleNamespace(search=search))  # type: ignore[arg-type]

    async def read() -> bytes:
        return body

    for path in ("/retrieve", "/search", "/batch_search"):
        content = SimpleNamespace(is_eof=lambda: True)
        keys = {"path": path, "headers": {}, "content_length": 0, "content": content}
        request: Any = SimpleNamespace(read=read, **keys)
        request.client_max_size = 1
        handler = retriever.retrieve if path == "/retrieve" else retriever.search
        try:
            status = (await handler(request)).status
        except ApiError as error:
            status = error.status
        assert status in (200, 400)
        outcomes["retriever", str(status)] += 1


MCP = Path(__file__).with_name("support") / "mcp_hostile.py"
MCP_SAID = {"content": [{"type": "text", "text": "x"}], "isError": False, "structuredContent": {}}
MCP_REPLY = {"jsonrpc": "2.0", "id": 424_242, "result": MCP_SAID}
MCP_ERROR = {"jsonrpc": "2.0", "id": 424_242, "error": {"code": -32602, "message": "m"}}


@fuzzed(0.05)  # most replies are waited for in vain
@given(said=damaged_json(MCP_REPLY, MCP_ERROR, MCP_SAID))
@pytest.mark.usefixtures("services")
async def test_servers_of_tools(said: bytes) -> None:
    pytest.importorskip("mcp")
    source = MCPTools([sys.executable, str(MCP)], call_timeout_s=0.2)
    (say,) = await source.load()
    called = say.call({"said": said.replace(b"\n", b" ").hex()}, None)
    written(await ended_async("mcp", called, ToolError, InfraError))
    # the next one is served, by a new connection if need be
    fine = json.dumps(MCP_REPLY).encode().hex()
    source.call_timeout_s = 20.0  # a process may have to start, on a machine that is busy
    assert (await say.call({"said": fine}, None)).text == "x"


@pytest.fixture(scope="module")
def cache_file(tmp_path_factory: pytest.TempPathFactory) -> memoryview:
    """A cache of a hundred searches; not bytes, since hypothesis prints the arguments of a test."""
    path = tmp_path_factory.mktemp("cache") / "cache.db"

    async def fill() -> None:
        cache = ResultCache(path)
        for number in range(100):
            cache.put(str(number), msgspec.json.encode([Hit("x" * 300, str(number))]))
        await cache.close()

    asyncio.run(fill())
    return memoryview(path.read_bytes())


PLACES = st.lists(st.tuples(st.integers(0, 1 << 17), st.integers(1, 5000)), max_size=3)


@fuzzed(0.15)
@given(places=PLACES, new=st.sampled_from([b"\x00", b"\xff", b"[", b"7"]), keep=st.integers(0, 9))
async def test_files_of_a_cache(
    places: list[tuple[int, int]], new: bytes, keep: int, cache_file: memoryview, tmp_path: Path
) -> None:
    data = bytearray(cache_file)
    for start, size in places:
        data[start % len(data) : start % len(data) + size] = new * size
    path = tmp_path / f"{next(numbers)}.db"
    path.write_bytes(data if keep else data[: len(data) // 2])
    try:
        cache = ResultCache(path)
    except ConfigError:
        outcomes["cache", "ConfigError"] += 1
    else:
        found = [cache.get(str(n), lambda value: decode(value, list[Hit])) for n in range(100)]
        outcomes["cache", "found" if None not in found else "misses"] += 1
        cache.put("new", b"[]")
        assert cache.get("new", bytes) == b"[]"
        await cache.close()
    path.unlink()


PACKED = frame_of(msgspec.msgpack.encode({"result": [1, "x", {"a": 1.5}], "error": "e", "pid": 3}))


@fuzzed(0.8)
@given(damaged(PACKED) | damaged(PACKED[8:]).map(frame_of) | st.binary(max_size=20).map(frame_of))
async def test_frames_of_a_worker(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(data)
    theirs.shutdown(socket.SHUT_WR)
    worker = _Worker(Link(*await asyncio.open_unix_connection(sock=ours)))
    found = await worker.receive()
    outcomes["workers", "result" if found else "died"] += 1
    written(found)
    worker.kill()
    theirs.close()
