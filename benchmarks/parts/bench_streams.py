"""CPU of the client for a token, where many turns stream at a time and at the pace of a GPU.

    python benchmarks/parts/bench_streams.py [--streams N] [--rate R] [--turn N] [--seconds S]

A server of vLLM's protocol in a process of its own recites at `rate` tokens a second and stream;
each stream takes turn after turn, and only what falls into the seconds behind a warm-up is counted.
Printed are microseconds of this process a token, medians of interleaved rounds:

    floor     aiohttp alone reads the bytes of such answers, in events of 32 tokens
    unheard   the pool, nobody listens to the turn
    window    the first 20 tokens are heard, with 20 rivals each, as where a trajectory may fork
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp
import uvloop
from aiohttp import web

from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.vllm import VLLMServer
from agentenv.envs.quickstart_setup import build_model
from agentenv.pipelines.run.event_loop import rolling_out
from agentenv.ports import held_ports
from agentenv.types import SamplingParams
from benchmarks.parts.engines import AllAtOnce, cpu_s, until_there
from benchmarks.parts.mock_server import Recital, RecitingServer

TOP_K, WINDOW, VOCAB = 20, 20, 1024
PROMPT = 200  # tokens
FLOOR_EVENT = 32
MODES = ("floor", "unheard", "window")
LAST = b'data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}\n\n'


class Paced(RecitingServer):
    """Recites the same tokens to everybody, `rate` of them a second: each event is made once."""

    rate = 32.0

    async def _recite(
        self, request: web.Request, body: dict[str, Any], *, is_turn: bool
    ) -> web.StreamResponse:
        params = body["sampling_params"]
        size, interval = params["max_tokens"], params.get("stream_interval", 1)
        is_greedy = params.get("top_k") == 1  # a probe of the pool
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for start in range(0, size, interval):
            count = min(interval, size - start)
            await asyncio.sleep(count / self.rate)
            ends = size if start + count == size else 0
            rivals = min(params.get("logprobs") or 0, 1 if is_greedy else TOP_K)
            await response.write(self._event(start % 100, count, rivals, ends, is_greedy))
        await response.write(LAST + b"data: [DONE]\n\n")
        return response

    def _event(self, first: int, count: int, rivals: int, ends: int, is_greedy: bool) -> bytes:
        known: dict[Any, bytes] = self.__dict__.setdefault("events", {})
        key = (first, count, rivals, ends, is_greedy)
        if key not in known:
            value = 0.0 if is_greedy else -0.51234567
            top = [{"logprob": value - 0.37 * place} for place in range(rivals)]
            token = {"logprob": value, "top_logprobs": top}
            ids = [100 + (first + place) % 100 for place in range(count)]
            choice: dict[str, Any] = {"token_ids": ids, "logprobs": {"content": [token] * count}}
            if ends:
                choice["finish_reason"] = "length"
                choice["weight_versions"] = [{"version": self._label, "start": 0, "end": ends}]
            known[key] = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        return known[key]


async def serve(port: int, model: Path, rate: float) -> None:
    server = Paced("", port, Recital(model), model, 0.0)
    server.rate = rate
    await server.open()
    await asyncio.Event().wait()


async def measure(url: str, model: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    async with AsyncExitStack() as stack:
        server = VLLMServer(url, entropy_top_k=TOP_K, vocab_size=VOCAB)
        pool = EnginePool(
            [server],
            model,
            0,
            vocab_size=VOCAB,
            eos_ids=(),
            config=AllAtOnce(),
            name="bench",
            entropies="window",
        )
        stack.push_async_callback(pool.close)
        await until_there(url)
        await pool.start(fresh=True)
        plain = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        sampling = SamplingParams(max_tokens=args.turn, temperature=1.0)
        prompts = [random.choices(range(16, 256), k=PROMPT) for _ in range(64)]

        async def turn(mode: str) -> None:
            prompt = random.choice(prompts)
            if mode == "floor":
                params = {"max_tokens": args.turn, "stream_interval": FLOOR_EVENT}
                body = {"token_ids": prompt, "sampling_params": params, "stream": True}
                async with plain.post(f"{url}/inference/v1/generate", json=body) as response:
                    assert response.status == 200
                    while await response.content.readany():
                        pass
                return
            heard = mode == "window"
            await pool.generate(
                prompt,
                sampling,
                session=str(random.random()),
                on_tokens=(lambda chunk: None) if heard else None,
                stream_interval=WINDOW if heard else 1,
            )

        stack.enter_context(rolling_out())  # as in a run
        for _ in range(args.rounds):
            for mode in MODES:
                found[mode].append(await steady(lambda mode=mode: turn(mode), args))
                print(f"{mode:8} {found[mode][-1]:.2f} us a token", flush=True)
    return found


async def steady(turn: Callable[[], Awaitable[None]], args: argparse.Namespace) -> float:
    """Microseconds of CPU a token of the turns that end while all streams go on."""
    took_s = args.turn / args.rate
    num_turns = 0

    async def stream(place: int) -> None:
        nonlocal num_turns
        await asyncio.sleep(took_s * place / args.streams)
        while True:
            await turn()
            num_turns += 1

    streams = [asyncio.create_task(stream(place)) for place in range(args.streams)]
    await asyncio.sleep(1.5 * took_s)
    cpu, began, num_before = cpu_s(), time.monotonic(), num_turns
    await asyncio.sleep(args.seconds)
    cpu, seconds = cpu_s() - cpu, time.monotonic() - began
    num_tokens = (num_turns - num_before) * args.turn
    for task in streams:
        task.cancel()
    failed = [e for e in await asyncio.gather(*streams, return_exceptions=True) if e is not None]
    assert all(isinstance(one, asyncio.CancelledError) for one in failed), failed[:1]
    rate, wanted = num_tokens / seconds, args.streams * args.rate
    if rate < 0.85 * wanted:
        print(f"  only {rate:,.0f} of {wanted:,.0f} tokens a second: the server is the limit")
    return cpu / num_tokens * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=32.0, help="tokens a second of a stream")
    parser.add_argument("--turn", type=int, default=512, help="tokens")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if args.serve:
        uvloop.run(serve(int(args.serve[0]), Path(args.serve[1]), args.rate))
        return
    with tempfile.TemporaryDirectory() as folder, held_ports(1) as (port,):
        model = Path(folder)
        build_model(model, seed=0)
        command = [sys.executable, __file__, "--rate", str(args.rate), "--serve", str(port), folder]
        server = subprocess.Popen(command)
        try:
            found = uvloop.run(measure(f"http://127.0.0.1:{port}", model, args))
        finally:
            server.kill()
    for mode, values in found.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"{mode:8} median {median(values):.2f} us a token ({spread})")


if __name__ == "__main__":
    main()
