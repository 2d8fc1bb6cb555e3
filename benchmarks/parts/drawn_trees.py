"""Randomly drawn trees, on which the partition of trees over ranks is measured.

A drawn tree has independent trajectories of two to seven turns and forks after turns of
theirs; turns differ in length by up to a factor of three, and whole trees by a log-normal factor,
whose deviation of the logarithm is the spread.
"""

from __future__ import annotations

import math
import operator
from random import Random
from statistics import fmean
from typing import NamedTuple

NARROW, WIDE = 0.25, 0.6  # spreads: of 64 trees the largest is 1.8 or 3 times the mean
NUM_TREES = 64


class Shape(NamedTuple):
    """Tokens of the nodes of a tree in pre-order, and the places of the nodes above them; -1 for
    the root, whose tokens are the prompt."""

    sizes: list[int]
    parents: list[int]


def simulated(
    num_leaves: int,
    num_roots: int,
    spread: float,
    *,
    tree_tokens: float = 0.0,
    path_tokens: float = 0.0,
    longest: float = math.inf,
    count: int = NUM_TREES,
    seed: int = 0,
) -> list[Shape]:
    """`count` trees, on average with so many tokens each, or else a trajectory; no trajectory has
    more than `longest`."""
    rng = Random(seed)
    trees = [_draw(rng, num_leaves, num_roots) for _ in range(count)]
    factors = [rng.lognormvariate(-0.5 * spread**2, spread) for _ in trees]
    drawn = [(tree, _path_lengths(*tree)) for tree in trees]
    average = [sum(sizes) if tree_tokens else fmean(paths) for (sizes, _), paths in drawn]
    scale = (tree_tokens or path_tokens) / fmean(map(operator.mul, average, factors))
    shapes = []
    for ((sizes, parents), paths), factor in zip(drawn, factors, strict=True):
        stretch = min(scale * factor, longest / max(paths))
        shapes.append(Shape([max(1, round(size * stretch)) for size in sizes], parents))
    return shapes


def _draw(rng: Random, num_leaves: int, num_roots: int) -> tuple[list[float], list[int]]:
    """Sizes, in lengths of an average turn, and parents."""
    sizes, children = [1.0], [[]]  # type: tuple[list[float], list[list[int]]]

    def grow(above: int, num_turns: int) -> list[int]:
        for _ in range(num_turns):
            sizes.append(rng.uniform(0.5, 1.5))
            children.append([])
            children[above].append(len(sizes) - 1)
            above = len(sizes) - 1
        return list(range(len(sizes) - num_turns, len(sizes)))

    points: list[tuple[int, int]] = []  # node, turns below it on its trajectory
    for _ in range(num_roots):
        turns = grow(0, rng.randint(2, 7))
        points += [(node, len(turns) - 1 - i) for i, node in enumerate(turns[:-1])]
    for _ in range(num_leaves - num_roots):
        node, left = rng.choice(points)
        grow(node, max(1, left + rng.randint(-1, 1)))
    order, stack = [], [0]
    while stack:
        order.append(stack.pop())
        stack.extend(reversed(children[order[-1]]))
    above = {child: node for node, below in enumerate(children) for child in below}
    place = {node: i for i, node in enumerate(order)}
    parents = [place[above[node]] if node else -1 for node in order]
    return [sizes[node] for node in order], parents


def _path_lengths(sizes: list[float], parents: list[int]) -> list[float]:
    """Of every trajectory."""
    ends: list[float] = []
    for size, parent in zip(sizes, parents, strict=True):
        ends.append(size + (ends[parent] if parent >= 0 else 0.0))
    return [end for i, end in enumerate(ends) if i not in set(parents)]
