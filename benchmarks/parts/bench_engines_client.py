"""One client of an engine server under load, in a process of its own; bench_engines.py starts it.

It opens so many streams at once, each asking for one greedy turn after the other, and prints what
that cost this process, as JSON: CPU microseconds a request and a token, wall time, a digest of all
tokens. Every kind gives token ids, log-probs and entropies from the same number of log-probs.

pool     EnginePool over VLLMServer: what an actor calls
openai   AsyncOpenAI().completions.create(stream=True) of the package openai
bytes    aiohttp alone: the answer is read and thrown away, the least that a client can do
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from agentenv.engines.remote.base import top_k_entropies
from benchmarks.parts.engines import Ask, Client, Turn, bytes_client, cpu_s, pool_client

MODEL = "policy"


async def openai_client(asked: Client, stack: AsyncExitStack) -> Ask:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{asked.url}/v1", api_key="none", max_retries=0, timeout=600)
    stack.push_async_callback(client.close)

    async def ask(prompt: list[int]) -> Turn:
        ids: list[int] = []
        logprobs: list[float] = []
        entropies: list[float] = []
        stream = await client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=asked.tokens,
            temperature=0.0,
            logprobs=asked.top_k,
            stream=True,
            extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True},
        )
        async for event in stream:
            for choice in event.choices:
                ids += (choice.model_extra or {}).get("token_ids") or []
                if choice.logprobs is not None:
                    logprobs += choice.logprobs.token_logprobs or []
                    tops = choice.logprobs.top_logprobs or []
                    entropies += top_k_entropies([[*top.values()] for top in tops])
        return ids, logprobs, entropies

    return ask


CLIENTS: dict[str, Callable[[Client, AsyncExitStack], Awaitable[Ask]]] = {
    "pool": pool_client,
    "openai": openai_client,
    "bytes": bytes_client,
}


def prompts_of(stream: int, args: argparse.Namespace, rounds: int, salt: int) -> list[list[int]]:
    rng = random.Random(f"{salt}/{stream}")
    return [rng.choices(range(16, 256), k=args.prompt) for _ in range(rounds)]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    turns: dict[tuple[int, ...], Turn] = {}

    async with AsyncExitStack() as stack:
        client = Client(
            url=args.url,
            model=args.model,
            vocab=args.vocab,
            tokens=args.tokens,
            top_k=args.top_k,
        )
        ask = await CLIENTS[args.kind](client, stack)

        async def stream(number: int, rounds: int, salt: int) -> None:
            for prompt in prompts_of(number, args, rounds, salt):
                turns[tuple(prompt)] = await ask(prompt)

        await asyncio.gather(*(stream(number, 1, -1) for number in range(args.streams)))
        turns.clear()
        loop = asyncio.get_running_loop()
        begin, cpu = loop.time(), cpu_s()
        await asyncio.gather(*(stream(number, args.rounds, 0) for number in range(args.streams)))
        cpu, wall = cpu_s() - cpu, loop.time() - begin
    sizes = {len(column) for turn in turns.values() for column in turn}
    if sizes != {args.tokens}:
        raise SystemExit(f"{args.kind}: columns of {sorted(sizes)} tokens, not {args.tokens}")
    texts = [(prompt, turn[0]) for prompt, turn in sorted(turns.items())]
    return {
        "kind": args.kind,
        "requests": len(turns),
        "us_per_request": 1e6 * cpu / len(turns),
        "us_per_token": 1e6 * cpu / len(turns) / args.tokens,
        "wall_s": wall,
        "digests": [hashlib.sha256(repr(text).encode()).hexdigest()[:8] for text in texts],
        "log_probs": sum(sum(turn[1]) for turn in turns.values()),
        "entropies": sum(sum(turn[2]) for turn in turns.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=list(CLIENTS))
    parser.add_argument("url")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=10)
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
