"""Signs of lost turns in the stored trees of a run: `agentenv doctor signs RUN`.

A turn is lost if nothing below it succeeds. A sign is a number that can be read off a turn without
its outcome; its AUC is the chance that it is larger at a lost turn than at another one of the same
kind of task and depth (ties count half): 0.5 says nothing, 1 separates all. Intervals (95 %) are
bootstrapped over trees, since turns of a tree depend on one another.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from agentenv.assembly.run.exits import exit_code_of
from agentenv.assembly.run.tables import Table
from agentenv.assembly.run.terminal import View
from agentenv.base.errors import DataError
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.evaluation.store import load_run_config
from agentenv.lab.diagnosis.audit import spread
from agentenv.rollout.archive import ARCHIVE
from agentenv.rollout.archive_reader import readable_steps
from agentenv.rollout.metrics import MeanCurve
from agentenv.rollout.unlearned import surprise_by_depth, unlearned_lines

logger = logging.getLogger(__name__)

WINDOW = 20  # first tokens of a turn, of its entropy
NUM_DRAWS = 200  # of trees, for an interval
Sign = Literal["surprise", "lowest", "entropy", "error", "repeat", "length"]
Floats = NDArray[np.float64]


def surprise(tree: TrajectoryTree, node: Node) -> float:
    """Minus the mean log-prob of the action's tokens, nats."""
    return fmean([-one for one in node.logprobs if one == one] or [0.0])


def lowest(tree: TrajectoryTree, node: Node) -> float:
    """Minus the lowest log-prob of the action's tokens, nats."""
    return max((-one for one in node.logprobs if one == one), default=0.0)


def entropy(tree: TrajectoryTree, node: Node) -> float:
    """The mean entropy of the first WINDOW tokens, nats."""
    return fmean([one for one in node.entropies[:WINDOW] if one == one] or [0.0])


def error(tree: TrajectoryTree, node: Node) -> float:
    """1 if a call of the turn failed."""
    return float(any(not call.get("ok", True) for call in node.info.get("tool_calls", ())))


def repeat(tree: TrajectoryTree, node: Node) -> float:
    """1 if the path has the turn's action, or its result, before."""
    result = node.observation_ids
    return float(
        any(
            one.action_ids == node.action_ids or (result and one.observation_ids == result)
            for one in tree.path(node)[:-1]
            if one.action_ids
        )
    )


def length(tree: TrajectoryTree, node: Node) -> float:
    """Tokens of the action."""
    return float(len(node.action_ids))


SIGNS: Mapping[str, Callable[[TrajectoryTree, Node], float]] = {
    one.__name__: one for one in (surprise, lowest, entropy, error, repeat, length)
}
# and a forecast: the failed share of the tree's trajectories that do not contain the turn
NAMES = (*SIGNS, "others")


class SignedTurn(NamedTuple):
    """A turn: its tree, kind of task, stratum of comparison, whether it is lost, its signs."""

    tree: int
    kind: str
    stratum: str
    is_lost: bool
    signs: tuple[float, ...]


def turns(trees: Iterable[TrajectoryTree]) -> Iterator[SignedTurn]:
    """Of all paths that ended."""
    for number, tree in enumerate(trees):
        found: dict[int, tuple[int, Node]] = {}  # by index: depth, node
        below, won = Counter[int](), Counter[int]()  # trajectories below it, successful ones
        paths = [*tree.trajectories()]
        num_won = sum(path.success for path in paths)
        for path in paths:
            for depth, node in enumerate(path.turns):
                found[node.index] = depth, node
                below[node.index] += 1
                won[node.index] += path.success
        for index, (depth, node) in found.items():
            if node.action_ids:
                rest = len(paths) - below[index]
                others = 1 - (num_won - won[index]) / rest if rest else 0.5
                kind = tree.task.kind
                values = (*(sign(tree, node) for sign in SIGNS.values()), others)
                yield SignedTurn(number, kind, f"{kind} {depth}", not won[index], values)


# Figures.


def auc(signal: Floats, positive: Floats) -> float:
    """The chance that a positive case has the higher signal, ties half; nan without one of the
    classes."""
    above, below = signal[positive > 0], signal[positive == 0]
    if not len(above) or not len(below):
        return math.nan
    ranks, least = rankdata(np.concatenate([above, below])), len(above) * (len(above) + 1) / 2
    return float(ranks[: len(above)].sum() - least) / len(above) / len(below)


def auc_within(signal: Floats, positive: Floats, strata: NDArray[np.int64]) -> float:
    """AUC over the pairs within a stratum; nan if there are no pairs."""
    total = pairs = 0.0
    for stratum in np.unique(strata):
        mine = strata == stratum
        if num := positive[mine].sum() * (1.0 - positive[mine]).sum():
            total += num * auc(signal[mine], positive[mine])
            pairs += num
    return total / pairs if pairs else math.nan


def interval(
    groups: Iterable[object],
    figure: Callable[[NDArray[np.int64]], float],
    num_draws: int = NUM_DRAWS,
) -> tuple[float, float]:
    """95 % interval of a figure of indices of cases, by bootstrap over their groups; nan if all
    draws agree, as with very few groups."""
    members: dict[object, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    own, rng, found = [*map(np.array, members.values())], np.random.default_rng(0), []
    for _ in range(num_draws):
        drawn = rng.integers(len(own), size=len(own))
        found.append(figure(np.concatenate([own[index] for index in drawn])))
    known = [value for value in found if not math.isnan(value)]
    if not known or min(known) == max(known):
        return math.nan, math.nan
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)


Auc = tuple[float | None, float | None, float | None]  # and its interval


class SignFigures(msgspec.Struct, frozen=True):
    """Of the turns of a kind of task; `auc`: by sign, with its interval, None where all turns have
    one outcome."""

    kind: str
    turns: int
    lost: float
    auc: dict[str, Auc]


def figures(kind: str, found: Sequence[SignedTurn]) -> SignFigures:
    values = np.array([one.signs for one in found], float)
    lost = np.array([one.is_lost for one in found], float)
    strata = np.unique([one.stratum for one in found], return_inverse=True)[1]
    trees, by_sign = [one.tree for one in found], dict[str, Auc]()
    for number, sign in enumerate(NAMES):

        def of_drawn(drawn: NDArray[np.int64], own: Floats = values[:, number]) -> float:
            return auc_within(own[drawn], lost[drawn], strata[drawn])

        every = of_drawn(np.arange(len(found))), *interval(trees, of_drawn)
        value, low, high = (None if math.isnan(one) else float(one) for one in every)
        by_sign[sign] = value, low, high
    return SignFigures(kind, len(found), float(lost.mean()), by_sign)


# The command.


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad arguments."""
    parser = argparse.ArgumentParser(
        prog="agentenv doctor signs",
        description="Measure how well cheap signs of a turn separate turns below which nothing "
        "succeeds from others of their depth, in the trees of a run.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, with trees/")
    parser.add_argument("--first", type=int, default=0, metavar="STEP", help="first update")
    parser.add_argument("--last", type=int, default=1 << 30, metavar="STEP", help="last update")
    parser.add_argument(
        "--max-trees", type=int, default=2000, metavar="N", help="trees to read (default: 2000)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args(argv)
    if arguments.max_trees < 1:
        parser.error("--max-trees must be at least 1")
    return exit_code_of(lambda view: _run(arguments, view), "the signs")


def _run(arguments: argparse.Namespace, view: View) -> int:
    load_run_config(arguments.run)  # so that another folder is named as such
    steps = [
        step
        for step in readable_steps(arguments.run / ARCHIVE, logger.warning)
        if arguments.first <= step.header.step <= arguments.last
    ]
    depths = MeanCurve()

    def trees() -> Iterator[TrajectoryTree]:
        nonlocal depths
        for step, entry in spread(steps, arguments.max_trees):
            yield (tree := step.tree(entry).tree)
            depths = depths.merged(surprise_by_depth([tree]))

    found = [*turns(trees())]
    if not found:
        raise DataError(
            f"{arguments.run / ARCHIVE} contains no turns of updates {arguments.first} to "
            f"{arguments.last}; archive.max_gb = 0 keeps no trees"
        )
    kinds = sorted({one.kind for one in found})
    every = [figures(kind, [one for one in found if one.kind == kind]) for kind in kinds]
    if len(kinds) > 1:
        every.insert(0, figures("all", found))
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(every)).decode() + "\n")
    else:
        view.show(table(every))
        for line in unlearned_lines(depths):
            view.log(line)
    return 0


def table(every: Sequence[SignFigures]) -> Table:
    """AUC by kind of task and sign."""
    rows = list[list[str]]()
    for one in every:
        heads = [one.kind, f"{one.turns:,}", f"{one.lost:.2f}"]
        for sign, (value, low, high) in one.auc.items():
            known = "-" if value is None else f"{value:.2f}"
            rows.append([*heads, sign, known, "" if low is None else f"{low:.2f} to {high:.2f}"])
            heads = ["", "", ""]
    return Table(
        title="Signs of lost turns, within kind of task and depth",
        columns=["kind", "turns", "lost", "sign", "AUC", "95 %"],
        rows=rows,
        sections=[place for place in range(0, len(rows), len(NAMES)) if place],
        left=[0, 3],
    )
