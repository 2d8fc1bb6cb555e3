"""Micro-batches of padded rows, cut from encoded trees so that little is computed twice.

A row is a subtree preceded by the path to it. A tree goes into one row, or is cut at a node into
one row for each child, which repeats the path and saves attention between siblings: dense
attention pays for every pair of a row's tokens. The cheaper of both is taken at each node;
gradients are the same, since a repeated token has its loss in one row only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learners.encoding import EncodedTree

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ActionTokens:
    """The trained tokens of a mini-batch, tree after tree, in pre-order; float64 [tokens]."""

    behaviour: Floats
    entropies: Floats  # nan where the engine gave none
    adv_pos: Floats
    adv_neg: Floats
    weight: Floats
    staleness: NDArray[np.int32]

    @classmethod
    def of(cls, trees: Sequence[EncodedTree]) -> ActionTokens:
        masks = [tree.actions() for tree in trees]

        def gather(name: str) -> Floats:
            return np.concatenate(
                [tree.floats(name)[m] for tree, m in zip(trees, masks, strict=True)]
            )

        entropies = [
            tree.floats("entropies")[mask] if tree.entropies else np.full(mask.sum(), np.nan)
            for tree, mask in zip(trees, masks, strict=True)
        ]
        staleness = [tree.ints("staleness")[m] for tree, m in zip(trees, masks, strict=True)]
        return cls(
            behaviour=gather("behaviour"),
            entropies=np.concatenate(entropies),
            adv_pos=gather("adv_pos"),
            adv_neg=gather("adv_neg"),
            weight=gather("weight"),
            staleness=np.concatenate(staleness),
        )


@dataclass(frozen=True)
class MicroBatch:
    """Rows of equal padded length; see `learners.encoding` for pred, depth and end.

    token_ids, position_ids, end: int64 [rows, length]; end is None when every row is one path.
    source: int64 [tokens], place of each trained token's predecessor in the flattened rows;
    targets: int64 [tokens], its id; index: int64 [tokens], its place in ActionTokens.
    """

    token_ids: Longs
    position_ids: Longs
    end: Longs | None
    source: Longs
    targets: Longs
    index: Longs


@dataclass(frozen=True)
class Row:
    """Tokens of one tree, ancestors first; `trained` marks those with a loss in this row."""

    tree: int
    tokens: Longs
    trained: NDArray[np.bool_]
    is_path: bool


def pack(
    trees: Sequence[EncodedTree], max_tokens: int, pair_cost: float = 1e-3
) -> list[MicroBatch]:
    """Cut trees into rows and rows into micro-batches of at most max_tokens padded tokens.

    A row longer than max_tokens is a micro-batch of its own. `pair_cost` is the cost of one
    attention pair in units of the cost of one token outside attention.
    """
    rows = [row for i, tree in enumerate(trees) for row in cut(tree, i, max_tokens, pair_cost)]
    rows.sort(key=lambda row: (row.is_path, len(row.tokens)))
    first_action = np.concatenate(([0], np.cumsum([tree.num_action_tokens for tree in trees])))
    batches: list[list[Row]] = []
    for row in rows:
        fits = (
            batches
            and batches[-1][0].is_path == row.is_path
            and (len(batches[-1]) + 1) * len(row.tokens) <= max_tokens
        )
        if fits:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [_assemble(trees, batch, first_action) for batch in batches]


def cut(tree: EncodedTree, number: int, max_tokens: int, pair_cost: float) -> list[Row]:
    """The rows of one tree; each trained token is trained in exactly one of them."""
    starts, parents = tree.ints("starts").tolist(), tree.ints("parents").tolist()
    stops = [*starts[1:], tree.num_tokens]
    num_nodes = len(starts)
    children: list[list[int]] = [[] for _ in starts]
    subtree = list(range(1, num_nodes + 1))  # exclusive end of each node's subtree, in nodes
    for i in range(num_nodes - 1, 0, -1):
        children[parents[i]].insert(0, i)
        subtree[parents[i]] = max(subtree[parents[i]], subtree[i])
    above = [0] * num_nodes  # tokens on the path before the node
    for i in range(1, num_nodes):
        above[i] = above[parents[i]] + stops[parents[i]] - starts[parents[i]]

    is_path = [False] * num_nodes  # the node's subtree has no fork
    joined = [False] * num_nodes
    cost = [0.0] * num_nodes
    for i in range(num_nodes - 1, -1, -1):
        length = above[i] + stops[subtree[i] - 1] - starts[i]
        is_path[i] = not children[i] or (len(children[i]) == 1 and is_path[children[i][0]])
        # Causal attention without a mask skips the upper half of the pairs.
        pairs = length * length * (0.5 if is_path[i] else 1.0)
        whole = length + pair_cost * pairs
        split = sum(cost[child] for child in children[i])
        fits = length <= max_tokens or not children[i]
        joined[i] = not children[i] or (fits and whole <= split)
        cost[i] = whole if joined[i] else split

    rows: list[Row] = []
    stack: list[tuple[int, list[int], int]] = [
        (0, [], 0)
    ]  # node, its path, how much of it to train
    action = tree.actions()
    while stack:
        node, path, fresh = stack.pop()
        if not joined[node]:
            for j, child in enumerate(children[node]):
                stack.append((child, [*path, node], fresh + 1 if j == 0 else 0))
            continue
        spans = [np.arange(starts[i], stops[i]) for i in path]
        spans.append(np.arange(starts[node], stops[subtree[node] - 1]))
        tokens = np.concatenate(spans)
        trained = action[tokens] & (tokens >= starts[path[-fresh] if fresh else node])
        if trained.any():
            rows.append(Row(number, tokens, trained, is_path[node]))
    return rows


def _assemble(
    trees: Sequence[EncodedTree], rows: list[Row], first_action: NDArray[np.int64]
) -> MicroBatch:
    length = max(len(row.tokens) for row in rows)
    token_ids = np.zeros((len(rows), length), np.int64)
    position_ids = np.tile(np.arange(length), (len(rows), 1))
    end = np.tile(np.arange(1, length + 1), (len(rows), 1))  # padding sees itself only
    sources, targets, indices = [], [], []
    for i, row in enumerate(rows):
        tree, size = trees[row.tree], len(row.tokens)
        place = np.zeros(tree.num_tokens, np.int64)  # old token -> place in the row
        place[row.tokens] = np.arange(size)
        token_ids[i, :size] = tree.ints("token_ids")[row.tokens]
        if not row.is_path:
            position_ids[i, :size] = tree.ints("depth")[row.tokens]
            last = np.searchsorted(row.tokens, tree.ints("end")[row.tokens])
            end[i, :size] = last
        trained = row.tokens[row.trained]
        sources.append(i * length + place[tree.ints("pred")[trained]])
        targets.append(tree.ints("token_ids")[trained])
        ordinal = np.cumsum(tree.actions()) - 1
        indices.append(first_action[row.tree] + ordinal[trained])
    return MicroBatch(
        token_ids=token_ids,
        position_ids=position_ids,
        end=None if rows[0].is_path else end,
        source=np.concatenate(sources),
        targets=np.concatenate(targets).astype(np.int64),
        index=np.concatenate(indices),
    )
