"""Requests that the pool lets a real server hold, beside limits that are fixed.

    python tests/bench/bench_concurrency.py [--seconds 30] [--rounds 2] [--fixed 4 8 16 32 64]

One vLLM server of a tiny model on the CPU (.venv-vllm, made by `sh .ci/engine-vllm`), which runs
NUM_SEQS requests at once, and 128 trajectories whose turns grow and wait for tools in between. The
pool's own limit and each fixed one take turns; of each what it sampled a second, behind a warm-up
of the pool's own. `launchers/bench.py concurrency` has the same of a simulated server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.vllm import VLLMServer
from agentenv.types import SamplingParams
from launchers.benches.concurrency import Fixed
from tests.engines.reference import EOS, VOCAB
from tests.engines.vllm_server import LOGPROBS, SCALE_OUT, VLLMProcess
from tests.engines.world import World, prompt

NUM_OPEN, NUM_TURNS, TURN_TOKENS, RESULT_TOKENS = 128, 4, 48, 24
TOOL_S = 0.3  # of most calls; a tenth takes ten times as long
WARM_S = 20.0


async def throughput(url: str, model: Path, limit: int | None, seconds: float) -> dict[str, float]:
    """Sampled tokens a second, and the limit at the end."""
    pool = EnginePool(
        [VLLMServer(url, entropy_top_k=2)], model, 0, vocab_size=VOCAB, eos_ids={EOS}, name="bench"
    )
    await pool.start(fresh=True)
    if limit is not None:
        pool.fleet.members[0].limit = Fixed(limit, limit)
    rng, numbers = Random(0), iter(range(10**9))

    async def trajectories() -> None:
        while True:
            number = next(numbers)
            ids = list(prompt(number, 40))
            for turn in range(NUM_TURNS):
                size = max(4, round(TURN_TOKENS * rng.expovariate(1.0)))
                done = await pool.generate(
                    ids,
                    SamplingParams(min(size, 200), seed=number),
                    session=str(number),
                    order=(number, turn),
                )
                ids += [*done.token_ids, *prompt(number + turn, RESULT_TOKENS)]
                wait_s = TOOL_S * (0.5 + rng.random())
                await asyncio.sleep(wait_s * (10 if rng.random() < 0.1 else 1))

    tasks = [asyncio.create_task(trajectories()) for _ in range(NUM_OPEN)]
    await asyncio.sleep(WARM_S)
    before = pool.stats()["sampled_tokens"]
    await asyncio.sleep(seconds)
    sampled, own = pool.stats()["sampled_tokens"] - before, pool.stats()["server/0/limit"]
    for task in tasks:
        task.cancel()
    with suppress(Exception):
        await asyncio.gather(*tasks, return_exceptions=True)
    await pool.close()
    return {"tokens_per_s": sampled / seconds, "limit": own}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--fixed", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    options = parser.parse_args()
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as text:
        world = World(Path(text), tied=False)
        model = world.paths[0]
        process = VLLMProcess(model, Path(text) / "server.log", (*SCALE_OUT, *LOGPROBS))
        try:
            process.wait_ready()
            for _ in range(options.rounds):
                for limit in (None, *options.fixed):
                    one = asyncio.run(throughput(process.url, model, limit, options.seconds))
                    found.setdefault(str(limit or "own"), []).append(one)
                    print(limit or "own", json.dumps(one), flush=True)
        finally:
            process.stop()
    medians = {name: median(one["tokens_per_s"] for one in rows) for name, rows in found.items()}
    best = max((name for name in medians if name != "own"), key=medians.__getitem__)
    print(json.dumps(medians, indent=1))
    print(f"own {medians['own']:.0f}, best fixed {best}: {medians[best]:.0f}, share "
          f"{medians['own'] / medians[best]:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
