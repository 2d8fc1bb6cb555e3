"""How long a newcomer waits: importing the package, the help of each command, a dry run.

    python benchmarks/bench.py start [--json FILE]

CPU and wall seconds of fresh processes, medians of `repeats`.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from msgspec import Struct

from agentenv.errors import AgentEnvError

ROOT = Path(__file__).resolve().parent.parent.parent
COMMANDS = ("train", "evaluate", "sft", "dpo", "synthesize", "serve", "export", "replay", "bench")


class Figures(Struct, frozen=True, kw_only=True):
    """Seconds of one process."""

    wall_s: float
    cpu_s: float


def run(repeats: int) -> dict[str, Figures]:
    """The figures by what is started."""
    found = {
        "python alone": _measure(["-c", ""], repeats),
        "import agentenv": _measure(["-c", "import agentenv"], repeats),
    }
    for name in COMMANDS:
        found[f"{name}.py --help"] = _measure([f"launchers/{name}.py", "--help"], repeats)
    dry_run = ["launchers/train.py", "configs/quickstart.toml", "--dry-run"]
    found["train.py --dry-run"] = _measure(dry_run, repeats)
    return found


def _measure(arguments: Sequence[str], repeats: int) -> Figures:
    rows = [_once(arguments) for _ in range(repeats)]
    wall, cpu = (median(column) for column in zip(*rows, strict=True))
    return Figures(wall_s=round(wall, 2), cpu_s=round(cpu, 2))


def _once(arguments: Sequence[str]) -> tuple[float, float]:
    before, began = _cpu_s(), time.monotonic()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise AgentEnvError(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return time.monotonic() - began, _cpu_s() - before


def _cpu_s() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
