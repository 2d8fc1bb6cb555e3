"""Encoded trees in micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentenv.learners.batch import EncodedTree, Layout, Longs


@dataclass(frozen=True)
class MicroBatch:
    """Trees and parts of trees side by side; see `agentenv.learners.batch` for pred, depth and end.

    token_ids, position_ids, end: int64 [length], end counted in this micro-batch.
    source: int64 [tokens], place of each trained token's predecessor; targets: int64 [tokens],
    its id; index: int64 [tokens], its place in ActionTokens. A padded one is `rows` rows of equal
    length, one after the other.
    """

    token_ids: Longs
    position_ids: Longs
    end: Longs
    source: Longs
    targets: Longs
    index: Longs
    layout: Layout = "tree"
    rows: int = 1

    @property
    def pairs(self) -> int:
        """Pairs of a token and one that it sees."""
        return int((self.end - np.arange(len(self.end))).sum())

    @property
    def paths(self) -> Longs:
        """Lengths of the paths that end with each segment, a run of tokens between forks."""
        last = np.append(np.flatnonzero(np.diff(self.end)), len(self.end) - 1)
        lengths: Longs = self.position_ids[last] + 1
        return lengths


@dataclass(frozen=True)
class Piece:
    """Tokens of one tree, ancestors first; `trained` marks those with a loss in this piece."""

    tree: int
    tokens: Longs
    trained: NDArray[np.bool_]


def pack(
    trees: Sequence[EncodedTree], max_tokens: int, layout: Layout = "tree"
) -> list[MicroBatch]:
    """Pack trees into micro-batches of at most max_tokens tokens.

    A tree stays whole unless it is larger; then it is cut (`cut`). A single path that is longer
    is a micro-batch of its own. First fit by decreasing size, without padding. Padded: each
    trajectory is a row, as long as the longest of its micro-batch; rows of similar length are
    together. A shared token is computed in all of its rows and trained in one.
    """
    most = 0 if layout == "padded" else max_tokens
    pieces = [piece for i, tree in enumerate(trees) for piece in cut(tree, i, most)]
    group = _in_rows if layout == "padded" else _first_fit
    batches = group(pieces, max_tokens)
    first_action = np.concatenate(([0], np.cumsum([tree.num_action_tokens for tree in trees])))
    found = [_assemble(trees, batch, first_action) for batch in batches]
    if layout == "padded":
        return [_pad(*pair) for pair in zip(found, batches, strict=True)]
    return [replace(one, layout=layout) for one in found]


def _first_fit(pieces: list[Piece], max_tokens: int) -> list[list[Piece]]:
    batches: list[list[Piece]] = []
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


def _in_rows(pieces: list[Piece], max_tokens: int) -> list[list[Piece]]:
    batches: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: len(piece.tokens)):
        if not batches or (len(batches[-1]) + 1) * len(piece.tokens) > max_tokens:
            batches.append([])
        batches[-1].append(piece)
    return batches


def _pad(batch: MicroBatch, pieces: Sequence[Piece]) -> MicroBatch:
    """The micro-batch of these pieces, in ascending order of their length, in rows."""
    sizes = np.array([len(piece.tokens) for piece in pieces])
    rows, length = len(sizes), int(sizes[-1])
    row = np.arange(rows)
    place = np.arange(sizes.sum()) + np.repeat(row * length - np.cumsum(sizes) + sizes, sizes)
    token_ids = np.zeros(rows * length, np.int64)
    token_ids[place] = batch.token_ids
    return replace(
        batch,
        token_ids=token_ids,
        position_ids=np.tile(np.arange(length), rows),
        end=np.repeat((row + 1) * length, length),
        source=place[batch.source],
        layout="padded",
        rows=rows,
    )


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
    """One micro-batch of these pieces, in their order."""
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
    ids, positions, end, source, targets, index = (
        np.concatenate(column).astype(np.int64) for column in zip(*columns, strict=True)
    )
    return MicroBatch(ids, positions, end, source, targets, index)
