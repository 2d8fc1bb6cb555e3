"""Figures of the Python sandbox with numpy and sympy preloaded, on each rung offered here.

    python tests/bench/bench_sandbox.py [--sessions 500] [--plain]

New session with its first call, warm call, fork of a session with 64 MB of variables, calls per
second over many live sessions, memory of each (PSS: what is shared counts in parts), and the
processes that are left after closing.
--plain preloads neither, as the quick start does.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from agentenv.errors import ConfigError
from envs.sandbox import Rung, Sandbox, SandboxSession

NUM_NEW, NUM_WARM, NUM_ROUNDS = 100, 1000, 20
TIMEOUT_S = 60.0
PAUSE_S = 0.03
FIRST = "import numpy, sympy; int(numpy.arange(4).sum()) + sympy.Integer(36)"
PLAIN_FIRST = "import math; math.isqrt(1764)"
WARM = "6 * 7"
STATE = "x = [bytearray(b'x' * 2000) for _ in range(32_000)]; 42"  # 64 MB


def spread(seconds: list[float]) -> str:
    cut = quantiles(seconds, n=100)
    return f"median {1e3 * median(seconds):.3f} ms, p99 {1e3 * cut[98]:.3f} ms"


async def timed(session: SandboxSession, code: str) -> float:
    start = time.perf_counter()
    result = await session.run(code, TIMEOUT_S)
    assert result.output == "42", result
    return time.perf_counter() - start


def pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"no Pss for {pid}")


async def measure(rung: Rung, num_sessions: int, plain: bool) -> None:
    first = PLAIN_FIRST if plain else FIRST
    sandbox = Sandbox(rungs=(rung,), preload=() if plain else ("numpy", "sympy"))
    start = time.perf_counter()
    await sandbox.start()
    print(f"{rung}: start with self-test {time.perf_counter() - start:.2f} s")
    new: list[float] = []
    for seed in range(NUM_NEW):
        session = sandbox.session(seed)
        new.append(await timed(session, first))
        session.close()
    print(f"  new session with first call: {spread(new)}")
    session = sandbox.session(0)
    await timed(session, WARM)
    print(f"  warm call: {spread([await timed(session, WARM) for _ in range(NUM_WARM)])}")
    session.close()
    parent = sandbox.session(0)
    await timed(parent, STATE)
    forks = []
    for _ in range(NUM_NEW):
        start = time.perf_counter()
        child = await parent.fork()
        forks.append(time.perf_counter() - start)
        child.close()
        await asyncio.sleep(PAUSE_S)  # its end is not to be part of the next one
    parent.close()
    live = sandbox.counters.num_live_forks
    print(f"  fork at 64 MB of state: {spread(forks)}, {live} of {NUM_NEW} copied")

    before = {process.pid for process in psutil.Process().children(recursive=True)}
    sessions = [sandbox.session(seed) for seed in range(num_sessions)]
    start = time.perf_counter()
    await asyncio.gather(*(timed(one, first) for one in sessions))
    print(f"  {num_sessions} sessions live after {time.perf_counter() - start:.1f} s")

    async def rounds(one: SandboxSession) -> None:
        for _ in range(NUM_ROUNDS):
            await timed(one, WARM)

    start = time.perf_counter()
    await asyncio.gather(*map(rounds, sessions))
    rate = num_sessions * NUM_ROUNDS / (time.perf_counter() - start)
    print(f"  warm calls over {num_sessions} live sessions: {rate:,.0f}/s")
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
    print(f"  processes left after close: {len(left)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    rungs: tuple[Rung, ...] = ("namespaces", "landlock")
    for rung in rungs:
        try:
            asyncio.run(measure(rung, options.sessions, options.plain))
        except ConfigError as error:
            print(f"{rung}: not offered by this machine: {error}")


if __name__ == "__main__":
    main()
