"""What forks save when tools are slow: rollouts of GRPO's and ARPO's plans with the same policy.

    python tests/bench/bench_algorithms_slow.py RUN [--step 3] [--delay 1.0] [--at-once 0 16]
                                                    [--groups 32] [--repeats 3]

Grows `groups` groups of 8 of the run's training questions, all at once as an asynchronous run
does, with tools that take `delay` seconds a call and serve `at-once` calls at a time (0: any
number, as a search API without a rate limit). Wall seconds are dominated by the delay, so that
they mean something on a shared machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agentenv.actor import Actor
from agentenv.config import build_config
from agentenv.engines.embedded import EmbeddedEngine
from agentenv.metrics import num_tool_calls
from agentenv.plan import RolloutPlan
from agentenv.shared import close_shared
from agentenv.tree import TrajectoryTree
from agentenv.types import Info, Message, Task
from envs.quickstart import QuickstartEnv
from launchers.assembly import load_tokenizer, make_renderer, vocab_size
from launchers.config import TrainConfig
from launchers.data import load_set
from launchers.rundir import CONFIG_FILE
from learners.arpo import ARPO
from learners.grpo import GRPO


class SlowQuickstart(QuickstartEnv):
    """The quick start whose tools take `delay` seconds a call, `turns` calls at a time."""

    def __init__(
        self, task: Task, corpus: str, delay: float, turns: asyncio.Semaphore | None
    ) -> None:
        super().__init__(task, corpus)
        self.delay = delay
        self.turns = turns

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        for _ in action.tool_calls:
            async with self.turns or nullcontext():
                await asyncio.sleep(self.delay)
        return await super().step(action)


async def measure(options: argparse.Namespace) -> None:
    """Print wall seconds and tool calls of both plans."""
    run = options.run
    raw = json.loads((run / CONFIG_FILE).read_text(encoding="utf-8"))
    config = build_config(TrainConfig, raw, str(run))
    model = run / "checkpoints" / f"step-{options.step:06d}"
    corpus = config.env.kwargs["corpus"].replace("{run}", str(run))
    size = vocab_size(model)
    plans = {
        "grpo": GRPO(group_size=8).plan(size),
        "arpo": ARPO(group_size=8, entropy_window=4).plan(size),
    }
    async with AsyncExitStack() as stack:
        tokenizer = load_tokenizer(model)
        renderer = make_renderer(config.renderer, config.prompt, tokenizer, model)
        stack.push_async_callback(close_shared)
        engine = EmbeddedEngine(config.engine, model)
        stack.push_async_callback(engine.close)
        tasks = await load_set(
            config.data.train,
            config.env.id,
            config.data,
            lambda text: Path(text.replace("{run}", str(run))),
            print,
            "data",
            options.groups * options.repeats,
        )
        for at_once in options.at_once:
            turns = asyncio.Semaphore(at_once) if at_once else None

            def make_env(task: Task, turns: asyncio.Semaphore | None = turns) -> SlowQuickstart:
                return SlowQuickstart(task, corpus, options.delay, turns)

            sampling = config.sampling.train.params()
            actor = Actor(engine, renderer, make_env, config.limits, sampling, seed="slow")
            for name, plan in plans.items():
                line = await _grow(actor, plan, tasks, options)
                print(f"at once {at_once or 'any'}, {name}: {line}", flush=True)


async def _grow(
    actor: Actor, plan: RolloutPlan, tasks: list[Task], options: argparse.Namespace
) -> str:
    loop = asyncio.get_running_loop()
    seconds, trees = [], list[TrajectoryTree]()
    for repeat in range(options.repeats):
        part = tasks[repeat * options.groups : (repeat + 1) * options.groups]
        start = loop.time()
        trees += await asyncio.gather(*(actor.rollout(task, plan) for task in part))
        seconds.append(loop.time() - start)
    calls = sum(map(num_tool_calls, trees)) / options.repeats
    done = [trajectory for tree in trees for trajectory in tree.trajectories()]
    contained = sum(trajectory.num_tool_calls for trajectory in done) / options.repeats
    return (
        f"{fmean(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f}), {calls:.0f} calls "
        f"made for {contained:.0f} in the trajectories"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--step", type=int, default=3)
    parser.add_argument("--delay", type=float, default=1.0)
    parser.add_argument("--at-once", type=int, nargs="+", default=[0, 16])
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
