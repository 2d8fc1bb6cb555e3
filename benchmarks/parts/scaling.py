"""How much faster rollouts grow in more rollout workers, where tools compute.

    benchmarks/bench.py workers [--kind processes | ray] [--most N] [--json FILE]

The workload of `overhead` on a policy that answers soon, and with a tool that computes for
about COMPUTE_S on the loop of its worker, one call at a time. It is measured with one worker and
with two; the times of the run with one are what `bench.py simulate` has for two, which is held
against the measurement, and for more.

The controller is a process too: on two cores two workers and it share them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from agentenv.config import load_config
from agentenv.pipelines.config.cluster import SpreadCluster
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.rl.training import Training
from agentenv.pipelines.run.timings import read_trace
from agentenv.tool_env import ToolEnv
from agentenv.tools import StatelessTool
from agentenv.types import Task, ToolResult
from benchmarks.parts import overhead
from benchmarks.parts.mock_server import SCHEMA
from benchmarks.parts.overhead import (
    CONFIG,
    FIGURES,
    LuckGrader,
    measured,
    obey,
    trained,
    write_workspace,
)
from benchmarks.parts.simulation import Variant, recorded, simulate

COMPUTE_S = 0.02
SECRET_BYTES, MAX_ROUNDS = 32, 10_000_000
NUM_PROMPTS, GROUP_SIZE, NUM_STEPS = 8, 4, 14
TURN_SHARE = 0.01  # of what a turn takes in `overhead`
SIMULATED = (1, 2, 4, 8, 16)
ROUNDS_VARIABLE = "AGENTENV_SCALING_ROUNDS"  # by which workers compute alike


class Figures(Struct):
    """With so many workers. Seconds a step of the measured and of the simulated run, and how many
    times as fast as one worker that is; `steps` are those that the queue was full in."""

    workers: int
    measured_s: float | None
    measured_times: float | None
    simulated_s: float
    simulated_times: float


def rounds() -> int:
    """Of a hash, which take COMPUTE_S on this machine when nothing else runs."""
    begin, num = time.process_time(), 100_000
    hashlib.pbkdf2_hmac("sha256", b"agentenv", b"scaling", num, SECRET_BYTES)
    spent = max(1e-4, time.process_time() - begin)
    return min(MAX_ROUNDS, max(1, int(num * COMPUTE_S / spent)))


class Compute(StatelessTool):
    """Computes on the loop, and gives a text of a few words."""

    name = "search"
    description = "Search."
    schema = SCHEMA

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        num = int(os.environ[ROUNDS_VARIABLE])
        found = hashlib.pbkdf2_hmac("sha256", b"agentenv", os.urandom(8), num, SECRET_BYTES)
        return ToolResult(f"the year {int.from_bytes(found[:2], 'little')}")


class ComputingEnv(ToolEnv):
    def __init__(self, task: Task, **keys: Any) -> None:
        super().__init__(task, tools=[Compute()], grader=LuckGrader(), **keys)


def run(
    kind: str, most: int, steps: int, prompts: int, say: Callable[[str], None]
) -> list[Figures]:
    """The figures by number of workers: one and two are measured."""
    os.environ[ROUNDS_VARIABLE] = str(rounds())
    with tempfile.TemporaryDirectory(prefix="agentenv-") as name:
        took: dict[int, float] = {}
        for num in (1, 2):
            folder = Path(name) / str(num)
            folder.mkdir()
            say(f"{num} worker{'s' * (num > 1)}, {steps} steps")
            options = [kind, str(num), str(steps), str(prompts)]
            took[num] = json.loads(measured("benchmarks.parts.scaling", options, folder))["step_s"]
        folder = Path(name) / "1"
        config, trace = load_config(TrainConfig, folder / CONFIG, []), read_trace(folder / "run")
        assert isinstance(config.cluster, SpreadCluster)
        simulated: dict[int, float] = {}
        for num in (one for one in SIMULATED if one <= most):
            more = replace(config, cluster=replace(config.cluster, workers=num))
            simulated[num] = simulate(more, trace, Variant(name=f"{num}"), steps).step_s
    return [
        Figures(
            num,
            took.get(num),
            round(took[1] / took[num], 2) if num in took else None,
            round(step_s, 3),
            round(simulated[1] / step_s, 2),
        )
        for num, step_s in simulated.items()
    ]


def _tables(kind: str, num_workers: int) -> str:
    more = f'env = ["{ROUNDS_VARIABLE}", "{overhead.SCALE_VARIABLE}"]' if kind == "ray" else ""
    return f"""
[env]
id = "benchmarks.parts.scaling:ComputingEnv"
[[env.tools]]
name = "search"
max_concurrency = 1
[engine]
name = "benchmarks.parts.overhead:WaitingConfig"
max_model_len = 4096
[cluster]
kind = "{kind}"
workers = {num_workers}
{more}
[log]
timings = true
"""


def measure(folder: Path) -> None:
    """One number of workers, in this process; seconds a step go to a file in the folder."""
    overhead.set_scale(TURN_SHARE)
    trained(Training, folder)
    found = recorded(read_trace(folder / "run"))
    (folder / FIGURES).write_text(json.dumps(asdict(found)))


def main(part: str, arguments: Sequence[str]) -> None:
    """One of the two processes of a measurement."""
    kind, num_workers, steps, prompts, folder, address = arguments
    if part == "measure":
        return measure(Path(folder))
    tables = _tables(kind, int(num_workers))
    write_workspace(Path(folder), address, int(prompts), int(steps), tables, GROUP_SIZE)
    asyncio.run(obey(address))


if __name__ == "__main__":
    sys.modules["benchmarks.parts.scaling"] = sys.modules["__main__"]
    main(sys.argv[1], sys.argv[2:])
