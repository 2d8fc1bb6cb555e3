"""Subscribers of the training loop: called as trees pass, they change nothing in it."""

from __future__ import annotations

from collections.abc import Sequence

from agentenv.frames import Leased, Started, Trained
from agentenv.journal import Journal


class Listener:
    """Callbacks of the loop, in the order of a step; this one does nothing."""

    def started(self, tree: int, step: int, early_s: float) -> None:
        """The feeder starts a rollout that no earlier process had started, `early_s` seconds after
        it had a slot, since the learner did not need it sooner."""

    def taken(self, step: int, trees: Sequence[int]) -> None:
        """The learner takes these trees."""

    def trained(self, step: int, policy_version: int, trees: Sequence[int]) -> None:
        """The weights trained on these trees are live."""


class JournalListener(Listener):
    """Writes the events of the loop to the journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def started(self, tree: int, step: int, early_s: float) -> None:
        self._journal.append(Started(tree, step, round(early_s, 3)))

    def taken(self, step: int, trees: Sequence[int]) -> None:
        self._journal.append(Leased(step, list(trees)))

    def trained(self, step: int, policy_version: int, trees: Sequence[int]) -> None:
        self._journal.append(Trained(step, policy_version, list(trees)))
