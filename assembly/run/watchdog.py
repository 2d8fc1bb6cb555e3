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
import os
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

from agentenv.assembly.run.garbage import collecting_seldom
from agentenv.base.errors import EXIT_INTERRUPTED

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
NUM_FRAMES = 12  # shown of a stack
LIBRARY = sysconfig.get_paths()["stdlib"]

_num_rolling = 0  # number of active `rolling_out`
_max_held_s: float | None = None  # of `ended_when_held`


@contextmanager
def rolling_out() -> Iterator[None]:
    """Inside, while rollouts grow, report code that blocks the loop, and collect garbage seldom."""
    global _num_rolling
    _num_rolling += 1
    try:
        with collecting_seldom():
            yield
    finally:
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
        self._watched = threading.current_thread()
        self._signals, self._wakeup = socket.socketpair()
        self._others: list[int] = []  # descriptors that received signals before this one

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Enter this in the main thread, around everything that runs on the loop."""
        self._wakeup.setblocking(False)
        before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        if isinstance(self._loop, CommandLoop):
            self._loop.on_run = self.claim_signals
        with self.watch_thread():
            try:
                yield
            finally:
                signal.set_wakeup_fd(before)
                if isinstance(self._loop, CommandLoop):
                    self._loop.on_run = None

    @contextmanager
    def watch_thread(self) -> Iterator[None]:
        """As `watch`, in any thread and without signals."""
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

    def _run(self) -> None:
        self._signals.settimeout(BEAT_S)
        while True:
            try:
                numbers = self._signals.recv(64)
                if not numbers:
                    return
                self._count(numbers)
                for other in self._others[-1:]:
                    with suppress(OSError):  # it no longer listens
                        os.write(other, numbers)
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
                self._loop.call_soon_threadsafe(setattr, self, "_pending", False)
            except RuntimeError:  # the loop is closed: the command ends
                return
        held_s = time.monotonic() - self._beat
        if _max_held_s is not None and held_s > _max_held_s:
            self._end(f"because {holder(self._frame())} blocked the event loop for {held_s:.0f} s")
        if _num_rolling and self._reported < len(HELD_S) and held_s > HELD_S[self._reported]:
            self._reported += 1
            queued = queued_s(self._watched.native_id) - self._queued
            if queued > held_s / 2:  # the stack is not the cause
                return self._try_report(
                    f"the event loop has not run for {held_s:.0f} s, and waited for a core for "
                    f"{queued:.1f} s of that: other processes keep the machine busy"
                )
            self._try_report(
                f"{holder(self._frame())} blocks every rollout: the event loop has not run for "
                f"{held_s:.0f} s; long work belongs in a thread or a process\n"
                f"{self._stack()}"
            )

    def _try_report(self, text: str) -> None:
        with suppress(OSError):  # a closed terminal; the thread must still count signals
            self._report(text)

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._watched.ident or 0)

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
