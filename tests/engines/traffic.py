"""Long requests that are running when a test does something to their engine, and a load whose
requests are of many lengths."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count

from agentenv.base.types import Chunk, Completion, SamplingParams
from agentenv.contract.engine import Engine
from agentenv.contract.request import ServerLostError
from tests.engines.world import Subject

LONG = 400  # tokens of a turn


class Traffic:
    """Long requests that run side by side, each followed by another one: some are always running,
    also where a server has sampled a whole turn before it hands out the first tokens, and where
    this process waits for a processor. `reported`: the chunks of the last request of each;
    `next_ids`: the prompt of those that follow, if it is another one."""

    def __init__(
        self,
        subject: Subject,
        ids: list[int],
        number: int,
        on_chunk: Callable[[Chunk], None] | None = None,
        next_ids: list[int] | None = None,
    ) -> None:
        self._subject, self._ids, self._on_chunk = subject, ids, on_chunk
        self._next_ids = next_ids or ids
        self._completions: list[Completion] = []
        self._over = False
        self.reported: list[list[Chunk]] = [[] for _ in range(number)]
        self._tasks = [asyncio.create_task(self._again_and_again(n)) for n in range(number)]

    async def finish(self) -> list[Completion]:
        """All completions, after the running requests have ended."""
        self._over = True
        await asyncio.gather(*self._tasks)
        return self._completions

    async def cancel(self) -> None:
        """Cancel them all; none may have failed before."""
        for task in self._tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes

    async def fail(self) -> None:
        """Wait until each has failed, since its server is lost."""
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert all(isinstance(outcome, ServerLostError) for outcome in outcomes), outcomes

    async def _again_and_again(self, number: int) -> None:
        def report(chunk: Chunk) -> None:
            self.reported[number].append(chunk)
            if self._on_chunk is not None:
                self._on_chunk(chunk)

        long, ids = SamplingParams(max_tokens=LONG), self._ids
        while not self._over:
            self.reported[number] = []
            self._completions.append(await self._subject.generate(ids, long, report))
            ids = self._next_ids


@asynccontextmanager
async def ragged_load(engine: Engine, number: int, vocab_size: int) -> AsyncIterator[None]:
    """Keep `number` rollouts running; eight each share a prompt of 90 to 220 tokens. A turn has 90
    tokens on average and at most 512; six of ten continue after a tool result of 10 to 60 tokens,
    for up to three turns."""
    rng = random.Random(0)

    def some_ids(least: int, most: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randint(least, most))]

    def make_prompts() -> Iterator[tuple[str, list[int]]]:
        for group in count():
            ids = some_ids(90, 220)
            yield from ((str(group), ids) for _ in range(8))

    async def roll_out_forever() -> None:
        for session, ids in prompts:
            for _ in range(3):
                length = max(5, min(512, int(rng.expovariate(1 / 90))))
                sampling = SamplingParams(length, seed=rng.getrandbits(30))
                completion = await engine.generate(ids, sampling, session=session)
                if rng.random() > 0.6:
                    break
                ids = [*ids, *completion.token_ids, *some_ids(10, 60)]

    prompts = make_prompts()
    tasks = [asyncio.create_task(roll_out_forever()) for _ in range(number)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes
