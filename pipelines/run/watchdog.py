"""The watchdogs of a command: one reports code that blocks the event loop and lets Ctrl-C through,
one reports waits of rollouts that are longer than expected.

Everything of a run shares one loop. A tool that sleeps, or computes for seconds, holds up every
rollout, and nothing on the loop can say so; a thread beside it can. It also counts signals (Ctrl-C,
SIGTERM, and SIGHUP of a terminal that is closed), so that they end a process whose main thread is
stuck:

    the first two       let the work end, which saves first
    the second          ends a process whose loop does not run for GRACE_S more
    a third, or later   ends the process at once, if it comes within GRACE_S of the one before

Expected times are no limits: `limits` end a rollout that takes too long.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import os
import resource
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING

from agentenv.offload import poll_pause

if TYPE_CHECKING:
    from asyncio import SelectorEventLoop as Loop

    from agentenv.actor import Actor, Awaited
    from agentenv.pipelines.run.terminal import View
else:
    try:
        from uvloop import Loop
    except ImportError:
        from asyncio import SelectorEventLoop as Loop

HELD_S = (1.0, 10.0, 100.0)  # a loop that did not run for so long is reported
BEAT_S = 0.2
GRACE_S = 5.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_INTERRUPTED = 130
NUM_FRAMES = 12  # of a stack that is shown
FREEZE_S, FULL_S, MOST_S = 1.0, 300.0, 3600.0  # between looks for garbage
RARELY = 1000  # of the time, the part in which a look may hold up the loop
FEW = 10_000  # pieces of garbage, for which the next look may come later
MUCH_BYTES = 1 << 30
SWITCH_S = 0.001
LIBRARY = sysconfig.get_paths()["stdlib"]
# Of glibc's malloc, with their names for `mallopt`.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
TRIM_BYTES, MMAP_BYTES = 1 << 20, 1 << 16

_num_rolling = 0  # how often `rolling_out` is entered
_most_held_s: float | None = None  # of `ended_when_held`


@contextmanager
def rolling_out() -> Iterator[None]:
    """Active while rollouts grow: reports code that blocks the loop, and garbage is looked
    for at times that hold up nobody; what is there already is not looked through.

    Left alone, collections walk the tokens of every rollout: a third of the controller's time, and
    stalls of over a second. Trees are freed by counting references; only cycles wait longer.
    """
    global _num_rolling
    collecting: asyncio.Task[None] | None = None
    if "torch" not in sys.modules:  # its tensors on the CPU would be mapped anew each time
        _set_malloc({M_TRIM_THRESHOLD: TRIM_BYTES, M_MMAP_THRESHOLD: MMAP_BYTES})
    before, switch_s = gc.get_threshold(), sys.getswitchinterval()
    _num_rolling += 1
    # Each write to a file or a socket gives Python's lock away; the loop waits this long to have it
    # back from a thread that computes.
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    with suppress(RuntimeError):  # no loop runs
        collecting = asyncio.get_running_loop().create_task(_collect())
    try:
        yield
    finally:
        if collecting is not None:
            collecting.cancel()
        sys.setswitchinterval(switch_s)
        gc.set_threshold(*before)
        gc.unfreeze()
        _num_rolling -= 1


@contextmanager
def ended_when_held(seconds: float) -> Iterator[None]:
    """Inside, the process exits when the loop does not run for this long: its controller has
    dropped it by then.
    """
    global _most_held_s
    _most_held_s = seconds
    try:
        yield
    finally:
        _most_held_s = None


async def _collect() -> None:
    """Set aside what is new, every FREEZE_S, and look for garbage everywhere each FULL_S, more
    seldom where a look takes long (RARELY) or finds little (FEW), or when the process has grown by
    MUCH_BYTES; until cancelled.

    Each look costs what it looks at, and at 10,000 rollouts what is new since a moment ago is much:
    looks five times a second took 100 us of each env step, those that Python itself makes (counting
    what was made less what was freed) stalled all for 360 ms.
    """
    looked, peak, pause_s = time.monotonic(), _peak_bytes(), FULL_S
    while True:
        await poll_pause(FREEZE_S)
        began = time.monotonic()
        if began - looked > pause_s or _peak_bytes() - peak > MUCH_BYTES:
            gc.unfreeze()
            num_found = gc.collect()
            looked, peak = time.monotonic(), _peak_bytes()
            pause_s = pause_after(pause_s, looked - began, num_found)
        gc.freeze()


def pause_after(pause_s: float, took_s: float, num_found: int) -> float:
    """Seconds until the next look, after one that came `pause_s` behind its last one."""
    later_s = min(2 * pause_s, MOST_S) if num_found < FEW else FULL_S
    return max(FULL_S, RARELY * took_s, later_s)


def _peak_bytes() -> int:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def share_heap() -> None:
    """Let all threads of this process take memory from one heap. Each has one of its own else, and
    CPU time that a step needed in a thread is missing for the next: a tenth at 10,000 rollouts."""
    _set_malloc({M_ARENA_MAX: 1})


def _set_malloc(options: dict[int, int]) -> None:
    """Memory that is free goes back to the system beyond so many bytes, for instance; nothing where
    the C library has no such options."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in options.items():
            mallopt(option, value)


class CommandLoop(Loop):
    """The loop of a command: uvloop's where it is installed, else Python's own.

    Rollout workers and the controller talk through sockets all the time, which uvloop does in C: a
    fifth of the controller's CPU with a worker.
    """

    on_run: Callable[[], None] | None = None  # called each time that the loop begins to run

    def run_forever(self) -> None:
        if self.on_run is not None:
            self.call_soon(self.on_run)
        super().run_forever()


class Watchdog:
    """A thread that looks whether `loop`, which runs in the main thread or within `look` in the one
    that calls it, still goes round.

    `report` is called from that thread with who holds the loop while rollouts grow, and with its
    stack. Signals are counted within `watch`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Callable[[str], None]) -> None:
        self._loop, self._report = loop, report
        self._beat = time.monotonic()
        self._queued = 0.0  # `queued_s` of then
        self._pending = False  # a beat is requested
        self._reported = 0  # of HELD_S, in this stall
        self._num_signals = 0
        self._last_signal = 0.0
        self._ending = 0.0  # when the process is ended, after the second signal
        self._looked_at = threading.main_thread()
        self._signals, self._wakeup = socket.socketpair()
        self._others: list[int] = []  # descriptors of those who heard of signals before

    @contextmanager
    def watch(self) -> Iterator[None]:
        """To be entered in the main thread, around everything that runs on the loop."""
        self._wakeup.setblocking(False)
        before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        if isinstance(self._loop, CommandLoop):
            self._loop.on_run = self.hear
        with self._looking():
            try:
                yield
            finally:
                signal.set_wakeup_fd(before)
                if isinstance(self._loop, CommandLoop):
                    self._loop.on_run = None

    @contextmanager
    def look(self) -> Iterator[None]:
        """The same in any thread, without signals."""
        self._looked_at = threading.current_thread()
        with self._looking():
            yield

    @contextmanager
    def _looking(self) -> Iterator[None]:
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            self._wakeup.close()
            self._thread.join(GRACE_S)
            self._signals.close()
            while self._others:
                os.close(self._others.pop())

    def hear(self) -> None:
        """Have the system notify this thread of signals, which notifies the one before it: uvloop
        takes that place each time that it begins to run.

        Whatever runs first on the loop calls this, too, since the loop may be held from then on.
        """
        before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        if before not in (-1, self._wakeup.fileno()):
            self._others.append(os.dup(before))  # its owner closes its own

    def _pass_on(self, numbers: bytes) -> None:
        for other in self._others[-1:]:
            with suppress(OSError):  # it does not listen any more
                os.write(other, numbers)

    def _run(self) -> None:
        self._signals.settimeout(BEAT_S)
        while True:
            try:
                numbers = self._signals.recv(64)
                if not numbers:
                    return
                self._count(numbers)
                self._pass_on(numbers)
            except TimeoutError:
                pass
            self._look()
            # A loop that runs has had the signals too, and may be saving a checkpoint.
            is_held = self._pending and time.monotonic() - self._beat > HELD_S[0]
            if self._ending and time.monotonic() > self._ending and is_held:
                self._end(f"{GRACE_S:g} s after the second signal (Ctrl-C or SIGTERM)")

    def _count(self, numbers: bytes) -> None:
        num_signals, now = sum(numbers.count(one) for one in ENDING), time.monotonic()
        if not num_signals:
            return
        self._num_signals += num_signals
        if self._num_signals >= 3 and (num_signals > 1 or now - self._last_signal < GRACE_S):
            self._end("at once by a third signal; unsaved work is lost")
        if self._num_signals >= 2 and not self._ending:
            self._ending = now + GRACE_S
        self._last_signal = now

    def _end(self, how: str) -> None:
        try:
            self._report(f"ended {how}\n{self._stack()}")
        finally:  # also if the report fails
            os._exit(EXIT_INTERRUPTED)

    def _look(self) -> None:
        if not self._pending:
            self._pending, self._reported, self._beat = True, 0, time.monotonic()
            self._queued = queued_s(self._looked_at.native_id)
            try:
                self._loop.call_soon_threadsafe(self._clear_pending)
            except RuntimeError:  # the loop is closed; what is left is the end of the command
                return
        held_s = time.monotonic() - self._beat
        if _most_held_s is not None and held_s > _most_held_s:
            self._end(f"because {self._holder()} blocked the event loop for {held_s:.0f} s")
        if _num_rolling and self._reported < len(HELD_S) and held_s > HELD_S[self._reported]:
            self._reported += 1
            queued = queued_s(self._looked_at.native_id) - self._queued
            if queued > held_s / 2:  # where it stands says nothing
                return self._say(
                    f"the event loop has not run for {held_s:.0f} s, and waited for a core for "
                    f"{queued:.1f} s of that: other processes keep the machine busy"
                )
            self._say(
                f"{self._holder()} blocks every rollout: the event loop has not run for "
                f"{held_s:.0f} s; long work belongs in a thread or a process\n"
                f"{self._stack()}"
            )

    def _say(self, text: str) -> None:
        with suppress(OSError):  # a terminal that is gone; signals are still to be counted
            self._report(text)

    def _clear_pending(self) -> None:
        self._pending = False

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._looked_at.ident or 0)

    def _holder(self) -> str:
        return holder(self._frame())

    def _stack(self) -> str:
        return "".join(traceback.format_stack(self._frame())[-NUM_FRAMES:]).rstrip()


def queued_s(thread: int | None = None) -> float:
    """Seconds that a thread, the main one by default, has been ready to run while no core was free;
    0 where the system does not count them."""
    try:
        with open(f"/proc/self/task/{thread or os.getpid()}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def holder(frame: FrameType | None) -> str:
    """The code that runs in this frame: a tool by name, else the innermost code outside of Python's
    library.
    """
    place = "the event loop"
    inner = True
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        owner = frame.f_locals.get("self")
        tool = getattr(owner, "name", None)
        if name == "call" and isinstance(tool, str) and hasattr(owner, "schema"):
            return f"the tool {tool!r}" + ("" if inner else f" ({place})")
        if inner and not path.startswith((LIBRARY, "<")):
            place, inner = f"{name} in {path}:{frame.f_lineno}", False
        frame = frame.f_back
    return place


LOOK_S = 5.0
EXPECTED_S = 60.0
LONG_S = 300.0  # of places, which a busy engine gives late, and of whole turns
AGAIN = 4  # factor by which a wait grows until it is reported again
_OLDEST = attrgetter("since", "tree", "branch")


def expected_s(what: str) -> float:
    """The time after which a rollout's wait for this is reported."""
    from agentenv.actor import PAUSED  # slow to load
    from agentenv.recovery import TURN

    if what == PAUSED:  # by a person, who knows
        return math.inf
    return LONG_S if what == TURN or what.startswith("a place") else EXPECTED_S


def line_of(what: str, waiting: Sequence[Awaited], now: float) -> str:
    """The rollouts that wait for `what`, as text; `now` is the loop's time."""
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
    """Rollouts with the same wait."""
    found: dict[str, list[Awaited]] = {}
    for one in awaited:
        found.setdefault(one.what, []).append(one)
    return found


@contextmanager
def watched(actors: Callable[[], Iterable[Actor]], view: View) -> Iterator[None]:
    """Inside, `view` reports waits that are longer than expected, and an interruption who is waited
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
    """Polls the rollouts of `actors` and reports waits that are longer than expected; each once,
    and again when it has become AGAIN times as long."""

    def __init__(
        self, actors: Callable[[], Iterable[Actor]], report: Callable[[str], None]
    ) -> None:
        self._actors, self._report = actors, report
        self._reported: dict[
            str, tuple[float, float]
        ] = {}  # by what: since when, and the next length

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await poll_pause(LOOK_S)
            self.look()

    def look(self) -> None:
        """Once."""
        now = asyncio.get_running_loop().time()
        longest: dict[str, float] = {}
        for actor in self._actors():
            for what, since in actor.longest().items():
                longest[what] = min(since, longest.get(what, since))
        self._reported = {what: one for what, one in self._reported.items() if what in longest}
        for what, since in longest.items():
            before, due_s = self._reported.get(what, (since, expected_s(what)))
            if since > before:  # that wait is over, and this one is another
                due_s = expected_s(what)
            if now - since >= due_s:
                group = [one for one in self._awaited() if one.what == what]
                late = [one for one in group if now - one.since >= expected_s(what)]
                self._report(line_of(what, late, now))
                due_s = AGAIN * (now - since)
            self._reported[what] = since, due_s

    def longest(self) -> str:
        """The longest wait, for an interrupted user; empty: none."""
        now = asyncio.get_running_loop().time()
        awaited = list(self._awaited())
        if not awaited:
            return ""
        what = min(awaited, key=_OLDEST).what
        return line_of(what, by_what(awaited)[what], now)

    def _awaited(self) -> Iterator[Awaited]:
        return (one for actor in self._actors() for one in actor.awaited())
