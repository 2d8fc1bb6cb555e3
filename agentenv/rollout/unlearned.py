"""Where the unlearned turns of a run lie, by their surprise, and the plan that suits them."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from agentenv.base.tree import Node, TrajectoryTree
from agentenv.rollout.metrics import MeanCurve

EVEN = 0.1  # of the mean place of the surprise, from the middle (0: the first turn, 1: the last)
MOST_SHOWN = 8
LONG = 8  # turns of the tasks in which forks of failed groups saved tool calls
FOR_LONG = "GRPO, groups of 4; rescue needed 0.85 [0.74, 0.98] of its tool calls in a study"
FOR_SHORT = "GRPO, groups of 4; no forks were found to save tool calls in trajectories so short"


def surprise(node: Node) -> float:
    """Minus the log-prob of the whole action, nats; tokens that could not be others add nothing."""
    return -sum(one for one in node.logprobs if one == one)


def surprise_by_depth(trees: Iterable[TrajectoryTree]) -> MeanCurve:
    """Means over the turns of each depth, in trees with a failure; a shared turn counts once."""
    found: list[list[float]] = []
    for tree in trees:
        paths = [*tree.trajectories()]
        if all(path.success for path in paths):
            continue
        own = {node.index: (depth, node) for path in paths for depth, node in enumerate(path.turns)}
        for depth, node in own.values():
            found += [[] for _ in range(depth + 1 - len(found))]
            found[depth].append(surprise(node))
    return MeanCurve([fmean(one or [0.0]) for one in found], [len(one) for one in found])


def reached(curve: MeanCurve) -> list[float]:
    """Of the depths that half of the paths reach."""
    counts = curve.count[:1]
    return [m for m, n in zip(curve.mean, curve.count, strict=True) if 2 * n >= max(counts)]


def profile(curve: MeanCurve) -> str:
    """early, late or even: where the surprise lies, over the depths that half of the paths reach;
    empty for paths of one turn."""
    if len(means := reached(curve)) < 2 or not sum(means):
        return ""
    place = sum(depth * mean for depth, mean in enumerate(means)) / sum(means) / (len(means) - 1)
    return "even" if abs(place - 0.5) < EVEN else "early" if place < 0.5 else "late"


def unlearned_lines(curve: MeanCurve) -> list[str]:
    """For terminal and log: the profile, and the plan that suits it; none without a profile."""
    if not (found := profile(curve)):
        return []
    shown = [f"{m:.2f}" for m in curve.mean[:MOST_SHOWN]] + ["..."] * (len(curve.mean) > MOST_SHOWN)
    first = f"unlearned turns: {found}; nats of surprise in trees with a failure, by turn: "
    plan = FOR_LONG if len(reached(curve)) >= LONG else FOR_SHORT
    return [first + ", ".join(shown), f"plan for such turns: {plan} (docs/experiments.md)"]
