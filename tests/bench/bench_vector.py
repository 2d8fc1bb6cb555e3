"""Ten thousand environments in one process: `python tests/bench/bench_vector.py [NUM_ENVS]`.

Prints, for grader and search environments and for 500 with interpreters, the time of a reset and
of a step of all of them, and what one costs in memory.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

import agentenv
import envs
from agentenv.env import close_shared
from agentenv.gym import VectorEnv
from agentenv.types import Message, Task, ToolCall

CASES: dict[str, dict[str, Any]] = {
    "agentenv/QAGrader-v0": {"grader": {"kind": "exact"}},
    "agentenv/WebSearch-v0": {},
    "agentenv/DeepSearch-v0": {"python": {"timeout_s": 60.0}},
}
NUM_INTERPRETERS = 500
ANSWER = Message("assistant", r"<think>.</think><answer>\boxed{Denver Broncos}</answer>")
SEARCHES = [
    Message("assistant", "<search>", (ToolCall("search", {"query": f"who won in {year}"}),))
    for year in range(1900, 2000)
]
CELLS = [
    Message("assistant", "<python>", (ToolCall("python", {"code": f"x = {n}; x * 57"}),))
    for n in range(100)
]
STEPS = {"agentenv/WebSearch-v0": SEARCHES, "agentenv/DeepSearch-v0": CELLS}


async def measure(env_id: str, num_envs: int) -> None:
    tasks = [Task(f"t{n}", env_id, "Who won?", ("Denver Broncos",)) for n in range(100)]

    def make(task: Task) -> Any:
        return agentenv.make(env_id, task, **CASES[env_id])

    async with VectorEnv(make, tasks[:1], 1) as warm:  # builds what all of them share
        await warm.reset(seed=0)
        await warm.step([STEPS.get(env_id, [ANSWER])[0]])
    before = psutil.Process().memory_info().rss
    async with VectorEnv(make, tasks, num_envs) as vector:
        start, cpu = time.perf_counter(), time.process_time()
        await vector.reset(seed=0)
        reset_s = time.perf_counter() - start
        calls = STEPS.get(env_id, [])
        start = time.perf_counter()
        if calls:
            actions = [calls[place % len(calls)] for place in range(num_envs)]
            _, _, _, truncated, infos = await vector.step(actions)
            assert not any(truncated), next(info for info in infos if "error" in info)
        step_s = time.perf_counter() - start
        start = time.perf_counter()
        _, rewards, terminated, *_ = await vector.step([ANSWER] * num_envs)
        answer_s = time.perf_counter() - start
        assert all(terminated)
        memory = (psutil.Process().memory_info().rss - before) / num_envs / 1000
        cpu = time.process_time() - cpu
        print(
            f"{env_id:24} {num_envs} envs: reset {reset_s:.2f} s, tool step {step_s:.2f} s, "
            f"answer step {answer_s:.2f} s, {cpu:.2f} CPU s in all, {memory:.1f} kB an env, "
            f"mean reward {sum(rewards) / num_envs:.2f}"
        )


async def main() -> None:
    num_envs = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    assert envs.__file__
    for env_id in CASES:
        interpreters = env_id == "agentenv/DeepSearch-v0"
        await measure(env_id, NUM_INTERPRETERS if interpreters else num_envs)
        await close_shared()


asyncio.run(main())
