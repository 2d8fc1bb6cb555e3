"""The engine pool: which server gets a request, how many it gets, and how requests end.

The clock is virtual; the servers are engines in this process that die and hang on command.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from agentenv.base.errors import EngineDeadError, EngineError
from agentenv.base.types import Chunk, VersionSpan
from agentenv.engines.pool.server import Heartbeat
from agentenv.engines.scripted import ScriptedEngine
from tests.engines.faulty_server import EOS
from tests.engines.pool_bench import TEXT, Bench, bench, virtual
from tests.support.virtual_clock import on_virtual_clock

# where requests go


@virtual(3)
async def test_siblings_share_a_server_and_trees_are_spread(b: Bench) -> None:
    pending = [b.generate(session=f"tree{n % 3}") for n in range(12)]
    await asyncio.gather(*pending)
    assert [len(server.requests) for server in b.servers] == [4, 4, 4]


@virtual(2, max_concurrency=2)
async def test_a_turn_leaves_its_full_home_server_only_temporarily(b: Bench) -> None:
    await asyncio.gather(*(b.generate(session="tree") for _ in range(3)))
    assert [len(server.requests) for server in b.servers] == [2, 1]
    await b.generate(session="tree")
    assert [len(server.requests) for server in b.servers] == [3, 1]


@virtual(1)
async def test_a_turn_of_the_pool_equals_that_of_its_server(b: Bench) -> None:
    chunks: list[Chunk] = []
    done = await b.generate(on_tokens=chunks.append, stream_interval=4)
    assert b.text(done) == TEXT
    assert (done.finish_reason, done.stop) == ("stop", "</a>")
    assert done.version_spans == [VersionSpan(0, 0, len(TEXT))]
    assert [len(chunk.token_ids) for chunk in chunks] == [4] * 5  # the rest is in the completion
    assert [t for chunk in chunks for t in chunk.token_ids] == done.token_ids[:20]
    assert (await b.generate(stop=())).token_ids[-1] == EOS
    assert (await b.generate(max_tokens=3)).finish_reason == "length"
    with pytest.raises(EngineError, match="max_model_len"):
        await b.generate(max_tokens=5000)
    assert b.pool.stats()["retries"] == 0


@virtual(1)
async def test_tokens_outside_a_fork_window_arrive_in_few_events(b: Bench) -> None:
    await b.generate()
    await b.generate(on_tokens=lambda chunk: None, stream_interval=4)
    assert [request.stream_interval for request in b.servers[0].requests] == [16, 4]


@virtual(1)
async def test_an_event_holds_the_tokens_of_two_seconds(b: Bench) -> None:
    """From 16 tokens to 64, by the requests before."""
    (server,) = b.servers
    engine = server._engine
    assert isinstance(engine, ScriptedEngine)
    for tokens_per_s, interval in ((10.1, 20), (25.1, 50), (500.0, 64), (2.0, 16)):
        engine.config = replace(engine.config, tokens_per_s=tokens_per_s)
        for _ in range(80):
            await b.generate("word " * 40, stop=(), max_tokens=200)
        assert server.requests[-1].stream_interval == interval


@virtual(1)
async def test_coalesced_events_do_not_raise_the_measured_speed_of_a_server(b: Bench) -> None:
    """One that gives two tokens a second would seem silent with events of 64."""
    heartbeat = Heartbeat()
    for pace in (2.0, 2.0, 1e6):
        heartbeat.observe(pace)
    assert heartbeat.interval == 16


@virtual(1, entropies="window", is_leased=False)
async def test_events_after_a_fork_window_are_large(b: Bench) -> None:
    for window in (4, 20):
        await b.generate(on_tokens=lambda chunk: None, stream_interval=window, max_tokens=22)
    intervals = [request.stream_interval for request in b.servers[0].requests]
    assert intervals[0] == 4
    assert intervals[1] >= 16
    assert intervals[2:] == [20, 20]


@pytest.mark.parametrize("stop", ["</a>", "</b>"])  # which no token holds, and which one does
@pytest.mark.parametrize(("window", "end"), [(n, 23) for n in (7, 19, 21, 23, 40, 0)])
@on_virtual_clock
async def test_only_the_tokens_of_a_fork_window_have_entropies(
    folder: Path, window: int, end: int, stop: str
) -> None:
    """They are requested with the first request of a turn, and the rest in a second one."""
    text = TEXT.replace("</a>", stop)
    async with bench(folder, 1, entropies="window") as b:
        chunks: list[Chunk] = []
        options = {"on_tokens": chunks.append, "stream_interval": window} if window else {}
        done = await b.generate(text + " and more", stop=(stop,), **options)
        assert b.text(done) == text
        assert (done.finish_reason, done.stop) == ("stop", stop)
        assert len(done.token_ids) == len(done.entropies) == end
        known = [not math.isnan(entropy) for entropy in done.entropies]
        assert known == [place < window for place in range(end)]
        received_ids = [token for chunk in chunks for token in chunk.token_ids]
        assert received_ids == done.token_ids[: len(received_ids)]
        requests = b.servers[0].requests
        assert [r.with_entropies for r in requests] == [True, False][not window :][: len(requests)]
        assert len(requests) == 1 + (0 < window < end)
        if len(requests) > 1:
            assert requests[0].sampling.max_tokens == window
            assert requests[1].sampling.max_tokens == 100 - window
        stats = b.pool.stats()
        assert (stats["retries"], stats["continuations"]) == (0, 0)


@virtual(1, entropies="window", is_leased=False)
async def test_a_turn_is_one_request_when_entropies_are_free(b: Bench) -> None:
    b.servers[0].has_free_entropies = True
    done = await b.generate(on_tokens=lambda chunk: None, stream_interval=4, max_tokens=22)
    assert not any(map(math.isnan, done.entropies))
    (request,) = b.servers[0].requests
    assert request.with_entropies
    assert (request.sampling.max_tokens, request.stream_interval) == (22, 4)


@virtual(1)
async def test_an_engine_gets_the_tokens_that_contain_a_stop_string(b: Bench) -> None:
    """If these tokens suffice to find the stop strings, it decodes nothing."""
    for stop in ((">",), ("</a>",), ("</a>", ">"), (">", "</b>")):
        done = await b.generate(stop=stop)
        assert b.text(done) == TEXT
        assert (done.finish_reason, done.stop) == ("stop", stop[0])
    requests = b.servers[0].requests
    stops = [b.tokenizer.decode(list(request.stop_token_ids)) for request in requests]
    assert stops == ["></b>", "", "></b>", "></b>"]
    assert [request.sampling.stop for request in requests] == [(), ("</a>",), ("</a>", ">"), ()]


@virtual(1)
async def test_a_stop_string_stops_in_any_tokenization(b: Bench) -> None:
    done = await b.generate("the fox</b> and more", stop=("</b>",))
    assert b.text(done) == "the fox</b>"
    assert (done.finish_reason, done.stop) == ("stop", "</b>")
    assert b.servers[0].requests[0].sampling.stop == ()
    assert b.servers[0].num_aborted == 1
    done = await b.generate("the fox</b>", stop=("</b>",))  # and then the end of the sequence
    assert (b.text(done), done.finish_reason, done.stop) == ("the fox</b>", "stop", "</b>")


@virtual(1)
async def test_cancelling_aborts_the_request_at_once(b: Bench) -> None:
    pending = await b.begin(0.5)
    pending.cancel()
    await asyncio.wait({pending})
    assert asyncio.get_running_loop().time() < 0.6
    assert (b.servers[0].num_running, b.servers[0].num_aborted) == (0, 1)
    assert b.pool.stats()["server/0/in_flight"] == 0


@virtual(1)
async def test_a_callback_that_raises_fails_its_turn_only(b: Bench) -> None:
    def on_tokens(chunk: Chunk) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await b.generate(on_tokens=on_tokens)
    assert b.text(await b.generate()) == TEXT
    assert b.pool.stats()["retries"] == 0


@virtual(1, max_concurrency=1)
async def test_closing_ends_running_and_waiting_turns(b: Bench) -> None:
    tasks = [asyncio.create_task(b.generate()) for _ in range(3)]
    await asyncio.sleep(0.5)
    await b.pool.close()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, EngineDeadError) for outcome in outcomes)
    assert b.servers[0].num_closed == 1


# concurrency


@virtual(1)
async def test_the_pool_finds_the_capacity_of_a_server(b: Bench) -> None:
    (server,) = b.servers
    server.num_slots = 20
    limits: list[float] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(1)
            limits.append(b.pool.stats()["server/0/limit"])

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(b.generate(session=str(n)) for n in range(3000)))
    watching.cancel()
    settled = limits[30:-5]
    assert len(settled) > 50
    assert min(settled) >= 30
    assert max(settled) <= 60
    assert 35 < sum(settled) / len(settled) < 50
