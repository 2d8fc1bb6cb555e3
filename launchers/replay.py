"""Computes again what a run computed from the trees that it kept: `agentenv replay RUN`.

RUN is the folder of a run, finished or not; its engine, environments and learner are not needed.
Of each step it computes again how every tree grew (the plan's roots and forks, limits, what
replaced a failure), the credit of every node, and the loss from the log-probs that the learner
found; of finished trees that no step took, which are in the journal, how they grew. Only where no
step is there the config.json of the model is needed. What comes out otherwise is named: step, tree,
node, what, recorded and computed. One process and one thread, on a clock that jumps, so that a
debugger may stop it anywhere:

    python -m pdb -c "b learners/arpo.py:154" -c c launchers/replay.py RUN --step 3 --tree 17
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from agentenv.archive import (
    ARCHIVE,
    Credit,
    Entry,
    KeptTree,
    Step,
    read_step,
    readable_steps,
    steps_of,
)
from agentenv.config import apply_overrides, build_config, resolver, upgrade
from agentenv.errors import ConfigError, DataError
from agentenv.frames import finished_trees
from agentenv.learners.algorithm import Algorithm
from agentenv.learners.batch import ActionTokens, encoded_nodes
from agentenv.learners.credit import CreditedTree, TreeCredit
from agentenv.learners.deepspeed_learner import encode_groups, in_order
from agentenv.learners.partition import minibatches
from agentenv.model_files import vocab_size
from agentenv.offload import run_virtual
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.run.arguments import EXIT_FAILED, Parser
from agentenv.pipelines.run.checkpoints import find_checkpoint
from agentenv.pipelines.run.rundir import CONFIG_FILE, JOURNAL
from agentenv.pipelines.run.terminal import View, to_its_end
from agentenv.pipelines.setup.assembly import TRAINING, actor_seed
from agentenv.plan import RolloutPlan
from agentenv.replay import Difference, cannot_grow_again, differences
from agentenv.tree import TrajectoryTree

TOLERANCE = {"rel_tol": 1e-4, "abs_tol": 1e-6}  # of a loss, which float32 sums in another order

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 all is equal, 1 something differs, 2 bad input, 130 interrupted."""
    arguments = _parse(argv)
    view = View()
    return to_its_end(lambda: replay(arguments, view), view, writing=str(arguments.run))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="agentenv replay",
        description="Compute again what a run computed, from the trees that it kept in RUN/trees: "
        "how they grew, their credit, the loss. Names what comes out otherwise, and ends with 1.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, finished or not")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.sub=value",
        help="keys that the run was resumed with, where they are others than at its start",
    )
    parser.add_argument("--step", type=int, metavar="N", help="only this step, counted from 1")
    parser.add_argument(
        "--tree", type=int, metavar="I", help="only the tree of this place in start order"
    )
    return parser.parse_intermixed_args(argv)


def replay(arguments: argparse.Namespace, view: View) -> int:
    """All that was asked for; the exit code."""
    config = config_of(arguments.run, arguments.overrides)
    if arguments.step is None:
        there = readable_steps(arguments.run / ARCHIVE, view.say)
    else:
        there = [asked_for(arguments.run, arguments.step, arguments.tree)]
    steps = [step for step in there if arguments.tree in (None, *_taken(step))]
    num_trees = num_different = 0
    view.begin("replay", len(steps))
    for number, step in enumerate(steps):
        view.advance(number, "steps")
        entries = [e for e in step.entries if arguments.tree in (None, e.tree)]
        found, notes = Replay(step, config).compare(entries, with_loss=arguments.tree is None)
        _tell(view, f"step {step.header.step}", found, notes)
        num_trees += len(entries)
        num_different += len(found)
    view.end()
    if arguments.step is None:
        count, found, notes = untaken(arguments.run, config, there, arguments.tree)
        _tell(view, "journal", found, notes)
        num_trees += count
        num_different += len(found)
    what = f"{len(steps)} step{'s' * (len(steps) != 1)}, {num_trees} tree{'s' * (num_trees != 1)}"
    if num_different:
        view.fail(f"{what}: {num_different} differences")
        return EXIT_FAILED
    view.say(f"{what}: all that was computed again is equal")
    return 0


def _tell(view: View, place: str, found: Sequence[str], notes: Sequence[str]) -> None:
    for line in (*notes, *found):
        view.say(f"{place}, {line}")


def config_of(run: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """That of a run. Raises ConfigError if the folder is none of agentenv train."""
    path = run / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{run}: not the folder of a run: {CONFIG_FILE} is missing")
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if "algorithm" not in raw:
        raise ConfigError(f"{run}: not a run of agentenv train: {path} names no algorithm")
    apply_overrides(upgrade(TrainConfig, raw), overrides, TrainConfig)
    return build_config(TrainConfig, raw, str(path))


def asked_for(run: Path, number: int, tree: int | None) -> Step:
    """One step. Raises DataError if it is not there, or `tree` not in it."""
    folder = run / ARCHIVE
    paths = steps_of(folder)
    if number not in paths:
        there = f"there are the steps {min(paths)} to {max(paths)}" if paths else "there is none"
        raise DataError(f"{folder}: step {number} is not there; {there}")
    step = read_step(paths[number])
    if tree is not None and tree not in (taken := _taken(step)):
        raise DataError(f"{step.path}: tree {tree} is not there; step {number} took {taken}")
    return step


def _taken(step: Step) -> list[int]:
    return [entry.tree for entry in step.entries]


def untaken(
    run: Path, config: TrainConfig, steps: Sequence[Step], tree: int | None
) -> tuple[int, list[str], list[str]]:
    """How many finished trees none of the steps took, as the journal has them; their differences,
    and what could not be compared. Raises DataError if there is nothing at all, or if `tree`, which
    is asked for, is nowhere."""
    from agentenv.pipelines.rl.training import rollout_settings

    taken = {one for step in steps for one in _taken(step)}
    last = max(taken, default=-1)
    work: Regrowing | None = None
    count, found, notes = 0, list[str](), list[str]()
    for one in finished_trees(run / JOURNAL, rollout_settings(config)):
        if one.index > last and tree in (None, one.index):
            if work is None:
                num_words = steps[-1].header.vocab_size if steps else vocab_of(run, config)
                work = Regrowing(config, num_words)
            count += 1
            work.grow(KeptTree(one, "trained"), found, notes)
    if not steps and not count:
        raise DataError(
            f"{run / ARCHIVE} holds no step: none was done yet, or archive.max_gb = 0 keeps none; "
            f"and {run / JOURNAL} holds no finished tree that was begun under this configuration"
        )
    if tree is not None and tree not in taken and not count:
        raise DataError(
            f"{run}: tree {tree} is not there; steps took those from {min(taken, default=0)} to "
            f"{last}"
        )
    return count, found, notes


def vocab_of(run: Path, config: TrainConfig) -> int:
    """What plans are made with, by the model that the run began with. Raises DataError."""
    return vocab_size(find_checkpoint(resolver(run)(config.model.path)))


class Regrowing:
    """Grows the trees of a run again."""

    def __init__(self, config: TrainConfig, vocab_size: int) -> None:
        self.seed = actor_seed(config, config.sampling.train, TRAINING)
        self.plan: RolloutPlan = config.algorithm.plan(vocab_size)
        self.limits = config.limits

    def grow(self, kept: KeptTree, found: list[str], notes: list[str]) -> None:
        """Adds what differs, or why nothing can be said."""
        place = f"tree {kept.tree.index}"
        if reason := cannot_grow_again(kept.tree):
            notes.append(f"{place} cannot be grown again: {reason}")
            return
        work = differences(kept.tree, self.plan, self.limits, self.seed, kept.told)
        found += [f"{place}, {one}" for one in run_virtual(work)]


class Replay:
    """One step, computed again."""

    def __init__(self, step: Step, config: TrainConfig) -> None:
        """Raises ConfigError if the step was made under another configuration."""
        from agentenv.pipelines.rl.training import rollout_settings

        if (settings := rollout_settings(config)) != step.header.settings:
            raise ConfigError(
                f"{step.path}: was made under another configuration ({step.header.settings}) than "
                f"that of {CONFIG_FILE} ({settings}); give the keys that the run was resumed with"
            )
        self.step = step
        self.config = config
        self.algorithm: Algorithm = config.algorithm
        self.regrowing = Regrowing(config, step.header.vocab_size)

    def compare(
        self, entries: Sequence[Entry], *, with_loss: bool = True
    ) -> tuple[list[str], list[str]]:
        """Differences, and what could not be compared."""
        from agentenv.pipelines.rl.batching import credits_of_update

        found: list[str] = []
        notes: list[str] = []
        if not self.step.is_whole:
            there, all_of = len(self.step.entries), self.step.header.num_trees
            notes.append(f"is cut off: {there} of its {all_of} trees are there")
        wanted = {entry.tree for entry in entries}
        over_update = type(self.algorithm).over_update is not Algorithm.over_update
        groups: list[KeptTree] = []
        for entry in self.step.entries if with_loss or over_update else entries:
            kept = self.step.tree(entry)
            groups.append(kept)
            if entry.tree in wanted:
                self.regrowing.grow(kept, found, notes)
        credits = credits_of_update(
            self.algorithm,
            [kept.tree for kept in groups],
            [self.algorithm.credit(kept.tree) for kept in groups],
            [kept.fate == "trained" for kept in groups],
        )
        for kept, credit in zip(groups, credits, strict=True):
            if kept.tree.index in wanted:
                lines = credit_differences(kept, credit)
                found += [f"tree {kept.tree.index}, {one}" for one in lines]
        if with_loss:
            trained = [
                (kept.tree, credit)
                for kept, credit in zip(groups, credits, strict=True)
                if credit is not None and kept.fate == "trained"
            ]
            if reason := self._without_loss(trained):
                notes.append(f"its loss is not computed again: {reason}")
            elif trained:
                found += self._loss_differences(trained)
        return found, notes

    def _without_loss(self, trained: Sequence[CreditedTree]) -> str:
        if not self.step.is_whole:
            return "trees are missing"
        if self.config.learner.num_epochs_per_batch > 1:
            return "log-probs are kept of the first of learner.num_epochs_per_batch only"
        if self.algorithm.needs_reference or self.algorithm.entropy_bonus:
            return "figures of a KL or of the entropy bonus are not kept"
        if any(not tree.scored for tree, _ in trained):
            return "the learner told no log-probs"
        if self.step.header.metrics.get("learner/num_skipped"):
            return "an optimizer step was skipped"
        return ""

    def _loss_differences(self, trained: Sequence[CreditedTree]) -> Iterator[str]:
        metrics = self.step.header.metrics
        recorded, count = metrics["learner/loss"], int(metrics["learner/num_steps"])
        losses = [self.loss(groups) for groups in minibatches(trained, count)]
        computed = sum(losses) / count
        if not math.isclose(recorded, computed, **TOLERANCE):
            yield f"loss: recorded {recorded:.7g}, computed {computed:.7g}"

    def loss(self, groups: Sequence[CreditedTree]) -> float:
        """Of a mini-batch, from the log-probs that the learner found."""
        import torch

        from agentenv.learners.minibatch import prepare

        groups = in_order(groups)
        version, config = self.step.header.policy_version, self.config.learner
        encoded = encode_groups(groups, version, config, self.algorithm)
        tokens = ActionTokens.of(encoded)
        proximal, logprobs, entropies = (
            np.concatenate([figures_of(group, name) for group in groups])
            for name in ("proximal", "logprobs", "entropies")
        )
        is_measured = ~np.isnan(proximal)
        proximal = np.where(is_measured, proximal, tokens.behaviour)
        entropies = np.where(np.isnan(entropies), tokens.entropies, entropies)
        batch = prepare(
            encoded, tokens, proximal, entropies, None, self.algorithm, _alone, is_measured
        )
        index, terms = np.arange(batch.num_computed), None
        if self.algorithm.clips_sequences:
            first = np.where(np.isnan(logprobs), proximal, logprobs)
            terms = batch.terms(self.algorithm, first, _alone)
        current = torch.from_numpy(logprobs[index]).float()
        given = batch.loss_batch(index, current, terms)
        known = torch.from_numpy(np.nan_to_num(entropies[index])).float()
        return float(self.algorithm.loss(given, current, known)[0])


def _alone(value: T) -> list[T]:
    return [value]


def figures_of(group: CreditedTree, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What the learner found of the trained tokens of a tree, in their order, nan where nothing."""
    tree, credit = group
    parts = [np.zeros(0)]
    for node in encoded_nodes(tree, credit):
        values = getattr(tree.scored[node.index], name)
        empty = np.full(len(node.action_ids), np.nan)
        parts.append(np.asarray(values, np.float64) if len(values) else empty)
    return np.concatenate(parts)


def credit_differences(kept: KeptTree, credit: TreeCredit | None) -> Iterator[str]:
    """Where credit was recorded otherwise."""
    tree: TrajectoryTree = kept.tree
    if (kept.credit is None) != (credit is None):
        there = ("none" if one is None else "there" for one in (kept.credit, credit))
        yield "credit: recorded {}, computed {}".format(*there)
        return
    if kept.credit is None or credit is None:
        return
    for name in Credit.__struct_fields__:
        before, now = np.asarray(getattr(kept.credit, name)), getattr(credit, name)
        for index in np.flatnonzero(~((before == now) | (np.isnan(before) & np.isnan(now)))):
            yield str(
                Difference(int(index), tree.nodes[index].branch, name, before[index], now[index])
            )


if __name__ == "__main__":
    sys.exit(main())
