"""The replay queue: a bounded FIFO of running rollouts with an exact bound on staleness.

    feeder   reserve() --slot--> start the rollout, put() its asyncio task, in start order
    learner  get() the next step's trees, update, publish, then release() their slots

A slot is held from before the rollout starts until weights trained on it are live. There are
    capacity = groups_per_step * (max_staleness + 1)
slots, and trees are delivered in start order. A tree that starts while policy version v is live
has at most capacity - 1 others before it, so it is trained at version v + max_staleness at the
latest. Delivery in completion order would break the bound and starve long, hard tasks: the price
of start order is that the learner may wait for one slow tree, hence the deadlines of the actor.

Within the bound a tree starts just in time: when the learner is expected to need it (`Pace`), so
that trees are no staler than the learner's share of the work makes them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median

from msgspec import Struct

from agentenv.tree import TrajectoryTree


class Waiting:
    """A rollout that is not delivered, and when it began and ended, on the loop's clock."""

    __slots__ = ("began_s", "due_s", "ended_s", "rollout")

    def __init__(self, rollout: asyncio.Task[TrajectoryTree], due_s: float | None) -> None:
        """`due_s`: when the learner is expected to ask for it; None: its time is no measure."""
        self.rollout = rollout
        self.due_s = due_s
        self.began_s = rollout.get_loop().time()
        self.ended_s: float | None = None
        rollout.add_done_callback(self._ends)

    def _ends(self, rollout: asyncio.Task[TrajectoryTree]) -> None:
        self.ended_s = rollout.get_loop().time()

    def grown(self) -> Grown | None:
        """Its times after its end, if they are a measure."""
        ended_s = self.rollout.get_loop().time() if self.ended_s is None else self.ended_s
        return None if self.due_s is None else Grown(self.began_s, ended_s, self.due_s)

    def age_s(self) -> float:
        """Seconds since it ended; 0 before the loop has come round to that."""
        return 0.0 if self.ended_s is None else self.rollout.get_loop().time() - self.ended_s


class Flow:
    """Waiting times between feeder and learner, since they were taken last."""

    def __init__(self) -> None:
        self._ages_s: list[float] = []
        self._blocked_s = self._early_s = 0.0

    def selected(self, age_s: float) -> None:
        """A tree was taken so long after it was whole."""
        self._ages_s.append(age_s)

    def blocked(self, seconds: float) -> None:
        """So long no tree could begin, as all slots were held."""
        self._blocked_s += seconds

    def early(self, seconds: float) -> None:
        """For this time the next tree was not needed yet."""
        self._early_s += seconds

    def take(self) -> dict[str, float]:
        """The figures as metrics, flow/NAME; they begin anew."""
        ages_s = self._ages_s
        figures = {
            "flow/producer_blocked_s": self._blocked_s,
            "flow/producer_early_s": self._early_s,
        }
        self._ages_s, self._blocked_s, self._early_s = [], 0.0, 0.0
        if ages_s:
            figures["flow/age_s"] = sum(ages_s) / len(ages_s)
            figures["flow/age_max_s"] = max(ages_s)
        return figures


class ReplayQueue:
    """Slots and trees between the feeder and the learner. One consumer."""

    def __init__(
        self, groups_per_step: int, max_staleness: int, *, just_in_time: bool = True
    ) -> None:
        """`just_in_time`: a tree starts when the learner is expected to need it; otherwise as soon
        as a slot is free. With `max_staleness` 0 both are the same."""
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.capacity = groups_per_step * (max_staleness + 1)
        self.num_reserved = 0
        self.flow = Flow()
        self._pace = Pace(max_staleness) if just_in_time and max_staleness else None
        self._num_taken = 0  # by the get() that runs
        self._kept: deque[bool] = deque([True], maxlen=4 * groups_per_step)  # which trees were
        self._rollouts: deque[Waiting] = deque()
        self._freed = asyncio.Event()
        self._changed = asyncio.Event()  # the learner has asked for trees, or has taken them
        self._arrived = asyncio.Event()
        self._closed = False

    async def reserve(self, *, at_once: bool = False) -> float:
        """Wait until one more rollout may start without becoming too stale, and, unless `at_once`,
        until the learner is expected to need it. Returns the seconds of the latter."""
        now = asyncio.get_running_loop().time
        if self.num_reserved >= self.capacity:
            began_s = now()
            while self.num_reserved >= self.capacity:
                self._freed.clear()
                await self._freed.wait()
            self.flow.blocked(now() - began_s)
        began_s = now()
        while self._pace is not None and not at_once:
            left_s = self._pace.early_s(now(), self._steps_ahead())
            if not left_s:
                break
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
        early_s = now() - began_s
        self.flow.early(early_s)
        self.num_reserved += 1
        return early_s

    def _steps_ahead(self) -> int:
        """The batches that are expected to be delivered before the one of the next tree."""
        share = sum(self._kept) / len(self._kept)
        return int(self._num_taken + len(self._rollouts) * share) // self.groups_per_step

    def put(self, rollout: asyncio.Task[TrajectoryTree], *, is_new: bool = True) -> None:
        """Add a rollout that holds a slot, right after it was started. One that is not new goes on
        with what an earlier process began: the time it takes is no measure."""
        due_s = None
        if self._pace is not None and is_new:
            due_s = self._pace.due_s(rollout.get_loop().time(), self._steps_ahead())
        self._rollouts.append(Waiting(rollout, due_s))
        self._arrived.set()

    def finish(self) -> None:
        """No more rollouts will come; get() then returns what is left, at the end nothing."""
        self._closed = True
        self._arrived.set()

    async def get(
        self, keep: Callable[[TrajectoryTree], bool] = lambda tree: True
    ) -> list[TrajectoryTree]:
        """The trees of the next step, in start order.

        Trees that `keep` refuses give their slot back at once and are replaced by later ones.
        Cancelling get() loses no tree, nor does what `keep` raises: those already taken go back to
        the front.
        """
        now = asyncio.get_running_loop().time
        if self._pace is not None:
            self._pace.learner_asks(now())
            self._changed.set()
        taken: list[Waiting] = []
        try:
            while len(taken) < self.groups_per_step:
                if not self._rollouts:
                    if self._closed:
                        break
                    self._arrived.clear()
                    await self._arrived.wait()
                    continue
                await asyncio.wait({self._rollouts[0].rollout})
                one = self._rollouts[0]
                is_kept = keep(one.rollout.result())  # may raise
                self._rollouts.popleft()
                self._kept.append(is_kept)
                if is_kept:
                    taken.append(one)
                    self._num_taken = len(taken)
                else:
                    self.flow.selected(one.age_s())
                    self.release(1)
                self._changed.set()
        except BaseException:
            self._rollouts.extendleft(reversed(taken))
            raise
        finally:
            self._num_taken = 0
        if self._pace is not None:
            self._pace.learner_takes(now(), [*filter(None, (one.grown() for one in taken))])
            self._changed.set()
        for one in taken:  # together they are a step
            self.flow.selected(one.age_s())
        return [one.rollout.result() for one in taken]

    def release(self, count: int) -> None:
        """Give back the slots of trees whose weights are live, or that will not be trained."""
        assert 0 <= count <= self.num_reserved
        self.num_reserved -= count
        self._freed.set()

    def drain(self) -> list[asyncio.Task[TrajectoryTree]]:
        """Take out every rollout that was not delivered, for the caller to cancel."""
        rollouts = [one.rollout for one in self._rollouts]
        self._rollouts.clear()
        self.release(len(rollouts))
        return rollouts

    @property
    def num_waiting(self) -> int:
        """Rollouts put and not yet delivered, finished or not."""
        return len(self._rollouts)

    @property
    def num_ready(self) -> int:
        """Rollouts that have ended and wait to be delivered."""
        return sum(one.rollout.done() for one in self._rollouts)


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
    """When the learner is expected to need a tree, and when the tree must start. Times on the event
    loop's clock, durations in seconds.

    A tree that starts before the learner needs it waits after its end, and is staler for nothing.
    So a tree starts `lead` seconds before the moment at which the learner is expected to ask:

        learner   trains step c ........ | asks, trains c+1 ........ | asks, trains c+2
                                         ^ now + the rest of L       ^ + L
        tree of step c+2                       | starts .. lead .... |

    L is the median time of the recent updates. When the learner has a batch, the lead that the
    batch needed is known: the time of its slowest tree, plus the time by which the learner asked
    sooner than was expected when that tree started. Then

        lead <- max(lead, need)                        if the learner had to wait for its trees, or
                                                       they started before L was known;
        lead <- lead - NARROW * max(lead - need, 0)    otherwise.

    Only a wait widens the lead, and only to what this batch needed: a long tree for which nobody
    waited (where all slots are full, trees take longer) widens nothing. So a short wait cannot fill
    the slots, which would lengthen the trees, which would fill the slots. The lead is at most what
    the slots allow. Until the lead and L are known, and while the learner waits for the trees of
    this very step, a tree starts at once.
    """

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
