"""The watchdog of a command: reports code that blocks the event loop, and handles Ctrl-C meanwhile.

A run has one event loop. A tool that sleeps, or computes for seconds, blocks every rollout, and
nothing on the loop can report it, but another thread can. That thread also counts signals (Ctrl-C,
SIGTERM, and SIGHUP of a closed terminal), so that they end a process whose main thread is stuck:

    the first two       let the work save and end
    the second          ends the process if its loop does not run within GRACE_S
    a third, or later   ends the process at once, if it comes within GRACE_S of the previous one
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from agentenv.base.offload import poll_pause

if TYPE_CHECKING:
    from asyncio import SelectorEventLoop as Loop

else:
    try:
        from uvloop import Loop
    except ImportError:
        from asyncio import SelectorEventLoop as Loop

HELD_S = (1.0, 10.0, 100.0)  # blocked times of the loop that are reported
BEAT_S = 0.2
GRACE_S = 5.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_INTERRUPTED = 130
NUM_FRAMES = 12  # shown of a stack
FREEZE_S, FULL_S = 1.0, 300.0  # between freezes; between full collections
RARELY = 1000  # a full collection may take at most 1/RARELY of the time
MUCH_BYTES = 1 << 30
SWITCH_S = 0.001
LIBRARY = sysconfig.get_paths()["stdlib"]
# Parameters of glibc's `mallopt`.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
TRIM_BYTES, MMAP_BYTES = 1 << 20, 1 << 16

_num_rolling = 0  # number of active `rolling_out`
_max_held_s: float | None = None  # of `ended_when_held`


@contextmanager
def rolling_out() -> Iterator[None]:
    """Inside, while rollouts grow, report code that blocks the loop, and collect garbage seldom;
    existing objects are exempt (frozen).

    Python's default collections walk the tokens of every rollout, which takes a third of the
    controller's time and causes stalls of over a second. Reference counts free the trees at once;
    only reference cycles wait longer.
    """
    global _num_rolling
    collecting: asyncio.Task[None] | None = None
    if "torch" not in sys.modules:  # else each CPU tensor would be a new memory mapping
        _set_malloc({M_TRIM_THRESHOLD: TRIM_BYTES, M_MMAP_THRESHOLD: MMAP_BYTES})
    before, switch_s = gc.get_threshold(), sys.getswitchinterval()
    _num_rolling += 1
    # Each write to a file or a socket releases the GIL; the loop then waits this long to get it
    # back from a busy thread.
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
    """Inside, the process exits if the loop is blocked for this long: by then, its controller has
    dropped it.
    """
    global _max_held_s
    _max_held_s = seconds
    try:
        yield
    finally:
        _max_held_s = None


async def _collect() -> None:
    """Freeze new objects every FREEZE_S, and run a full collection every FULL_S, or when the
    process has grown by MUCH_BYTES. The interval grows after a collection that took long (RARELY).
    Runs until cancelled.

    A collection costs time for each object that it visits, and 10,000 rollouts create many objects
    in a moment: five collections per second took 100 us of each env step, and Python's own
    generational collections stalled the loop for 360 ms.
    """
    collected, peak, pause_s = time.monotonic(), _peak_bytes(), FULL_S
    while True:
        await poll_pause(FREEZE_S)
        began = time.monotonic()
        if began - collected > pause_s or _peak_bytes() - peak > MUCH_BYTES:
            gc.unfreeze()
            gc.collect()
            collected, peak = time.monotonic(), _peak_bytes()
            pause_s = max(FULL_S, RARELY * (collected - began))
        gc.freeze()


def _peak_bytes() -> int:
    """The peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def share_heap() -> None:
    """Let all threads of this process allocate from one heap (malloc arena). With an arena per
    thread, memory freed by one thread does not serve the next; a tenth of the CPU at 10,000
    rollouts."""
    _set_malloc({M_ARENA_MAX: 1})


def _set_malloc(options: dict[int, int]) -> None:
    """Set parameters of glibc's malloc; does nothing for other C libraries."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in options.items():
            mallopt(option, value)


class CommandLoop(Loop):
    """The event loop of a command: uvloop's if it is installed, else asyncio's.

    Rollout workers and the controller exchange many messages over sockets, which uvloop handles in
    C: this saves a fifth of the controller's CPU per worker.
    """

    on_run: Callable[[], None] | None = None  # called whenever the loop starts to run

    def run_forever(self) -> None:
        if self.on_run is not None:
            self.call_soon(self.on_run)
        super().run_forever()


class Watchdog:
    """A thread that checks whether `loop` still runs: in the main thread with `watch`, which also
    counts signals, or in the calling thread with `watch_thread`.

    While rollouts grow, the thread calls `report` with the code that blocks the loop, and its
    stack.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Callable[[str], None]) -> None:
        self._loop, self._report = loop, report
        self._beat = time.monotonic()
        self._queued = 0.0  # `queued_s` at the last beat
        self._pending = False  # a beat was requested
        self._reported = 0  # number of thresholds in HELD_S reported in this stall
        self._num_signals = 0
        self._last_signal = 0.0
        self._ending = 0.0  # deadline of the process, after the second signal
        self._watched = threading.main_thread()
        self._signals, self._wakeup = socket.socketpair()
        self._others: list[int] = []  # descriptors that received signals before this one

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Enter this in the main thread, around everything that runs on the loop."""
        self._wakeup.setblocking(False)
        before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        if isinstance(self._loop, CommandLoop):
            self._loop.on_run = self.claim_signals
        with self._running():
            try:
                yield
            finally:
                signal.set_wakeup_fd(before)
                if isinstance(self._loop, CommandLoop):
                    self._loop.on_run = None

    @contextmanager
    def watch_thread(self) -> Iterator[None]:
        """As `watch`, in any thread and without signals."""
        self._watched = threading.current_thread()
        with self._running():
            yield

    @contextmanager
    def _running(self) -> Iterator[None]:
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

    def claim_signals(self) -> None:
        """Become the receiver of signals (signal.set_wakeup_fd), and forward them to the previous
        receiver: uvloop sets its own each time that it starts to run.

        The first code on the loop must call this too, since the loop may block from then on.
        """
        before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        if before not in (-1, self._wakeup.fileno()):
            self._others.append(os.dup(before))  # the owner closes the original

    def _forward(self, numbers: bytes) -> None:
        for other in self._others[-1:]:
            with suppress(OSError):  # it no longer listens
                os.write(other, numbers)

    def _run(self) -> None:
        self._signals.settimeout(BEAT_S)
        while True:
            try:
                numbers = self._signals.recv(64)
                if not numbers:
                    return
                self._count(numbers)
                self._forward(numbers)
            except TimeoutError:
                pass
            self._check()
            # A loop that runs has received the signals too, and may be saving a checkpoint.
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

    def _check(self) -> None:
        if not self._pending:
            self._pending, self._reported, self._beat = True, 0, time.monotonic()
            self._queued = queued_s(self._watched.native_id)
            try:
                self._loop.call_soon_threadsafe(self._clear_pending)
            except RuntimeError:  # the loop is closed: the command ends
                return
        held_s = time.monotonic() - self._beat
        if _max_held_s is not None and held_s > _max_held_s:
            self._end(f"because {self._holder()} blocked the event loop for {held_s:.0f} s")
        if _num_rolling and self._reported < len(HELD_S) and held_s > HELD_S[self._reported]:
            self._reported += 1
            queued = queued_s(self._watched.native_id) - self._queued
            if queued > held_s / 2:  # the stack is not the cause
                return self._try_report(
                    f"the event loop has not run for {held_s:.0f} s, and waited for a core for "
                    f"{queued:.1f} s of that: other processes keep the machine busy"
                )
            self._try_report(
                f"{self._holder()} blocks every rollout: the event loop has not run for "
                f"{held_s:.0f} s; long work belongs in a thread or a process\n"
                f"{self._stack()}"
            )

    def _try_report(self, text: str) -> None:
        with suppress(OSError):  # a closed terminal; the thread must still count signals
            self._report(text)

    def _clear_pending(self) -> None:
        self._pending = False

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._watched.ident or 0)

    def _holder(self) -> str:
        return holder(self._frame())

    def _stack(self) -> str:
        return "".join(traceback.format_stack(self._frame())[-NUM_FRAMES:]).rstrip()


def queued_s(thread: int | None = None) -> float:
    """Seconds that a thread, by default the main one, has been runnable without a free core; 0 if
    the system does not count them."""
    try:
        with open(f"/proc/self/task/{thread or os.getpid()}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def holder(frame: FrameType | None) -> str:
    """A description of the code in this frame: a tool by name, else the innermost function outside
    Python's library.
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
