"""Signs of a lost turn: numbers that can be read off a turn of a stored tree, and how well each
separates turns below which nothing succeeds from the others.

    python benchmarks/experiments/signs.py RUN [RUN ...] [--first STEP] [--last STEP]

AUC: the chance that a sign is larger at a lost turn than at another one of the same kind of task
and depth (with --siblings: of two turns after one tool result), ties counted half. With --inner the
last turn of a path is left out, whose outcome is its own. Intervals (95 %) are bootstrapped over
trees. Loads no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agentenv.base.tree import Node, TrajectoryTree
from agentenv.rollout.archive import steps_of
from agentenv.rollout.archive_reader import read_step
from benchmarks.experiments.posterior import Profile, Sketch, alive, sketch
from benchmarks.experiments.signals import auc_within, interval
from benchmarks.experiments.tables import markdown

WINDOW = 20  # first tokens of a turn, of its entropy
NUM_DRAWS = 200  # of trees, for an interval
Sign = Literal["surprise", "lowest", "entropy", "error", "repeat", "length"]


def surprise(tree: TrajectoryTree, node: Node) -> float:
    """Minus the mean log-prob of the action's tokens, nats."""
    known = [-one for one in node.logprobs if one == one]
    return fmean(known) if known else 0.0


def lowest(tree: TrajectoryTree, node: Node) -> float:
    """Minus the lowest log-prob of the action's tokens, nats."""
    return max((-one for one in node.logprobs if one == one), default=0.0)


def entropy(tree: TrajectoryTree, node: Node) -> float:
    """The mean entropy of the first WINDOW tokens, nats."""
    known = [one for one in node.entropies[:WINDOW] if one == one]
    return fmean(known) if known else 0.0


def error(tree: TrajectoryTree, node: Node) -> float:
    """1 if a call of the turn failed."""
    return float(any(not call.get("ok", True) for call in node.info.get("tool_calls", ())))


def repeat(tree: TrajectoryTree, node: Node) -> float:
    """1 if the path has the turn's action, or its result, before."""
    before = [one for one in tree.path(node)[:-1] if one.action_ids]
    result = node.observation_ids
    return float(
        any(
            one.action_ids == node.action_ids or (result and one.observation_ids == result)
            for one in before
        )
    )


def length(tree: TrajectoryTree, node: Node) -> float:
    """Tokens of the action."""
    return float(len(node.action_ids))


SIGNS: Mapping[Sign, Callable[[TrajectoryTree, Node], float]] = {
    "surprise": surprise,
    "lowest": lowest,
    "entropy": entropy,
    "error": error,
    "repeat": repeat,
    "length": length,
}


def forecast(tree: TrajectoryTree, node: Node, whole: Sketch) -> float:
    """The chance that the path is lost after the turn, from the outcomes beside it, without those
    below: of the prior profile (posterior.py)."""
    below = {node.index}
    for one in tree.nodes[node.index + 1 :]:
        if one.parent in below:
            below.add(one.index)
    outcomes = [-1 if n in below else one for n, one in enumerate(whole.outcomes)]
    return 1 - alive(whole._replace(outcomes=outcomes), Profile())[node.index]


NAMES = (*SIGNS, "forecast")


class Turn(NamedTuple):
    """A turn: its tree, its stratum of comparison, whether nothing below it succeeds, its signs."""

    tree: int
    stratum: str
    is_lost: bool
    signs: tuple[float, ...]


def turns(
    trees: Iterable[TrajectoryTree],
    success_from: float = 0.5,
    *,
    siblings: bool = False,
    inner: bool = False,
) -> list[Turn]:
    """Of all paths that ended."""
    found = []
    for number, tree in enumerate(trees):
        won = {path.leaf.index: path.reward >= success_from for path in tree.trajectories()}
        below: dict[int, bool] = {}
        whole = sketch(tree, success_from)
        for leaf, right in won.items():
            for node in tree.path(tree.nodes[leaf])[1:]:
                below[node.index] = below.get(node.index, False) or right
        for index, right in below.items():
            node = tree.nodes[index]
            if inner and node.end is not None:
                continue
            depth = f"{tree.task.kind} {len(tree.path(node)) - 1}"
            place = f"{number} {node.parent}" if siblings else depth
            values = [sign(tree, node) for sign in SIGNS.values()]
            values.append(forecast(tree, node, whole))
            found.append(Turn(number, place, not right, tuple(values)))
    return found


def auc(rows: Sequence[Turn], sign: int) -> tuple[float, float, float]:
    """The AUC within strata and its 95 % interval, by bootstrap over trees; nan without pairs."""
    values = np.array([row.signs[sign] for row in rows])
    lost = np.array([row.is_lost for row in rows], float)
    strata = np.unique([row.stratum for row in rows], return_inverse=True)[1]
    named = [{"run": "", "question": str(row.tree)} for row in rows]
    low, high = interval(
        named, lambda drawn: auc_within(values[drawn], lost[drawn], strata[drawn]), NUM_DRAWS
    )
    return auc_within(values, lost, strata), low, high


def table(named: Mapping[str, Sequence[Turn]]) -> str:
    """AUC by sign and by name of a set of turns."""
    rows = []
    for name, found in named.items():
        every = (auc(found, sign) for sign in range(len(NAMES)))
        cells = ["{:.2f} [{:.2f}, {:.2f}]".format(*one) for one in every]
        lost = sum(row.is_lost for row in found)
        rows.append([name, str(len(found)), f"{lost / max(len(found), 1):.2f}", *cells])
    return markdown(["trees", "turns", "lost", *NAMES], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=1 << 30)
    parser.add_argument("--siblings", action="store_true")
    parser.add_argument("--inner", action="store_true")
    options = parser.parse_args(argv)
    found = {}
    for run in options.runs:
        trees = [
            kept.tree
            for step, path in steps_of(run / "trees").items()
            if options.first <= step <= options.last
            for kept in read_step(path).trees()
        ]
        found[run.name] = turns(trees, siblings=options.siblings, inner=options.inner)
    print(table(found))


if __name__ == "__main__":
    main()
