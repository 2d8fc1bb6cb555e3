"""Dialogues of our clients with real servers, recorded once and played without a server.

    python -m tests.engines.dialogues vllm|sglang    writes tests/fixtures/dialogue_NAME.json anew

Each is an outcome and the exchanges that led there: what the client sent, to the letter, and what
the server answered. A Player gives the answers to a client that sends the same requests, and fails
any other request; so a client that sends or reads something else has another outcome.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import aiohttp
import msgspec
from aiohttp import web

from agentenv.base.errors import EngineError
from agentenv.base.types import Chunk, SamplingParams
from agentenv.contract.request import ServerRequest
from agentenv.engines.remote.base import RemoteServer
from agentenv.engines.remote.routing import SESSION_HEADER
from agentenv.engines.sglang import SGLangServer
from agentenv.engines.vllm import VLLMServer
from tests.engines.reference import VOCAB
from tests.engines.sglang_server import SGLangProcess
from tests.engines.vllm_server import LOGPROBS, SCALE_OUT, VLLMProcess
from tests.engines.world import World, streamed
from tests.support.listening import listening

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
CLIENTS: dict[str, type[RemoteServer[Any]]] = {"vllm": VLLMServer, "sglang": SGLangServer}
PROMPT = [16, 40, 41, 42, 99, 200, 130, 131]
PAUSES: dict[str, Any] = {
    "vllm": {"path": "/pause", "params": {"mode": "keep"}},
    "sglang": {"path": "/pause_generation", "json": {"mode": "retract"}},
}
SHORT_S = 0.3  # for a request to reach its server
LONGEST_S = 20.0  # that an answer waits for what came before it when it was recorded
# The parts of long answers that clients read.
SHOWN = {
    "/openapi.json": ("paths", "components/schemas/GenerateReqInput/properties"),
    "/server_info": (
        "vllm_config/device_config", "vllm_config/model_config/logprobs_mode",
        "vllm_config/model_config/quantization", "vllm_config/speculative_config",
        "vllm_config/parallel_config/data_parallel_size", "dp_size", "quantization",
        "incremental_streaming_output", "speculative_algorithm",
        "vllm_config/model_config/max_logprobs",
        "vllm_config/parallel_config/worker_extension_cls", "version", "max_req_input_len",
        "sampling_mask_max_tokens", "enable_metrics", "skip_tokenizer_init",
    ),
}  # fmt: skip
LINES = ("vllm:num_", "vllm:kv_cache_usage_perc", "sglang:num_retracted_requests_total")


class Exchange(msgspec.Struct):
    """`target` is a path with its query, `session` the header that names one; `answer` the body, as
    received until the client disconnected (`whole` is false then). `num_begun` exchanges had begun
    when the answer did, this one too."""

    method: str
    target: str
    body: Any
    status: int
    answer: str
    whole: bool = True
    num_begun: int = 0
    session: str = ""


class Dialogue(msgspec.Struct):
    """The outcome of `talk`, and its exchanges in the order in which they began."""

    outcome: Any
    exchanges: list[Exchange]


async def talk(name: str, url: str, models: list[Path]) -> dict[str, Any]:
    """The requests of a dialogue; returns all outcomes. `models`: the first is served."""
    numbers, rids = itertools.count(), itertools.count()
    found: dict[str, Any] = {}
    with (
        mock.patch("secrets.token_hex", side_effect=lambda _: f"nonce{next(numbers)}"),
        mock.patch(
            "agentenv.engines.sglang.uuid4", side_effect=lambda: SimpleNamespace(hex=next(rids))
        ),
    ):
        kept: dict[str, Any] = {"update_kv": "keep"} if name == "vllm" else {}
        server = CLIENTS[name](url, vocab_size=VOCAB, entropy_top_k=3, **kept)
        try:
            info = await server.connect(3)
            found["features"] = sorted(info.features)
            found["greedy"] = await turn(server, "greedy", SamplingParams(6, temperature=0.0))
            sampling = SamplingParams(
                12, 0.7, top_p=0.9, top_k=20, min_p=0.01, stop=("zz",), seed=5, returns_kept=True
            )
            found["sampled"] = await turn(server, "sampled", sampling, 4, (300,))
            found["plain"] = await turn(server, "plain", SamplingParams(12, seed=6), 4)
            found["bare"] = await turn(server, "bare", SamplingParams(5, seed=7), bare=True)
            await leave(server)
            found["unstarted"] = await update_while_paused(name, server, models[1], 4, "unstarted")
            found["version"] = server.policy_version
            found["refused"] = await refused(server, models[0])
            found["version after a refusal"] = server.policy_version
            found["label kept"] = await server.keeps_label()
            if "sleep" in info.features:
                await server.sleep()
                await server.wake()
                await server.load_weights(models[0], 5)
            found["last"] = await turn(server, "last", SamplingParams(3, temperature=0.0))
            load = await server.load()
            found["load"] = [load.num_running, load.num_waiting, load.num_preemptions]
            found["healthy"] = await server.healthy()
            if not kept:
                found["guest"] = await guest_while_paused(name, server, models[1], 6)
        finally:
            await server.close()
        if kept:  # the other way, with another client
            server = CLIENTS[name](url, vocab_size=VOCAB, entropy_top_k=3)
            try:
                await server.connect(6)
                again = await update_while_paused(name, server, models[1], 7, "unstarted")
                found["recomputed"] = again
                found["guest"] = await guest_while_paused(name, server, models[0], 8)
            finally:
                await server.close()
    return found


async def turn(
    server: RemoteServer[Any],
    name: str,
    sampling: SamplingParams,
    interval: int = 1,
    stops: tuple[int, ...] = (),
    *,
    bare: bool = False,
) -> Any:
    """A turn, and the tokens of its chunks; `bare`: without entropies."""
    chunks: list[Chunk] = []
    request = ServerRequest(name, PROMPT, sampling, interval, stops, f"tree of {name}", not bare)
    done = await streamed(server, request, chunks.append)
    assert [token for chunk in chunks for token in chunk.token_ids] == done.token_ids
    return msgspec.to_builtins(done)


async def leave(server: RemoteServer[Any]) -> None:
    """Cancel a turn that has begun, and wait until the server was notified."""
    begun = asyncio.Event()
    request = ServerRequest("left", PROMPT, SamplingParams(400, seed=1), 1)
    pending = asyncio.create_task(server.generate(request, lambda chunk: begun.set()))
    await begun.wait()
    pending.cancel()
    await asyncio.wait({pending})
    await asyncio.wait(server._tasks)


async def update_while_paused(
    name: str, server: RemoteServer[Any], source: Path, version: int, key: str, client: Any = None
) -> Any:
    """An update while a turn of the client is on the server and has no token yet."""
    await server._http.call("POST", **PAUSES[name])
    pending = asyncio.create_task(turn(client or server, key, SamplingParams(5, temperature=0.0)))
    await asyncio.sleep(SHORT_S)
    await server.load_weights(source, version)
    return await pending


async def guest_while_paused(
    name: str, server: RemoteServer[Any], source: Path, version: int
) -> Any:
    """An update while a client that the server was handed to has a turn there, without a token
    yet."""
    guest = CLIENTS[name](server.url, vocab_size=VOCAB, entropy_top_k=3)
    guest.take_over(server.handed())
    try:
        return await update_while_paused(name, server, source, version, "guest", guest)
    finally:
        await guest.close()


async def refused(server: RemoteServer[Any], source: Path) -> str:
    """An update that the server itself refuses, since it does not see the directory."""
    layout = msgspec.structs.replace(server._layout, directory=source.parent / "elsewhere")
    with mock.patch("agentenv.engines.remote.weight_sync.read_layout", return_value=layout):
        try:
            await server.load_weights(source, 5)
        except EngineError as error:
            return type(error).__name__
    return "not refused"


class Stage:
    """Answers requests by `answer`, on a free port."""

    def __init__(self, answer: Callable[[web.Request, Any], Awaitable[web.StreamResponse]]) -> None:
        self.url = ""
        self._answer = answer

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Stage]:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        async with listening(app) as self.url:
            yield self

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        text = (await request.read()).decode()
        return await self._answer(request, json.loads(text) if text else None)


async def begin(request: web.Request, status: int, kind: str) -> web.StreamResponse:
    response = web.StreamResponse(status=status, headers={"Content-Type": kind})
    await response.prepare(request)
    return response


class Recorder:
    """Forwards requests to a real server and records the exchanges."""

    def __init__(self, url: str, root: Path, session: aiohttp.ClientSession) -> None:
        self.exchanges: list[Exchange] = []
        self._url, self._root, self._session = url, root, session

    async def answer(self, request: web.Request, body: Any) -> web.StreamResponse:
        known = json.loads(json.dumps(body).replace(str(self._root), "{root}"))
        session = request.headers.get(SESSION_HEADER, "")
        one = Exchange(request.method, request.path_qs, known, 0, "", whole=False, session=session)
        self.exchanges.append(one)
        pieces: list[bytes] = []
        headers = {"Content-Type": "application/json"}
        headers |= {SESSION_HEADER: session} if session else {}
        data = None if body is None else json.dumps(body)
        url = self._url + request.path_qs
        try:
            async with self._session.request(
                request.method, url, data=data, headers=headers
            ) as got:
                one.status = got.status
                response = await begin(request, got.status, got.headers.get("Content-Type", ""))
                async for piece in got.content.iter_any():
                    one.num_begun = one.num_begun or len(self.exchanges)
                    pieces.append(piece)
                    await response.write(piece)
                one.whole = True
                await response.write_eof()
                return response
        finally:
            text = b"".join(pieces).decode().replace(str(self._root), "{root}")
            one.answer = shown(request.path, text)


def shown(path: str, text: str) -> str:
    """An answer without the fields that no client reads."""
    if path == "/metrics":
        return "".join(line + "\n" for line in text.splitlines() if line.startswith(LINES))
    if path not in SHOWN:
        return text
    whole, kept = json.loads(text), {}
    for place in SHOWN[path]:
        source, target, (*keys, last) = whole, kept, place.split("/")
        for key in keys:
            source, target = source.get(key, {}), target.setdefault(key, {})
        if last in source:
            found = source[last]
            names = path == "/openapi.json" and last != "paths"
            target[last] = nothing(found) if names else found
    if "paths" in kept:
        kept["paths"] = {place: nothing(verbs) for place, verbs in kept["paths"].items()}
    return json.dumps(kept)


def nothing(names: Iterable[str]) -> dict[str, Any]:
    return {name: {} for name in names}


class Player:
    """Answers as recorded, each exchange once; requests that were not recorded are in
    `surprises`."""

    def __init__(
        self, dialogue: Dialogue, root: Path, changes: dict[str, Callable[[str], str]]
    ) -> None:
        """`changes`: functions of answers, by path."""
        self._changes = changes
        self.left = list(dialogue.exchanges)
        self.surprises: list[str] = []
        self._begun = asyncio.Condition()
        self._num_begun = 0
        self._root = root

    async def answer(self, request: web.Request, body: Any) -> web.StreamResponse:
        known = json.loads(json.dumps(body).replace(str(self._root), "{root}"))
        session = request.headers.get(SESSION_HEADER, "")
        request_key = (request.method, request.path_qs, known, session)
        one = next(
            (e for e in self.left if (e.method, e.target, e.body, e.session) == request_key), None
        )
        if one is None:
            self.surprises.append(f"{request.method} {request.path_qs} {json.dumps(known)}")
            return web.Response(status=418, text=f"never asked so: {self.surprises[-1]}")
        self.left.remove(one)
        async with self._begun, asyncio.timeout(LONGEST_S):
            self._num_begun += 1
            self._begun.notify_all()
            await self._begun.wait_for(lambda: self._num_begun >= one.num_begun)
        streams = one.answer.startswith("data:") or not one.whole
        kind = "text/event-stream" if streams else "application/json"
        response = await begin(request, one.status or 200, kind)
        answer = self._changes.get(request.path, str)(one.answer)
        await response.write(answer.replace("{root}", str(self._root)).encode())
        if not one.whole:
            await asyncio.Event().wait()  # until the client leaves, as it did
        await response.write_eof()
        return response


def read_dialogue(name: str) -> Dialogue:
    return msgspec.json.decode((FIXTURES / f"dialogue_{name}.json").read_bytes(), type=Dialogue)


async def play(
    name: str, models: list[Path], changes: dict[str, Callable[[str], str]] | None = None
) -> tuple[Dialogue, Any, Player]:
    """The recorded dialogue, its outcome this time, and the exchanges that were left out.
    `changes`: functions of the server's answers, by path."""
    dialogue = read_dialogue(name)
    player = Player(dialogue, models[0].parent, changes or {})
    async with Stage(player.answer).open() as stage:
        outcome = await talk(name, stage.url, models)
    return dialogue, json.loads(msgspec.json.encode(outcome)), player


async def record(name: str) -> None:
    """Write the dialogue with a real server."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        models = World(root, tied=False, num_models=2).paths
        process = (
            VLLMProcess(models[0], root / "log", (*SCALE_OUT, *LOGPROBS))
            if name == "vllm"
            else SGLangProcess(models[0], root / "log")
        )
        try:
            process.wait_ready()
            async with aiohttp.ClientSession() as session:
                recorder = Recorder(process.url, root, session)
                async with Stage(recorder.answer).open() as stage:
                    outcome = await talk(name, stage.url, models)
        finally:
            process.kill()
    made = Dialogue(outcome, recorder.exchanges)
    text = msgspec.json.format(msgspec.json.encode(made), indent=1)
    (FIXTURES / f"dialogue_{name}.json").write_bytes(text + b"\n")


if __name__ == "__main__":
    asyncio.run(record(sys.argv[1]))
