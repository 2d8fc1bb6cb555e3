"""What the processes of a run hold, and whether it grows: memory, descriptors, shared memory.

    benchmarks/bench.py soak [--json -] [--minutes 30]

The calm run of a fault storm (chaos.py): reciting servers, a real learner, checkpoints,
a journal that is rotated. Each process is looked at every second; what it holds more and more of is
a slope by least squares, over the second half of the time, when caches are warm and buffers have
their size. Open connections are counted apart from other descriptors: there is one for each turn
that runs, and as many as the queue lets run are no growth. One that its other end has closed counts
among the others.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean, linear_regression
from typing import NamedTuple

import psutil
from msgspec import Struct

from benchmarks.parts.chaos import MAX_STALENESS, Run, Servers, Size, make_model, write_workspace

MEMORY = Path("/dev/shm")
PATIENCE_S = 300.0  # for the first step, and beyond the time
MAX_MB = 16.0  # that a process may hold more at the end of the second half than at its beginning
MAX_SHARE = 0.05  # or that much of what it holds
MAX_DESCRIPTORS = 4.0
OTHERS = 16  # connections beside those of turns: to ranks, to look after servers


class Held(Struct):
    """Of one process, or of the shared memory: means of the second half, and how they grow;
    `most_connections` is the largest number seen in it, `expected_connections` what turns and what
    looks after servers may hold."""

    memory_mb: float
    mb_an_hour: float
    descriptors: float
    descriptors_an_hour: float
    connections_an_hour: float
    most_connections: float
    expected_connections: int
    seconds: float  # of the second half

    @property
    def grows(self) -> bool:
        hours = self.seconds / 3600
        more_mb, more_files = self.mb_an_hour * hours, self.descriptors_an_hour * hours
        more_connections = self.connections_an_hour * hours
        return (
            more_mb > max(MAX_MB, MAX_SHARE * self.memory_mb)
            or more_files > MAX_DESCRIPTORS
            or (
                more_connections > MAX_DESCRIPTORS
                and self.most_connections > self.expected_connections
            )
        )


class Look(NamedTuple):
    """What one process held then; connections that are open count apart from descriptors."""

    seconds: float
    mb: float
    descriptors: float
    connections: float = 0.0


def expected_connections(size: Size) -> int:
    """Of one process: a turn that runs is a connection, and as many branches grow at once as the
    queue has trees."""
    return size.prompts * (MAX_STALENESS + 1) * size.group_size + OTHERS


def run(seconds: float, size: Size = Size()) -> dict[str, Held]:  # noqa: B008 - it is frozen
    """What each process held, by its name, and under "shared memory" the run's files there."""
    looks: dict[str, list[Look]] = {}
    with tempfile.TemporaryDirectory(prefix="agentenv-soak-") as name:
        folder = Path(name)
        make_model(folder)
        with Servers(size, folder) as servers:
            write_workspace(folder, size, servers.ports)
            soaked = Run(folder, "soak")
            with soaked.process() as process:
                soaked.watch(process, lambda: soaked.witness.num_steps > 0, PATIENCE_S)
                begin = time.monotonic()

                def is_over() -> bool:
                    now = time.monotonic() - begin
                    look(psutil.Process(process.pid), list(servers.pids().values()), now, looks)
                    time.sleep(1.0)
                    return now > seconds

                soaked.watch(process, is_over, seconds + PATIENCE_S)
                process.send_signal(signal.SIGTERM)
                soaked.end(process)
    expected = expected_connections(size)
    return {name: held(of_one, seconds, expected) for name, of_one in looks.items()}


def look(
    root: psutil.Process, servers: list[int], now: float, looks: dict[str, list[Look]]
) -> None:
    """Note what each process holds now."""
    found = {"controller": root}
    found |= {f"server {n}": psutil.Process(pid) for n, pid in enumerate(servers)}
    for one in root.children(recursive=True):
        with suppress(psutil.Error):
            found[f"{name_of(one)} {one.pid}"] = one
    for name, one in found.items():
        with suppress(psutil.Error):
            used = one.memory_info().rss - one.memory_info().shared
            num_open = num_connections(one)
            seen = Look(now, used / 1e6, float(one.num_fds() - num_open), float(num_open))
            looks.setdefault(name, []).append(seen)
    sizes = []
    for folder in open_in_memory(root.pid):
        for parent, _, names in os.walk(folder):  # where weights come and go meanwhile
            for name in names:
                with suppress(OSError):
                    sizes.append(os.stat(os.path.join(parent, name)).st_size)
    seen = Look(now, sum(sizes) / 1e6, float(len(sizes)))
    looks.setdefault("shared memory", []).append(seen)


def num_connections(process: psutil.Process) -> int:
    """Those whose both ends are open."""
    found = process.net_connections(kind="tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED for one in found)


def open_in_memory(pid: int) -> set[Path]:
    """The folders in shared memory that a process has open: it holds a lock on its own."""
    found = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            path = Path(os.readlink(one))
            if MEMORY in path.parents and path.is_dir():
                found.add(path)
    return found


def name_of(process: psutil.Process) -> str:
    """What it runs: a module, or else its program."""
    words = process.cmdline()
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return Path(words[0]).name if words else process.name()


def held(looks: list[Look], seconds: float, expected: int = OTHERS) -> Held:
    """The figures of one process, from the looks of the second half."""
    late = [one for one in looks if one.seconds > seconds / 2] or looks
    times = [one.seconds for one in late]

    def an_hour(values: list[float]) -> float:
        if len(set(times)) < 2:
            return 0.0
        return round(linear_regression(times, values).slope * 3600, 1)

    memory, descriptors = [one.mb for one in late], [one.descriptors for one in late]
    connections = [one.connections for one in late]
    return Held(
        memory_mb=round(fmean(memory), 1),
        mb_an_hour=an_hour(memory),
        descriptors=round(fmean(descriptors), 1),
        descriptors_an_hour=an_hour(descriptors),
        connections_an_hour=an_hour(connections),
        most_connections=max(connections),
        expected_connections=expected,
        seconds=round(times[-1] - times[0], 1),
    )
