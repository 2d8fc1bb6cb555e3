"""Which rank of the learner computes what: trees and parts of trees, dealt by cost (numpy only).

Whole trees are dealt first, the largest first, each to the rank with the least so far (Graham
1969). Then, as long as it pays, the rank with the most gives trajectories of one of its trees to
the rank with the least. Such a rank gets a part of the tree: the tokens on the paths to its
trajectories. A token is trained on the rank that has the first trajectory through it; elsewhere it
is computed again as context, and costs count that.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike

from agentenv.learners.batch import (
    EncodedTree,
    Whole,
    computed,
    from_arrays,
    leaf_ranges,
    path_sums,
)

PAIR_COST = 1e-4  # of an attention pair, in tokens outside attention: a model of about 1e9 weights
MIN_GAIN = 0.003  # what dividing a tree has to take off the rank with the most
PER_TOKEN, PER_NODE = ("behaviour", "entropies"), ("adv_pos", "adv_neg", "weight")

T = TypeVar("T")

Hand = dict[int, list[int]]  # tree -> its trajectories, as ordinals of its leaves in pre-order


def cost(tree: EncodedTree) -> float:
    """Work that a tree is, in tokens: each token, and each pair of a token and one it sees."""
    sizes = tree.sizes.astype(np.float64)
    above = path_sums(sizes, tree.ints("parents")) - sizes
    num_pairs = float((sizes * above + sizes * (sizes + 1) / 2).sum())
    return tree.num_tokens + PAIR_COST * num_pairs


def deal(trees: Sequence[EncodedTree], num_ranks: int) -> list[list[int]]:
    """Places of the trees of each rank, in their order, all of them whole. A rank may get none."""
    return _largest_first([cost(tree) for tree in trees], num_ranks)


def _largest_first(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    ranks = [(0.0, rank) for rank in range(num_ranks)]
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    for place in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, rank = heapq.heappop(ranks)
        hands[rank].append(place)
        heapq.heappush(ranks, (total + costs[place], rank))
    return [sorted(hand) for hand in hands]


class Paths:
    """What trajectories of a tree cost together, computed in micro-batches of `max_tokens`.

    `sizes` are the tokens of each node, in pre-order, `parents` the places of the nodes above, -1
    for the root.
    """

    def __init__(self, sizes: ArrayLike, parents: Sequence[int], max_tokens: int) -> None:
        self.max_tokens = max_tokens
        lengths, costs = [0] * len(parents), [0.0] * len(parents)  # of the path to a node's end
        is_leaf = [True] * len(parents)
        for i, (size, parent) in enumerate(zip(np.asarray(sizes).tolist(), parents, strict=True)):
            above, before = (lengths[parent], costs[parent]) if parent >= 0 else (0, 0.0)
            lengths[i] = above + size
            costs[i] = before + size + PAIR_COST * size * (above + 1 + lengths[i]) / 2
            if parent >= 0:
                is_leaf[parent] = False
        leaves = [i for i, here in enumerate(is_leaf) if here]
        # The node behind a leaf is the child of what the leaf shares with the next one.
        forks = [parents[leaf + 1] for leaf in leaves[:-1]]
        self._path = [(lengths[i], costs[i]) for i in leaves]
        self._shared = [(0, 0.0), *((lengths[i], costs[i]) for i in forks)]
        self._costs: dict[tuple[int, ...], float] = {(): 0.0}

    @property
    def leaves(self) -> list[int]:
        """All of them."""
        return list(range(len(self._path)))

    def cost(self, leaves: Sequence[int]) -> float:
        """Of these, which ascend: what neighbours share counts once in a micro-batch."""
        key = tuple(leaves)
        if key not in self._costs:
            self._costs[key] = self._sum(key)
        return self._costs[key]

    def _sum(self, leaves: tuple[int, ...]) -> float:
        total, used, before = 0.0, self.max_tokens, -1
        for leaf in leaves:
            length, own = self._path[leaf]
            shared, saved = min(self._shared[before + 1 : leaf + 1])
            if used + length - shared > self.max_tokens:  # another micro-batch
                used, shared, saved = 0, 0, 0.0
            used += length - shared
            total += own - saved
            before = leaf
        return total


def share(trees: Sequence[Paths], num_ranks: int) -> list[Hand]:
    """The trajectories that each rank gets; a rank may get none."""
    dealt = _largest_first([tree.cost(tree.leaves) for tree in trees], num_ranks)
    hands: list[Hand] = [{place: trees[place].leaves for place in places} for places in dealt]
    loads = [load(hand, trees) for hand in hands]
    while (move := _best_move(hands, loads, trees)) is not None:
        giver, taker = hands[move.giver], hands[move.taker]
        giver[move.tree] = move.kept
        if not move.kept:
            del giver[move.tree]
        taker[move.tree] = sorted(taker.get(move.tree, []) + move.given)
        loads[move.giver], loads[move.taker] = move.loads
    return hands


def load(hand: Hand, trees: Sequence[Paths]) -> float:
    """Cost of what a rank has."""
    return sum(trees[place].cost(leaves) for place, leaves in hand.items())


def idle_share(steps: Sequence[Sequence[float]]) -> float:
    """Part of their time that ranks wait for the one with the most, from their loads in each
    optimizer step."""
    num_ranks, most = len(steps[0]), sum(max(loads) for loads in steps)
    return 1.0 - sum(sum(loads) for loads in steps) / (num_ranks * most) if most else 0.0


@dataclass(frozen=True)
class _Move:
    """Trajectories of a tree that go to another rank; `loads` are those of both ranks then."""

    giver: int
    taker: int
    tree: int
    kept: list[int]
    given: list[int]
    loads: tuple[float, float]


def _best_move(
    hands: Sequence[Hand], loads: Sequence[float], trees: Sequence[Paths]
) -> _Move | None:
    """What lowers the largest load most: the first or the last trajectories of one of its trees go
    to the rank with the least. None if nothing lowers it by MIN_GAIN."""
    giver, taker = (pick(range(len(loads)), key=loads.__getitem__) for pick in (max, min))
    best, bound = None, loads[giver] * (1.0 - MIN_GAIN)
    if giver == taker:
        return None
    for place, leaves in hands[giver].items():
        tree, there = trees[place], hands[taker].get(place, [])
        rest = loads[giver] - tree.cost(leaves)
        other = loads[taker] - tree.cost(there)
        halves = [(leaves[:i], leaves[i:]) for i in range(len(leaves) + 1)]
        for kept, given in (*halves, *(half[::-1] for half in halves)):
            left = rest + tree.cost(kept)
            if left >= bound:
                continue
            got = other + tree.cost(sorted(there + given))
            if got < bound:
                bound = max(left, got)
                best = _Move(giver, taker, place, kept, given, (left, got))
    return best


def minibatches(groups: Sequence[T], count: int) -> list[Sequence[T]]:
    """So many neighbouring runs of the groups, as even as possible; of fewer groups one each."""
    count = min(count, len(groups))
    cuts = [len(groups) * i // count for i in range(count + 1)] if count else []
    return [groups[start:stop] for start, stop in pairwise(cuts)]


def deal_parts(
    trees: Sequence[EncodedTree], num_ranks: int, max_tokens: int
) -> tuple[list[list[EncodedTree]], list[float]]:
    """Trees and parts of trees of each rank, and what they cost; `max_tokens` of a micro-batch. One
    rank has the trees themselves. Counted trees, which come last, stay whole and cost nothing."""
    counted, trees = [tree for tree in trees if tree.is_counted], computed(trees)
    shapes = [_paths(tree, max_tokens) for tree in trees]
    hands = share(shapes, num_ranks)
    homes = {place: rank for rank, hand in enumerate(hands) for place in hand if 0 in hand[place]}
    parts = [
        [part(trees[i], hand[i], i, is_home=homes[i] == rank) for i in sorted(hand)]
        for rank, hand in enumerate(hands)
    ]
    for mine, places in zip(parts, deal(counted, num_ranks), strict=True):
        mine += [counted[place] for place in places]
    return parts, [load(hand, shapes) for hand in hands]


def _paths(tree: EncodedTree, max_tokens: int) -> Paths:
    return Paths(tree.sizes, tree.ints("parents").tolist(), max_tokens)


def part(tree: EncodedTree, leaves: Sequence[int], number: int, *, is_home: bool) -> EncodedTree:
    """The paths to some leaves of a tree, which is number `number` of a mini-batch; all leaves are
    the tree itself. Trained are the tokens whose first leaf is among them."""
    sizes, parents, owner = tree.sizes, tree.ints("parents"), tree.owner
    is_leaf, first, last = leaf_ranges(parents.astype(np.int64))
    if len(leaves) == is_leaf.sum():
        return tree
    chosen = np.isin(np.arange(is_leaf.sum()), leaves)
    before = np.concatenate(([0], np.cumsum(chosen)))  # chosen leaves before each one
    leads = before[last] > before[first]  # a node to one of them
    is_mine = chosen[first]  # a node whose tokens are trained here
    here, trained = np.flatnonzero(leads[owner]), is_mine[owner[tree.actions()]]
    own_sizes = np.where(leads, sizes, 0)
    counts = np.bincount(owner[tree.actions()], minlength=len(sizes))
    whole = Whole(number, is_home, tree.max_staleness, counts.astype(np.int32).tobytes())
    figures = {name: tree.floats(name)[trained] for name in PER_TOKEN if getattr(tree, name)}
    figures |= {name: np.where(is_mine, tree.floats(name), 0.0) for name in PER_NODE}
    encoded = from_arrays(
        tree.ints("token_ids")[here],
        (tree.actions() & is_mine[owner])[here],
        np.cumsum(own_sizes) - own_sizes,
        parents,
        tree.ints("staleness")[trained],
        returns=tree.floats("returns"),
        advantages=tree.floats("advantages"),
        **figures,
    )
    return replace(encoded, whole=whole)
