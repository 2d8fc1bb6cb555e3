"""What bench_engines_rollouts.py measures with: turns that are kept, wall and CPU seconds."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from typing import Any

import psutil

from agentenv.engine import Engine
from agentenv.types import Completion, SamplingParams

Turn = tuple[Sequence[int], SamplingParams, str, int]  # prompt, sampling, session, tokens it gave


class Recorder:
    """An engine that remembers the turns it was asked for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.turns: list[Turn] = []
        self.running = self.peak = 0
        self.sums = [0, 0]  # of the requests that ran beside each new one, and their number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str, **rest: Any
    ) -> Completion:
        self.running += 1
        self.peak = max(self.peak, self.running)
        self.sums[0] += self.running
        self.sums[1] += 1
        prompt = list(prompt_ids)
        place = len(self.turns)
        self.turns.append((prompt, sampling, session, 0))
        try:
            done = await self.engine.generate(prompt_ids, sampling, session=session, **rest)
        finally:
            self.running -= 1
        self.turns[place] = (prompt, sampling, session, len(done.token_ids))
        return done


class Clock:
    """Wall and CPU seconds of a phase: this process with its ended children, and the server."""

    def __init__(self, server: psutil.Process) -> None:
        self._server = server

    def _now(self) -> tuple[float, float, float]:
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        own = sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, kinds))
        tree = [self._server, *self._server.children(recursive=True)]
        times = [process.cpu_times() for process in tree]
        return asyncio.get_running_loop().time(), own, sum(t.user + t.system for t in times)

    async def time(self, name: str, work: Awaitable[int]) -> float:
        """Tokens a second of `work`, which returns how many it sampled."""
        before = self._now()
        tokens = await work
        wall, own, served = (b - a for a, b in zip(before, self._now(), strict=True))
        print(
            f"{name:10s} {tokens:8d} tokens {wall:7.1f} s {tokens / wall:7.0f} tokens/s "
            f"{tokens / (own + served):7.0f} tokens/CPU s; CPU s: here {own:.1f}, server "
            f"{served:.1f}",
            flush=True,
        )
        return tokens / wall


class Apart:
    """The server on one half of the cores, this process and the tools on the other one, as where
    an engine has a machine of its own. To be made before anything is started."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise SystemExit("--apart needs at least two cores")
        self._served, own = cores[: len(cores) // 2], cores[len(cores) // 2 :]
        os.sched_setaffinity(0, own)  # what is started from here on inherits it

    def move(self, server: psutil.Process) -> None:
        for process in (server, *server.children(recursive=True)):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, self._served)


async def in_tasks(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)
