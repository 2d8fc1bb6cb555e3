"""The workload of every peer, and its cost. Runs in the interpreter of the peer.

    PYTHON work.py DRIVER.py TASK.json FIGURES.json

This file needs only the standard library, because the peers' virtual environments contain none of
our packages. DRIVER is a file of drivers/. Its `async def run(work)` keeps `work.at_once` rollouts
running with the code of its peer until `work.is_over`. It gets the policy's turns from
`work.turn(form, num_results)` and the tool's results from `work.result()`. Both wait as an engine
and a search would, and count the calls. contest.py writes TASK.json.

The figures cover a window of env steps in which rollouts are at all of their stages, so they
exclude the cost of the start. The same process first measures `idle`, a bare loop with the same
waits.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

WAVES, FLOOR_WAVES = 5, 2  # env steps of a window per concurrent rollout; a rollout has five
END_S = 20.0  # limit for a driver to end after it was cancelled


class Work:
    """The workload at one size: `at_once` rollouts, with waits multiplied by `scale`."""

    def __init__(
        self, task: dict[str, Any], at_once: int, scale: float, num_waves: int = WAVES
    ) -> None:
        self.task, self.at_once = task, at_once
        self.tokenizer: str = task["tokenizer"]  # folder in Hugging Face format
        self.num_calls: int = task["num_calls"]
        self.group_size: int = task["group_size"]
        self.is_over = False
        self.over = asyncio.Event()
        self.num_steps = self.num_results = 0
        self.scale = scale
        self._rng = Random(at_once)
        self._texts: list[str] = task["texts"]
        self._logprobs: list[list[float]] = task["logprobs"]
        self._numbers = count()
        self._begin = at_once
        self._end = self._begin + max(num_waves * at_once, task["min_steps"])
        self._at_begin = self._at_end = (0.0, 0.0, 0.0)

    def question(self, number: int) -> str:
        """Return a question; the questions repeat."""
        questions: list[str] = self.task["questions"]
        return questions[number % len(questions)]

    async def turn(self, form: str, num_results: int) -> tuple[list[int], list[float]]:
        """Return the token IDs and log-probs of the turn after `num_results` results: a call or the
        answer, in the form "tags" or "json"."""
        seconds = self.scale * self.task["turn_s"] * (0.5 + self._rng.random())
        first = self.task["first_part"] * seconds
        if not self.is_over:
            await asyncio.sleep(first)  # the first part that a streaming engine sends
            await asyncio.sleep(seconds - first)
        self._count()
        name = "call" if num_results < self.num_calls else "answer"
        return list(self.task["forms"][form][name]), list(self._rng.choice(self._logprobs))

    def text(self, form: str, num_results: int) -> str:
        """Return the text of the turn that `turn` returns."""
        name = "call_text" if num_results < self.num_calls else "answer_text"
        text: str = self.task["forms"][form][name]
        return text

    async def result(self) -> str:
        """Return a tool result after a wait."""
        if not self.is_over:
            await asyncio.sleep(self.tool_seconds())
        return self.next_text()

    def result_blocking(self) -> str:
        """Return a tool result after a blocking wait, for synchronous tools in threads."""
        if not self.is_over:
            time.sleep(self.tool_seconds())
        return self.next_text()

    def tool_seconds(self) -> float:
        seconds: float = self.scale * self.task["tool_s"] * (0.5 + self._rng.random())
        return seconds

    def next_text(self) -> str:
        """Return the next of the texts drawn in advance."""
        self.num_results += 1
        number = next(self._numbers)
        return f"{number}: {self._texts[number % len(self._texts)]}"

    def _count(self) -> None:
        if self.num_steps == self._begin:
            below = cpu_below_s()
            self._at_begin = time.monotonic(), cpu_s(), below
        elif self.num_steps == self._end:
            self._at_end = time.monotonic(), cpu_s(), cpu_below_s()
            self.is_over = True
            self.over.set()
        self.num_steps += 1

    def figures(self) -> dict[str, float]:
        """Return the window's CPU microseconds per env step, and its env steps per second."""
        if not self.is_over:
            raise RuntimeError(f"the driver ended after {self.num_steps} env steps of {self._end}")
        calls = self.num_calls / (self.num_calls + 1) * self.num_steps
        if self.num_results < 0.7 * calls:
            raise RuntimeError(
                f"{self.num_steps} turns of the policy and {self.num_results} results of the tool: "
                "the driver does not pass its peer's calls to the tool"
            )
        wall, own, below = (
            end - begin for begin, end in zip(self._at_begin, self._at_end, strict=True)
        )
        steps = self._end - self._begin
        return {
            "cpu_us": round(own / steps * 1e6, 1),
            "children_us": round(below / steps * 1e6, 1),
            "steps_per_s": round(steps / wall, 1),
        }


def cpu_s() -> float:
    """Return the user and system time of this process, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_below_s() -> float:
    """Return the CPU seconds of all descendants of this process, running and ended.

    Running processes are read from /proc/PID/task/*/schedstat in nanoseconds: /proc/PID/stat is too
    coarse for a thousand processes that do little.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    parents, found = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            threads = [one.read_text() for one in folder.glob("task/*/schedstat")]
        except OSError:  # ended meanwhile
            continue
        parents[int(folder.name)] = int(fields[1])
        found[int(folder.name)] = sum(int(text.split()[0]) for text in threads) / 1e9
    total = used.ru_utime + used.ru_stime
    for pid, seconds in found.items():
        above = parents[pid]
        while above not in (0, 1, os.getpid()):
            above = parents.get(above, 0)
        if above == os.getpid():
            total += seconds
    return total


async def rollouts(work: Work, some: Callable[[int], Awaitable[object]], num_each: int = 1) -> None:
    """Keep `work.at_once` rollouts running until the window is over. `some(number)` runs `num_each`
    rollouts. An exception of a rollout propagates."""
    numbers = count()

    async def place() -> None:
        while not work.is_over:
            await some(next(numbers))

    async with asyncio.TaskGroup() as group:
        for _ in range(max(1, work.at_once // num_each)):
            group.create_task(place())


async def idle(work: Work) -> None:
    """The floor: a loop with the same waits that does nothing else."""

    async def one(number: int) -> None:
        for num_results in range(work.num_calls + 1):
            if work.is_over:
                return
            await work.turn("tags", num_results)
            if num_results < work.num_calls:
                await work.result()

    await rollouts(work, one)


async def until_over(run: Callable[[Work], Awaitable[object]], work: Work) -> None:
    """Run the driver until the window is over, then cancel it. Its exceptions propagate."""
    running = asyncio.ensure_future(run(work))
    waiting = asyncio.ensure_future(work.over.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done():
        return running.result()  # type: ignore[return-value]
    running.cancel()
    await asyncio.wait({running}, timeout=END_S)


def measure(driver: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Return the figures by size."""
    found: dict[str, Any] = {}
    for size in task["sizes"]:
        floor = Work(task, size["at_once"], size["scale"], FLOOR_WAVES)
        asyncio.run(until_over(idle, floor))
        work = Work(task, size["at_once"], size["scale"])
        asyncio.run(until_over(driver.run, work))
        found[str(size["at_once"])] = {
            **work.figures(),
            "floor_us": floor.figures()["cpu_us"],
            "floor_steps_per_s": floor.figures()["steps_per_s"],
        }
    return found


def main(driver: str, task_file: str, figures_file: str) -> None:
    # Some peers open a pipe or a socket for each rollout.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    task = json.loads(Path(task_file).read_text(encoding="utf-8"))
    sys.path.insert(0, str(Path(driver).parent))
    found = measure(importlib.import_module(Path(driver).stem), task)
    Path(figures_file).write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # do not wait for tasks and threads that a peer left running


if __name__ == "__main__":
    sys.modules["work"] = sys.modules["__main__"]  # a driver imports it by this name
    main(*sys.argv[1:])
