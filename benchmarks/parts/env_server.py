"""Step times in thousands of sessions of `agentenv serve-env` that all step at the same time.

The server runs the quick-start environment in its own process. The clients, which are those of
agentenv/OpenEnv-v0, run in this process. A step is a search, so the benchmark measures both ends of
the protocol and a lookup in a small index.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
from msgspec import Struct

from agentenv.base.errors import ConfigError
from agentenv.base.types import Message, Task, ToolCall
from agentenv.contract.env import isolated_shared
from agentenv.envs.bridges.openenv import OpenEnv, rows
from agentenv.envs.quickstart.setup import write_data

T = TypeVar("T")

SIZES = (512, 2048)
NUM_STEPS = 8
START_S, STOP_S = 120.0, 10.0


class Figures(Struct):
    """Figures for one number of sessions: times of steps and of session starts, in seconds."""

    begin_p99_s: float
    step_p50_s: float
    step_p99_s: float
    step_max_s: float
    steps_per_s: float
    server_us_a_step: float


def run(sizes: Sequence[int] = SIZES, num_steps: int = NUM_STEPS) -> dict[int, Figures]:
    """Return the figures by number of sessions."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    with tempfile.TemporaryDirectory() as folder:
        write_data(folder, 0)
        return asyncio.run(_run(Path(folder), sizes, num_steps))


async def _run(folder: Path, sizes: Sequence[int], num_steps: int) -> dict[int, Figures]:
    command = [
        sys.executable, "-m", "agentenv.launchers", "serve-env", "agentenv/Quickstart-v0",
        f"env.kwargs.corpus={folder}/kb.jsonl", f"data.train={folder}/train.jsonl", "port=0",
    ]  # fmt: skip
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert server.stdout is not None
        line = (await asyncio.wait_for(server.stdout.readline(), START_S)).decode()
        url = line.split()[-1] if "http" in line else ""
        if not url:
            raise ConfigError("agentenv serve-env did not start")
        return {size: await _measured(url, size, num_steps, server.pid) for size in sizes}
    finally:
        server.terminate()
        await asyncio.wait_for(server.wait(), STOP_S)


async def _measured(url: str, size: int, num_steps: int, pid: int) -> Figures:
    process = psutil.Process(pid)
    begun: list[float] = []
    taken: list[float] = []
    found = [row for row, _ in zip(rows(url, {}, held_out=False), range(size), strict=False)]
    tasks = [Task(str(row["id"]), "", "", (), metadata=row) for row in found]
    async with isolated_shared():
        envs = [OpenEnv(tasks[number % len(tasks)], url) for number in range(size)]
        await asyncio.gather(*(_timed(begun, env.reset(seed=1)) for env in envs))
        cpu, start = sum(process.cpu_times()[:2]), time.monotonic()
        await asyncio.gather(*(_steps(env, num_steps, taken) for env in envs))
        wall_s, cpu = time.monotonic() - start, sum(process.cpu_times()[:2]) - cpu
        await asyncio.gather(*(env.close() for env in envs))
    p50, p99 = np.percentile(taken, (50, 99))
    return Figures(
        begin_p99_s=float(np.percentile(begun, 99)),
        step_p50_s=float(p50),
        step_p99_s=float(p99),
        step_max_s=max(taken),
        steps_per_s=len(taken) / wall_s,
        server_us_a_step=cpu * 1e6 / len(taken),
    )


async def _steps(env: OpenEnv, number: int, taken: list[float]) -> None:
    call = ToolCall("search", {"query": env.task.metadata["question"]})
    for _ in range(number):
        messages, *_ = await _timed(taken, env.step(Message("assistant", "", (call,))))
        assert messages[0].content


async def _timed(times: list[float], work: Awaitable[T]) -> T:
    start = time.monotonic()
    found = await work
    times.append(time.monotonic() - start)
    return found
