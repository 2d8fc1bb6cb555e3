"""What rollouts wait for: who waits longer than expected is named, in the log and on the terminal.

    12 rollouts wait for the tool 'search' longer than expected; the first since 14:03:22 (75 s):
    task t17, tree 5, branch 0.1

What is expected is no limit: a rollout that takes too long is ended by those (`limits`), and what
is said helps to find out why.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

from agentenv.actor import PAUSED, Actor, Awaited
from agentenv.offload import look_again
from agentenv.pipelines.run.terminal import View
from agentenv.recovery import TURN

LOOK_S = 5.0
EXPECTED_S = 60.0
LONG_S = 300.0  # of places, which a busy engine gives late, and of whole turns
AGAIN = 4  # told again when the wait has become so many times longer
_OLDEST = attrgetter("since", "tree", "branch")


def expected_s(what: str) -> float:
    """How long a rollout may wait for this before it is told of."""
    if what == PAUSED:  # by a person, who knows
        return math.inf
    return LONG_S if what == TURN or what.startswith("a place") else EXPECTED_S


def line_of(what: str, waiting: Sequence[Awaited], now: float) -> str:
    """Who waits for `what`, for people; `now` is the loop's time."""
    first = min(waiting, key=_OLDEST)
    seconds = now - first.since
    who = "1 rollout waits" if len(waiting) == 1 else f"{len(waiting)} rollouts wait"
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    branch = f", branch {first.branch}" if first.branch else ""
    return (
        f"{who} for {what}, the first since {since} ({seconds:.0f} s): task {first.task_id}, tree "
        f"{first.tree}{branch}"
    )


def by_what(awaited: Iterable[Awaited]) -> dict[str, list[Awaited]]:
    """Those that wait for the same."""
    found: dict[str, list[Awaited]] = {}
    for one in awaited:
        found.setdefault(one.what, []).append(one)
    return found


@contextmanager
def watched(actors: Callable[[], Iterable[Actor]], view: View) -> Iterator[None]:
    """Inside, `view` tells who waits longer than expected, and an interruption who is waited
    for."""
    waits = Waits(actors, view.warn)
    watching = asyncio.create_task(waits.run())
    view.behind = waits.longest
    try:
        yield
    finally:
        watching.cancel()
        view.behind = str


class Waits:
    """Looks at the rollouts of `actors`, and tells who waits longer than expected; each wait once,
    and again when it has become AGAIN times as long."""

    def __init__(self, actors: Callable[[], Iterable[Actor]], tell: Callable[[str], None]) -> None:
        self._actors, self._tell = actors, tell
        self._told: dict[str, tuple[float, float]] = {}  # by what: since when, and the next length

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await look_again(LOOK_S)
            self.look()

    def look(self) -> None:
        """Once."""
        now = asyncio.get_running_loop().time()
        longest: dict[str, float] = {}
        for actor in self._actors():
            for what, since in actor.longest().items():
                longest[what] = min(since, longest.get(what, since))
        self._told = {what: told for what, told in self._told.items() if what in longest}
        for what, since in longest.items():
            before, due_s = self._told.get(what, (since, expected_s(what)))
            if since > before:  # that wait is over, and this one is another
                due_s = expected_s(what)
            if now - since >= due_s:
                group = [one for one in self._awaited() if one.what == what]
                late = [one for one in group if now - one.since >= expected_s(what)]
                self._tell(line_of(what, late, now))
                due_s = AGAIN * (now - since)
            self._told[what] = since, due_s

    def longest(self) -> str:
        """Who has waited longest, for whoever waits for them to end; empty: there are none."""
        now = asyncio.get_running_loop().time()
        awaited = list(self._awaited())
        if not awaited:
            return ""
        what = min(awaited, key=_OLDEST).what
        return line_of(what, by_what(awaited)[what], now)

    def _awaited(self) -> Iterator[Awaited]:
        return (one for actor in self._actors() for one in actor.awaited())
