"""The pace of a run: when the learner is expected to need a tree, and when the tree must start.

A tree that starts before the learner needs it waits after its end, and is staler for nothing. From
the two durations that a run shows by itself follows the latest start that keeps the learner busy:

    learner   trains step c ........ | asks, trains c+1 ........ | asks, trains c+2
                                     ^ now + the rest of L       ^ + L
    tree of step c+2                     | starts .. margin * D . |

L is the shortest recent time from one batch to the next request for one. D is the longest time of a
tree, of one that still grows too; older times count less with every step. Both err on the side of
an early start, and the margin grows whenever the learner had to wait after trees were held back.
Until both are known, and while the learner waits for the trees of this very step, a tree starts at
once.
"""

from __future__ import annotations

from collections import deque

NUM_UPDATES = 4  # of which the shortest counts: one with an evaluation in it is no measure
DECAY = 0.93  # a step, of D: the first trees of a run crowd the engine and take longer
MARGIN, MAX_MARGIN = 1.25, 5.0
WIDEN, NARROW = 1.25, 0.9  # the margin, at a step that had to wait and at one that had not
LEAST_S = 1e-3  # below it a wait would not move a clock that rounds
WAITED = 0.02  # of L, above which the learner had to wait


class Pace:
    """Times on the event loop's clock, durations in seconds."""

    def __init__(self) -> None:
        self._tree_s = 0.0  # D
        self._ended = False  # a tree has, since the learner took its last batch
        self._learner_s: deque[float] = deque(maxlen=NUM_UPDATES)
        self._margin = MARGIN
        self._since_s = 0.0  # the learner waits, or is busy
        self._waits = True
        self._held_back = False  # a tree was, since the learner took its last batch

    def tree_ended(self, seconds: float) -> None:
        """A tree took so long from its start to its end."""
        self._tree_s = max(self._tree_s, seconds)
        self._ended = True

    def learner_asks(self, now_s: float) -> None:
        """The learner is ready for a batch."""
        if not self._waits:
            self._learner_s.append(now_s - self._since_s)
            self._since_s, self._waits = now_s, True

    def learner_takes(self, now_s: float) -> None:
        """The learner has its batch."""
        waited = bool(self._learner_s) and now_s - self._since_s > WAITED * min(self._learner_s)
        if self._held_back or not waited:  # else the wait was no fault of the margin
            margin = self._margin * (WIDEN if waited else NARROW)
            self._margin = min(max(margin, MARGIN), MAX_MARGIN)
        self._since_s, self._waits, self._held_back = now_s, False, False
        if self._ended:
            self._tree_s *= DECAY
            self._ended = False

    def early_s(self, now_s: float, steps_ahead: int, oldest_s: float) -> float:
        """The seconds that a tree should still wait for its start; 0: it starts now.

        `steps_ahead` batches are delivered before the one that has this tree, and the oldest tree
        that still grows began `oldest_s` seconds ago.
        """
        if not self._tree_s or not self._learner_s:
            return 0.0
        update_s = min(self._learner_s)
        asks_s = now_s if self._waits else max(now_s, self._since_s + update_s)
        start_s = asks_s + steps_ahead * update_s - self._margin * max(self._tree_s, oldest_s)
        early_s = start_s - now_s
        if early_s < LEAST_S:
            return 0.0
        self._held_back = True
        return early_s
