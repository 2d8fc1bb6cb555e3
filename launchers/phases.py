"""Wall and CPU seconds of the phases of a run, all its processes counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


def cpu_seconds() -> float:
    """CPU time of this process and of all below it, ended ones included."""
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


class Stopwatch:
    """Wall seconds of named parts since they were taken last."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def take(self) -> dict[str, float]:
        """The seconds as metrics, time/NAME_s; the parts begin anew."""
        taken, self._seconds = self._seconds, {}
        return {f"time/{name}_s": seconds for name, seconds in taken.items()}


class PhaseClock:
    """Adds up seconds by phase; a phase may be entered many times, also from a resumed run."""

    def __init__(self, wall_s: dict[str, float], cpu_s: dict[str, float]) -> None:
        self.wall_s = wall_s
        self.cpu_s = cpu_s

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        wall, cpu = time.monotonic(), cpu_seconds()
        try:
            yield
        finally:
            self.wall_s[name] = self.wall_s.get(name, 0.0) + time.monotonic() - wall
            self.cpu_s[name] = self.cpu_s.get(name, 0.0) + cpu_seconds() - cpu
