"""How late the controller's event loop is while tools give very long texts.

    python benchmarks/bench.py lag [--json FILE]

The run of `overhead` with PROMPTS prompts a step, 16 trajectories each, whose tool gives a text of
5 MB each time, never the same, of which `limits.max_tool_result_tokens` keeps a part; beside it the
same run with results of about 300 tokens. A sleeper of 20 ms that wakes late stands for all that
would have been late meanwhile, so that a stall counts by its length (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct

from agentenv.tool_env import ToolEnv
from agentenv.tools import StatelessTool
from agentenv.types import Task, ToolResult
from benchmarks.parts import overhead
from benchmarks.parts.mock_server import SCHEMA

PROMPTS = 2
TEXT_MB = 5
WAIT_S = 0.5
ENV = "benchmarks.parts.lag:FloodEnv"


class Figures(Struct, frozen=True, kw_only=True):
    """Of the phase of RL. CPU is that of an env step, in all processes."""

    result_mb: float
    lag_p99_ms: float
    lag_max_ms: float
    cpu_ms_per_env_step: float
    rss_mb: float


class Flood(StatelessTool):
    """Waits, then gives a text of TEXT_MB, each time with another beginning."""

    name = "search"
    description = "Search."
    schema = SCHEMA

    def __init__(self) -> None:
        fact = overhead.FACT.format("Osberg", 1900) + "\n"
        self._text = fact * (TEXT_MB * 1_000_000 // len(fact))
        self._count, self._rng = count(), Random(0)

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        await asyncio.sleep(WAIT_S * (0.5 + self._rng.random()))
        return ToolResult(f"{next(self._count)}: {self._text}")


_flood = Flood()


class FloodEnv(ToolEnv):
    def __init__(self, task: Task) -> None:
        super().__init__(task, tools=[_flood], grader=overhead.LuckGrader())


def run() -> dict[str, Figures]:
    """The figures by what a tool gives."""
    sizes = {
        "about 300 tokens": (overhead.ENV, 0.001),
        f"{TEXT_MB} MB": (ENV, TEXT_MB),
    }
    return {name: _measure(env, megabytes) for name, (env, megabytes) in sizes.items()}


def _measure(env: str, megabytes: float) -> Figures:
    with tempfile.TemporaryDirectory(prefix="agentenv-") as folder:
        options = [str(PROMPTS), "0", str(overhead.NUM_STEPS), env]
        found = json.loads(overhead.measured("benchmarks.parts.lag", options, Path(folder)))
    return Figures(
        result_mb=megabytes,
        lag_p99_ms=found["lag_p99_ms"],
        lag_max_ms=found["lag_max_ms"],
        cpu_ms_per_env_step=round(found["all_processes_us"] / 1e3, 2),
        rss_mb=found["rss_mb"],
    )


if __name__ == "__main__":
    overhead.main(*sys.argv[1:])
