"""Time in the engine pool: the clock of a rollout, the order of turns, the loss of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.deadline import Deadline, WorkClock, working
from agentenv.base.types import Chunk
from agentenv.contract.request import PartEnd, ServerLoad, ServerRequest
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from tests.engines.faulty_server import ByteTokenizer, recite
from tests.engines.pool_bench import TEXT, Bench, bench, virtual
from tests.support.virtual_clock import on_virtual_clock, run_virtual


async def timed_turn(bench: Bench) -> float:
    """The seconds that one whole turn charges to its rollout."""
    with working(WorkClock()) as clock:
        assert bench.text(await bench.generate()) == TEXT
    return clock()


@virtual(1, max_concurrency=1)
async def test_later_turns_precede_first_turns_and_older_trees_precede_newer_ones(b: Bench) -> None:
    ended: list[tuple[int, int]] = []

    async def take_turn(order: tuple[int, int]) -> None:
        await b.generate(order=order)
        ended.append(order)

    orders = [(1, 2), (1, 9), (1, 3), (0, 8), (0, 4), (1, 1)]
    await asyncio.gather(*(take_turn(order) for order in orders))
    assert ended == [(1, 2), (0, 4), (0, 8), (1, 1), (1, 3), (1, 9)]


@virtual(1, max_concurrency=1)
async def test_the_clock_of_a_rollout_runs_only_while_a_server_processes_its_turn(b: Bench) -> None:
    """Turns of 2.3 s, one after the other."""
    assert await asyncio.gather(*(timed_turn(b) for _ in range(4))) == pytest.approx([2.3] * 4)


@virtual(2, max_concurrency=8)
async def test_the_pool_has_room_while_few_turns_wait_and_caches_have_space(b: Bench) -> None:
    """16 places, of which a tenth may be waited for; half of each cache is in use."""
    assert b.pool.has_room(10**6), "nothing is known of what a trajectory needs"
    pending = [asyncio.create_task(b.generate(session=f"{n}")) for n in range(17)]
    await asyncio.sleep(1.5)
    assert b.pool.stats()["waiting"] == 1
    assert b.pool.has_room(30)
    assert not b.pool.has_room(31), "16 running ones need one of two caches"
    pending.append(asyncio.create_task(b.generate(session="one more")))
    await asyncio.sleep(0.1)
    assert not b.pool.has_room(18), "two of 16 wait"
    await asyncio.gather(*pending)
    for server in b.servers:
        server.kill()
    await asyncio.sleep(2.0)
    assert not b.pool.has_room(0), "no server is there"
    for server in b.servers:
        server.restart()
    await b.until_up(2)


@virtual(1, max_retries=0, first_token_s=5.0)
async def test_a_turn_without_a_file_descriptor_waits_and_counts_no_loss(b: Bench) -> None:
    (server,) = b.servers
    server.num_starved = 40

    assert await timed_turn(b) == pytest.approx(2.3)
    assert asyncio.get_running_loop().time() > 10.0
    stats = b.pool.stats()
    assert (stats["retries"], stats["server/0/lost"], stats["descriptor_waits"]) == (0, 0, 40)


@virtual(1)
async def test_a_paused_server_charges_no_time_and_is_not_lost(b: Bench) -> None:
    (server,) = b.servers
    load = server.load_weights

    async def slow(source: Path, policy_version: int) -> None:
        await asyncio.sleep(320.0)
        await load(source, policy_version)

    server.load_weights = slow  # type: ignore[method-assign]

    async def report_load() -> ServerLoad:
        return ServerLoad(1, 0, 0.1, 0)

    pending = asyncio.create_task(timed_turn(b))
    await asyncio.sleep(1.0)
    await b.load(1)
    assert await pending == pytest.approx(1.0)  # this server samples on while it loads
    server.hanging, server.load = True, report_load  # type: ignore[method-assign]
    pending = asyncio.create_task(timed_turn(b))
    await asyncio.sleep(20.0)
    await b.load(2)
    assert b.pool.stats()["server/0/lost"] == 0, "the pause is no silence"
    pending.cancel()
    await asyncio.wait({pending})


@virtual(2, first_token_s=50.0, silence_s=7.0)
async def test_a_silent_server_is_lost_and_its_turns_continue_on_another(b: Bench) -> None:
    """It still reports that it is healthy."""
    first, second = b.servers

    async def well() -> bool:
        return True

    for server in b.servers:
        server.healthy = well  # type: ignore[method-assign]
    loop = asyncio.get_running_loop()
    for num_lost, (delay, patience_s) in enumerate([(0.0, 50.0), (1.05, 7.0)], start=1):
        begin = loop.time()
        pending = asyncio.create_task(b.generate(session=f"{delay}", on_tokens=lambda chunk: None))
        if delay:
            await asyncio.sleep(delay)
        else:
            first.hanging = second.hanging = True
            await asyncio.sleep(patience_s - 1.0)
        home = next(server for server in b.servers if server.num_running)
        first.hanging, second.hanging = home is first, home is second
        assert b.text(await pending) == TEXT
        assert patience_s <= loop.time() - begin <= patience_s + 8.0
        assert sum(b.pool.stats()[f"server/{n}/lost"] for n in range(2)) == num_lost
        home.kill()  # its hanging turns
        home.restart()
        await b.until_up(2)


async def seconds_of(b: Bench, seconds: float, spent_s: float = 0.0, **options: Any) -> float:
    """The seconds on the clock of a rollout after one turn, within a limit."""
    with working(WorkClock(spent_s)) as clock, Deadline(seconds, clock, LateError()):
        assert b.text(await b.generate(**options)) == options.get("text", TEXT)
    return clock()


class LateError(Exception):
    """The rollout was out of time."""


@pytest.mark.parametrize(("spent_s", "left_after_s"), [(0.0, 60.0), (50.0, 30.0)])
def test_the_silence_of_a_server_is_not_charged_to_a_rollout_out_of_time(
    folder: Path, spent_s: float, left_after_s: float
) -> None:
    """It reports that it is healthy, also by a token; a first one may take longer than the time of
    a rollout. If less than `silence_s` remains to the rollout, the pool waits that long."""

    async def main(is_leased: bool) -> None:
        async with bench(folder, 2, is_leased=is_leased) as b:
            silent = b.servers[0]
            silent.silent = silent.answers_probes = True
            at_s = await seconds_of(b, 60.0, spent_s)
            assert at_s == pytest.approx(spent_s + 2.3)
            now = asyncio.get_running_loop().time()
            assert now == pytest.approx(left_after_s + 2.3, abs=3.0)
            assert (silent.num_aborted, b.pool.stats()["server/0/lost"]) == (1, 1)

    for is_leased in (False, True):
        run_virtual(main(is_leased))


@virtual(1)
async def test_a_turn_that_waits_in_a_responsive_server_runs_out_of_time(b: Bench) -> None:
    (server,) = b.servers
    generate = server.generate

    async def keep_waiting(request: ServerRequest, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        if request.session == "waits":
            await asyncio.Event().wait()
        return await generate(request, on_chunk)

    server.generate = keep_waiting  # type: ignore[method-assign]
    others = asyncio.create_task(b.generate(TEXT * 20, session="other", stop=(), max_tokens=1000))
    with pytest.raises(LateError):
        await seconds_of(b, 20.0, session="waits")
    assert asyncio.get_running_loop().time() == pytest.approx(20.0, abs=0.1)
    assert b.pool.stats()["server/0/lost"] == 0
    await others


@on_virtual_clock
async def test_a_slow_server_is_not_silent(folder: Path) -> None:
    """A token each 5 s, and 17 s of time: it ends with the next token."""
    async with bench(folder, 1) as b:
        (server,) = b.servers
        config = ScriptedConfig(tokens_per_s=0.2, max_model_len=4096)
        server._engine = ScriptedEngine(config, ByteTokenizer(folder), script=recite)
        with pytest.raises(LateError):
            await seconds_of(b, 17.0, on_tokens=lambda chunk: None)
        assert 17.0 <= asyncio.get_running_loop().time() <= 22.0
        assert b.pool.stats()["server/0/lost"] == 0


@pytest.mark.parametrize(("num_slots", "num_lost"), [(1, 0), (2, 1)])
@virtual(1, silence_s=30.0, is_leased=False)
async def test_a_preempted_request_is_not_lost_while_its_server_is_responsive(
    b: Bench, num_slots: int, num_lost: int
) -> None:
    """It gives no token for 60 s. A server that reports no waiting request has lost it."""
    (server,) = b.servers
    server.num_slots = num_slots
    generate, break_s = server.generate, [60.0]

    async def take_a_break(request: ServerRequest, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        if request.session != "preempted" or not break_s:
            return await generate(request, on_chunk)
        on_chunk(Chunk(b.tokenizer.encode(TEXT[0]), [0.0], [0.0]))
        await asyncio.sleep(break_s.pop())
        chunks: list[Chunk] = []
        end = await generate(request, chunks.append)
        for chunk in chunks[1:]:
            on_chunk(chunk)
        return end

    server.generate = take_a_break  # type: ignore[method-assign]
    calls = (b.generate(TEXT * 40, session=f"{n}", stop=(), max_tokens=1000) for n in range(2))
    others = [asyncio.create_task(call) for call in calls]
    assert b.text(await b.generate(session="preempted")) == TEXT
    assert b.pool.stats()["server/0/lost"] == num_lost
    await asyncio.gather(*others)


@virtual(2, silence_s=30.0)
async def test_a_rollout_gets_back_the_seconds_of_a_silent_server(b: Bench) -> None:
    """It sends tokens for a second and then none; the other server samples the rest."""

    async def take_turn() -> tuple[float, float]:
        with working(WorkClock(outer=WorkClock())) as clock:
            assert b.text(await b.generate()) == TEXT
            assert clock._outer is not None
            return clock(), clock._outer()

    pending = asyncio.create_task(take_turn())
    await asyncio.sleep(1.05)
    (server,) = (one for one in b.servers if one.num_running)
    server.hanging = True
    spent_s = await pending
    assert asyncio.get_running_loop().time() > 30.0
    assert spent_s == pytest.approx((2.3, 2.3), abs=1.5), "without the silence"
