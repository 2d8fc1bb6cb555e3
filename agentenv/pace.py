"""The pace of a run: when the learner is expected to need a tree, and when the tree must start.

A tree that starts before the learner needs it waits after its end, and is staler for nothing. So a
tree starts `lead` seconds before the moment at which the learner is expected to ask for it:

    learner   trains step c ........ | asks, trains c+1 ........ | asks, trains c+2
                                     ^ now + the rest of L       ^ + L
    tree of step c+2                       | starts .. lead .... |

L is the median time of the recent updates. When the learner has a batch, the lead that the batch
needed is known: the time of its slowest tree, plus the time by which the learner asked sooner than
was expected when that tree started. Then

    lead <- max(lead, need)                        if the learner had to wait for its trees, or
                                                   they started before L was known;
    lead <- lead - NARROW * max(lead - need, 0)    otherwise.

Only a wait widens the lead, and only to what this batch needed: a long tree for which nobody waited
(as in a crowd: where all slots are full, trees take longer) widens nothing. So a short wait cannot
fill the slots, which would lengthen the trees, which would fill the slots. The lead is at most what
the slots allow. Until the lead and L are known, and while the learner waits for the trees of this
very step, a tree starts at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from msgspec import Struct

NUM_UPDATES = 5  # of which the median counts: one with an evaluation in it is no measure
NARROW = 0.1  # smaller: fewer waits of the learner; larger: staleness falls sooner
LEAST_S = 1e-3  # below it a wait would not move a clock that rounds


class Grown(Struct, frozen=True):
    """A tree from its start to its end, and when the learner was expected to ask for it."""

    began_s: float
    ended_s: float
    due_s: float

    def needed_s(self, asked_s: float) -> float:
        """The lead with which it would have ended when the learner asked."""
        return self.ended_s - self.began_s + max(0.0, self.due_s - max(asked_s, self.began_s))


class Pace:
    """Times on the event loop's clock, durations in seconds."""

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self._lead_s = 0.0
        self._updates_s: deque[float] = deque(maxlen=NUM_UPDATES)
        self._since_s = 0.0  # the learner waits, or is busy
        self._waits = True

    def learner_asks(self, now_s: float) -> None:
        """The learner is ready for a batch."""
        if not self._waits:
            self._updates_s.append(now_s - self._since_s)
            self._since_s, self._waits = now_s, True

    def learner_takes(self, now_s: float, trees: Sequence[Grown]) -> None:
        """The learner has its batch, of which these trees are a measure."""
        asked_s = self._since_s
        late = [tree.needed_s(asked_s) for tree in trees if tree.ended_s > asked_s]
        first = [tree.needed_s(asked_s) for tree in trees if tree.due_s <= tree.began_s]
        if late or first:
            self._lead_s = max(self._lead_s, *late, *first)
        elif trees:
            needed_s = max(tree.needed_s(asked_s) for tree in trees)
            self._lead_s -= NARROW * max(0.0, self._lead_s - needed_s)
        if self._updates_s:
            most_s = (self.max_staleness + 1) * median(self._updates_s)
            self._lead_s = min(self._lead_s, most_s)
        self._since_s, self._waits = now_s, False

    def due_s(self, now_s: float, steps_ahead: int) -> float:
        """When the learner is expected to ask for a tree; `steps_ahead` batches are delivered
        before the one that has it."""
        if not self._updates_s:
            return now_s
        update_s = median(self._updates_s)
        asks_s = now_s if self._waits else max(now_s, self._since_s + update_s)
        return asks_s + steps_ahead * update_s

    def early_s(self, now_s: float, steps_ahead: int) -> float:
        """The seconds that such a tree should still wait for its start; 0: it starts now."""
        if not self._lead_s:
            return 0.0
        early_s = self.due_s(now_s, steps_ahead) - self._lead_s - now_s
        return early_s if early_s >= LEAST_S else 0.0
