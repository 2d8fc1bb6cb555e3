"""Requests that the pool lets a real server hold, beside limits that are fixed.

    python benchmarks/parts/bench_concurrency.py [--seconds 30] [--rounds 2] [--fixed 4 8 16 32 64]

One vLLM server of a tiny model on the CPU (.venv-vllm, made by `sh .ci/engine-vllm`), which runs
NUM_SEQS requests at once, and 128 trajectories whose turns grow and wait for tools in between. The
pool's own limit, with trajectories that begin as the feeder of a run lets them, and each fixed one
take turns, in another order in each round, with prompts that the server has not seen; of each what
it sampled a second, behind a warm-up. `benchmarks/bench.py concurrency` has the same of a simulated
server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.vllm import VLLMServer
from agentenv.types import SamplingParams
from benchmarks.parts.concurrency import Fixed
from tests.engines.reference import EOS, VOCAB
from tests.engines.vllm_server import LOGPROBS, SCALE_OUT, VLLMProcess
from tests.engines.world import World, prompt

NUM_OPEN, NUM_TURNS, TURN_TOKENS, RESULT_TOKENS = 128, 4, 48, 24
MOST_TOKENS = 90  # of a turn, so that all fit in the 512 of the model
TOOL_S = 0.3  # of most calls; a tenth takes ten times as long
WARM_S = 20.0
ROOM_S = 0.2  # between two looks at whether a trajectory may begin
MOST = 100_000  # trajectories of a trial


async def throughput(
    url: str, model: Path, limit: int | None, seconds: float, number: int
) -> dict[str, float]:
    """Sampled tokens a second, and the limit at the end, of the trial of this number."""
    pool = EnginePool(
        [VLLMServer(url, entropy_top_k=2)], model, 0, vocab_size=VOCAB, eos_ids={EOS}, name="bench"
    )
    await pool.start(fresh=True)
    if limit is not None:
        pool.servers[0].limit = Fixed(limit, limit)
    rng, live = Random(0), set[asyncio.Task[None]]()
    places = asyncio.Semaphore(NUM_OPEN)

    async def feed() -> None:
        for one in count(number * MOST):
            await places.acquire()
            while limit is None and live and not pool.has_room(len(live)):  # noqa: ASYNC110
                await asyncio.sleep(ROOM_S)
            trajectory = asyncio.create_task(grow(one))
            live.add(trajectory)
            trajectory.add_done_callback(live.discard)

    async def grow(one: int) -> None:
        ids = list(prompt(one, 40))
        for turn in range(NUM_TURNS):
            size = max(4, round(TURN_TOKENS * rng.expovariate(1.0)))
            done = await pool.generate(
                ids,
                SamplingParams(min(size, MOST_TOKENS), seed=one),
                session=str(one),
                order=(one, turn),
            )
            ids += [*done.token_ids, *prompt(one + turn, RESULT_TOKENS)]
            wait_s = TOOL_S * (0.5 + rng.random())
            await asyncio.sleep(wait_s * (10 if rng.random() < 0.1 else 1))
        places.release()

    feeding = asyncio.create_task(feed())
    await asyncio.sleep(WARM_S)
    before = pool.stats()["sampled_tokens"]
    await asyncio.sleep(seconds)
    sampled, own = pool.stats()["sampled_tokens"] - before, pool.stats()["server/0/limit"]
    for task in (feeding, *live):
        task.cancel()
    await asyncio.gather(feeding, *live, return_exceptions=True)
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
            numbers = count()
            for index in range(options.rounds):
                limits = [None, *options.fixed]
                Random(index).shuffle(limits)
                for limit in limits:
                    trial = throughput(process.url, model, limit, options.seconds, next(numbers))
                    one = asyncio.run(trial)
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
