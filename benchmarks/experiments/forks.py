"""Does entropy after a tool result predict the value of a fork?

    python benchmarks/experiments/forks.py --out FILE.json [RUN ...]
                                [--steps 0 3 6 12] [--questions 100] [--siblings 8]

With RUNs (arms of algorithms.py, or any runs with checkpoints), fork
points are added to the file; without, its content is reported. For each checkpoint and question,
ROOTS trajectories are sampled from scratch; at each tool result of the PROBES among them,
`siblings` more are forked, which do not fork again. Each fork point then has two figures:

    signal   from the entropies of the trajectory's own next turn, the input of a plan
    worth    from the siblings alone: the variance of their returns, and whether they differ in
             success. A group with equal returns gives no gradient.

For each signal: AUC for "the siblings differ" (0.5 is chance). `within` is the AUC among fork
points of the same kind of question and the same number of earlier calls, with its 95 % interval by
bootstrap over questions. Dividing by ln V or V changes none of these, only `shift`, the change of
the fork probability.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pvariance
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.parts.assembly import load_set, make_renderer
from agentenv.assembly.parts.environments import EnvMaker
from agentenv.assembly.run.rundir import CONFIG_FILE
from agentenv.base.config import build_config
from agentenv.base.model_files import load_tokenizer, vocab_size
from agentenv.base.tree import Node, Trajectory, TrajectoryTree
from agentenv.base.types import Task
from agentenv.contract.env import close_shared
from agentenv.contract.plan import RolloutPlan
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.embedded.engine import EmbeddedEngine
from agentenv.rollout.actor import Actor

ROOTS = 8
PROBES = ("0", "1", "2", "3")  # branches whose tool results are measured


@dataclass(frozen=True)
class ProbePlan:
    """Forks `siblings` times at each tool result of the PROBES."""

    siblings: int
    group_size: int = 10_000
    fork_window: int = 1

    def on_start(self, tree: TrajectoryTree) -> int:
        return ROOTS

    def on_fork_point(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float], rng: Random
    ) -> int:
        return self.siblings if node.branch in PROBES else 0

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> int:
        return 0


def fork_points(tree: TrajectoryTree) -> list[dict[str, Any]]:
    """One row per tool result of a probe: the entropies (nats) of the next turn and of the first
    turn, and the returns and successes of the siblings; `order` is the order in which the next
    turns ended."""
    done = list(tree.trajectories())
    roots = [t for t in done if "+" not in t.leaf.branch]
    rows: list[dict[str, Any]] = []
    for name in PROBES:
        probe = [node for node in tree.nodes[1:] if node.branch == name]
        others = [t.reward for t in roots if t.leaf.branch != name]
        for depth, (node, following) in enumerate(pairwise(probe), 1):
            siblings = [t for t in done if _starts_at(t, node)]
            calls = node.info.get("tool_calls", ())
            if not siblings or not following.entropies or not calls:
                continue
            rows.append(
                {
                    "question": tree.task.id,
                    "kind": tree.task.kind,
                    "tool": calls[-1]["name"],
                    "probe": name,
                    "depth": depth,
                    "result_tokens": len(node.observation_ids),
                    "order": following.index,
                    "first": probe[0].entropies.tolist(),
                    "after": following.entropies.tolist(),
                    "returns": [t.reward for t in siblings],
                    "right": [bool(t.success) for t in siblings],
                    "root_variance": pvariance(others) if len(others) > 1 else 0.0,
                    "calls": fmean(t.num_tool_calls - depth for t in siblings),
                    "root_calls": fmean(t.num_tool_calls for t in roots),
                }
            )
    return rows


def _starts_at(trajectory: Trajectory, node: Node) -> bool:
    """True for a sibling forked at `node`."""
    own = [one for one in trajectory.path if one.branch == trajectory.leaf.branch]
    return "+" in trajectory.leaf.branch and own[0].parent == node.index


class Frozen(NamedTuple):
    """The policy of a run after some updates, and the run's training questions."""

    actor: Actor
    tasks: list[Task]
    config: TrainConfig
    model: Path


@asynccontextmanager
async def frozen(run: Path, step: int) -> AsyncIterator[Frozen]:
    raw = json.loads((run / CONFIG_FILE).read_text(encoding="utf-8"))
    config = build_config(TrainConfig, raw, str(run))
    model = run / "checkpoints" / f"step-{step:06d}"

    def resolve(text: str) -> Path:
        return Path(text.replace("{run}", str(run)))

    async with AsyncExitStack() as stack:
        tokenizer = load_tokenizer(model)
        renderer = make_renderer(config.renderer, config.prompt, tokenizer, model)
        stack.push_async_callback(close_shared)
        make_env = EnvMaker(config, resolve)
        tasks = await load_set(config.data, config.env.id, resolve, print)
        if not isinstance(config.engine, EmbeddedConfig):
            raise SystemExit(f"{run}: engine.name: the probe samples with the embedded engine")
        engine = EmbeddedEngine(config.engine, model)
        stack.push_async_callback(engine.close)
        sampling = config.sampling.train.params()
        actor = Actor(engine, renderer, make_env, config.limits, sampling, seed=f"forks {step}")
        yield Frozen(actor, list(tasks), config, model)


async def grown(
    actor: Actor, plan: RolloutPlan, tasks: Sequence[Task], first: int = 0, slots: int = 8
) -> list[TrajectoryTree]:
    """A tree of each task, `slots` at a time; `first` is the index of the first one."""
    free = asyncio.Semaphore(slots)

    async def one(number: int, task: Task) -> TrajectoryTree:
        async with free:
            return await actor.rollout(task, plan, index=first + number)

    async with asyncio.TaskGroup() as group:
        growing = [group.create_task(one(*pair)) for pair in enumerate(tasks)]
    return [tree.result() for tree in growing]


async def grow(run: Path, step: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Fork points of the run's policy after `step` updates, on its training questions."""
    async with frozen(run, step) as policy:
        rng = Random(f"forks {policy.config.run.seed}")
        tasks = rng.sample(policy.tasks, options.questions)
        trees = await grown(policy.actor, ProbePlan(options.siblings), tasks)
    origin = {"run": str(run), "step": step, "vocab_size": vocab_size(policy.model)}
    return [row | origin for tree in trees for row in fork_points(tree)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, help="rows of all fork points")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 3, 6, 12])
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--siblings", type=int, default=8)
    options = parser.parse_args(argv)
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    known = {(row["run"], row["step"]) for row in rows}
    for run in options.runs:
        for step in options.steps:
            if (str(run), step) in known:
                continue
            rows += asyncio.run(grow(run, step, options))
            options.out.write_text(json.dumps(rows) + "\n", encoding="utf-8")
            print(f"{run} step {step}: {len(rows)} fork points so far", flush=True)
    if not options.runs:
        from benchmarks.experiments.signals import show

        show(rows)


if __name__ == "__main__":
    main()
