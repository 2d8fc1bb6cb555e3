"""How long ranks of the learner would wait for each other: dealing tried on simulated trees.

A simulated tree has independent trajectories of two to seven turns and forks after turns of
theirs; turns differ in length by up to a factor of three, and whole trees by a log-normal factor,
whose deviation of the logarithm is the spread.
"""

from __future__ import annotations

import math
import operator
from functools import cache
from random import Random
from statistics import fmean
from typing import NamedTuple

from agentenv.errors import ConfigError
from agentenv.learners.algorithm import Algorithm
from agentenv.learners.learner import LearnerConfig
from agentenv.learners.partition import Paths, assign_paths, idle_share, load
from agentenv.types import Limits

NARROW, WIDE = 0.25, 0.6  # spreads: of 64 trees the largest is 1.8 or 3 times the mean
NUM_TREES = 64
PART_OF_LIMIT = 0.4  # of the longest possible trajectory, what one has on average
MAX_IDLE = 0.25


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


def expected_idle(learner: LearnerConfig, algorithm: Algorithm, limits: Limits) -> float:
    """Part of their time that the ranks would wait for the one with the most, in trees of a wide
    spread, whose trajectories are on average PART_OF_LIMIT as long as the limits allow."""
    if learner.num_replicas == 1:
        return 0.0
    return _expected_idle(
        learner.num_replicas,
        learner.groups_per_minibatch,
        learner.replica_tokens,
        algorithm.group_size,
        getattr(algorithm, "num_initial", algorithm.group_size),
        limits.max_prompt_tokens + limits.max_response_tokens,
    )


@cache  # a dry run asks three times
def _expected_idle(
    num_replicas: int, groups: int, budget: int, group_size: int, num_initial: int, longest: int
) -> float:
    trees = simulated(
        group_size,
        num_initial,
        WIDE,
        path_tokens=PART_OF_LIMIT * longest,
        longest=longest,
        count=groups * -(-NUM_TREES // groups),
    )
    paths = [Paths(sizes, parents, budget) for sizes, parents in trees]
    steps = []
    for first in range(0, len(paths), groups):
        step = paths[first : first + groups]
        steps.append([load(shard, step) for shard in assign_paths(step, num_replicas)])
    return idle_share(steps)


def check_idle(learner: LearnerConfig, algorithm: Algorithm, limits: Limits) -> None:
    """Raises ConfigError where ranks would wait too long."""
    idle = expected_idle(learner, algorithm, limits)
    if idle > MAX_IDLE and not learner.allow_idle:
        raise ConfigError(
            f"learner.num_ranks = {learner.num_ranks}: ranks would wait {idle:.0%} of their time "
            f"for the one with the most, with learner.groups_per_minibatch = "
            f"{learner.groups_per_minibatch} trees of {algorithm.group_size} trajectories; raise "
            "groups_per_minibatch or context_parallel, lower num_ranks, or set "
            "learner.allow_idle = true"
        )
