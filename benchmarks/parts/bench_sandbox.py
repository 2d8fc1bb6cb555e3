"""Figures of the Python sandbox with numpy and sympy preloaded, on each rung offered here.

    python benchmarks/parts/bench_sandbox.py [--against CHECKOUT ...] [--rounds 10] [--sessions 500]
                                        [--rung RUNG] [--plain]

New session with its first call, warm call, fork of a session with 64 MB of variables: wall
milliseconds, and CPU milliseconds of host, zygote and sessions together. Other checkouts take turns
with this one, and so do two floors: a bare fork of a process of the same size until the child has
answered, and a byte that goes to another process and back. `quiet` is the median of the quietest
round, for machines where others work too. Then calls per second over many live sessions, memory of
each (PSS: what is shared counts in parts), and the processes that are left after closing.
--plain preloads neither, as the quick start does.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any

import psutil

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, os.environ.get("BENCHED", str(HERE)))

if TYPE_CHECKING:
    from agentenv.envs.sandbox.process import Rung
    from agentenv.envs.sandbox.sandbox import Sandbox, SandboxSession

NUM_IN_ROUND = {"new": 12, "warm": 200, "fork": 12}
WHAT = {
    "new": "new session with first call",
    "warm": "warm call",
    "fork": "fork at 64 MB of state",
}
RUNGS: tuple[Rung, ...] = ("namespaces", "landlock")
NUM_CALLS_EACH = 20
TIMEOUT_S = 60.0
PAUSE_S = 0.03  # what ended is buried meanwhile
FIRST = "import numpy, sympy; int(numpy.arange(4).sum()) + sympy.Integer(36)"
PLAIN_FIRST = "import math; math.isqrt(1764)"
WARM = "6 * 7"
STATE = "x = [bytearray(b'x' * 2000) for _ in range(32_000)]; 42"  # 64 MB


# One checkout, in a process of its own.


async def timed(session: SandboxSession, code: str) -> float:
    """Milliseconds of a call."""
    start = time.perf_counter()
    result = await session.run(code, TIMEOUT_S)
    assert result.output == "42", result
    return 1e3 * (time.perf_counter() - start)


async def rounds(sandbox: Sandbox, what: str, num: int, first: str) -> list[float]:
    """Milliseconds of each of `num` operations."""
    if what == "new":
        new = []
        for seed in range(num):
            session = sandbox.session(seed)
            new.append(await timed(session, first))
            session.close()
            await asyncio.sleep(PAUSE_S)
        return new
    session = sandbox.session(0)
    if what == "warm":
        await timed(session, WARM)
        milliseconds = [await timed(session, WARM) for _ in range(num)]
        session.close()
        return milliseconds
    await timed(session, STATE)
    forks = []
    for _ in range(num):
        start = time.perf_counter()
        child: Any = session.fork()
        if inspect.isawaitable(child):
            child = await child
        else:  # of an old checkout: its first call replays
            await timed(child, WARM)
        forks.append(1e3 * (time.perf_counter() - start))
        child.close()
        await asyncio.sleep(PAUSE_S)
    session.close()
    return forks


def cpu_ms() -> float:
    """Of this process and all below it, buried ones too, to 10 ms."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return 1e3 * sum(sum(process.cpu_times()[:4]) for process in processes)


async def worker(rung: Rung, first: str) -> None:
    """Does what it reads, {"new": 12} say, and prints how long each took."""
    from agentenv.envs.sandbox.sandbox import Sandbox
    from agentenv.errors import ConfigError

    sandbox = Sandbox(rungs=(rung,), preload=() if first == PLAIN_FIRST else ("numpy", "sympy"))
    start = time.perf_counter()
    try:
        await sandbox.start()
    except ConfigError as error:
        print(json.dumps(str(error)), flush=True)
        return
    print(json.dumps(time.perf_counter() - start), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        ((what, num),) = json.loads(line).items()
        if what == "many":
            await many(sandbox, num, first)
            continue
        before = cpu_ms()
        milliseconds = await rounds(sandbox, what, num, first)
        await asyncio.sleep(0.2)  # until the zygote has buried them
        answer = {"wall": milliseconds, "cpu": (cpu_ms() - before) / num}
        if what == "fork":
            answer["copied"] = getattr(sandbox.counters, "num_live_forks", 0)
        print(json.dumps(answer), flush=True)
    await sandbox.close()


async def many(sandbox: Sandbox, num: int, first: str) -> None:
    """Prints lines about `num` sessions at once, the last one empty."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    sessions = [sandbox.session(seed) for seed in range(num)]
    start = time.perf_counter()
    await asyncio.gather(*(timed(one, first) for one in sessions))
    print(f"  {num} sessions live after {time.perf_counter() - start:.1f} s")

    async def call(one: SandboxSession) -> None:
        for _ in range(NUM_CALLS_EACH):
            await timed(one, WARM)

    start = time.perf_counter()
    await asyncio.gather(*map(call, sessions))
    rate = num * NUM_CALLS_EACH / (time.perf_counter() - start)
    print(f"  warm calls over {num} live sessions: {rate:,.0f}/s")
    pids = {process.pid for process in psutil.Process().children(recursive=True)} - before
    try:
        each = [pss_bytes(pid) for pid in pids]
        print(f"  memory of a session (PSS): mean {sum(each) / len(each) / 2**20:.2f} MiB")
    except PermissionError:
        print("  memory of a session: cannot be read, run as root")
    for one in sessions:
        one.close()
    await sandbox.close()
    left = psutil.Process().children(recursive=True)
    print(f"  processes left after close: {len(left)}\n", flush=True)


def pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"no Pss for {pid}")


# What the machine needs for the least that could do it.


def floor() -> None:
    """Like a worker: a bare fork, of a process with numpy and sympy, then also with the state, and
    a byte to another process and back."""
    import numpy as numpy
    import sympy as sympy

    state: dict[str, Any] = {}
    gc.collect()
    gc.freeze()
    print(json.dumps(0.0), flush=True)
    for line in sys.stdin:
        ((what, num),) = json.loads(line).items()
        if what == "fork" and not state:
            exec(STATE, state)
        before = cpu_ms()
        milliseconds = list(round_trips(num) if what == "warm" else bare_forks(num))
        if what == "fork":
            state.clear()
        print(json.dumps({"wall": milliseconds, "cpu": (cpu_ms() - before) / num}), flush=True)


def bare_forks(num: int) -> Iterator[float]:
    for _ in range(num):
        reading, writing = os.pipe()
        start = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            os.write(writing, b"1")
            os._exit(0)
        os.read(reading, 1)
        yield 1e3 * (time.perf_counter() - start)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
        time.sleep(PAUSE_S)


def round_trips(num: int) -> Iterator[float]:
    there, back = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        while True:
            os.write(back[1], os.read(there[0], 1))
    for _ in range(num):
        start = time.perf_counter()
        os.write(there[1], b"1")
        os.read(back[0], 1)
        yield 1e3 * (time.perf_counter() - start)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for fd in (*there, *back):
        os.close(fd)


# All of them, in turns.


class Contestant:
    """A worker, and what it has answered so far."""

    def __init__(self, name: str, checkout: Path, *arguments: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env={**os.environ, "BENCHED": str(checkout), "PYTHONPATH": str(checkout)},
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started = self.read()
        self.wall: dict[str, list[list[float]]] = defaultdict(list)
        self.cpu: dict[str, list[float]] = defaultdict(list)
        self.copied = 0

    def read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def write(self, what: str, num: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({what: num}) + "\n")
        self._process.stdin.flush()

    def turn(self, what: str) -> None:
        self.write(what, NUM_IN_ROUND[what])
        answer = self.read()
        self.wall[what].append(answer["wall"])
        self.cpu[what].append(answer["cpu"])
        self.copied = answer.get("copied", 0)

    def many(self, num: int) -> None:
        self.write("many", num)
        assert self._process.stdout is not None
        while line := self._process.stdout.readline().rstrip():
            print(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def compare(rung: Rung, checkouts: list[Path], options: argparse.Namespace) -> None:
    plain = ["--plain"] if options.plain else []
    contestants = [Contestant("bare", HERE, "--floor")]
    for checkout in checkouts:
        one = Contestant(checkout.name, checkout, "--worker", rung, *plain)
        if isinstance(one.started, str):
            print(f"{rung}: not offered by this machine to {checkout.name}: {one.started}")
            one.close()
        else:
            print(f"{rung}: {one.name}: start with self-test {one.started:.2f} s")
            contestants.append(one)
    for number in range(options.rounds):
        for what in NUM_IN_ROUND:  # who begins changes, so that no one always follows another
            shift = number % len(contestants)
            for one in contestants[shift:] + contestants[:shift]:
                one.turn(what)
    for what, title in WHAT.items():
        print(f"  {title}, ms")
        for one in contestants:
            seconds = sorted(value for values in one.wall[what] for value in values)
            cut = quantiles(seconds, n=100)
            quiet = min(map(median, one.wall[what]))
            print(
                f"    {one.name:16} least {seconds[0]:7.3f}  quiet {quiet:7.3f}  "
                f"median {median(seconds):7.3f}  p99 {cut[98]:7.3f}  "
                f"CPU {fmean(one.cpu[what]):6.3f}"
            )
    for one in contestants[1:]:
        print(f"  {one.name}: {one.copied} of {len(one.wall['fork']) * 12} forks are copies")
    if len(contestants) > 1 and options.sessions:
        contestants[1].many(options.sessions)
    for one in contestants:
        one.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--rung", choices=RUNGS)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--worker", choices=RUNGS, help=argparse.SUPPRESS)
    parser.add_argument("--floor", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.floor:
        floor()
    elif options.worker:
        asyncio.run(worker(options.worker, PLAIN_FIRST if options.plain else FIRST))
    else:
        checkouts = [HERE, *(path.resolve() for path in options.against)]
        for rung in (options.rung,) if options.rung else RUNGS:
            compare(rung, checkouts, options)


if __name__ == "__main__":
    main()
