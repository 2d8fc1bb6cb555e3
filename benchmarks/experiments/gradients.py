"""The signal of a gradient per tool call: plans and credits of the study on frozen policies.

    python benchmarks/experiments/gradients.py --out FOLDER [--tasks mend chain] [--seeds 900]
        [--steps 0 5 10] [--arms grpo-8 ...] [--trees 300] [--groups 500] [--report-only]

Trains, for each task and seed, GRPO with groups of 4 at four times the quick start's rate, as
study.py does, but to its last update; then measures, for its policy after each of `steps` updates,
the gradients of `trees` trees of each arm, one of a question: their parts in the loss of the
learner, if they were one mini-batch. The true gradient is that of the mean return, from `groups`
other groups of 8 without forks, whose advantages are r - mean. With u its direction, and g the
gradient of a tree:

    signal    (mean of g u)^2 / variance of g u / calls of a tree, to that of the first arm
    first     the same of first turns alone, for g and for the true gradient
    cosine    of the mean of g with u: below 1 by bias
    update    the cosine of u with the sum of g over UPDATE trees: by bias and noise

Gradients are kept as projections on DIRECTIONS fixed random directions (with n, cosines have errors
of n ** -0.5); noise is subtracted from the squares of means. Intervals (95 %) are jackknifed over
BLOCKS blocks of trees. Each arm is kept in a file, FOLDER/gradients/TASK-SEED-STEP/ARM.npz, and
not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.config import build_config
from agentenv.base.errors import DataError
from agentenv.base.model_files import load_pretrained, vocab_size
from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.algorithms.credit import TreeCredit
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.backend import RankBackend
from agentenv.learners.trees.encoded_tree import ActionTokens, encode
from agentenv.learners.trees.minibatch import MiniBatch
from agentenv.learners.trees.partition import pack
from agentenv.learners.trees.policy import Policy
from benchmarks.experiments.algorithms import configuration, seeds_of
from benchmarks.experiments.forks import frozen, grown
from benchmarks.experiments.runs import START, start_config, train
from benchmarks.experiments.study import Cell, Study, start_of

ARMS = ["grpo-8", "grpo-4", "uniform-turnwise-4", "spread-turnwise-4"]
ARMS += ["gigpo-4", "tree_grpo", "arpo"]
TRUE = "truth"
TRUTH = GRPO(group_size=8, normalize_by_std=False)
RATE, EVERY = 4.0, 5  # of the runs: the rate of the study, updates between checkpoints
DIRECTIONS, BLOCKS, UPDATE, SLOTS = 4096, 20, 4, 24
Floats = NDArray[np.float64]
Measured = dict[str, dict[str, NDArray[Any]]]  # by name: its `measure`


def policy(study: Study, task: str, seed: int) -> Path:
    """The run whose checkpoints are the policies, trained unless it is there."""
    cell, raw = Cell(task, "grpo-4", RATE, seed), configuration(task)
    begun, folder = study.out / start_of(cell), study.out / task / f"seed-{seed}"
    config = study.config(cell, raw, (begun / START).resolve())
    del config["train"]["stop_at"]
    config["checkpoint"] = {"every": EVERY, "keep_last": 9}
    if not train(begun, START, start_config(raw, seed, study.plan["questions"])):
        raise DataError(f"the cold start failed: {begun / START}.log")
    if not train(folder, "policy", config):
        raise DataError(f"the run failed: {folder / 'policy'}.log")
    return folder / "policy"


def algorithm_of(study: Study, cell: Cell) -> Algorithm:
    config = study.config(cell, configuration(cell.task), study.out)
    return build_config(TrainConfig, config, cell.arm).algorithm


class Gradients:
    """Of trees, at the weights of a model."""

    def __init__(self, model: Path) -> None:
        weights = load_pretrained(
            "AutoModelForCausalLM", model, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.backend = RankBackend(Policy(weights.eval()), LearnerConfig(zero_stage=0))
        self.parameters = [one for one in weights.parameters() if one.requires_grad]
        torch.set_num_threads(1)  # several wait for each other at low priority
        rng, size = np.random.default_rng(0), sum(one.numel() for one in self.parameters)
        self.places = rng.integers(DIRECTIONS, size=size)
        self.signs = rng.choice([-1.0, 1.0], size)

    def of(self, tree: TrajectoryTree, credit: TreeCredit, algorithm: Algorithm) -> Floats:
        """The tree's part of the gradient of a mini-batch, times its denominator: [directions]."""
        if not credit.has_signal:
            return np.zeros(DIRECTIONS)
        trees = [encode(tree, credit, tree.policy_version)]
        tokens, gather = ActionTokens(trees), self.backend.gather_replicas
        fixed = (tokens.behavior, tokens.entropies, None)
        batch = MiniBatch(trees, tokens, *fixed, algorithm, gather)
        for part in pack(trees, self.backend.config.replica_tokens, "segments"):
            logprobs, entropies, _ = self.backend.forward(part)
            given = batch.loss_batch(part.index, logprobs, None)
            self.backend.backward(algorithm.loss(given, logprobs, entropies)[0])
        flat = torch.cat([one.grad.ravel() for one in self.parameters if one.grad is not None])
        self.backend.skip()
        found = np.bincount(self.places, self.signs * flat.numpy(), DIRECTIONS)
        return np.asarray(found * -batch.denominator, np.float64)

    def parts(self, trees: Sequence[TrajectoryTree], algorithm: Algorithm) -> NDArray[np.float32]:
        """Of all turns, and of the first ones: [2, trees, directions]. 0 for a tree with too few
        counted leaves."""
        found = np.zeros((2, len(trees), DIRECTIONS), np.float32)
        for number, tree in enumerate(trees):
            if (credit := algorithm.credit(tree)) is not None:
                found[0, number] = self.of(tree, credit, algorithm)
                found[1, number] = self.of(tree, of_first_turns(tree, credit), algorithm)
        return found


def of_first_turns(tree: TrajectoryTree, credit: TreeCredit) -> TreeCredit:
    """The credit without later turns."""
    own = np.array([node.parent in (None, tree.root.index) for node in tree.nodes])
    pos, neg, weight = (one * own for one in (credit.adv_pos, credit.adv_neg, credit.weight))
    return dataclasses.replace(credit, adv_pos=pos, adv_neg=neg, weight=weight)


def num_calls(tree: TrajectoryTree) -> int:
    """Those of a shared prefix count once."""
    return sum(len(node.info.get("tool_calls", ())) for node in tree.nodes)


async def measure(
    run: Path, step: int, algorithm: Algorithm, count: int, first: int
) -> dict[str, NDArray[Any]]:
    """`parts` of `count` trees, and the `calls` of each. Trees of a place have equal seeds."""
    async with frozen(run, step) as policy:
        rng = Random(f"gradients {policy.config.run.seed}")
        questions = cycle(rng.sample(policy.tasks, len(policy.tasks)))
        tasks = list(islice(questions, first, first + count))
        plan = algorithm.plan(vocab_size(policy.model))
        trees = await grown(policy.actor, plan, tasks, first, SLOTS)
        parts = Gradients(policy.model).parts(trees, algorithm)
    return {"parts": parts, "calls": np.array([num_calls(tree) for tree in trees])}


def square(parts: Floats) -> float:
    """|mean|^2 of [trees, directions] without the noise's part: over pairs of different trees."""
    num, total = len(parts), parts.sum(0)
    return float((total @ total - (parts * parts).sum()) / (num * (num - 1)))


def signal(parts: Floats, calls: Floats, truth: Floats) -> float:
    """Per call, along `truth` [directions]; nan if noise hides the mean."""
    along = parts @ truth / np.linalg.norm(truth)
    variance = float(along.var(ddof=1))
    if not variance:
        return math.nan
    found = (float(along.mean()) ** 2 - variance / len(along)) / variance / float(calls.mean())
    return found if found > 0 else math.nan


def cosine(parts: Floats, truths: Floats, num: float = math.inf) -> float:
    """Of the mean over `num` trees with the mean of `truths`, both [trees, directions]."""
    mean = square(parts)
    noise = (float((parts * parts).sum(1).mean()) - mean) / num
    product = float(parts.mean(0) @ truths.mean(0))
    squares = (mean + noise) * square(truths)
    return product / math.sqrt(squares) if squares > 0 else math.nan


def interval(figure: Callable[[int], float]) -> tuple[float, float]:
    """The value of a figure, which is computed with all trees (-1) or without those of one of
    `BLOCKS` blocks, and the half-width of its 95 % interval."""
    without = np.array([figure(block) for block in range(BLOCKS)])
    spread = (BLOCKS - 1) / BLOCKS * ((without - without.mean()) ** 2).sum()
    return figure(-1), 1.96 * math.sqrt(spread)


def kept(values: NDArray[Any], block: int) -> Floats:
    """Without each tree of the block."""
    return np.asarray(values[np.arange(len(values)) % BLOCKS != block], np.float64)


def figures(found: Measured, arm: str, base: str) -> dict[str, tuple[float, float]]:
    """Each figure of an arm with the half-width of its interval."""

    def ratio(part: int, block: int) -> float:
        truth = kept(found[TRUE]["parts"][part], block).mean(0)
        own, other = (
            signal(kept(one["parts"][part], block), kept(one["calls"], block), truth)
            for one in (found[arm], found[base])
        )
        return own / other

    def angle(num: float, block: int) -> float:
        own, true = (kept(found[name]["parts"][0], block) for name in (arm, TRUE))
        return cosine(own, true, num)

    return {
        "signal": interval(partial(ratio, 0)),
        "first": interval(partial(ratio, 1)),
        "cosine": interval(partial(angle, math.inf)),
        "update": interval(partial(angle, UPDATE)),
    }


def report(folder: Path, arms: Sequence[str]) -> None:
    """Print the table of a policy, as far as its arms are measured."""
    found: Measured = {}
    for name in (TRUE, *arms):
        if (file := folder / f"{name}.npz").is_file():
            with np.load(file) as stored:
                found[name] = dict(stored)
    if not {TRUE, arms[0]} <= found.keys():
        return
    truths = found[TRUE]["parts"][0].astype(np.float64)
    share = square(truths) / float(np.square(truths.mean(0)).sum())
    print(
        f"\n{folder.name}, {len(truths)} groups for the true gradient ({share:.0%} of its square)"
    )
    print("\narm | calls | equal | signal | first | cosine | update\n" + " | ".join(["---"] * 7))
    for arm in list(found)[1:]:
        equal = (~found[arm]["parts"].any((0, 2))).mean()
        cells = [f"{one:.2f} ± {half:.2f}" for one, half in figures(found, arm, arms[0]).values()]
        print(" | ".join([arm, f"{found[arm]['calls'].mean():.1f}", f"{equal:.2f}", *cells]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=("mend", "chain"), default=["mend", "chain"])
    parser.add_argument("--seeds", type=seeds_of, default=[900])
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 5, 10])
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--trees", type=int, default=300)
    parser.add_argument("--groups", type=int, default=500)
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    study = Study(options.out)
    for seed, task, step in product(options.seeds, options.tasks, options.steps):
        folder = options.out / "gradients" / f"{task}-{seed}-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        for name in () if options.report_only else (TRUE, *options.arms):
            if not (file := folder / f"{name}.npz").is_file():
                run = policy(study, task, seed)
                if name == TRUE:
                    work = measure(run, step, TRUTH, options.groups, options.trees)
                else:
                    algorithm = algorithm_of(study, Cell(task, name, RATE, seed))
                    work = measure(run, step, algorithm, options.trees, 0)
                found = asyncio.run(work)
                np.savez(folder / "part.npz", **found)  # type: ignore[arg-type]
                (folder / "part.npz").replace(file)
                print(f"{folder.name}, {name}: {time.process_time():.0f} CPU s", flush=True)
        report(folder, options.arms)


if __name__ == "__main__":
    main()
