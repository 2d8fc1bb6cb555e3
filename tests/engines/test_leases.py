"""Places that rollout workers have on the servers of a pool; that turns are taken there as a pool
itself takes them is in the tests of the pool (pool_bench.virtual)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentenv.base.deadline import WorkClock, working
from agentenv.base.errors import EngineDeadError, EngineError
from agentenv.base.types import Chunk, SamplingParams, VersionSpan
from agentenv.cluster.engines import LeasedEngine
from agentenv.cluster.messages import SlotRelease, pack, read_answer
from agentenv.contract.request import ForeignWeightsError, PartEnd, ServerLostError, ServerRequest
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.pool.server import Aborted, Busy, Lost, Outcome, Reset, Starved, TurnDone
from tests.engines.faulty_server import FaultyServer, Guest
from tests.engines.pool_bench import TEXT, Bench, bench, deliver_all, leased, write_folder
from tests.support.virtual_clock import on_virtual_clock, run_virtual


def shared(
    count: int,
) -> Callable[[Callable[[Bench, LeasedEngine], Awaitable[None]]], Callable[[Path], None]]:
    """A test over a pool that requests turns itself, with one worker."""

    def decorate(body: Callable[[Bench, LeasedEngine], Awaitable[None]]) -> Callable[[Path], None]:
        def test(folder: Path) -> None:
            async def main() -> None:
                async with bench(folder, count) as b, leased(b.pool, folder) as engine:
                    async with asyncio.timeout(10_000):
                        await body(b, engine)

            run_virtual(main())

        return test

    return decorate


def start_turn(b: Bench, engine: LeasedEngine, text: str = TEXT) -> asyncio.Task[str]:
    sampling = SamplingParams(100, stop=("</a>",), seed=1)
    prompt = b.tokenizer.encode(text + "|")

    async def generate() -> str:
        return b.text(await engine.generate(prompt, sampling, session="s"))

    return asyncio.create_task(generate())


@on_virtual_clock
async def test_a_lost_worker_frees_its_slots(folder: Path) -> None:
    async with bench(folder, 1) as b:
        async with leased(b.pool, folder, is_killed=True) as engine:
            pending = [start_turn(b, engine) for _ in range(3)]
            await asyncio.sleep(0.5)
            assert b.pool.stats()["running"] == 3
        assert b.pool.stats()["running"] == 0
        for one in pending:
            one.cancel()
        assert b.text(await b.generate()) == TEXT


@shared(1)
async def test_a_half_loaded_server_resumes_after_the_requests_of_workers_end(
    b: Bench, engine: LeasedEngine
) -> None:
    pending = start_turn(b, engine)
    await asyncio.sleep(0.5)
    (server,) = b.servers
    assert server.before_release is not None
    await server.before_release()
    assert (server.num_running, server.num_aborted) == (0, 1)
    assert await pending == TEXT, "it goes on from its tokens"


@on_virtual_clock
async def test_a_worker_uses_the_new_process_of_a_restarted_server(folder: Path) -> None:
    """After each connection the server is handed over again."""
    guests: list[Guest] = []
    async with bench(folder, 1) as b, leased(b.pool, folder, guests=guests) as engine:
        assert [await start_turn(b, engine) for _ in range(2)] == [TEXT, TEXT]
        assert [one.num_taken_over for one in guests] == [1]
        b.servers[0].restart()
        await b.until_up(0)
        await b.until_up(1)
        assert await start_turn(b, engine) == TEXT
        assert [one.num_taken_over for one in guests] == [2]


@shared(1)
async def test_a_dead_pool_ends_the_turns_of_workers(b: Bench, engine: LeasedEngine) -> None:
    b.servers[0].kill()
    with pytest.raises(EngineDeadError):
        await start_turn(b, engine)


@on_virtual_clock
async def test_a_turn_that_runs_when_the_pool_dies_is_not_requested_again(folder: Path) -> None:
    async with bench(folder, 1, max_retries=0) as b, leased(b.pool, folder) as engine:
        pending = start_turn(b, engine)
        await asyncio.sleep(0.5)
        b.pool.end("all is over")
        with pytest.raises(EngineDeadError, match="all is over"):
            await pending
        await deliver_all()


@shared(1)
async def test_workers_and_the_pool_share_the_slots_of_a_server(
    b: Bench, engine: LeasedEngine
) -> None:
    b.servers[0].capacity = 2
    turns = [start_turn(b, engine) for _ in range(4)]
    own = [asyncio.create_task(b.generate()) for _ in range(4)]
    assert await asyncio.gather(*turns) == [TEXT] * 4
    assert [b.text(done) for done in await asyncio.gather(*own)] == [TEXT] * 4
    assert b.servers[0].peak_running == 2
    stats = b.pool.stats()
    assert (stats["requests"], stats["server/0/in_flight"]) == (8, 0)
    assert stats["sampled_tokens"] == stats["server/0/sampled_tokens"] == 8 * len(TEXT)


@shared(1)
async def test_losses_of_an_earlier_process_do_not_count_against_the_next(
    b: Bench, engine: LeasedEngine
) -> None:
    """The message of a worker may be late."""
    pending = start_turn(b, engine)
    await asyncio.sleep(0.5)
    link, loop = engine._link, asyncio.get_running_loop()
    link.send = partial(loop.call_later, 5.0, link.send)  # type: ignore[assignment]
    b.servers[0].restart()
    lost_s = loop.time()
    await b.until_up(0)
    await b.until_up(1)
    await asyncio.sleep(lost_s + 5.01 - loop.time())
    assert (b.pool.stats()["server/0/lost"], b.pool.stats()["servers_up"]) == (1, 1)
    assert await pending == TEXT
    await asyncio.sleep(5.0)


@shared(2)
async def test_tokens_right_after_an_update_have_its_version(
    b: Bench, engine: LeasedEngine
) -> None:
    """Also if the server is lost before the update is over: its weights are being probed."""
    (server, _) = b.servers
    generate = server.generate

    async def slow_probe(request: ServerRequest, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        if request.id.startswith("weights-"):
            await asyncio.sleep(0.6)
        return await generate(request, on_chunk)

    server.generate = slow_probe  # type: ignore[method-assign]
    prompt = b.tokenizer.encode(TEXT + "|")
    sampling = SamplingParams(100, stop=("</a>",), seed=1)
    pending = asyncio.create_task(engine.generate(prompt, sampling, session="s"))
    await asyncio.sleep(0.48)
    loading = asyncio.create_task(b.load(1))
    await asyncio.sleep(0.4)
    server.kill()
    await loading
    done = await pending
    assert b.text(done) == TEXT
    assert done.version_spans == [VersionSpan(0, 0, 5), VersionSpan(1, 5, len(TEXT))]


@pytest.mark.parametrize("outcome", [
    TurnDone(), Aborted("why"), Busy("full", 2.5), Starved(), Reset("gone"), Lost("failed", "500"),
])  # fmt: skip
def test_every_outcome_of_a_lease_survives_encoding(outcome: Outcome) -> None:
    left = SlotRelease(7, 1, 1, 2, {"requests": 1}, outcome)
    assert read_answer(pack(left)) == left


STEPS = "ask ask ask cancel kill restart load load refuse doubt sleep wake break fill leave join"


class Storm:
    """Workers and the pool itself request turns while faults happen to them and the servers.
    `latency_s` is that of the workers' links."""

    def __init__(self, b: Bench, latency_s: float) -> None:
        self.b, self.latency_s = b, latency_s
        self.workers: list[tuple[AsyncExitStack, LeasedEngine]] = []
        self.pending: dict[asyncio.Task[None], object] = {}  # and their engines
        self.background: list[asyncio.Task[None]] = []
        # By session: of each request, versions of tokens; None: it came at an update.
        self.sampled: dict[str, list[list[int | None]]] = {}
        self.named_s = {server.name: -1.0 for server in b.servers}
        self.num_requests = self.version = self.served = 0
        for server in b.servers:
            server.generate = partial(self.sample, server, server.generate)  # type: ignore[method-assign]
            server.on_named = partial(self.named, server.name, server.on_named)

    def named(self, name: str, on_named: Callable[[], None]) -> None:
        self.named_s[name] = asyncio.get_running_loop().time()
        on_named()

    async def sample(
        self, server: FaultyServer, generate: Any, request: ServerRequest, on_chunk: Any
    ) -> PartEnd:
        """Like the server; records the versions of sampled tokens."""
        if request.id.startswith("weights-"):
            return await generate(request, on_chunk)  # type: ignore[no-any-return]
        assert self.latency_s or server.policy_version >= self.served
        versions: list[int | None] = []
        self.sampled.setdefault(request.session, []).append(versions)

        def record(chunk: Chunk) -> None:
            is_clear = asyncio.get_running_loop().time() > self.named_s[server.name]
            version = server.policy_version if is_clear else None
            versions.extend([version] * len(chunk.token_ids))
            on_chunk(chunk)

        try:
            return await generate(request, record)  # type: ignore[no-any-return]
        except ForeignWeightsError:
            versions.clear()
            raise

    async def generate(self, number: int, engine: EnginePool | LeasedEngine) -> None:
        text, session = f"{number} is not {number + 1}" * (1 + number % 4) + "</a>", str(number)
        prompt = self.b.tokenizer.encode(text + "|")
        sampling = SamplingParams(200, stop=("</a>",), seed=number)
        with working(WorkClock()) as clock:
            done = await engine.generate(prompt, sampling, session=session)
            before = clock()
            await asyncio.sleep(1.0)
            assert clock() - before == pytest.approx(1.0), "it stands still"
        assert self.b.text(done) == text
        versions_found = [
            span.version for span in done.version_spans for _ in range(span.start, span.end)
        ]
        given = [version for one in self.sampled[session] for version in one]
        pairs = zip(versions_found, given, strict=False)
        assert self.latency_s or all(version in (None, one) for one, version in pairs)

    async def step(self, kind: str, number: int) -> None:
        server = self.b.servers[number % len(self.b.servers)]
        match kind:
            case "ask":
                for engine in [self.b.pool, *(engine for _, engine in self.workers)] * 2:
                    self.num_requests += 1
                    task = asyncio.create_task(self.generate(self.num_requests, engine))
                    self.pending[task] = engine
            case "cancel":
                for _ in range(number):
                    await asyncio.sleep(0)
                for one in list(self.pending)[number % 2 :: 2]:
                    del self.pending[one]
                    one.cancel()
            case "kill" | "restart":
                getattr(server, kind)()
            case "load":
                self.version += 1
                self.background.append(asyncio.create_task(self.load(self.version)))
            case "refuse" | "doubt":
                fault = EngineError if kind == "refuse" else ServerLostError
                server.load_faults = [fault(kind)] * 2
            case "sleep" | "wake":
                self.background.append(asyncio.create_task(getattr(self.b.pool, kind)()))
            case "break":
                server.breaks = [number % 7]
            case "fill":
                server.capacity = number % 3
            case "join":
                await self.join()
            case "leave" if self.workers:
                await self.leave(number % len(self.workers))

    async def load(self, version: int) -> None:
        await self.b.load(version)
        await deliver_all()  # places that were under way
        self.served = version

    async def join(self) -> None:
        stack, b = AsyncExitStack(), self.b
        worker = leased(b.pool, b.folder, is_killed=True, latency_s=self.latency_s)
        self.workers.append((stack, await stack.enter_async_context(worker)))

    async def leave(self, number: int) -> None:
        """A worker is lost at once, with all its requests."""
        stack, engine = self.workers.pop(number)
        gone = [one for one, its in self.pending.items() if its is engine]
        for one in gone:
            del self.pending[one]
            one.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        await stack.aclose()

    async def end(self) -> None:
        """All faults are repaired, and all requests end."""
        for server in self.b.servers:
            server.load_faults, server.breaks, server.capacity = [], [], None
            if not await server.healthy():
                server.restart()
        outcomes = await asyncio.gather(*self.background, return_exceptions=True)
        assert all(one is None or isinstance(one, EngineError) for one in outcomes), outcomes
        await self.b.pool.wake()
        await asyncio.gather(*self.pending)
        await asyncio.sleep(5 * self.latency_s + 0.1)
        stats = self.b.pool.stats()
        assert (stats["running"], stats["waiting"]) == (0, 0)
        assert not any(member.running or member.guests for member in self.b.pool.servers)
        while self.workers:
            await self.leave(0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(STEPS.split()),
            st.integers(0, 20),
            st.sampled_from([0.0, 0.04, 0.35, 1.5]),
        ),
        min_size=10,
        max_size=30,
    ),
    st.sampled_from([0.0, 0.0, 0.3]),
)
@example([("ask", 0, 0.35), ("load", 0, 0.35), ("kill", 0, 0.35), ("kill", 1, 1.5)], 0.0)
@example(  # another process takes the place of the only server between its load and its probe
    [
        *[("ask", 0, 0.0)] * 4,
        ("kill", 0, 0.0),
        ("fill", 5, 0.0),
        *[("ask", 0, 0.0)] * 2,
        ("load", 0, 0.35),
        ("restart", 13, 1.5),
    ],
    0.0,
)
def test_turns_are_complete_and_no_slot_is_lost_under_any_faults(
    steps: list[tuple[str, int, float]], latency_s: float
) -> None:
    """And each token has the version of the weights that sampled it."""

    async def main(folder: Path) -> None:
        async with bench(folder, 2, max_retries=1000, max_outage_s=1e6) as b:
            storm = Storm(b, latency_s)
            async with asyncio.timeout(10_000):
                await storm.join()
                await storm.join()
                for kind, number, pause_s in steps:
                    await storm.step(kind, number)
                    await asyncio.sleep(pause_s)
                await storm.end()

    with TemporaryDirectory() as root:
        run_virtual(main(write_folder(Path(root))))
