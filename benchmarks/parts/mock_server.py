"""Mock engine servers with vLLM's HTTP routes. They replay the tokens of a policy with one tool, at
the speed of a real server, and can have the faults of one.

    python -m benchmarks.parts.mock_server PORT MODEL SCALE   a healthy server; waits for a line

Benchmarks of the controller use them in place of real servers.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from agentenv.adapters.cold_start import END, START

NUM_CALLS, TURN_TOKENS = 4, 40  # of a trajectory, of a turn
SCHEMA: dict[str, Any] = {  # query of its tool, search
    "type": "object",
    "properties": {"query": {"type": "string"}},
    "required": ["query"],
}
CAPACITY = 8  # queued requests of a full server
SLOWNESS = 3.0
# Seconds, multiplied by `scale`.
TOKEN_S = 0.25
BEGIN_S = 100.0  # from its first turn until a server hangs or dies
DOWN_S = 60.0
UPDATE_S = 320.0


class Replayed:
    """The policy's text: four tool calls, then an answer. The prompt's tokens give the position in
    the text, so that any part of a turn can be requested."""

    def __init__(self, model: Path) -> None:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

        def ids(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        self._header = ids(f"{START}assistant\n")
        (self._result_end,) = ids("</result>")
        filler = ids("and")[:1]
        call, answer = ids("<search>it</search>"), ids(f"<answer>it</answer>{END}")
        self._call = filler * (TURN_TOKENS - len(call)) + call
        self._answer = filler * (TURN_TOKENS - len(answer)) + answer

    def rest(self, prompt: list[int]) -> list[int]:
        """Return the tokens that follow `prompt`; for an unknown prompt, those of a first turn."""
        response: list[int] = []
        if self._header[0] in prompt:
            last = len(prompt) - prompt[::-1].index(self._header[0]) - 1
            response = prompt[last + len(self._header) :]
        num_calls = response.count(self._result_end)
        while self._result_end in response:
            response = response[response.index(self._result_end) + 1 :]
        turn = self._answer if num_calls >= NUM_CALLS else self._call
        return turn[len(response) :] or turn[-1:]


class MockServer:
    """A server with the routes that agentenv.engines.vllm uses. A server that dies closes its
    connections and its port, and restarts as a process without a weights label."""

    def __init__(
        self, fault: str, port: int, replayed: Replayed, model: Path, scale: float
    ) -> None:
        self.fault, self.port = fault, port
        self._replayed, self._model, self._scale = replayed, model, scale
        self._label = "default"
        self._going = asyncio.Event()
        self._going.set()
        self._running: set[asyncio.Task[Any]] = set()
        self._aborted: set[str] = set()
        self._known: dict[str, int] = {}  # prompt tokens of sessions that are cached
        self._begins: asyncio.TimerHandle | None = None  # the fault
        self._silent = False
        self._runner: web.AppRunner | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.routes_seen: set[str] = set()  # routes
        self._routes: dict[str, Callable[[web.Request, Any], Any]] = {
            "GET /openapi.json": self._openapi,
            "GET /version": lambda request, body: {"version": "0.32.0"},
            "GET /v1/models": self._models,
            "GET /server_info": self._info,
            "GET /health": lambda request, body: {},
            "GET /metrics": self._metrics,
            "GET /is_paused": lambda request, body: {"is_paused": not self._going.is_set()},
            "GET /weight_info": lambda request, body: {"weight_version": self._label},
            "POST /pause": self._pause,
            "POST /resume": self._resume,
            "POST /collective_rpc": self._load,
            "POST /reset_prefix_cache": self._drop,
            "POST /update_weight_version": self._name,
            "POST /inference/v1/abort_requests": self._abort,
        }

    async def open(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=1024).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.read()
        body = json.loads(text) if text else None
        place = f"{request.method} {request.path}"
        self.routes_seen.add(place)
        if place == "POST /inference/v1/generate":
            return await self._generate(request, body)
        answer = self._routes[place](request, body) if place in self._routes else None
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, str):
            return web.Response(text=answer)
        return web.json_response(answer, status=404 if answer is None else 200)

    # server information and weights

    def _openapi(self, request: web.Request, body: Any) -> Any:
        paths: dict[str, Any] = {"/inference/v1/generate": {"post": {}}}
        for place in self._routes:
            verb, path = place.split()
            paths.setdefault(path, {})[verb.lower()] = {}
        return {"paths": paths}

    def _models(self, request: web.Request, body: Any) -> Any:
        return {"data": [{"id": "policy", "root": str(self._model), "max_model_len": 1024}]}

    def _info(self, request: web.Request, body: Any) -> Any:
        model_config = {
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "quantization": None,
        }
        return {
            "vllm_config": {
                "device_config": {"device": "cuda"},
                "model_config": model_config,
                "scheduler_config": {},
                "parallel_config": {},
            }
        }

    def _metrics(self, request: web.Request, body: Any) -> str:
        figures = {
            "vllm:num_requests_running": len(self._running),
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": min(1.0, len(self._running) / 512),
            "vllm:num_preemptions_total": 0,
        }
        return "".join(f'{name}{{engine="0"}} {value}\n' for name, value in figures.items())

    def _pause(self, request: web.Request, body: Any) -> Any:
        self._going.clear()
        return {}

    def _resume(self, request: web.Request, body: Any) -> Any:
        self._going.set()
        return {}

    async def _load(self, request: web.Request, body: Any) -> Any:
        await asyncio.sleep(self._scale * (UPDATE_S if self.fault == "update" else 1.0))
        return {}

    def _drop(self, request: web.Request, body: Any) -> Any:
        self._known.clear()
        return {"success": True}

    def _name(self, request: web.Request, body: Any) -> Any:
        self._label = body["new_version"]
        return {"success": True}

    def _abort(self, request: web.Request, body: Any) -> Any:
        self._aborted.update(body["request_ids"])
        return {}

    # turns

    async def _generate(self, request: web.Request, body: Any) -> web.StreamResponse:
        is_turn = "X-Session-ID" in request.headers
        if is_turn and self._begins is None and self.fault in ("silent", "restarted"):
            loop = asyncio.get_running_loop()
            self._begins = loop.call_later(self._scale * BEGIN_S, self._begin_fault)
        if is_turn and self.fault == "sick":
            raise web.HTTPInternalServerError(text='{"error": {"message": "CUDA error"}}')
        if self.fault == "full" and len(self._running) >= CAPACITY:
            raise web.HTTPTooManyRequests(text='{"error": {"message": "too many requests"}}')
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await self._replay(request, body, is_turn=is_turn)
        except ConnectionError:  # the client has disconnected
            return web.Response()
        finally:
            self._running.discard(task)

    async def _replay(
        self, request: web.Request, body: Any, *, is_turn: bool
    ) -> web.StreamResponse:
        """Answer a request with the next replayed tokens at the server's speed."""
        params, prompt = body["sampling_params"], body["token_ids"]
        ids = self._replayed.rest(prompt)[: params["max_tokens"]]
        ends = set(params.get("stop_token_ids", ()))
        ids = ids[: next((n for n, token in enumerate(ids, 1) if token in ends), len(ids))]
        session = request.headers.get("X-Session-ID", "")
        cached = min(self._known.get(session, 0), len(prompt) - 1)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        interval = params.get("stream_interval", 1)
        pace = self._scale * TOKEN_S * (SLOWNESS if self.fault == "slow" else 1.0)
        spans: list[dict[str, Any]] = []
        for start in range(0, len(ids), interval):
            new = ids[start : start + interval]
            await asyncio.sleep(pace * len(new))
            await self._going.wait()
            if is_turn and self._silent:
                await asyncio.Event().wait()
            if not spans or spans[-1]["version"] != self._label:
                spans.append({"version": self._label, "start": start, "end": start})
            end = spans[-1]["end"] = start + len(new)
            choice = {"token_ids": new, "logprobs": {"content": _positions(len(new), params)}}
            if end == len(ids):
                by_length = len(ids) == params["max_tokens"] and ids[-1] not in ends
                choice["finish_reason"] = "length" if by_length else "stop"
                choice["weight_versions"] = spans
            await _send(response, {"choices": [choice]})
        self._known[session] = max(self._known.get(session, 0), len(prompt) + len(ids))
        usage = {"prompt_tokens_details": {"cached_tokens": cached}}
        await _send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _begin_fault(self) -> None:
        if self.fault == "silent":
            self._silent = True
            return
        task = asyncio.create_task(self._restart_in_a_turn())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart_in_a_turn(self) -> None:
        while not self._running:  # noqa: ASYNC110 (there is no event to wait for)
            await asyncio.sleep(0.01)
        await self.restart()

    async def restart(self) -> None:
        """Die, then restart as another process."""
        for task in self._running:
            task.cancel()
        await self.close()
        self._label = "default"
        self._known.clear()
        self._going.set()
        await asyncio.sleep(self._scale * DOWN_S)
        await self.open()


def _positions(count: int, params: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the log-probs of sampled tokens: 0 if only one token is allowed, otherwise -0.5."""
    value = 0.0 if params["top_k"] == 1 else -0.5
    tops = [{"logprob": value}] * min(1, params["logprobs"])
    return [{"logprob": value, "top_logprobs": tops}] * count


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def serve(port: int, model: Path, scale: float) -> None:
    """Run one server until the process is killed."""
    server = MockServer("", port, Replayed(model), model, scale)
    sys.stdin.readline()  # wait for the signal to start, with the slow imports done
    await server.open()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])))
