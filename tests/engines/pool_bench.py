"""A started pool over servers in this process, under the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.server_config import PoolConfig
from agentenv.types import Completion, SamplingParams
from tests.engines.faulty_server import (
    EOS,
    VOCAB_SIZE,
    ByteTokenizer,
    FaultyServer,
    reciter,
    write_tokenizer,
)
from tests.support.virtual_clock import run_virtual

TEXT = "the quick brown fox</a>"


def write_folder(root: Path) -> Path:
    """A directory named as the weights that a FaultyServer starts with."""
    path = root / "initial"
    path.mkdir()
    write_tokenizer(path)
    return path


class Bench:
    """A started pool with its servers, and what is needed to ask it."""

    def __init__(self, pool: EnginePool, servers: list[FaultyServer], folder: Path) -> None:
        self.pool, self.servers, self.folder = pool, servers, folder
        self.tokenizer = ByteTokenizer(folder)

    async def ask(
        self, text: str = TEXT, session: str = "s", stop: tuple[str, ...] = ("</a>",), **rest: Any
    ) -> Completion:
        sampling = SamplingParams(rest.pop("max_tokens", 100), stop=stop, seed=1)
        prompt = self.tokenizer.encode(text + "|")
        return await self.pool.generate(prompt, sampling, session=session, **rest)

    def text(self, completion: Completion) -> str:
        sizes = {len(completion.token_ids), len(completion.logprobs), len(completion.entropies)}
        assert len(sizes) == 1
        ends = [(span.start, span.end) for span in completion.version_spans]
        assert [s for s, _ in ends] + [len(completion.token_ids)] == [0] + [e for _, e in ends]
        return self.tokenizer.decode(completion.token_ids)

    async def load(self, version: int) -> None:
        await self.pool.load_weights(self.folder.parent / f"v{version}", version)

    async def until_up(self, count: int) -> None:
        for _ in range(1000):
            if self.pool.stats()["servers_up"] == count:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(self.pool.stats())


@asynccontextmanager
async def bench(
    folder: Path, count: int, entropies: Literal["all", "window"] = "all", **settings: Any
) -> AsyncIterator[Bench]:
    servers = [FaultyServer(f"server{n}", reciter(folder)) for n in range(count)]
    pool = EnginePool(
        servers,
        folder,
        0,
        vocab_size=VOCAB_SIZE,
        eos_ids={EOS},
        config=PoolConfig(**settings),
        entropies=entropies,
    )
    await pool.start(fresh=True)
    try:
        yield Bench(pool, servers, folder)
    finally:
        await pool.close()
        assert all(server.num_running == 0 for server in servers)


def virtual(
    count: int, **settings: Any
) -> Callable[[Callable[[Bench], Coroutine[Any, Any, None]]], Callable[[Path], None]]:
    """A test over a pool of `count` servers under the virtual clock."""

    def decorate(body: Callable[[Bench], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
        def test(folder: Path) -> None:
            async def main() -> None:
                async with bench(folder, count, **settings) as built:
                    await body(built)

            run_virtual(main())

        test.__doc__ = body.__doc__
        return test

    return decorate
