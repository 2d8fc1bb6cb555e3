"""Under any faults of the servers of a pool, no weights are mixed and no older ones are served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentenv.assembly.run.terminal import is_shown
from agentenv.base.errors import ConfigError, EngineDeadError, EngineError
from agentenv.base.types import Chunk, SamplingParams, VersionSpan
from agentenv.contract.request import ServerLostError
from agentenv.contract.server_config import PoolConfig
from agentenv.engines.pool.pool import EnginePool
from tests.engines.faulty_server import EOS, FaultyServer, reciter
from tests.engines.pool_bench import TEXT, Bench, bench, virtual
from tests.support.virtual_clock import on_virtual_clock


@virtual(2)
async def test_an_update_reaches_all_servers_and_running_turns(b: Bench) -> None:
    pending = await b.begin(0.91)
    await b.load(1)
    assert (b.pool.policy_version, b.pool.stats()["weight_updates"]) == (1, 1)
    assert [server.loaded for server in b.servers] == [[("v1", 1)]] * 2
    assert (await pending).version_spans == [VersionSpan(0, 0, 9), VersionSpan(1, 9, len(TEXT))]


@virtual(1, max_concurrency=8)
async def test_preemptions_by_an_update_do_not_lower_the_limit(b: Bench) -> None:
    pending = [asyncio.create_task(b.generate()) for _ in range(6)]
    await asyncio.sleep(1.2)  # it has been looked at before and is after
    await b.load(1)
    await asyncio.sleep(0.9)
    assert b.servers[0].num_preemptions == 6
    assert b.pool.stats()["server/0/limit"] == 8
    await asyncio.gather(*pending)


@virtual(2)
async def test_version_spans_are_exact_over_a_loss_and_an_update(b: Bench) -> None:
    """The versions of a lost part are those of its server when the tokens arrived."""
    pending = await b.begin(0.41)
    await b.load(1)
    await asyncio.sleep(0.5)
    b.servers[0].kill()
    await asyncio.sleep(0.1)
    await b.load(2)
    spans = (await pending).version_spans
    assert [span.version for span in spans] == [0, 1, 2]
    assert spans[0].end == 4
    assert spans[1].end == 9


@virtual(2)
async def test_an_incomplete_update_excludes_the_server_until_it_has_the_weights(b: Bench) -> None:
    bad = b.servers[0]
    bad.load_faults = [ServerLostError("broken pipe"), ServerLostError("still broken")]
    pending = await b.begin(0.5)
    await b.load(1)
    assert b.pool.policy_version == 1
    assert b.pool.stats()["servers_up"] == 1
    assert b.text(await b.generate()) == TEXT
    assert b.text(await pending) == TEXT
    await b.until_up(2)
    assert bad.weights == "v1"
    assert bad.versions_requested == [0]  # no request met the mixed weights


@virtual(2)
async def test_a_server_that_refuses_an_update_is_excluded_and_keeps_its_turns(b: Bench) -> None:
    bad = b.servers[0]
    bad.load_faults = [EngineError("no memory")] * 3
    pending = asyncio.create_task(b.generate(TEXT * 3, stop=()))
    await asyncio.sleep(0.5)
    await b.load(1)
    later = [await b.generate(session=str(n)) for n in range(3)]
    assert {span.version for done in later for span in done.version_spans} == {1}
    assert [span.version for span in (await pending).version_spans] == [0, 1]
    assert (bad.versions_requested[0], bad.num_aborted) == (0, 0)
    await b.until_up(2)
    assert bad.loaded == [("v1", 1)]


@on_virtual_clock
async def test_the_terminal_reports_refused_weights_and_an_added_server(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(folder, 2) as b:
        b.servers[0].load_faults = [EngineError("no memory")] * 2
        await b.load(1)
        await b.until_up(2)
        late = FaultyServer("late", reciter(folder))
        b.pool.add_server(late)
        await b.until_up(3)
        await b.pool.sleep()
        await b.load(2)
    shown = [one.args for one in caplog.records if is_shown(one)]
    assert [args[0] for args in shown if isinstance(args, tuple)] == ["server0", "server0", "late"]


@virtual(2, max_concurrency=1)
async def test_a_turn_that_waits_during_a_refused_update_gets_no_slot_on_that_server(
    b: Bench,
) -> None:
    bad = b.servers[1]
    bad.load_faults = [EngineError("no memory")] * 2
    pending = [asyncio.create_task(b.generate(TEXT * 4, stop=()))]  # on the other
    refuse = bad.load_weights

    async def refuse_and_add_turn(source: Path, policy_version: int) -> None:
        if len(bad.load_faults) == 1:
            pending.append(asyncio.create_task(b.generate(session="later")))
        await refuse(source, policy_version)

    bad.load_weights = refuse_and_add_turn  # type: ignore[method-assign]
    await asyncio.sleep(0.1)
    await b.load(1)
    assert (await pending[1]).version_spans == [VersionSpan(1, 0, len(TEXT))]
    assert set(bad.versions_requested) <= {1}
    await pending[0]


@virtual(1)
async def test_a_full_server_takes_an_update_and_loses_no_turn(b: Bench) -> None:
    """It refuses the token that identifies its weights until one of its requests has ended."""
    (server,) = b.servers
    server.capacity = 8
    pending = [asyncio.create_task(b.generate(session=str(number))) for number in range(8)]
    await asyncio.sleep(0.5)
    await b.load(1)
    assert server.num_refused > 0
    assert (server.loaded, server.num_aborted) == ([("v1", 1)], 0)
    assert {b.text(await one) for one in pending} == {TEXT}
    stats = b.pool.stats()
    assert (stats["retries"], stats["server/0/lost"], stats["servers_up"]) == (0, 0, 1)


@virtual(1)
async def test_an_update_waits_for_a_file_descriptor_and_counts_no_loss(b: Bench) -> None:
    (server,) = b.servers
    server.num_starved = 5
    await b.load(1)
    assert (server.num_starved, server.loaded) == (0, [("v1", 1)])
    assert b.pool.stats()["servers_up"] == 1


@virtual(2)
async def test_an_update_refused_by_all_servers_keeps_the_old_weights(b: Bench) -> None:
    for server in b.servers:
        server.load_faults = [EngineError("the directory lacks lm_head.weight")] * 2
    with pytest.raises(EngineError, match=r"1.*server0.*lm_head"):
        await b.load(1)
    assert b.pool.policy_version == 0
    assert (await b.generate()).version_spans[0].version == 0
    await b.load(2)
    assert b.pool.policy_version == 2


@virtual(1)
async def test_an_update_waits_for_the_only_server_to_return(b: Bench) -> None:
    (server,) = b.servers
    server.kill()
    loading = asyncio.create_task(b.load(1))
    await asyncio.sleep(20)
    assert not loading.done()
    server.restart()
    await loading
    assert server.loaded == [("v1", 1)]


@virtual(1)
async def test_a_server_never_serves_older_weights_even_as_the_last_one(b: Bench) -> None:
    late = FaultyServer("late", reciter(b.folder))
    late.load_faults = [EngineError("no memory")] * 4
    b.pool.add_server(late)
    await b.load(1)
    b.servers[0].kill()
    assert (await b.generate()).version_spans[0].version == 1
    assert late.versions_requested == [1]


@virtual(1)
async def test_a_server_can_be_added_and_removed_during_the_run(b: Bench) -> None:
    await b.load(1)
    late = FaultyServer("late", reciter(b.folder))
    b.pool.add_server(late)
    await b.until_up(2)
    assert late.loaded == [("v1", 1)]
    await b.load(2)
    assert late.loaded[-1] == ("v2", 2)
    pending = await b.begin(0.5)
    b.pool.remove_server("server0")
    assert b.pool.stats()["servers"] == 1
    assert not any(name.startswith("server/0/") for name in b.pool.stats())
    assert b.text(await pending) == TEXT
    await b.generate()
    assert late.versions_requested == [2]
    assert b.servers[0].num_closed == 1


@virtual(1)
async def test_a_restart_at_the_same_url_is_detected_before_a_request_fails(b: Bench) -> None:
    """The label of the pool is lost; the new process gets the weights first."""
    await b.load(1)
    (server,) = b.servers
    server.restart()
    await asyncio.sleep(3)
    assert server.loaded == [("v1", 1), ("v1", 1)]
    assert (await b.generate()).version_spans == [VersionSpan(1, 0, len(TEXT))]


@pytest.mark.parametrize("listens", [False, True])
@on_virtual_clock
async def test_tokens_of_foreign_weights_are_not_used(
    folder: Path, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client loads weights into a server while a request runs there. A caller that has
    received its tokens cannot receive replacements, and must request the turn again."""

    monkeypatch.setattr(PoolConfig, "poll_interval_s", 60.0)
    async with bench(folder, 1) as b:
        await b.load(1)
        (server,) = b.servers
        chunks: list[Chunk] = []
        pending = asyncio.create_task(b.generate(on_tokens=chunks.append if listens else None))
        await asyncio.sleep(0.5)
        server.change_weights("others", "default")
        if listens:
            with pytest.raises(EngineError, match="weights named default"):
                await pending
        else:
            assert b.text(await pending) == TEXT
        assert server.loaded == [("v1", 1)] * (1 if listens else 2)
        assert b.text(await b.generate()) == TEXT
        assert (server.weights, len(server.loaded)) == ("v1", 2)


async def test_an_absent_server_is_refused_at_the_start(folder: Path) -> None:
    server = FaultyServer("http://nowhere:1", reciter(folder))
    server.kill()
    pool = EnginePool([server], folder, 0, vocab_size=256, eos_ids={EOS})
    with pytest.raises(ConfigError, match="http://nowhere:1"):
        await pool.start(fresh=False)
    await pool.close()


@pytest.mark.parametrize(
    ("names", "is_lost"), [(["there", "late"], True), (["there", "late"], False), (["late"], False)]
)
@on_virtual_clock
async def test_a_run_starts_without_a_lost_or_full_server_and_adds_it_later(
    folder: Path, names: list[str], is_lost: bool
) -> None:
    """A server that restarts when a run is resumed, or that other clients use too. A full server is
    available, even if it is the only one."""
    servers = [FaultyServer(name, reciter(folder)) for name in names]
    late = servers[-1]
    if is_lost:
        late.kill()
    else:
        late.capacity = 0
    pool = EnginePool(servers, folder, 0, vocab_size=256, eos_ids={EOS})
    await pool.start(fresh=False)
    assert pool.stats()["servers_up"] == len(names) - 1
    await asyncio.sleep(60)
    late.capacity = None
    if is_lost:
        late.restart()
    await pool.load_weights(folder / "v1", 1)
    await asyncio.sleep(60)
    assert [server.weights for server in servers] == ["v1"] * len(names)
    assert pool.stats()["servers_up"] == len(names)
    await pool.close()


@on_virtual_clock
async def test_servers_full_from_the_start_are_an_outage(folder: Path) -> None:
    server = FaultyServer("full", reciter(folder))
    server.capacity = 0
    pool = EnginePool([server], folder, 0, vocab_size=256, eos_ids={EOS})
    await pool.start(fresh=False)
    await asyncio.sleep(700)
    with pytest.raises(EngineDeadError, match=r"600.*429"):
        await pool.generate([1], SamplingParams(1), session="s")
    await pool.close()
