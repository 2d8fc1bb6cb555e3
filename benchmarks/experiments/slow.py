"""What forks save when tools are slow: GRPO's and ARPO's rollouts of the same questions.

    python benchmarks/experiments/slow.py [--groups 32] [--repeats 5]

A scripted policy (turns of 40 to 240 tokens at 50 tokens a second, up to 6 calls, 4 on average)
grows all groups of 8 at once, as an asynchronous run does, under a clock that jumps from event to
event: seconds are exact and do not depend on the machine. A tool takes `delay` seconds a call and
serves any number of calls at once, as a search API without a rate limit, or 16.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from random import Random
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from agentenv.actor import Actor
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.learners.arpo import ARPO
from agentenv.learners.baselines import GRPO
from agentenv.plan import RolloutPlan
from agentenv.renderer import TagRenderer
from agentenv.tree import TrajectoryTree
from agentenv.types import Info, Limits, Message, SamplingParams, Task
from tests.support.toy import CharTokenizer, CountingEnv
from tests.support.virtual_clock import run_virtual

MAX_CALLS, GO_ON = 6, 0.85
DELAYS = (0.1, 1.0, 5.0)
AT_ONCE = (0, 16)  # 0: any number
PLANS = {"grpo": GRPO(group_size=8), "arpo": ARPO(group_size=8)}


class SlowEnv(CountingEnv):
    """Every call takes `delay` seconds and one of `places`."""

    def __init__(self, task: Task, delay: float, places: asyncio.Semaphore | None) -> None:
        super().__init__(task)
        self.delay = delay
        self.places = places

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        for _ in action.tool_calls:
            async with self.places or nullcontext():
                await asyncio.sleep(self.delay)
        return await super().step(action)

    async def fork(self) -> SlowEnv:
        other = SlowEnv(self.task, self.delay, self.places)
        other.calls = list(self.calls)
        return other


def _turn(prompt: str, rng: Random) -> str:
    thought = f"<think>{'x' * rng.randint(40, 240)}</think>"
    if prompt.count("<result>") < MAX_CALLS and rng.random() < GO_ON:
        return f"{thought}<search>q{rng.randrange(9)}</search>"
    return f"{thought}<answer>2</answer>"


async def grow(
    plan: RolloutPlan, delay: float, at_once: int, groups: int, seed: int
) -> tuple[float, list[TrajectoryTree]]:
    """Seconds until all groups have ended, and their trees."""
    places = asyncio.Semaphore(at_once) if at_once else None
    tokenizer = CharTokenizer()
    config = ScriptedConfig(max_model_len=20_000, tokens_per_s=50.0)
    actor = Actor(
        ScriptedEngine(config, tokenizer, script=_turn),
        TagRenderer(tokenizer),
        lambda task: SlowEnv(task, delay, places),
        Limits(max_response_tokens=8192, max_turns=16, max_tool_calls=16, max_seconds=3600),
        SamplingParams(max_tokens=1),
        seed,
    )
    tasks = [Task(str(number), "toy", "how many?", ("2",)) for number in range(groups)]
    loop = asyncio.get_running_loop()
    start = loop.time()
    trees = await asyncio.gather(*(actor.rollout(task, plan) for task in tasks))
    return loop.time() - start, trees


def num_tool_calls(trees: Sequence[TrajectoryTree]) -> int:
    """Calls that were really made; one on a shared prefix counts once."""
    return sum(len(node.info.get("tool_calls", ())) for tree in trees for node in tree.nodes)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    for at_once in AT_ONCE:
        for delay in DELAYS:
            texts = []
            for name, algorithm in PLANS.items():
                plan = algorithm.plan(256)
                runs = [
                    run_virtual(grow(plan, delay, at_once, options.groups, seed))
                    for seed in range(options.repeats)
                ]
                seconds = [found for found, _ in runs]
                calls = fmean(num_tool_calls(trees) for _, trees in runs)
                texts.append(
                    f"{name} {fmean(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f}), "
                    f"{calls:.0f} calls"
                )
            print(f"delay {delay} s, at once {at_once or 'any'}: {'; '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
