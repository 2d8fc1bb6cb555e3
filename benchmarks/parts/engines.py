"""What a client of engine servers costs the controller, by the token.

    python benchmarks/bench.py engines [--repeats N] [--json FILE]

STREAMS turns at a time of TURN_TOKENS tokens each, on a server that recites (recital.py) in a
process of its own. CPU counts of the process of the client alone, so that the pace of the server
does not enter.

    pool    EnginePool over VLLMServer: what an actor calls; log-probs and entropies are read
    bytes   aiohttp alone: the answer is read and thrown away, the least that a client can do

Tokens come WINDOW at a time, as ARPO's actor asks for them, and one at a time.

`benchmarks/parts/bench_engines.py` asks a real vLLM server, also through the package openai.
"""

from __future__ import annotations

import asyncio
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import ClassVar

import aiohttp
import msgspec
from msgspec import Struct

from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.remote.server import Request
from agentenv.engines.vllm import VLLMServer, request_body
from agentenv.errors import AgentEnvError
from agentenv.ports import held_ports
from agentenv.server_config import PoolConfig
from agentenv.types import Chunk, SamplingParams
from benchmarks.parts import overhead
from benchmarks.parts.mock_server import TURN_TOKENS

Turn = tuple[list[int], list[float], list[float]]  # token ids, log-probs, entropies
Ask = Callable[[list[int]], Awaitable[Turn]]

STREAMS, ROUNDS = 128, 4
PROMPT_TOKENS, TOP_K = 32, 1  # the server recites one log-prob a position
SCALE = 0.004  # a millisecond a token
START_S = 60.0


class Client(Struct, frozen=True, kw_only=True):
    """Whom a client asks, and for what."""

    url: str
    model: Path
    vocab: int
    tokens: int
    top_k: int
    interval: int = 1  # tokens that come together


class Figures(Struct, frozen=True, kw_only=True):
    """CPU microseconds of the client."""

    us_per_token: float
    us_per_request: float
    over_bytes: float  # how many times what the least costs


class AllAtOnce(PoolConfig, frozen=True, kw_only=True):
    """Does not wait for the figures of the server's load."""

    initial_concurrency: ClassVar[int] = PoolConfig().max_concurrency


async def pool_client(client: Client, stack: AsyncExitStack) -> Ask:
    """Through the pool, as an actor does."""
    engine = EnginePool(
        [VLLMServer(client.url, entropy_top_k=client.top_k, vocab_size=client.vocab)],
        client.model,
        0,
        vocab_size=client.vocab,
        eos_ids=(),
        config=AllAtOnce(),
        name=f"bench-{random.random()}",
    )
    stack.push_async_callback(engine.close)
    await engine.start(fresh=True)
    sampling = SamplingParams(max_tokens=client.tokens, temperature=0.0)

    async def ask(prompt: list[int]) -> Turn:
        chunks: list[Chunk] = []
        done = await engine.generate(
            prompt,
            sampling,
            session=str(prompt[0]),
            on_tokens=chunks.append,
            stream_interval=client.interval,
        )
        return done.token_ids, done.logprobs, done.entropies

    return ask


async def bytes_client(client: Client, stack: AsyncExitStack) -> Ask:
    """Reads what comes, and looks at none of it."""
    session = await stack.enter_async_context(
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(START_S)
        )
    )
    sampling = SamplingParams(max_tokens=client.tokens, temperature=0.0)
    salt = str(random.random())

    async def ask(prompt: list[int]) -> Turn:
        request = Request(str(random.random()), prompt, sampling, stream_interval=client.interval)
        body = request_body(request.id, request, client.top_k, salt)
        data, headers = msgspec.json.encode(body), {"Content-Type": "application/json"}
        url = f"{client.url}/inference/v1/generate"
        async with session.post(url, data=data, headers=headers) as response:
            response.raise_for_status()
            while await response.content.readany():
                pass
        return [0] * client.tokens, [0.0] * client.tokens, [0.0] * client.tokens

    return ask


CLIENTS = {"bytes": bytes_client, "pool": pool_client}
INTERVALS = (overhead.WINDOW, 1)


def cpu_s() -> float:
    """Of this process, so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(repeats: int) -> dict[str, Figures]:
    """The figures by client, medians of rounds in which the clients take turns."""
    from agentenv.envs.quickstart_setup import build_model

    with tempfile.TemporaryDirectory(prefix="agentenv-") as folder, held_ports(1) as (port,):
        model = Path(folder)
        build_model(model, seed=0)
        command = [sys.executable, "-m", "benchmarks.parts.mock_server", str(port), folder]
        root = Path(__file__).resolve().parents[2]
        server = subprocess.Popen([*command, str(SCALE)], cwd=root, stdin=subprocess.PIPE)
        try:
            assert server.stdin is not None
            server.stdin.write(b"\n")
            server.stdin.flush()
            asked = [
                Client(
                    url=f"http://127.0.0.1:{port}",
                    model=model,
                    vocab=1024,
                    tokens=TURN_TOKENS,
                    top_k=TOP_K,
                    interval=interval,
                )
                for interval in INTERVALS
            ]
            costs: dict[tuple[str, int], list[float]] = defaultdict(list)
            for _ in range(repeats):
                for client in asked:
                    for name in CLIENTS:
                        found = asyncio.run(_measure(name, client))
                        costs[name, client.interval].append(found)
        finally:
            server.kill()
            server.communicate()
    return {
        f"{name}, {interval} at a time": Figures(
            us_per_token=round(median(times) / TURN_TOKENS, 2),
            us_per_request=round(median(times), 1),
            over_bytes=round(median(times) / median(costs["bytes", interval]), 2),
        )
        for (name, interval), times in costs.items()
    }


async def _measure(name: str, client: Client) -> float:
    """CPU microseconds a request, behind a first round that opens the connections."""
    rng = random.Random(name)
    async with AsyncExitStack() as stack:
        await until_there(client.url)
        ask = await CLIENTS[name](client, stack)

        async def stream(num: int) -> int:
            sizes = [
                len((await ask(rng.choices(range(16, 256), k=PROMPT_TOKENS)))[0])
                for _ in range(num)
            ]
            if set(sizes) != {client.tokens}:
                raise AgentEnvError(f"{name}: turns of {sorted(set(sizes))} tokens")
            return num

        await asyncio.gather(*(stream(1) for _ in range(STREAMS)))
        before = cpu_s()
        num = sum(await asyncio.gather(*(stream(ROUNDS) for _ in range(STREAMS))))
        return (cpu_s() - before) / num * 1e6


async def until_there(url: str) -> None:
    due = time.monotonic() + START_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(START_S)) as session:
        while True:
            try:
                async with session.get(f"{url}/health"):
                    return
            except aiohttp.ClientConnectionError:
                if time.monotonic() > due:
                    raise
                await asyncio.sleep(0.1)
