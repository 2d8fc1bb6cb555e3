"""Servers sleep while the learner has their GPUs: no turn runs on them, and none is lost."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.base.deadline import Deadline, WorkClock, working
from agentenv.base.errors import ConfigError, EngineDeadError, EngineError
from agentenv.base.types import Chunk, Completion, VersionSpan
from agentenv.contract.request import ServerLostError
from tests.engines.pool_bench import TEXT, Bench, virtual


@virtual(2, max_retries=0, max_outage_s=60)
async def test_turns_continue_after_a_sleep_and_use_up_no_deadline_or_retry(b: Bench) -> None:
    """Neither does a sleep that is longer than an outage may be end the run."""
    loop = asyncio.get_running_loop()
    chunks: list[Chunk] = []

    async def within(seconds: float) -> Completion:
        with working(WorkClock()) as clock, Deadline(seconds, clock, TimeoutError()):
            return await b.generate(on_tokens=chunks.append)

    pending = asyncio.create_task(within(3.0))  # the turn takes 2.3 s
    await asyncio.sleep(0.91)
    await b.pool.sleep()
    assert [server.asleep for server in b.servers] == [True, True]
    later = asyncio.create_task(b.generate(session="later"))
    await asyncio.sleep(500)
    assert (len(chunks), later.done()) == (9, False)
    await b.pool.wake()
    begin = loop.time()
    done = await pending
    assert b.text(done) == b.text(await later) == TEXT
    assert loop.time() - begin < 2.5
    assert [t for chunk in chunks for t in chunk.token_ids] == done.token_ids
    assert done.version_spans == [VersionSpan(0, 0, len(TEXT))]
    stats = b.pool.stats()
    assert (stats["retries"], stats["continuations"], stats["sleeps"]) == (0, 1, 1)
    assert 500 <= stats["outage_s"] < 501
    assert (stats["server/0/lost"], stats["sampled_tokens"]) == (0, 2 * len(TEXT))


@virtual(2)
async def test_new_weights_wake_the_servers_and_sample_every_later_token(b: Bench) -> None:
    pending = await b.begin(0.91)
    await b.pool.sleep()
    await b.load(1)
    assert [(s.asleep, s.weights, s.policy_version) for s in b.servers] == [(False, "v1", 1)] * 2
    assert (await pending).version_spans == [VersionSpan(0, 0, 9), VersionSpan(1, 9, len(TEXT))]
    await b.pool.sleep()
    await b.pool.wake()  # without an update: the same weights once more
    assert (await b.generate()).version_spans == [VersionSpan(1, 0, len(TEXT))]


@virtual(2)
async def test_a_server_that_dies_asleep_returns_with_the_weights(b: Bench) -> None:
    pending = await b.begin(0.91)
    await b.pool.sleep()
    dead, restarted = b.servers
    dead.kill()
    restarted.restart()  # another process in its place, awake, with the weights of the start
    await asyncio.sleep(100)
    await b.load(1)
    assert b.text(await pending) == TEXT
    assert (b.pool.stats()["servers_up"], restarted.weights) == (1, "v1")
    dead.restart()
    await b.until_up(2)
    assert dead.weights == "v1"


@virtual(2)
async def test_a_lost_server_does_not_keep_the_others_awake(b: Bench) -> None:
    b.servers[0].kill()
    await b.pool.sleep()
    assert b.servers[1].asleep
    await b.pool.wake()
    assert b.text(await b.generate()) == TEXT
    b.servers[0].restart()
    await b.until_up(2)


@pytest.mark.parametrize("what", ["a token", "its weights"])
@virtual(2, silence_s=5.0, is_leased=False)
async def test_a_recovering_server_does_not_delay_a_sleep(b: Bench, what: str) -> None:
    """The server reports that it is healthy, and then answers no request."""
    silent = b.servers[0]
    await b.load(1)
    pending = await b.begin(0.91)
    if what == "a token":
        silent.silent = True
    else:
        silent.load_s = 500.0
        silent.restart()
    assert b.text(await pending) == TEXT
    await asyncio.sleep(10)
    begin = asyncio.get_running_loop().time()
    await b.pool.sleep()
    assert asyncio.get_running_loop().time() - begin < 1.0
    assert [server.asleep for server in b.servers] == [True, True]
    silent.silent, silent.load_s = False, 0.05
    await b.load(2)
    assert b.pool.stats()["servers_up"] == 2
    assert [server.weights for server in b.servers] == ["v2", "v2"]


@virtual(2, first_token_s=20.0)
async def test_a_server_without_a_token_in_its_trial_is_excluded(b: Bench) -> None:
    """Its other turns continue on another server."""
    pending = [asyncio.create_task(b.generate(session="s")) for _ in range(2)]
    await asyncio.sleep(0.91)
    b.servers[0].silent = True
    b.pool.servers[0].suspend("somebody doubts it")
    begin = asyncio.get_running_loop().time()
    assert [b.text(await one) for one in pending] == [TEXT, TEXT]
    assert asyncio.get_running_loop().time() - begin < 25.0


@virtual(2)
async def test_refused_weights_leave_the_old_ones_in_service(b: Bench) -> None:
    await b.load(1)
    await b.pool.sleep()
    for server in b.servers:
        server.load_faults = [EngineError("another shape")]
    with pytest.raises(EngineError, match="policy version 2"):
        await b.load(2)
    assert (await b.generate()).version_spans == [VersionSpan(1, 0, len(TEXT))]


@virtual(2)
async def test_a_server_that_fails_to_sleep_ends_the_pool(b: Bench) -> None:
    b.servers[1].sleep_fault = ServerLostError("500")
    with pytest.raises(EngineError, match=r"server1.*500"):
        await b.pool.sleep()
    await b.pool.close()
    with pytest.raises(EngineDeadError):
        await b.generate()


@virtual(2)
async def test_a_server_without_the_feature_is_refused_with_the_missing_flag(b: Bench) -> None:
    b.pool.require("sleep")
    b.servers[1].can_sleep = False
    b.servers[1].restart()
    await b.generate()
    b.pool.remove_server("server1")
    b.pool.add_server(b.servers[1])
    await b.until_up(2)
    with pytest.raises(ConfigError, match=r"server1.*--enable-sleep-mode"):
        b.pool.require("sleep")
