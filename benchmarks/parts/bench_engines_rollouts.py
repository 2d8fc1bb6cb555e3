r"""Rollouts on a real vLLM server against the same server driven flat out, and the embedded engine.

    python benchmarks/parts/bench_engines_rollouts.py RUN \
        [--trees 128] [--rounds 2] [--extra-layers N] [--apart]

RUN is a finished run of the quick start (`make train`): its environment, limits, plan and number
of trees in flight unless --in-flight says another, and its last weights unless --model names
others. `--extra-layers` makes the model deeper without changing an answer: the one of the quick
start, half a million parameters, costs less than what is around it. `--apart` gives the server one
half of the cores and all else the other one, as where engines have machines of their own.
The launcher starts the server, as for a run. In each round:

rollouts   the actor grows trees against the server, tools and forks included, until the last tree
           has begun, so that as many grow all the time as in a run; each turn is kept
flat out   the same prompts for as many tokens each, in the same order, as many at once as there
           were: plain POSTs whose answers are thrown away, no streaming, no end of sequence
replay     the same turns through the pool, without an environment: what the client costs
embedded   the same turns through the embedded engine in this process

Sampled tokens per second of wall time, and per second of CPU time: of this process, and for vLLM
also of the server's processes. Log-probs are asked for in all of them. Prefix caches start empty
in each. Without `--apart` everything shares the machine's cores, so the share of the rollouts
includes what the environment, its tools and the controller take from the server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp
import msgspec
import psutil

from agentenv.actor import Actor
from agentenv.config import build_config
from agentenv.engine import Engine, EngineStart
from agentenv.engines.embedded import EmbeddedConfig
from agentenv.engines.embedded.engine import EmbeddedEngine
from agentenv.engines.remote.server import Request
from agentenv.engines.vllm import VLLMConfig, request_body
from agentenv.env import close_shared
from agentenv.model_files import load_tokenizer, vocab_size
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.run.rundir import CONFIG_FILE, find_checkpoint
from agentenv.pipelines.serving.servers import ServerFactory
from agentenv.pipelines.setup.assembly import make_renderer
from agentenv.pipelines.setup.data import EnvMaker, fit_prompts, load_training, tables_of
from agentenv.server_config import ServersConfig
from benchmarks.parts.bench_engines_parts import Apart, Clock, Recorder, Turn, in_tasks
from benchmarks.parts.deeper_model import deepened


class Bench:
    """What the rounds share."""

    def __init__(
        self,
        config: TrainConfig,
        actor: Actor,
        tasks: Sequence[Any],
        model: Path,
        in_flight: int | None,
    ) -> None:
        self.config, self.actor, self.tasks, self.model = config, actor, tasks, model
        self.plan = config.algorithm.plan(vocab_size(model))
        queue = config.queue
        self.in_flight = in_flight or queue.groups_per_step * (queue.max_staleness + 1)
        self.growing: asyncio.Task[None]

    async def rollouts(self, recorder: Recorder, first: int, count: int) -> int:
        """Grow `count` trees, as many at once as a run has; tokens until the last one begins."""
        self.actor.engine = recorder
        slots = asyncio.Semaphore(self.in_flight)
        sampled = recorder.stats()["sampled_tokens"]
        num_begun, last = 0, asyncio.Event()

        async def grow(index: int) -> None:
            nonlocal num_begun
            async with slots:
                num_begun += 1
                if num_begun == count:
                    last.set()
                task = self.tasks[index % len(self.tasks)]
                await self.actor.rollout(task, self.plan, index=index)

        self.growing = asyncio.create_task(
            in_tasks(grow(index) for index in range(first, first + count))
        )
        await last.wait()
        return int(recorder.stats()["sampled_tokens"] - sampled)

    async def flat_out(self, url: str, turns: Sequence[Turn], top_k: int, at_once: int) -> int:
        salt, queue, done = secrets.token_hex(8), iter(turns), 0
        connector = aiohttp.TCPConnector(limit=0)

        async def drive(session: aiohttp.ClientSession) -> None:
            nonlocal done
            for prompt, sampling, _, size in queue:
                plain = msgspec.structs.replace(sampling, max_tokens=size, stop=())
                request = Request(secrets.token_hex(8), prompt, plain)
                body = request_body(request.id, request, top_k, salt)
                body["sampling_params"]["ignore_eos"] = True
                body |= {"stream": False}
                del body["stream_options"]
                data = msgspec.json.encode(body)
                async with session.post(
                    f"{url}/inference/v1/generate",
                    data=data,
                    headers={"Content-Type": "application/json"},
                ) as response:
                    response.raise_for_status()
                    await response.read()
                done += size

        async with aiohttp.ClientSession(connector=connector) as session:
            await in_tasks(drive(session) for _ in range(at_once))
        return done

    async def replay(self, engine: Engine, turns: Sequence[Turn], at_once: int) -> int:
        queue, done = iter(turns), 0

        async def drive() -> None:
            nonlocal done
            for prompt, sampling, session, _ in queue:
                found = await engine.generate(prompt, sampling, session=session)
                done += len(found.token_ids)

        await in_tasks(drive() for _ in range(at_once))
        return done


async def run_all(args: argparse.Namespace) -> None:
    run: Path = args.run
    raw = msgspec.json.decode((run / CONFIG_FILE).read_bytes())
    config = build_config(TrainConfig, raw, str(run))
    model = find_checkpoint(args.model or run)
    apart = Apart() if args.apart else None
    tokenizer = load_tokenizer(model)

    def resolve(text: str) -> Path:
        return Path(text.replace("{run}", str(run)))

    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.extra_layers:
            model = deepened(model, folder / "model", args.extra_layers)
        stack.push_async_callback(close_shared)
        renderer = make_renderer(config.renderer, config.prompt, tokenizer, model)
        make_env = EnvMaker(config.env, tables_of(config), resolve, config.limits, config.prompt)
        tasks = await load_training(config.data, config.env.id, resolve, print)
        tasks = await fit_prompts(
            tasks, config.data, make_env, renderer, config.limits, print, "data"
        )
        factory = ServerFactory(folder, stack, print)
        engine_config = VLLMConfig(servers=ServersConfig())
        pool = await engine_config.start(
            EngineStart(
                model=model,
                tokenizer=tokenizer,
                policy_version=0,
                limits=config.limits,
                stack=stack,
                servers=factory,
                seed=config.run.seed,
            )
        )
        sampling = config.sampling.train.params()
        actor = Actor(pool, renderer, make_env, config.limits, sampling, f"{config.run.seed}/bench")
        bench = Bench(config, actor, tasks, model, args.in_flight)
        server = psutil.Process(factory.processes[0].pid)
        if apart is not None:
            apart.move(server)
        clock = Clock(server)
        url = factory.processes[0].spec.url
        await bench.rollouts(Recorder(pool), 10**6, 8)  # warm
        await bench.growing
        version = 0
        for number in range(args.rounds):
            await forget(pool, model, version := version + 1)
            recorder = Recorder(pool)
            first = number * args.trees
            grown = await clock.time("rollouts", bench.rollouts(recorder, first, args.trees))
            mean = recorder.sums[0] / recorder.sums[1]
            await bench.growing
            turns = [turn for turn in recorder.turns if turn[3]]
            top_k, peak = engine_config.entropy_top_k, recorder.peak
            flat = await clock.time("flat out", bench.flat_out(url, turns, top_k, peak))
            await forget(pool, model, version := version + 1)
            replayed = await clock.time("replay", bench.replay(pool, turns, peak))
            embedded = EmbeddedEngine(EmbeddedConfig(device="cpu"), model)
            own = await clock.time("embedded", bench.replay(embedded, turns, peak))
            await embedded.close()
            print(
                f"round {number}: {len(turns)} turns, {mean:.0f} at once, at most {peak}; of flat "
                f"out: rollouts {grown / flat:.2f}, replay {replayed / flat:.2f}; embedded / "
                f"replay {own / replayed:.2f}\n",
                flush=True,
            )


async def forget(pool: Engine, model: Path, version: int) -> None:
    """An update to the same weights, after which no prefix is cached."""
    await pool.load_weights(model, version)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", type=Path, help="another checkpoint than the last of the run")
    parser.add_argument("--trees", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--in-flight", type=int, help="trees that grow at a time")
    parser.add_argument("--extra-layers", type=int, default=0)
    parser.add_argument("--apart", action="store_true", help="half of the cores for the server")
    args = parser.parse_args()
    args.run = args.run.absolute()
    asyncio.run(run_all(args))


if __name__ == "__main__":
    main()
