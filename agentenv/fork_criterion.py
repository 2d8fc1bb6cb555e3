"""When is the policy uncertain after a tool result? Three answers, as pure functions of the tree.

Entropies are means over the first `window` tokens of a turn, divided by ln V, in [0, 1].

    rise      dH = H(after the tool result) - H(first turn of the root)
    paper     P = alpha + beta * dH                                (ARPO, arXiv 2507.19849, 3.1)
    zscore    P = alpha + beta * clip((dH - m) / s, -3, 3)
    relative  P = alpha + beta * (H after - H first) / (H after + H first)

With the paper's beta of 0.2 "paper" is a coin toss: on the quick start one standard deviation of
dH moves P = 0.5 by 0.001 to 0.003. The other two have a scale of their own, also when entropies
fall during training. "zscore" measures a rise against the rises seen before on the same tree: m
is their mean and s their spread, drawn towards `rise_scale` as if PRIOR_COUNT such rises had been
seen; before any was seen P = alpha. "relative" needs no others and lies within +-1.
Nothing is kept outside the tree, so decisions depend on nothing else.

Whether a rise says anything about what a fork is worth depends on the window: it has to reach the
tokens in which the turn is decided, and those behind a fixed phrase at its start are not among
the first few. docs/experiments.md has the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from agentenv.tree import TrajectoryTree

Criterion = Literal["paper", "zscore", "relative"]

PRIOR_COUNT = 2.0
MAX_SCORE = 3.0


def window_entropy(entropies: Sequence[float], window: int, vocab_size: int) -> float:
    """Mean over the first `window` tokens (nats), divided by ln V; 0 for an empty turn."""
    first = entropies[:window]
    return fmean(first) / math.log(vocab_size) if first else 0.0


def seen_rises(tree: TrajectoryTree, window: int, vocab_size: int) -> list[float]:
    """Rises at the fork points of the tree whose next turn has ended, in order of the turns.

    One per fork point, from the first turn that followed it, over the first turn of its root.
    """
    rises, seen = [], set()
    bases = [0.0]  # by node: entropy of the first turn of its root, which forks inherit
    for node in tree.nodes[1:]:
        above = tree.nodes[node.parent or 0]
        first_turn = above.parent is None
        asked = above.num_forks is not None and above.index not in seen and bool(node.entropies)
        entropy = 0.0
        if first_turn or asked:
            entropy = window_entropy(node.entropies, window, vocab_size)
        bases.append(entropy if first_turn else bases[above.index])
        if asked:
            seen.add(above.index)
            rises.append(entropy - bases[above.index])
    return rises


def rise_score(rise: float, seen: Sequence[float], rise_scale: float) -> float:
    """(rise - m) / s, within +-3; 0 before any rise was seen.

    m = mean(seen), s^2 = (2 rise_scale^2 + sum (r - m)^2) / (n + 2).
    """
    if not seen:
        return 0.0
    mean = fmean(seen)
    squares = math.fsum((value - mean) ** 2 for value in seen)
    scale = math.sqrt((PRIOR_COUNT * rise_scale**2 + squares) / (len(seen) + PRIOR_COUNT))
    return min(MAX_SCORE, max(-MAX_SCORE, (rise - mean) / scale))


def relative_rise(after: float, before: float) -> float:
    """(after - before) / (after + before) of two entropies, in [-1, 1]; 0 if both are 0."""
    total = after + before
    return (after - before) / total if total > 0 else 0.0
