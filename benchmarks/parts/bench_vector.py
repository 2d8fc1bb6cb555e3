"""Ten thousand environments in one process: `python benchmarks/parts/bench_vector.py [NUM_ENVS]`.

Prints, for grader and search environments and for 500 with interpreters, the time of a reset and
of a step of all of them, and what one costs in memory.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gymnasium
import psutil

import agentenv.gym
from agentenv.types import Task

CASES: dict[str, dict[str, Any]] = {
    "agentenv/QAGrader-v0": {"grader": {"kind": "exact"}},
    "agentenv/WebSearch-v0": {},
    "agentenv/DeepSearch-v0": {"python": {"timeout_s": 60.0}},
}
NUM_INTERPRETERS = 500
ANSWER = r"<think>.</think><answer>\boxed{Denver Broncos}</answer>"
SEARCHES = [f"<search>who won in {year}</search>" for year in range(1900, 2000)]
CELLS = [f"<python>x = {n}; x * 57</python>" for n in range(100)]
STEPS = {"agentenv/WebSearch-v0": SEARCHES, "agentenv/DeepSearch-v0": CELLS}


def measure(env_id: str, num_envs: int) -> None:
    tasks = [Task(f"t{n}", env_id, "Who won?", ("Denver Broncos",)) for n in range(100)]

    def make(num_envs: int) -> Any:
        return gymnasium.make_vec(env_id, num_envs=num_envs, tasks=tasks, **CASES[env_id])

    warm = make(1)  # builds what all of them share
    warm.reset(seed=0)
    warm.step([STEPS.get(env_id, [ANSWER])[0]])
    before = psutil.Process().memory_info().rss
    vector = make(num_envs)
    start, cpu = time.perf_counter(), time.process_time()
    vector.reset(seed=0)
    reset_s = time.perf_counter() - start
    calls = STEPS.get(env_id, [])
    start = time.perf_counter()
    if calls:
        actions = [calls[place % len(calls)] for place in range(num_envs)]
        *_, truncated, infos = vector.step(actions)
        assert not truncated.any(), infos["error"]
    step_s = time.perf_counter() - start
    start = time.perf_counter()
    _, rewards, terminated, *_ = vector.step([ANSWER] * num_envs)
    answer_s = time.perf_counter() - start
    assert terminated.all()
    memory = (psutil.Process().memory_info().rss - before) / num_envs / 1000
    cpu = time.process_time() - cpu
    print(
        f"{env_id:24} {num_envs} envs: reset {reset_s:.2f} s, tool step {step_s:.2f} s, "
        f"answer step {answer_s:.2f} s, {cpu:.2f} CPU s in all, {memory:.1f} kB an env, "
        f"mean reward {rewards.mean():.2f}"
    )
    vector.close()
    warm.close()


if __name__ == "__main__":
    assert agentenv.gym.VectorEnv
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    for env_id in CASES:
        measure(env_id, NUM_INTERPRETERS if env_id == "agentenv/DeepSearch-v0" else count)
