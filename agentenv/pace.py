"""The pace of a run: when the learner is expected to need a tree, and when the tree must start.

A tree that starts before the learner needs it waits after its end, and is staler for nothing. So a
tree starts `lead` seconds before the moment at which the learner is expected to ask for it:

    learner   trains step c ........ | asks, trains c+1 ........ | asks, trains c+2
                                     ^ now + the rest of L       ^ + L
    tree of step c+2                       | starts .. lead .... |

L is the median time of the recent updates. When the learner takes a batch, it is known which lead
the batch needed: the time of its slowest tree, and by how much the learner asked sooner than was
expected at the start of that tree. With it, after each batch,

    lead <- max(lead, need)                            if the learner had to wait for the batch,
    lead <- lead - NARROW * max(lead - need, 0)        if not.

So a wait moves later starts forward by the time that was lost and no more, however many trees grow
beside each other, and trees that took long in a crowd without a wait change nothing. In the long run
the learner waits NARROW times as long as its trees are early. The lead is at most what the slots can
give. Until both durations are known, and while the learner waits for the trees of this very step, a
tree starts at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

NUM_UPDATES = 5  # of which the median counts: one with an evaluation in it is no measure
NARROW = 0.1
LEAST_S = 1e-3  # below it a wait would not move a clock that rounds


class Pace:
    """Times on the event loop's clock, durations in seconds."""

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self._lead_s = 0.0
        self._learner_s: deque[float] = deque(maxlen=NUM_UPDATES)
        self._since_s = 0.0  # the learner waits, or is busy
        self._waits = True

    def learner_asks(self, now_s: float) -> None:
        """The learner is ready for a batch."""
        if not self._waits:
            self._learner_s.append(now_s - self._since_s)
            self._since_s, self._waits = now_s, True

    def learner_takes(self, now_s: float, trees: Iterable[tuple[float, float, float]]) -> None:
        """The learner has its batch. Of each tree that is a measure: its start, its end, and when
        the learner was expected to ask for it."""
        asked_s = self._since_s
        late, timely = [0.0], [0.0]  # the leads that trees needed
        for start_s, end_s, due_s in trees:
            sooner_s = max(0.0, due_s - max(asked_s, start_s))
            (late if end_s > asked_s else timely).append(end_s - start_s + sooner_s)
        if len(late) > 1:
            self._lead_s = max(self._lead_s, *late)
        elif len(timely) > 1:
            self._lead_s -= NARROW * max(0.0, self._lead_s - max(timely))
        if self._learner_s:
            most_s = (self.max_staleness + 1) * median(self._learner_s)
            self._lead_s = min(self._lead_s, most_s)
        self._since_s, self._waits = now_s, False

    def due_s(self, now_s: float, steps_ahead: int) -> float:
        """When the learner is expected to ask for a tree, if it asks for `steps_ahead` batches
        before the one that has this tree."""
        if not self._learner_s:
            return now_s
        update_s = median(self._learner_s)
        asks_s = now_s if self._waits else max(now_s, self._since_s + update_s)
        return asks_s + steps_ahead * update_s

    def early_s(self, now_s: float, steps_ahead: int) -> float:
        """The seconds that such a tree should still wait for its start; 0: it starts now."""
        if not self._lead_s:
            return 0.0
        early_s = self.due_s(now_s, steps_ahead) - self._lead_s - now_s
        return 0.0 if early_s < LEAST_S else early_s
