"""Requests to a server, watched as they run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from agentenv.base.types import Chunk, Completion, SamplingParams
from agentenv.contract.request import ServerRequest
from agentenv.engines.sglang import SGLangServer
from tests.engines.world import prompt, streamed

Clients = Callable[..., SGLangServer]  # of the server of this name
PROMPT = prompt(seed=1, size=40)
IDS = itertools.count()
STEP_S = 0.02  # of a forward pass that is slowed down


class Reply:
    """A completion under way, with its chunks; greedy unless a temperature is given."""

    def __init__(
        self, server: SGLangServer, prompt_ids: list[int], max_tokens: int, **fields: Any
    ) -> None:
        self.chunks: list[Chunk] = []
        self.prompt_ids = prompt_ids
        self._news = asyncio.Event()
        sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0} | fields)
        request = ServerRequest(f"test-{next(IDS)}", prompt_ids, sampling)
        self.task = asyncio.create_task(streamed(server, request, self._receive))

    async def started(self, num_tokens: int) -> None:
        while len(self.token_ids) < num_tokens:
            self._news.clear()
            await self._news.wait()

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    def _receive(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self._news.set()


async def generate(
    server: SGLangServer, prompt_ids: list[int], max_tokens: int, **fields: Any
) -> Completion:
    return await Reply(server, prompt_ids, max_tokens, **fields).task
