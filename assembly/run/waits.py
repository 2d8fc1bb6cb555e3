"""Reports rollouts that wait longer than expected. Expected times are not limits: `limits` ends a
rollout that takes too long."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from agentenv.assembly.run.terminal import View
from agentenv.base.deadline import WaitKind
from agentenv.base.offload import poll_pause
from agentenv.rollout.actor import Actor
from agentenv.rollout.branch import BranchNow

LOOK_S = 5.0
EXPECTED_S = 60.0
LONG_S = 300.0  # for a slot on a busy server, and for a whole turn
AGAIN = 4  # a wait is reported again at AGAIN times its last reported length


def oldest(one: BranchNow) -> tuple[float, int, str]:
    """The order of waits: first the one that most exceeds its expected length, a pause last."""
    return expected_s(one.what) - one.for_s, one.tree, one.branch


def expected_s(what: str) -> float:
    """Seconds after which a rollout's wait for `what` is reported."""
    if what == WaitKind.PAUSED:  # the user requested it
        return math.inf
    return LONG_S if what in (WaitKind.TURN, WaitKind.SLOT) else EXPECTED_S


def clock_text(seconds_ago: float) -> str:
    """The local time of day `seconds_ago`."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_ago))


def line_of(what: str, waiting: Sequence[BranchNow]) -> str:
    """Describes the rollouts that wait for `what`."""
    first = min(waiting, key=oldest)
    seconds = first.for_s
    who = "1 rollout waits" if len(waiting) == 1 else f"{len(waiting)} rollouts wait"
    since = clock_text(seconds)
    branch = f", branch {first.branch}" if first.branch else ""
    return (
        f"{who} for {what}, the first since {since} ({seconds:.0f} s): task {first.task_id}, tree "
        f"{first.tree}{branch}"
    )


def by_what(awaited: Iterable[BranchNow]) -> dict[str, list[BranchNow]]:
    """The waits, grouped by their `what`."""
    found: dict[str, list[BranchNow]] = {}
    for one in awaited:
        found.setdefault(one.what, []).append(one)
    return found


@contextmanager
def watched(actors: Callable[[], Iterable[Actor]], view: View) -> Iterator[None]:
    """Inside, `view` warns of waits that are longer than expected, and an interruption shows the
    longest wait."""
    waits = WaitWatch(actors, view.warn)
    watching = asyncio.create_task(waits.run())
    view.longest_wait = waits.longest
    try:
        yield
    finally:
        watching.cancel()
        view.longest_wait = str


class WaitWatch:
    """Polls the rollouts of `actors` and reports each wait that is longer than expected, and again
    whenever it has become AGAIN times as long."""

    def __init__(
        self, actors: Callable[[], Iterable[Actor]], report: Callable[[str], None]
    ) -> None:
        self._actors, self._report = actors, report
        # By `what`: its start, and the length of the next report, s.
        self._reported: dict[str, tuple[float, float]] = {}

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await poll_pause(LOOK_S)
            self.poll()

    def poll(self) -> None:
        """Check all waits once."""
        now = asyncio.get_running_loop().time()
        longest: dict[str, float] = {}
        for actor in self._actors():
            for what, since in actor.longest().items():
                longest[what] = min(since, longest.get(what, since))
        self._reported = {what: one for what, one in self._reported.items() if what in longest}
        for what, since in longest.items():
            before, due_s = self._reported.get(what, (since, expected_s(what)))
            if since > before:  # the reported wait is over; this is a new one
                due_s = expected_s(what)
            if now - since >= due_s:
                group = [one for one in self._awaited() if one.what == what]
                late = [one for one in group if one.for_s >= expected_s(what)]
                self._report(line_of(what, late))
                due_s = AGAIN * (now - since)
            self._reported[what] = since, due_s

    def longest(self) -> str:
        """A description of the longest wait; empty: none."""
        awaited = list(self._awaited())
        if not awaited:
            return ""
        what = min(awaited, key=oldest).what
        return line_of(what, by_what(awaited)[what])

    def _awaited(self) -> Iterator[BranchNow]:
        return (one for actor in self._actors() for one in actor.awaited())
