"""Clocks of a run: seconds by part of a step, and by phase."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import psutil


@contextmanager
def adding(
    seconds: dict[str, float], name: str, clock: Callable[[], float] | None = None
) -> Iterator[None]:
    """Inside, add the elapsed seconds of `clock`, by default the event loop's, to seconds[name]."""
    clock = clock or asyncio.get_running_loop().time
    start = clock()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + clock() - start


class Stopwatch:
    """Wall seconds of named parts since the last `take`."""

    prefix = "time/"  # of its metrics

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def part(self, name: str) -> AbstractContextManager[None]:
        """Enter this around a part."""
        return adding(self._seconds, f"{self.prefix}{name}_s")

    def take(self) -> dict[str, float]:
        """The seconds as metrics, PREFIX/NAME_s; resets all parts."""
        taken, self._seconds = self._seconds, {}
        return taken


class PhaseClock:
    """Sums seconds by phase; a phase may be entered many times, also by a resumed run."""

    def __init__(self, wall_s: dict[str, float], cpu_s: dict[str, float]) -> None:
        self.wall_s = wall_s
        self.cpu_s = cpu_s

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with adding(self.wall_s, name), adding(self.cpu_s, name, cpu_seconds):
            yield


def cpu_seconds() -> float:
    """CPU time of this process and all its descendants, including ended ones."""
    total = 0.0
    for pid in _with_descendants(os.getpid()):
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _with_descendants(pid: int) -> list[int]:
    """The process and all its descendants. If the kernel lists the children of a process, this
    avoids a search through all processes of the machine."""
    folder = Path(f"/proc/{pid}/task")
    try:
        texts = [(thread / "children").read_text() for thread in folder.iterdir()]
    except OSError:
        if pid != os.getpid():  # it has ended
            return [pid]
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    children = [int(child) for text in texts for child in text.split()]
    return [pid, *(one for child in children for one in _with_descendants(child))]
