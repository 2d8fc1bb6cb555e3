"""The replay queue: a bounded FIFO of running rollouts with an exact bound on staleness.

    feeder   reserve() --slot--> start the rollout, put() its asyncio task, in start order
    learner  get() the next step's trees, update, publish, then release() their slots

A slot is held from before the rollout starts until weights trained on it are live. There are
    capacity = groups_per_step * (max_staleness + 1)
slots, and trees are delivered in start order. A tree that starts while policy version v is live
has at most capacity - 1 others before it, so it is trained at version v + max_staleness at the
latest. Delivery in completion order would break the bound and starve long, hard tasks. The cost of
start order is that the learner may wait for one slow tree; the actor's deadlines limit this wait.

Within the bound, `Pace` delays the start of a tree until the learner is expected to need it, so
that trees are not staler than necessary.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median
from typing import NamedTuple

from msgspec import Struct

from agentenv.base.deadline import at_most
from agentenv.base.tree import TrajectoryTree


class TreeTimes(Struct):
    """Start and end of a rollout, and the time at which the learner was expected to request its
    tree (loop times, seconds)."""

    began_s: float
    ended_s: float
    due_s: float

    def needed_s(self, requested_s: float) -> float:
        """The lead with which the tree would have ended exactly at the learner's request."""
        return self.ended_s - self.began_s + max(0.0, self.due_s - max(requested_s, self.began_s))


class Waiting(NamedTuple):
    """An undelivered rollout. `is_new`: its time is measured."""

    rollout: asyncio.Task[TrajectoryTree]
    times: TreeTimes
    is_new: bool


class Flow:
    """Waiting times between feeder and learner, in seconds, since the last `take`: from a tree's
    end to its delivery; in which no tree could begin, since all slots were held; and in which the
    next tree was not needed yet."""

    def __init__(self) -> None:
        self.ages_s: list[float] = []
        self.blocked_s = self.early_s = 0.0

    def take(self) -> dict[str, float]:
        """The metrics, flow/NAME; resets them."""
        figures = {"flow/producer_blocked_s": self.blocked_s, "flow/producer_early_s": self.early_s}
        if self.ages_s:
            figures |= {"flow/age_s": fmean(self.ages_s), "flow/age_max_s": max(self.ages_s)}
        self.ages_s, self.blocked_s, self.early_s = [], 0.0, 0.0
        return figures


class ReplayQueue:
    """Slots and trees between the feeder and the learner. One consumer."""

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        """With `max_staleness` 0 a tree starts as soon as a slot is free, otherwise when the
        learner is expected to need it."""
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.capacity = groups_per_step * (max_staleness + 1)
        self.num_reserved = 0
        self.flow = Flow()
        self._pace = Pace(max_staleness) if max_staleness else None
        self._num_taken = 0  # by the running get()
        self._kept: deque[bool] = deque([True], maxlen=4 * groups_per_step)  # of the last trees
        self._rollouts: deque[Waiting] = deque()
        self._freed = asyncio.Event()
        self._changed = asyncio.Event()  # the learner has requested or received trees
        self._arrived = asyncio.Event()
        self._closed = False

    async def reserve(self, *, at_once: bool = False) -> float:
        """Wait until another rollout may start without becoming too stale and, unless `at_once`,
        until the learner is expected to need it. Returns the seconds of the second wait."""
        now = asyncio.get_running_loop().time
        if self.num_reserved >= self.capacity:
            began_s = now()
            while self.num_reserved >= self.capacity:
                self._freed.clear()
                await self._freed.wait()
            self.flow.blocked_s += now() - began_s
        began_s = now()
        while self._pace is not None and not at_once:
            left_s = self._pace.early_s(now(), self._steps_ahead())
            if not left_s:
                break
            self._changed.clear()
            await at_most(left_s, self._changed.wait())
        early_s = now() - began_s
        self.flow.early_s += early_s
        self.num_reserved += 1
        return early_s

    def _steps_ahead(self) -> int:
        """The expected number of batches before the one with the next tree."""
        share = sum(self._kept) / len(self._kept)
        return int(self._num_taken + len(self._rollouts) * share) // self.groups_per_step

    def put(self, rollout: asyncio.Task[TrajectoryTree], *, is_new: bool = True) -> None:
        """Add a rollout that holds a slot, right after its start. If it is not new, it resumes a
        tree of an earlier process, and its time is not measured."""
        now_s = rollout.get_loop().time()
        due_s = now_s if self._pace is None else self._pace.due_s(now_s, self._steps_ahead())
        times = TreeTimes(now_s, now_s, due_s)
        rollout.add_done_callback(partial(_ended, times))
        self._rollouts.append(Waiting(rollout, times, is_new))
        self._arrived.set()

    def finish(self) -> None:
        """Mark the end of the rollouts; get() then returns the remaining trees, finally none."""
        self._closed = True
        self._arrived.set()

    async def get(
        self, keep: Callable[[TrajectoryTree], bool] = lambda tree: True
    ) -> list[TrajectoryTree]:
        """The trees of the next step, in start order.

        Trees that `keep` rejects release their slots at once and are replaced by later ones. No
        tree is lost if get() is cancelled or `keep` raises: trees already taken return to the
        front.
        """
        now = asyncio.get_running_loop().time
        if self._pace is not None:
            self._pace.learner_requests(now())
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
                    self.flow.ages_s.append(now() - one.times.ended_s)
                    self.release(1)
                self._changed.set()
        except BaseException:
            self._rollouts.extendleft(reversed(taken))
            raise
        finally:
            self._num_taken = 0
        if self._pace is not None:
            self._pace.learner_takes(now(), [one.times for one in taken if one.is_new])
            self._changed.set()
        self.flow.ages_s += [now() - one.times.ended_s for one in taken]  # they form a step
        return [one.rollout.result() for one in taken]

    def release(self, count: int) -> None:
        """Release the slots of trees whose weights are live, or that will not be trained."""
        assert 0 <= count <= self.num_reserved
        self.num_reserved -= count
        self._freed.set()

    def drain(self) -> list[asyncio.Task[TrajectoryTree]]:
        """Remove all undelivered rollouts, for the caller to cancel."""
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
        """Finished rollouts that wait for delivery."""
        return sum(one.rollout.done() for one in self._rollouts)


def _ended(times: TreeTimes, rollout: asyncio.Task[TrajectoryTree]) -> None:
    times.ended_s = rollout.get_loop().time()


NUM_UPDATES = 5  # window of the median, which ignores an update with an evaluation
NARROW = 0.1  # smaller: fewer waits of the learner; larger: staleness falls sooner
LEAST_S = 1e-3  # a shorter wait would not advance a clock that rounds


class Pace:
    """Predicts when the learner needs a tree, and when the tree must start. Times are loop times,
    durations are in seconds.

    A tree that ends before the learner needs it only becomes stale. So a tree starts `lead` seconds
    before the learner is expected to request it:

        learner   trains step c ........ | get(), trains c+1 ....... | get(), trains c+2
                                         ^ now + the rest of L       ^ + L
        tree of step c+2                       | starts .. lead .... |

    L is the median time of the recent updates. When the learner has received a batch, the lead that
    it needed is known: the time of its slowest tree, plus the time by which the learner's request
    came earlier than expected at the start of that tree. Then

        lead <- max(lead, need)                        if the learner had to wait for its trees, or
                                                       they started before L was known;
        lead <- lead - NARROW * max(lead - need, 0)    otherwise.

    Only a wait of the learner increases the lead, and only to the need of this batch; a long tree
    without a wait does not. Otherwise there would be a feedback loop: more trees in flight make
    trees slower, which would increase the lead again. The slots limit the lead. Until the lead and
    L are known, and while the learner waits for trees of the current step, trees start at once.
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self._lead_s = 0.0
        self._updates_s: deque[float] = deque(maxlen=NUM_UPDATES)
        self._since_s = 0.0  # start of the learner's current state, waiting or busy
        self._waits = True

    def learner_requests(self, now_s: float) -> None:
        """The learner is ready for a batch."""
        if not self._waits:
            self._updates_s.append(now_s - self._since_s)
            self._since_s, self._waits = now_s, True

    def learner_takes(self, now_s: float, trees: Sequence[TreeTimes]) -> None:
        """The learner has received its batch; `trees` are its measured trees."""
        requested_s = self._since_s
        late = [tree.needed_s(requested_s) for tree in trees if tree.ended_s > requested_s]
        first = [tree.needed_s(requested_s) for tree in trees if tree.due_s <= tree.began_s]
        if late or first:
            self._lead_s = max(self._lead_s, *late, *first)
        elif trees:
            needed_s = max(tree.needed_s(requested_s) for tree in trees)
            self._lead_s -= NARROW * max(0.0, self._lead_s - needed_s)
        if self._updates_s:
            most_s = (self.max_staleness + 1) * median(self._updates_s)
            self._lead_s = min(self._lead_s, most_s)
        self._since_s, self._waits = now_s, False

    def due_s(self, now_s: float, steps_ahead: int) -> float:
        """When the learner is expected to request a tree; `steps_ahead` batches come before its
        batch."""
        if not self._updates_s:
            return now_s
        update_s = median(self._updates_s)
        request_s = now_s if self._waits else max(now_s, self._since_s + update_s)
        return request_s + steps_ahead * update_s

    def early_s(self, now_s: float, steps_ahead: int) -> float:
        """The seconds by which the start of such a tree should be delayed; 0: start now."""
        if not self._lead_s:
            return 0.0
        early_s = self.due_s(now_s, steps_ahead) - self._lead_s - now_s
        return early_s if early_s >= LEAST_S else 0.0
