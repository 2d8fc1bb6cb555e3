"""Partition of trees over the learner's ranks and micro-batches, and the return of results.

Whole trees are assigned first, in decreasing order of cost, each to the rank with the least cost so
far (Graham 1969). Then, while it reduces the largest load, trajectories of one tree move from the
most to the least loaded rank. That rank gets a part of the tree: the tokens on the paths to its
trajectories. A token is trained on the rank with the first trajectory through it; other ranks
compute it again as context, which the costs include.

The results are log-probs, and exact entropies of trees without entropies: an engine in another
process reports only lower bounds, and only where forks are decided; the learner computes exact ones
anyway when it trains a token. numpy only.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from agentenv.base.tree import Scored, TrajectoryTree
from agentenv.learners.algorithms.credit import CreditedTree, Floats
from agentenv.learners.trees.encoded_tree import (
    EncodedTree,
    Layout,
    Longs,
    WholeTree,
    chosen_ids,
    computed,
    encoded_nodes,
    from_arrays,
    leaf_ranges,
    path_sums,
    trained,
)

PAIR_COST = 1e-4  # of an attention pair, in tokens outside attention, for about 1e9 weights
MIN_GAIN = 0.003  # minimum reduction of the largest load by a move, as a share
PER_TOKEN, PER_NODE = ("behavior", "entropies", "dense"), ("adv_pos", "adv_neg", "weight")

T = TypeVar("T")

Shard = dict[int, list[int]]  # tree -> its trajectories, as ordinals of its leaves in pre-order


def cost(tree: EncodedTree) -> float:
    """The work of a tree, in tokens: its tokens, and its pairs of a token and a visible one."""
    sizes = tree.sizes.astype(np.float64)
    above = path_sums(sizes, tree.ints("parents")) - sizes
    num_pairs = float((sizes * above + sizes * (sizes + 1) / 2).sum())
    return tree.num_tokens + PAIR_COST * num_pairs


def assign(trees: Sequence[EncodedTree], num_ranks: int) -> list[list[int]]:
    """Indices of the whole trees of each rank, ascending. A rank may get none."""
    return _largest_first([cost(tree) for tree in trees], num_ranks)


def _largest_first(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    ranks = [(0.0, rank) for rank in range(num_ranks)]
    shards: list[list[int]] = [[] for _ in range(num_ranks)]
    for place in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, rank = heapq.heappop(ranks)
        shards[rank].append(place)
        heapq.heappush(ranks, (total + costs[place], rank))
    return [sorted(shard) for shard in shards]


class Paths:
    """Costs of sets of trajectories of a tree, computed in micro-batches of `max_tokens`.

    `sizes` has the number of tokens of each node, in pre-order, `parents` the indices of the
    parents, -1 for the root.
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
        # The node after a leaf is a child of the last node that the leaf shares with the next one.
        forks = [parents[leaf + 1] for leaf in leaves[:-1]]
        self._path = [(lengths[i], costs[i]) for i in leaves]
        self._shared = [(0, 0.0), *((lengths[i], costs[i]) for i in forks)]
        self._costs: dict[tuple[int, ...], float] = {(): 0.0}

    @property
    def leaves(self) -> list[int]:
        """All leaves."""
        return list(range(len(self._path)))

    def cost(self, leaves: Sequence[int]) -> float:
        """The cost of these ascending leaves; tokens shared by neighbors count once per
        micro-batch."""
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


def assign_paths(trees: Sequence[Paths], num_ranks: int) -> list[Shard]:
    """The trajectories of each rank; a rank may get none."""
    assigned = _largest_first([tree.cost(tree.leaves) for tree in trees], num_ranks)
    shards: list[Shard] = [{place: trees[place].leaves for place in places} for places in assigned]
    loads = [load(shard, trees) for shard in shards]
    while True:
        most, least = (pick(range(num_ranks), key=loads.__getitem__) for pick in (max, min))
        source, target = shards[most], shards[least]
        if most == least:
            return shards
        move = _best_move(source, target, loads[most], loads[least], trees)
        if move is None:
            return shards
        place, kept, moved, loads[most], loads[least] = move
        source[place] = kept
        if not kept:
            del source[place]
        target[place] = sorted(target.get(place, []) + moved)


def load(shard: Shard, trees: Sequence[Paths]) -> float:
    """Cost of a rank's shard."""
    return sum(trees[place].cost(leaves) for place, leaves in shard.items())


def idle_share(steps: Sequence[Sequence[float]]) -> float:
    """The share of time that ranks wait for the most loaded one, from their loads in each optimizer
    step."""
    num_ranks, most = len(steps[0]), sum(max(loads) for loads in steps)
    return 1.0 - sum(sum(loads) for loads in steps) / (num_ranks * most) if most else 0.0


def _best_move(
    source: Shard, target: Shard, most: float, least: float, trees: Sequence[Paths]
) -> tuple[int, list[int], list[int], float, float] | None:
    """The move with the largest reduction of the largest load, `most`: the first or the last
    trajectories of one of its trees go to the least loaded rank. Returns the tree, the kept and the
    moved trajectories, and both loads afterwards; None if no move reduces it by MIN_GAIN."""
    best, bound = None, most * (1.0 - MIN_GAIN)
    for place, leaves in source.items():
        tree, there = trees[place], target.get(place, [])
        rest, other = most - tree.cost(leaves), least - tree.cost(there)
        halves = [(leaves[:i], leaves[i:]) for i in range(len(leaves) + 1)]
        for kept, moved in (*halves, *(half[::-1] for half in halves)):
            left = rest + tree.cost(kept)
            if left >= bound:
                continue
            got = other + tree.cost(sorted(there + moved))
            if got < bound:
                bound = max(left, got)
                best = place, kept, moved, left, got
    return best


def minibatches(groups: Sequence[T], count: int) -> list[Sequence[T]]:
    """`count` runs of neighboring groups, as even as possible; fewer if there are fewer groups."""
    count = min(count, len(groups))
    cuts = [len(groups) * i // count for i in range(count + 1)] if count else []
    return [groups[start:stop] for start, stop in pairwise(cuts)]


def partition(
    trees: Sequence[EncodedTree], num_ranks: int, max_tokens: int
) -> tuple[list[list[EncodedTree]], list[float]]:
    """Trees and parts of trees of each rank, and their costs; `max_tokens` is that of a
    micro-batch. A single rank gets the trees themselves. Counted trees, which come last, stay whole
    and cost nothing."""
    counted, trees = [tree for tree in trees if tree.is_counted], computed(trees)
    shapes = [Paths(one.sizes, one.ints("parents").tolist(), max_tokens) for one in trees]
    shards = assign_paths(shapes, num_ranks)
    parts = [
        [part(trees[i], shard[i], i, is_home=0 in shard[i]) for i in sorted(shard)]
        for shard in shards
    ]
    for mine, places in zip(parts, assign(counted, num_ranks), strict=True):
        mine += [counted[place] for place in places]
    return parts, [load(shard, shapes) for shard in shards]


def part(tree: EncodedTree, leaves: Sequence[int], number: int, *, is_home: bool) -> EncodedTree:
    """The part of a tree, which is number `number` in a mini-batch, with the paths to `leaves`; the
    tree itself for all leaves. It trains the tokens whose first leaf is in `leaves`."""
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
    whole = WholeTree(number, is_home, tree.max_staleness, counts.astype(np.int32).tobytes())
    figures: dict[str, NDArray[Any]]
    figures = {name: tree.floats(name)[trained] for name in PER_TOKEN if getattr(tree, name)}
    figures |= {name: np.where(is_mine, tree.floats(name), 0.0) for name in PER_NODE}
    if tree.teacher:
        ids, logprobs = (one[trained] for one in tree.taught)
        figures |= {"taught_ids": ids, "teacher": logprobs}
    encoded = from_arrays(
        tree.ints("token_ids")[here],
        (tree.actions() & is_mine[owner])[here],
        np.cumsum(own_sizes) - own_sizes,
        parents,
        tree.ints("staleness")[trained],
        returns=tree.floats("returns"),
        temperatures=tree.floats("temperatures"),
        advantages=tree.floats("advantages"),
        **figures,
    )
    kept = {}
    if tree.num_kept:
        kept = chosen_ids(tree.ints("num_kept"), tree.ints("kept_ids"), trained)
    return replace(encoded, whole=whole, **kept)


def forget_entropies(trees: Sequence[TrajectoryTree]) -> None:
    """Drop the engine's entropies, after the decisions on forks."""
    for tree in trees:
        for node in tree.nodes:
            node.entropies = array("f")


# Of a rank: trees, and for each the values of its trained tokens, float32 [3, tokens]: entropies,
# log-probs before the update, and log-probs at the first training.
Share = tuple[Sequence[EncodedTree], Sequence[bytes]]


def by_tree(trees: Sequence[EncodedTree], values: NDArray[Any]) -> list[NDArray[Any]]:
    """Those of each tree, from the values of all trained tokens, [.., tokens], tree after tree."""
    cuts = np.cumsum([tree.num_action_tokens for tree in trees])[:-1]
    return np.split(values, cuts, axis=-1) if trees else []


def split_by_tree(trees: Sequence[EncodedTree], values: Floats) -> list[bytes]:
    """The values of a Share, from those of all trained tokens."""
    return [part.tobytes() for part in by_tree(trees, values.astype(np.float32))]


def gathered(encoded: Sequence[EncodedTree], shares: Sequence[Share]) -> list[NDArray[np.float32]]:
    """The values of each tree of a mini-batch, [3, tokens] in the order of its tokens, nan where no
    rank reported any. `shares`: of each rank."""
    found = [np.full((3, tree.num_action_tokens), nan, np.float32) for tree in encoded]
    whole = {id(tree): number for number, tree in enumerate(encoded)}
    for parts, values in shares:
        for part, own in zip(parts, values, strict=False):
            number = whole[id(part)] if part.whole is None else part.whole.number
            # A part trains all tokens of a node or none.
            owners, theirs = (one.owner[one.actions()] for one in (encoded[number], part))
            reported = np.frombuffer(own, np.float32).reshape(3, -1)
            found[number][:, np.isin(owners, theirs)] = reported
    return found


def write_back(
    groups: Sequence[CreditedTree], encoded: Sequence[EncodedTree], shares: Sequence[Share]
) -> None:
    """Write the ranks' values into the trees of a mini-batch: into `scored`, and entropies into the
    nodes of trees without any. Untrained tokens get nan."""
    every = zip(groups, encoded, gathered(encoded, shares), strict=True)
    for (tree, credit), one, values in every:
        tree.scored = [Scored() for _ in tree.nodes]
        if not one.entropies:
            for node in tree.nodes:
                node.entropies = array("f", [nan]) * len(node.action_ids)
        is_reported = [not np.isnan(row).all() for row in values]
        stop = 0
        for node in encoded_nodes(tree, credit):
            is_trained = trained(node)
            start, stop = stop, stop + int(is_trained.sum())
            exact, before, first = (
                _scattered(row[start:stop], is_trained) if known else array("f")
                for row, known in zip(values, is_reported, strict=True)
            )
            taught = array("f", credit.teacher.get(node.index, ()))
            own = exact if one.entropies else array("f")
            tree.scored[node.index] = Scored(before, first, own, taught)
            if is_reported[0] and not one.entropies:
                node.entropies = exact


def _scattered(values: NDArray[Any], is_trained: NDArray[np.bool_]) -> array[float]:
    """float32 [trained tokens] -> [tokens], nan elsewhere."""
    whole = np.full(len(is_trained), nan, np.float32)
    whole[is_trained] = values
    return array("f", whole.tobytes())


@dataclass(frozen=True)
class MicroBatch:
    """Trees and parts of trees side by side; see encoded_tree.py for pred, depth and end.

    token_ids, position_ids, end: int64 [length], end counted in this micro-batch.
    source: int64 [tokens], place of each trained token's predecessor; targets: int64 [tokens],
    its id; index: int64 [tokens], its place in ActionTokens; temperature: float64 [tokens], None
    where all are 1; kept: int64 [tokens, most ids], those that could be sampled, -1 for all ids;
    None where no token was truncated.
    """

    token_ids: Longs
    position_ids: Longs
    end: Longs
    source: Longs
    targets: Longs
    index: Longs
    layout: Layout = "tree"
    temperature: Floats | None = None
    kept: Longs | None = None

    @property
    def paths(self) -> Longs:
        """Lengths of the paths that end with each segment, a run of tokens between forks."""
        last = np.append(np.flatnonzero(np.diff(self.end)), len(self.end) - 1)
        return np.asarray(self.position_ids[last] + 1)


@dataclass(frozen=True)
class TreePiece:
    """Tokens of one tree, ancestors first; `trained` marks those with a loss in this piece."""

    tree: int
    tokens: Longs
    trained: NDArray[np.bool_]


def pack(
    trees: Sequence[EncodedTree], max_tokens: int, layout: Layout = "tree"
) -> list[MicroBatch]:
    """Pack trees into micro-batches of at most max_tokens tokens.

    A tree stays whole unless it is larger; then it is cut (`cut`). A longer single path is a
    separate micro-batch. First fit by decreasing size, without padding.
    """
    pieces = [piece for i, tree in enumerate(trees) for piece in cut(tree, i, max_tokens)]
    first_action = np.concatenate(([0], np.cumsum([tree.num_action_tokens for tree in trees])))
    batches = _first_fit(pieces, max_tokens)
    return [_assemble(trees, batch, first_action, layout) for batch in batches]


def _first_fit(pieces: list[TreePiece], max_tokens: int) -> list[list[TreePiece]]:
    batches: list[list[TreePiece]] = []
    left: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -len(piece.tokens)):
        size = len(piece.tokens)
        place = next((i for i, room in enumerate(left) if size <= room), len(batches))
        if place == len(batches):
            batches.append([])
            left.append(max_tokens)
        batches[place].append(piece)
        left[place] -= size
    return batches


def cut(tree: EncodedTree, number: int, max_tokens: int) -> list[TreePiece]:
    """Pieces of at most max_tokens tokens, or one path, that train each token exactly once.

    A tree that is too large is cut below a node: neighboring children stay together as far as they
    fit, and each piece repeats the path to them.
    """
    starts, parents = tree.ints("starts").tolist(), tree.ints("parents").tolist()
    stops = [*starts[1:], tree.num_tokens]
    children: list[list[int]] = [[] for _ in starts]
    last = list(stops)  # exclusive end of each node's subtree, in tokens
    for i in range(len(starts) - 1, 0, -1):
        children[parents[i]].insert(0, i)
        last[parents[i]] = max(last[parents[i]], last[i])
    action = tree.actions().copy()  # not trained yet
    pieces: list[TreePiece] = []

    def emit(path: list[int], start: int, stop: int) -> None:
        spans = [np.arange(starts[node], stops[node]) for node in path]
        tokens = np.concatenate([*spans, np.arange(start, stop)])
        trained = action[tokens]
        action[tokens] = False
        if trained.any():
            pieces.append(TreePiece(number, tokens, trained))

    todo: list[tuple[int, list[int], int]] = [(0, [], 0)]  # node, path to it, its tokens
    while todo:
        node, path, above = todo.pop()
        if not children[node] or above + last[node] - starts[node] <= max_tokens:
            emit(path, starts[node], last[node])
            continue
        path, above = [*path, node], above + stops[node] - starts[node]
        room = max_tokens - above
        first = stop = starts[children[node][0]]
        for child in children[node]:
            if last[child] - first > room and stop > first:
                emit(path, first, stop)
                first = stop
            stop = last[child]
            if stop - first > room:
                todo.append((child, path, above))
                first = stop
        if stop > first:
            emit(path, first, stop)
    return pieces


def _assemble(
    trees: Sequence[EncodedTree],
    pieces: list[TreePiece],
    first_action: NDArray[np.int64],
    layout: Layout,
) -> MicroBatch:
    """One micro-batch of these pieces, in their order."""
    columns: list[tuple[NDArray[Any], ...]] = []
    temperatures: list[Floats] = []
    is_tempered = any(trees[piece.tree].temperatures for piece in pieces)
    rows: list[Longs] = []
    most_kept = max(int(trees[piece.tree].ints("num_kept").max(initial=0)) for piece in pieces)
    offset = 0
    for piece in pieces:
        tree, tokens = trees[piece.tree], piece.tokens
        place = np.full(tree.num_tokens, -1)  # token of the tree -> place in the micro-batch
        place[tokens] = np.arange(offset, offset + len(tokens))
        trained = tokens[piece.trained]
        ordinal = np.cumsum(tree.actions()) - 1
        token_ids = tree.ints("token_ids")
        if is_tempered:
            temperatures.append(tree.temperature[ordinal[trained]])
        if most_kept:
            rows.append(tree.kept(most_kept)[ordinal[trained]])
        columns.append(
            (
                token_ids[tokens],
                tree.ints("depth")[tokens],
                offset + np.searchsorted(tokens, tree.ints("end")[tokens]),
                place[tree.ints("pred")[trained]],
                token_ids[trained],
                first_action[piece.tree] + ordinal[trained],
            )
        )
        offset += len(tokens)
    ids, positions, end, source, targets, index = (
        np.concatenate(column).astype(np.int64) for column in zip(*columns, strict=True)
    )
    temperature = np.concatenate(temperatures) if is_tempered else None
    kept = np.concatenate(rows) if most_kept else None
    return MicroBatch(ids, positions, end, source, targets, index, layout, temperature, kept)
