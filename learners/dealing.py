"""Which rank trains which tree: whole trees, balanced by what they cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from learners.encoding import EncodedTree

PAIR_COST = 1e-4  # of an attention pair, in tokens outside attention: a model of about 1e9 weights


def cost(tree: EncodedTree) -> float:
    """Work that a tree is, in tokens: each token, and each pair of a token and one it sees."""
    depth = tree.ints("depth")
    return tree.num_tokens + PAIR_COST * float(depth.sum(dtype="int64") + len(depth))


def deal(trees: Sequence[EncodedTree], num_ranks: int) -> list[list[int]]:
    """Places of the trees of each rank, in their order: the largest first, each to the rank with
    the least so far (Graham 1969). A rank may get none."""
    if num_ranks == 1:
        return [list(range(len(trees)))]
    costs = [cost(tree) for tree in trees]
    ranks = [(0.0, rank) for rank in range(num_ranks)]
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    for place in sorted(range(len(trees)), key=lambda i: (-costs[i], i)):
        total, rank = heapq.heappop(ranks)
        hands[rank].append(place)
        heapq.heappush(ranks, (total + costs[place], rank))
    return [sorted(hand) for hand in hands]
