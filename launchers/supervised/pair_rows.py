"""Pairs that rollouts gave, token for token: as the self-critic writes them, and from trees.

{"prompt_ids": [..], "chosen_ids": [..], "chosen_mask": [0, 1, ..], "rejected_ids": [..],
 "rejected_mask": [..]}        masks are 1 on what the policy sampled
{"task": .., "nodes": [..]}    a tree (agentenv/tree.py); its leaves are paired by reward
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.data_files import Row
from agentenv.errors import DataError
from agentenv.tree import Trajectory, TrajectoryTree
from learners.dpo_pairs import Answer


class PairRow(Struct, frozen=True, omit_defaults=True):
    """Prompt and two answers in tokens; `task` and the rewards are for the reader."""

    prompt_ids: list[int]
    chosen_ids: list[int]
    chosen_mask: list[int]
    rejected_ids: list[int]
    rejected_mask: list[int]
    task: str = ""
    chosen_reward: float = 0.0
    rejected_reward: float = 0.0

    def answers(self) -> tuple[Answer, Answer]:
        """Each with the prompt, which is not the policy's."""
        for name, ids, mask in (
            ("chosen", self.chosen_ids, self.chosen_mask),
            ("rejected", self.rejected_ids, self.rejected_mask),
        ):
            if len(ids) != len(mask) or not any(mask):
                raise DataError(
                    f"key '{name}_mask': expected as many entries as {name}_ids has, {len(ids)}, "
                    f"at least one of them 1, got {len(mask)}"
                )
        prompt = [0] * len(self.prompt_ids)
        return (
            (self.prompt_ids + self.chosen_ids, prompt + self.chosen_mask),
            (self.prompt_ids + self.rejected_ids, prompt + self.rejected_mask),
        )


def is_pair_row(row: Row) -> bool:
    """Whether a row is one of the two forms above."""
    return "prompt_ids" in row or ("nodes" in row and "task" in row)


def read_pair_row(row: Row, threshold: float, limit: int, rng: Random) -> list[PairRow]:
    """The pairs of a row; raises DataError with key and what was expected."""
    kind: Any = PairRow if "prompt_ids" in row else TrajectoryTree
    try:
        found = msgspec.convert(row, kind)
    except msgspec.ValidationError as error:
        raise DataError(str(error)) from error
    return [found] if isinstance(found, PairRow) else list(pairs_of(found, threshold, limit, rng))


def pairs_of(tree: TrajectoryTree, threshold: float, limit: int, rng: Random) -> Iterator[PairRow]:
    """Up to `limit` random pairs of a trajectory with at least that reward and one with less.

    Truncated trajectories count by their reward, failed ones not at all. Trajectories without a
    token of the policy, and pairs of equal texts, are left out.
    """
    done = [t for t in tree.trajectories() if any(t.loss_mask)]
    chosen = [t for t in done if t.reward >= threshold]
    rejected = [t for t in done if t.reward < threshold]
    pairs = [(good, bad) for good in chosen for bad in rejected if good.token_ids != bad.token_ids]
    for good, bad in rng.sample(pairs, min(limit, len(pairs))):
        prompt = tree.root.observation_ids
        yield PairRow(
            prompt_ids=prompt,
            chosen_ids=good.token_ids[len(prompt) :],
            chosen_mask=_mask(good, len(prompt)),
            rejected_ids=bad.token_ids[len(prompt) :],
            rejected_mask=_mask(bad, len(prompt)),
            task=tree.task.id,
            chosen_reward=good.reward,
            rejected_reward=bad.reward,
        )


def _mask(trajectory: Trajectory, start: int) -> list[int]:
    return [int(sampled) for sampled in trajectory.loss_mask[start:]]


def num_kinds(trees: Sequence[TrajectoryTree], threshold: float) -> dict[str, int]:
    """How many questions had only chosen, only rejected, or both kinds of answers."""
    counts = {"all_chosen": 0, "all_rejected": 0, "mixed": 0}
    for tree in trees:
        right = [trajectory.reward >= threshold for trajectory in tree.trajectories()]
        if right:
            kind = (
                "mixed"
                if any(right) and not all(right)
                else "all_chosen"
                if right[0]
                else "all_rejected"
            )
            counts[kind] += 1
    return counts
