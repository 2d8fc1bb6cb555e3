"""What the ranks find of trained tokens, back to their trees (numpy only).

Log-probs, and the exact entropies of trees that brought none: an engine that is another process
tells entropies where forks are decided, and those are lower bounds; the learner computes the exact
ones anyway when it trains a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from math import nan
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agentenv.learners.batch import EncodedTree, encoded_nodes
from agentenv.learners.credit import CreditedTree, Floats, TreeCredit
from agentenv.tree import Node, Scored, TrajectoryTree

if TYPE_CHECKING:
    Places = NDArray[np.int64]


def forget_entropies(trees: Sequence[TrajectoryTree]) -> None:
    """What the engine told has served to decide forks; from here on it is unknown."""
    for tree in trees:
        for node in tree.nodes:
            node.entropies = array("f")


Share = tuple[Sequence[EncodedTree], Sequence[bytes]]  # of a rank: trees, figures of each


def split_by_tree(trees: Sequence[EncodedTree], figures: Floats) -> list[bytes]:
    """Of trained tokens, tree after tree: as float32, for each tree."""
    cuts = np.cumsum([tree.num_action_tokens for tree in trees])[:-1]
    parts = np.split(figures.astype(np.float32), cuts) if trees else []
    return [part.tobytes() for part in parts]


def gathered(encoded: Sequence[EncodedTree], shares: Sequence[Share]) -> list[NDArray[np.float32]]:
    """What ranks found of the trained tokens of each tree of a mini-batch, in the order of its
    tokens. `shares`: of each rank its trees and parts of trees, and what `split_by_tree` made of
    them. What no rank told is nan."""
    found = [np.full(tree.num_action_tokens, nan, np.float32) for tree in encoded]
    whole = {id(tree): number for number, tree in enumerate(encoded)}
    for parts, figures in shares:
        for part, values in zip(parts, figures, strict=False):
            number = whole[id(part)] if part.whole is None else part.whole.number
            if values:
                places = trained_places(part, encoded[number])
                found[number][places] = np.frombuffer(values, np.float32)
    return found


def give_back(
    groups: Sequence[CreditedTree],
    encoded: Sequence[EncodedTree],
    entropies: Sequence[Share],
    proximal: Sequence[Share] = (),
    logprobs: Sequence[Share] = (),
) -> None:
    """Put what ranks found into the trees of a mini-batch: their `scored`, and entropies into the
    nodes of those that brought none. A token that was not trained has nan there."""
    found = zip(*(gathered(encoded, one) for one in (entropies, proximal, logprobs)), strict=True)
    for (tree, credit), one, (exact, before, first) in zip(groups, encoded, found, strict=True):
        tree.scored = [Scored() for _ in tree.nodes]
        for node, values in _by_node(tree, credit, before):
            tree.scored[node.index].proximal = values
        for node, values in _by_node(tree, credit, first):
            tree.scored[node.index].logprobs = values
        if not one.entropies:
            for node in tree.nodes:
                node.entropies = array("f", [nan]) * len(node.action_ids)
        for node, values in _by_node(tree, credit, exact):
            if one.entropies:
                tree.scored[node.index].entropies = values
            else:
                node.entropies = values


def _by_node(
    tree: TrajectoryTree, credit: TreeCredit, figures: NDArray[np.float32]
) -> Iterator[tuple[Node, array[float]]]:
    """Trained nodes with the figures of their tokens; none where nothing was told of the tree."""
    start = 0
    for node in encoded_nodes(tree, credit) if not np.isnan(figures).all() else ():
        stop = start + len(node.action_ids)
        yield node, array("f", figures[start:stop].tobytes())
        start = stop


def trained_places(part: EncodedTree, tree: EncodedTree) -> Places:
    """Which of the trained tokens of a tree are those of a part of it, in their order: a part
    trains all tokens of a node or none."""
    ours, theirs = (one.owner[one.actions()] for one in (tree, part))
    return np.flatnonzero(np.isin(ours, theirs))
