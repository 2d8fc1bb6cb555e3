"""Long requests that are running when a test does something to their engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agentenv.types import Chunk, Completion, SamplingParams
from tests.engines.world import Subject

LONG = 400  # tokens of a turn


def start_many(subject: Subject, ids: list[int], number: int) -> list[asyncio.Task[Completion]]:
    """Long requests that run side by side: some are still running when the test goes on, also
    where the server's own processes have to wait for a processor."""
    long = SamplingParams(max_tokens=LONG)
    return [asyncio.create_task(subject.generate(ids, long)) for _ in range(number)]


class Traffic:
    """Long requests that run side by side, each followed by another one: some are always running,
    also where a server has sampled a whole turn before it hands out the first tokens."""

    def __init__(
        self,
        subject: Subject,
        ids: list[int],
        number: int,
        on_chunk: Callable[[Chunk], None] | None = None,
    ) -> None:
        self._subject, self._ids, self._on_chunk = subject, ids, on_chunk
        self._completions: list[Completion] = []
        self._over = False
        self._tasks = [asyncio.create_task(self._again_and_again()) for _ in range(number)]

    async def finish(self) -> list[Completion]:
        """All completions, when those that run have come to their ends."""
        self._over = True
        await asyncio.gather(*self._tasks)
        return self._completions

    async def cancel(self) -> None:
        """Cancel them all; none may have failed before."""
        for task in self._tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes

    async def _again_and_again(self) -> None:
        long = SamplingParams(max_tokens=LONG)
        while not self._over:
            self._completions.append(await self._subject.generate(self._ids, long, self._on_chunk))
