"""Micro-batches of whole trees side by side, so that no token is computed twice or padded.

Attention keeps trees apart and pays for visible pairs only (`learners.attention`). A tree larger
than the budget is cut, and its pieces repeat the path to them; gradients are the same, since a
repeated token has its loss in one piece only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
            parts = [tree.floats(name)[m] for tree, m in zip(trees, masks, strict=True)]
            return np.concatenate([np.zeros(0), *parts])

        entropies = [
            tree.floats("entropies")[mask] if tree.entropies else np.full(mask.sum(), np.nan)
            for tree, mask in zip(trees, masks, strict=True)
        ]
        staleness = [tree.ints("staleness")[m] for tree, m in zip(trees, masks, strict=True)]
        return cls(
            behaviour=gather("behaviour"),
            entropies=np.concatenate([np.zeros(0), *entropies]),
            adv_pos=gather("adv_pos"),
            adv_neg=gather("adv_neg"),
            weight=gather("weight"),
            staleness=np.concatenate([np.zeros(0, np.int32), *staleness]),
        )


@dataclass(frozen=True)
class MicroBatch:
    """Trees and parts of trees side by side; see `learners.encoding` for pred, depth and end.

    token_ids, position_ids, end: int64 [length], end counted in this micro-batch.
    source: int64 [tokens], place of each trained token's predecessor; targets: int64 [tokens],
    its id; index: int64 [tokens], its place in ActionTokens.
    """

    token_ids: Longs
    position_ids: Longs
    end: Longs
    source: Longs
    targets: Longs
    index: Longs


@dataclass(frozen=True)
class Piece:
    """Tokens of one tree, ancestors first; `trained` marks those with a loss in this piece."""

    tree: int
    tokens: Longs
    trained: NDArray[np.bool_]


def pack(trees: Sequence[EncodedTree], max_tokens: int) -> list[MicroBatch]:
    """Pack trees into micro-batches of at most max_tokens tokens, without padding.

    A tree stays whole unless it is larger; then it is cut (`cut`). A single path that is longer
    is a micro-batch of its own. First fit by decreasing size.
    """
    pieces = [piece for i, tree in enumerate(trees) for piece in cut(tree, i, max_tokens)]
    pieces.sort(key=lambda piece: -len(piece.tokens))
    batches: list[list[Piece]] = []
    left: list[int] = []
    for piece in pieces:
        size = len(piece.tokens)
        place = next((i for i, room in enumerate(left) if size <= room), len(batches))
        if place == len(batches):
            batches.append([])
            left.append(max_tokens)
        batches[place].append(piece)
        left[place] -= size
    first_action = np.concatenate(([0], np.cumsum([tree.num_action_tokens for tree in trees])))
    return [_assemble(trees, batch, first_action) for batch in batches]


def cut(tree: EncodedTree, number: int, max_tokens: int) -> list[Piece]:
    """Pieces of at most max_tokens tokens, or one path, that train each token exactly once.

    A tree that is too large is cut below a node: neighbouring children stay together as far as
    they fit, and each piece repeats the path that leads to them.
    """
    starts, parents = tree.ints("starts").tolist(), tree.ints("parents").tolist()
    stops = [*starts[1:], tree.num_tokens]
    children: list[list[int]] = [[] for _ in starts]
    last = list(stops)  # exclusive end of each node's subtree, in tokens
    for i in range(len(starts) - 1, 0, -1):
        children[parents[i]].insert(0, i)
        last[parents[i]] = max(last[parents[i]], last[i])
    action = tree.actions().copy()  # not trained yet
    pieces: list[Piece] = []

    def emit(path: list[int], start: int, stop: int) -> None:
        spans = [np.arange(starts[node], stops[node]) for node in path]
        tokens = np.concatenate([*spans, np.arange(start, stop)])
        trained = action[tokens]
        action[tokens] = False
        if trained.any():
            pieces.append(Piece(number, tokens, trained))

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
    trees: Sequence[EncodedTree], pieces: list[Piece], first_action: NDArray[np.int64]
) -> MicroBatch:
    columns: list[tuple[NDArray[Any], ...]] = []
    offset = 0
    for piece in pieces:
        tree, tokens = trees[piece.tree], piece.tokens
        place = np.full(tree.num_tokens, -1)  # token of the tree -> place in the micro-batch
        place[tokens] = np.arange(offset, offset + len(tokens))
        trained = tokens[piece.trained]
        ordinal = np.cumsum(tree.actions()) - 1
        token_ids = tree.ints("token_ids")
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
    joined = (np.concatenate(column).astype(np.int64) for column in zip(*columns, strict=True))
    return MicroBatch(*joined)
