"""Under any faults of the servers of a pool, no turn is lost and each token counts once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.run.terminal import is_shown
from agentenv.base.deadline import Deadline, WorkClock, working
from agentenv.base.errors import EngineDeadError, EngineError
from agentenv.base.types import Chunk, Completion, VersionSpan
from agentenv.contract.request import BusyError, PartEnd, ServerLostError, ServerRequest
from tests.engines.faulty_server import FaultyServer
from tests.engines.pool_bench import TEXT, Bench, bench, virtual
from tests.support.virtual_clock import on_virtual_clock


@virtual(2)
async def test_a_turn_continues_on_another_server_from_its_received_tokens(b: Bench) -> None:
    b.servers[0].die_after = 9
    chunks: list[Chunk] = []
    done = await b.generate(on_tokens=chunks.append)
    assert b.text(done) == TEXT
    assert (done.finish_reason, done.stop) == ("stop", "</a>")
    assert [t for chunk in chunks for t in chunk.token_ids] == done.token_ids
    second = b.servers[1].requests[0]
    assert b.tokenizer.decode(list(second.prompt_ids)) == TEXT + "|" + TEXT[:9]
    assert second.sampling.max_tokens == 100 - 9
    assert second.sampling.seed != b.servers[0].requests[0].sampling.seed
    stats = b.pool.stats()
    assert (stats["requests"], stats["retries"], stats["continuations"]) == (1, 1, 1)
    assert (stats["servers_up"], stats["server/0/lost"]) == (1, 1)
    assert stats["sampled_tokens"] == len(TEXT)


@pytest.mark.parametrize("stop", ["</a>", "</b>"])  # which no token holds, and which one does
@pytest.mark.parametrize("cut", range(1, len(TEXT)))
@on_virtual_clock
async def test_a_stop_string_across_two_servers_still_stops(
    folder: Path, cut: int, stop: str
) -> None:
    """The second server sees only a part of the stop string, and would continue after it."""
    text = TEXT.replace("</a>", stop)
    async with bench(folder, 2) as b:
        b.servers[0].die_after = cut
        done = await b.generate(text + " and more, much more", stop=(stop,))
        assert b.text(done) == text
        assert (done.finish_reason, done.stop) == ("stop", stop)
        within = cut > TEXT.index("</a>") or stop == "</b>"
        assert b.servers[1].num_aborted == within  # the pool cut it


@pytest.mark.parametrize(
    ("options", "reason"), [({}, "stop"), ({"stop": ()}, "stop"), ({"max_tokens": 5}, "length")]
)
@virtual(2, is_leased=False)
async def test_a_turn_that_lost_only_its_end_is_complete(
    b: Bench, options: dict[str, Any], reason: str
) -> None:
    whole = await b.generate(session="other", **options)
    b.servers[1].die_after = len(whole.token_ids)
    done = await b.generate(session="other2", **options)
    b.servers[0].die_after = len(whole.token_ids)
    done = await b.generate(session="other", **options)
    assert done.token_ids == whole.token_ids
    assert (done.finish_reason, done.stop) == (reason, whole.stop)
    assert b.pool.stats()["retries"] == 0


@virtual(1)
async def test_a_restarted_single_server_loads_the_weights_before_it_serves(b: Bench) -> None:
    await b.load(1)
    (server,) = b.servers
    pending = await b.begin(0.95)
    server.kill()
    await asyncio.sleep(30)
    server.restart()
    done = await pending
    assert b.text(done) == TEXT
    assert done.version_spans == [VersionSpan(1, 0, len(TEXT))]
    assert server.loaded == [("v1", 1), ("v1", 1)]
    assert server.versions_requested == [1, 1]
    assert b.pool.stats()["continuations"] == 1


@virtual(2)
async def test_turns_leave_a_hanging_server(b: Bench) -> None:
    pending = await b.begin(0.95)
    b.servers[0].hanging = True
    assert b.text(await pending) == TEXT
    assert asyncio.get_running_loop().time() < 70
    assert b.servers[0].num_aborted == 1


@virtual(2, max_retries=2)
async def test_the_retries_of_a_turn_are_bounded(b: Bench) -> None:
    """For a turn that fails on servers that are well."""
    for server in b.servers:
        fail_turns(server)
    with pytest.raises(EngineError, match="3 attempts: 502"):
        await b.generate()


def fail_turns(server: FaultyServer, number: int = 10**6) -> None:
    generate, left = server.generate, iter(range(number))

    async def fail(request: ServerRequest, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        if request.id.startswith("weights-") or next(left, None) is None:
            return await generate(request, on_chunk)
        raise ServerLostError("502 bad gateway")

    server.generate = fail  # type: ignore[method-assign]


@virtual(2)
async def test_a_server_that_samples_nothing_stays_excluded_although_it_reports_healthy(
    b: Bench,
) -> None:
    sick = b.servers[0]

    async def fail(*_: Any) -> PartEnd:
        raise ServerLostError("500 CUDA error")

    sick.generate = fail  # type: ignore[method-assign]
    for number in range(10):
        assert b.text(await b.generate(session=str(number))) == TEXT
    assert b.pool.stats()["retries"] == 1
    assert b.pool.stats()["servers_up"] == 1


@virtual(3)
async def test_a_healthy_server_that_fails_requests_is_avoided_and_then_excluded(b: Bench) -> None:
    """Each turn costs one retry at most, and the server gets ever fewer requests."""
    sick = b.servers[0]
    sick.fails = True
    for number in range(40):
        assert b.text(await b.generate(session=str(number))) == TEXT  # 2.3 s each
    assert b.pool.stats()["retries"] == sick.num_failed <= 9
    assert sick.loaded == []
    sick.fails = False
    await asyncio.sleep(100)
    await asyncio.gather(*(b.generate(session=f"later{number}") for number in range(6)))
    assert b.pool.stats()["servers_up"] == 3
    assert len(sick.requests) > 0


@virtual(1)
async def test_a_full_server_loses_no_turn_and_gets_fewer_requests(b: Bench) -> None:
    (server,) = b.servers
    server.capacity = 16
    done = await asyncio.gather(*(b.generate(session=str(number)) for number in range(200)))
    assert {b.text(completion) for completion in done} == {TEXT}
    stats = b.pool.stats()
    assert (stats["retries"], stats["server/0/lost"], stats["servers_up"]) == (0, 0, 1)
    assert stats["server/0/refused"] == server.num_refused > 0
    assert server.peak_running == 16
    assert stats["server/0/limit"] < 32
    # 200 turns of 2.3 s on 16 slots take 29 s; only the time it was closed is lost.
    assert asyncio.get_running_loop().time() < 60


@virtual(1)
async def test_a_server_too_busy_to_report_its_label_is_queried_again(b: Bench) -> None:
    """One of its requests was lost; the other one continues there."""
    (server,) = b.servers
    keeps_label, refusals = server.keeps_label, [BusyError("503")] * 2

    async def refuse_then_report() -> bool:
        if refusals:
            raise refusals.pop()
        return await keeps_label()

    pending = asyncio.create_task(b.generate(TEXT * 2, stop=()))
    await asyncio.sleep(0.5)
    server.keeps_label, server.fails = refuse_then_report, True  # type: ignore[method-assign]
    other = asyncio.create_task(b.generate(session="other"))
    await asyncio.sleep(0.1)
    server.fails = False
    assert b.text(await pending) == TEXT * 2
    assert (b.text(await other), refusals) == (TEXT, [])
    assert (server.num_aborted, server.loaded) == (0, [])


@virtual(2)
async def test_refused_turns_go_to_another_server_before_all_others(b: Bench) -> None:
    b.servers[0].capacity = 0
    pending = [asyncio.create_task(b.generate(session=str(number))) for number in range(8)]
    await asyncio.sleep(0.01)
    assert b.pool.stats()["server/0/refused"] >= 1
    assert {b.text(await one) for one in pending} == {TEXT}
    assert len(b.servers[1].requests) == 8
    assert b.pool.stats()["retries"] == 0


@virtual(1, max_outage_s=1000)
async def test_a_server_that_refuses_every_request_is_lost_eventually(b: Bench) -> None:
    b.servers[0].capacity = 0
    with pytest.raises(EngineDeadError, match=r"1000.*server0.*429"):
        await b.generate()


@pytest.mark.parametrize("breaks", [[0], [9], [3, 9]])
@virtual(2, is_leased=False)
async def test_a_broken_connection_costs_neither_a_retry_nor_the_server(
    b: Bench, breaks: list[int]
) -> None:
    b.servers[0].breaks = list(breaks)
    assert b.text(await b.generate()) == TEXT
    stats = b.pool.stats()
    assert (stats["retries"], stats["server/0/lost"]) == (0, 0)
    assert stats["reconnections"] == len(breaks)
    assert b.servers[1].requests == []


@virtual(2)
async def test_a_connection_broken_twice_without_a_token_is_a_lost_server(b: Bench) -> None:
    b.servers[0].breaks = [0, 0]
    assert b.text(await b.generate()) == TEXT
    stats = b.pool.stats()
    assert (stats["retries"], stats["server/0/lost"], stats["reconnections"]) == (1, 1, 1)
    assert len(b.servers[1].requests) == 1


def outages(caplog: pytest.LogCaptureFixture) -> list[bool]:
    """Of each message on the terminal since the last call, whether a server is out."""
    found = ["is out" in one.msg for one in caplog.records if is_shown(one)]
    caplog.clear()
    return found


@on_virtual_clock
async def test_the_terminal_reports_an_outage_and_a_recovery_once_each(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that returns and fails again has not recovered; a lost request is not an outage."""
    async with bench(folder, 2) as b:
        server = b.servers[0]
        server.kill()
        assert b.text(await b.generate()) == TEXT
        await asyncio.sleep(100)
        assert outages(caplog) == [True]
        server.restart()
        await b.until_up(2)
        assert outages(caplog) == [False]
        server.fails = True
        for number in range(60):
            await b.generate(session=str(number))
        assert outages(caplog) == [True]
        assert server.num_failed > 3
        server.fails = False
        await asyncio.sleep(100)
        await asyncio.gather(*(b.generate(session=f"later{number}") for number in range(6)))
        assert outages(caplog) == [False]
        fail_turns(server, 1)
        assert b.text(await b.generate(session="later")) == TEXT
        await b.until_up(2)
    assert outages(caplog) == []


@virtual(2, max_outage_s=60)
async def test_the_run_ends_with_the_reason_of_each_server_when_all_are_lost(b: Bench) -> None:
    running = [asyncio.create_task(b.generate(session=str(n))) for n in range(4)]
    await asyncio.sleep(0.5)
    for server in b.servers:
        server.kill()
    for task in running:
        with pytest.raises(EngineDeadError, match=r"60.*server0.*server1"):
            await task
    assert 55 < asyncio.get_running_loop().time() < 65
    with pytest.raises(EngineDeadError):
        await b.generate()


@virtual(1)
async def test_time_without_a_server_counts_toward_no_deadline(b: Bench) -> None:
    """Limits of seconds bound the work of the policy; an outage extends them."""
    (server,) = b.servers
    loop = asyncio.get_running_loop()
    begin = loop.time()

    async def within(seconds: float, text: str = TEXT) -> Completion:
        with working(WorkClock()) as clock, Deadline(seconds, clock, TimeoutError()):
            return await b.generate(text, session="s", stop=("</a>",) if text == TEXT else ())

    pending = asyncio.create_task(within(6.0))  # the turn takes 2.3 s, a retry at most 2
    await asyncio.sleep(0.95)
    server.kill()
    await asyncio.sleep(200)
    server.restart()
    assert b.text(await pending) == TEXT
    assert loop.time() > begin + 200
    assert 200 < b.pool.stats()["outage_s"] < 235
    begin = loop.time()
    with pytest.raises(TimeoutError):  # a slow server is another case
        await within(6.0, TEXT * 4)
    assert loop.time() - begin < 7
