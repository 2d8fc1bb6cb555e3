"""The policy as its own teacher, with a hint: text that only the teacher reads.

    teacher reads   prefix, observation, hint, observation, turns of the failed trajectory
    policy read     prefix, observation,                    turns of the failed trajectory

A hint belongs to a place of a failed trajectory: a node whose observation it follows, and which is
repeated after it. `sibling` is the rest of the best trajectory of the tree from the place where
both part: the siblings of a fork share the exact prefix, so that the hint begins at the turn that
differs. `gold` is the answer of the row, after the prompt. Only turns after the place are scored
(SDPO, arXiv 2601.20802, hints whole prompts; SDAR, arXiv 2605.15155, adds a gate).

The tokens of a hint are in no tree: they are in the sequences that the learner scores, and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from agentenv.base.crashes import called
from agentenv.base.errors import ConfigError
from agentenv.base.registry import loaded
from agentenv.base.tree import Node, Trajectory, TrajectoryTree
from agentenv.learners.algorithms.credit import are_equal
from agentenv.learners.trees.encoded_tree import trained

Encode = Callable[[str], Sequence[int]]
MATCH = 3  # tokens of a trained token and those before it, that a hint has too: a copy


class PlacedHint(NamedTuple):
    """`ids` stand after the observation of `place`."""

    place: Node
    ids: Sequence[int]


Builder = Callable[[TrajectoryTree, Trajectory], PlacedHint | None]


class HintedPath(NamedTuple):
    """What the teacher reads of a trajectory: `mask` marks the tokens of `nodes`, which it scores,
    in their order."""

    ids: list[int]
    mask: list[bool]
    nodes: list[Node]
    hint: Sequence[int]


def tokens(nodes: Sequence[Node]) -> list[int]:
    return [one for node in nodes for one in (*node.action_ids, *node.observation_ids)]


def sibling(tree: TrajectoryTree, failed: Trajectory) -> PlacedHint | None:
    """Of the trajectories with the highest return, which is above the failed one's, that which
    shares the longest part with it, from there on."""
    known, best = {node.index for node in failed.path}, (failed.reward, 0, failed.path)
    for other in tree.trajectories():
        returns = np.array([other.reward, failed.reward])
        shared = len([*takewhile(lambda node: node.index in known, other.path)])
        if shared and other.reward > failed.reward and not are_equal(returns):
            best = max(best, (other.reward, shared, other.path), key=lambda one: one[:2])
    _, shared, path = best
    return None if path is failed.path else PlacedHint(path[shared - 1], tokens(path[shared:]))


def gold(tree: TrajectoryTree, failed: Trajectory) -> str | None:
    """The row's answer."""
    return f" The answer is {tree.task.answers[0]}. " if tree.task.answers else None


def own(function: Any, encode: Encode) -> Builder:
    """A user's function of the tree and a failed trajectory: text after the prompt, or None."""

    def build(tree: TrajectoryTree, failed: Trajectory) -> PlacedHint | None:
        text = None if failed.success else called(function, tree, failed)
        if not isinstance(text, str | None):
            raise ConfigError(f"algorithm.hint returned {text!r}; expected a text or None")
        return PlacedHint(failed.path[0], encode(text)) if text else None

    return build


def builder(name: str, tokenizer: Any) -> Builder:
    """The builder of `algorithm.hint`. Raises ConfigError for a function that cannot be loaded."""

    encode = partial(tokenizer.encode, add_special_tokens=False)
    if name == "sibling":
        return sibling
    return own(gold if name == "gold" else loaded(name), encode)


def hinted(tree: TrajectoryTree, build: Builder, most: int) -> tuple[list[HintedPath], int]:
    """Every trajectory that has a hint and with it at most so many tokens, and the number of longer
    ones. A shared turn is scored in the first one, and not at all if a trajectory without a hint
    has it. Raises ConfigError for a tree of a program."""
    if tree.is_captured:
        raise ConfigError("algorithm.hint: a program's turns have several contexts; remove it")
    given = [(path, build(tree, path)) for path in tree.trajectories()]
    seen = {n.index for path, hint in given if hint is None for n in path.path}
    found, num_long = [], 0
    for path, hint in given:
        if hint is None or not hint.ids:
            continue
        place = next(n for n, node in enumerate(path.path) if node is hint.place)
        ids = [*tokens(path.path[: place + 1]), *hint.ids, *hint.place.observation_ids]
        mask, nodes, later = [False] * len(ids), [], path.path[place + 1 :]
        if len(ids) + len(tokens(later)) > most:
            num_long += 1
            continue
        for node in later:
            is_new = node.index not in seen
            seen.add(node.index)
            nodes += [node] if is_new and node.action_ids else []
            mask += [is_new and one for one in trained(node).tolist()]
            mask += [False] * len(node.observation_ids)
            ids += [*node.action_ids, *node.observation_ids]
        if any(mask):
            found.append(HintedPath(ids, mask, nodes, hint.ids))
    return found, num_long


def copied(path: HintedPath) -> list[bool]:
    """Of each scored token, whether the hint has it after the same MATCH - 1 tokens."""
    grams = {tuple(path.hint[n - MATCH : n]) for n in range(MATCH, len(path.hint) + 1)}
    places = [n for n, is_scored in enumerate(path.mask) if is_scored]
    return [tuple(path.ids[n - MATCH + 1 : n + 1]) in grams for n in places]
