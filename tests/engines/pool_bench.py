"""A started pool over servers in this process, under the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import defstruct

from agentenv.base.types import Completion, SamplingParams
from agentenv.cluster.engines import LeasedEngine, Leases
from agentenv.cluster.messages import Acquire, Grow, Quit, SlotRelease, read_answer, read_request
from agentenv.contract.server_config import PoolConfig
from agentenv.engines.pool.pool import EnginePool
from agentenv.processes.link import Link
from tests.engines import faulty_server
from tests.support.links import linked
from tests.support.virtual_clock import run_virtual

TEXT = "the quick brown fox</a>"


def write_folder(root: Path) -> Path:
    """A directory named as the weights that a FaultyServer starts with."""
    path = root / "initial"
    path.mkdir()
    faulty_server.write_tokenizer(path)
    return path


class Bench:
    """A started pool with its servers, and helpers to request turns."""

    def __init__(
        self,
        pool: EnginePool,
        servers: list[faulty_server.FaultyServer],
        folder: Path,
        engine: EnginePool | LeasedEngine,
    ) -> None:
        self.pool, self.servers, self.folder, self.engine = pool, servers, folder, engine
        self.tokenizer = faulty_server.ByteTokenizer(folder)

    async def generate(
        self, text: str = TEXT, session: str = "s", stop: tuple[str, ...] = ("</a>",), **rest: Any
    ) -> Completion:
        sampling = SamplingParams(rest.pop("max_tokens", 100), stop=stop, seed=1)
        prompt = self.tokenizer.encode(text + "|")
        try:
            return await self.engine.generate(prompt, sampling, session=session, **rest)
        finally:
            await deliver_all()

    async def begin(self, seconds: float) -> asyncio.Task[Completion]:
        """A turn that has run for so long."""
        pending = asyncio.create_task(self.generate())
        await asyncio.sleep(seconds)
        return pending

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
    folder: Path,
    count: int,
    entropies: Literal["all", "window"] = "all",
    *,
    is_leased: bool = False,
    max_outage_s: float = PoolConfig.max_outage_s,
    **settings: Any,
) -> AsyncIterator[Bench]:
    """`is_leased`: turns are taken as a rollout worker takes them."""
    servers = [
        faulty_server.FaultyServer(f"server{n}", faulty_server.reciter(folder))
        for n in range(count)
    ]
    own = {"max_outage_s": max_outage_s}
    config = defstruct("Config", [], bases=(PoolConfig,), namespace=own, frozen=True)
    pool = EnginePool(
        servers,
        folder,
        0,
        vocab_size=faulty_server.VOCAB_SIZE,
        eos_ids={faulty_server.EOS},
        config=config(**settings),
        entropies=entropies,
    )
    await pool.start(fresh=True)
    try:
        if is_leased:
            async with leased(pool, folder, entropies) as engine:
                yield Bench(pool, servers, folder, engine)
        else:
            yield Bench(pool, servers, folder, pool)
    finally:
        await pool.close()
        assert all(server.num_running == 0 for server in servers)


async def deliver_all() -> None:
    """Deliver all sent messages to both ends of a link."""
    for _ in range(10):
        await asyncio.sleep(0)


@asynccontextmanager
async def leased(
    pool: EnginePool,
    folder: Path,
    entropies: Literal["all", "window"] = "all",
    *,
    guests: list[faulty_server.Guest] | None = None,
    is_killed: bool = False,
    latency_s: float = 0.0,
) -> AsyncIterator[LeasedEngine]:
    """The engine of a rollout worker over a pool, at the other end of a link of this latency.
    `guests` are the clients that it makes. `is_killed`: at its end the worker is lost at once."""
    ours, theirs = linked()
    for end in (ours, theirs) if latency_s else ():
        _slow_down(end, latency_s)
    leases = Leases(pool, ours)
    made = guests if guests is not None else []

    def make(url: str) -> faulty_server.Guest:
        (found,) = [member.client for member in pool.servers if member.name == url]
        assert isinstance(found, faulty_server.FaultyServer)
        made.append(faulty_server.Guest(found))
        return made[-1]

    engine = LeasedEngine(
        theirs,
        make,
        folder,
        vocab_size=faulty_server.VOCAB_SIZE,
        eos_ids={faulty_server.EOS},
        config=pool.config,
        name="worker",
        entropies=entropies,
    )

    async def receive_from_controller() -> None:
        while True:
            message = read_request(await theirs.receive())
            assert not isinstance(message, Grow | Quit)
            engine.handle(message)  # type: ignore[arg-type]

    async def receive_from_worker() -> None:
        while True:
            message = read_answer(await ours.receive())
            if isinstance(message, Quit):
                leases.quit(message.number)
            else:
                assert isinstance(message, Acquire | SlotRelease)
                leases.handle(message)

    receiving = [
        asyncio.create_task(one) for one in (receive_from_controller(), receive_from_worker())
    ]
    try:
        yield engine
    finally:
        if not is_killed:
            await deliver_all()
            assert not leases._held
        for one in receiving:
            if one.done():
                one.result()  # its error
            one.cancel()
        leases.close()
        assert not leases._held
        await engine.close()


def _slow_down(link: Link, latency_s: float) -> None:
    """Messages arrive later, in their order."""
    send, loop, last = link.send, asyncio.get_running_loop(), 0.0

    def send_late(frame: bytes) -> None:
        nonlocal last
        last = max(last + 1e-6, loop.time() + latency_s)
        loop.call_at(last, send, frame)

    link.send = send_late  # type: ignore[method-assign]


BenchTest = Callable[..., Coroutine[Any, Any, None]]  # of a Bench, and of parameters of pytest


def virtual(
    count: int, *, is_leased: bool | None = None, **settings: Any
) -> Callable[[BenchTest], Callable[..., None]]:
    """A test over a pool of `count` servers under the virtual clock, whose turns are taken by the
    pool itself, and by a rollout worker; by one of them unless `is_leased` is None."""

    def decorate(body: BenchTest) -> Callable[..., None]:
        def test(folder: Path, is_leased: bool, **given: Any) -> None:
            async def main() -> None:
                async with bench(folder, count, is_leased=is_leased, **settings) as built:
                    await body(built, **given)

            run_virtual(main())

        own = [one for name, one in signature(test).parameters.items() if name != "given"]
        others = list(signature(body).parameters.values())[1:]
        named = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in (*own, *others)]
        test.__signature__ = Signature(named)  # type: ignore[attr-defined]
        test.__doc__ = body.__doc__
        modes = {False: "own", True: "leased"}
        wanted = modes if is_leased is None else [is_leased]
        params = [pytest.param(mode, id=modes[mode]) for mode in wanted]
        return pytest.mark.parametrize("is_leased", params)(test)

    return decorate
