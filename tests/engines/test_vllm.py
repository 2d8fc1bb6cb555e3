"""The contract of engines on a real vLLM server, and features of vLLM."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.errors import ConfigError, EngineError
from agentenv.base.types import SamplingParams, VersionSpan
from agentenv.contract.http_client import ServerClient
from agentenv.contract.request import ServerLostError
from agentenv.engines.remote.probes import VLLM_NEEDED, probe_vllm
from agentenv.engines.vllm import VLLMServer
from tests.engines import contract
from tests.engines.reference import VOCAB, check_sampled, distribution
from tests.engines.traffic import Traffic
from tests.engines.vllm_server import (
    BLOCK,
    EXTENSION,
    LOGPROBS,
    NO_PLUGIN,
    NUM_SEQS,
    SCALE_OUT,
    VLLMProcess,
    require_vllm,
)
from tests.engines.world import ServerSubject, World, pool_of, prompt

pytestmark = pytest.mark.engine_vllm
TOP_K = 4


class Servers:
    """Each starts when a test asks for it: `plain`, which lacks the plugin of agentenv, `tied`,
    and `closed` without --enable-scale-out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.untied_world = World(root / "untied", tied=False)
        self.tied_world = World(root / "tied", tied=True)
        self.started: list[VLLMProcess] = []

    @cached_property
    def plain(self) -> VLLMProcess:
        return self._start(self.untied_world, "plain", (*SCALE_OUT, *LOGPROBS), NO_PLUGIN)

    @cached_property
    def tied(self) -> VLLMProcess:
        return self._start(self.tied_world, "tied", (*SCALE_OUT, *LOGPROBS, *EXTENSION))

    @cached_property
    def closed(self) -> VLLMProcess:
        return self._start(self.untied_world, "closed", LOGPROBS)

    def _start(self, world: World, name: str, *given: Any) -> VLLMProcess:
        self.started.append(VLLMProcess(world.paths[0], self.root / f"{name}.log", *given))
        return self.started[-1]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    require_vllm()
    servers = Servers(tmp_path_factory.mktemp("vllm"))
    try:
        yield servers
    finally:
        for process in servers.started:
            process.stop()


@asynccontextmanager
async def serving(process: VLLMProcess, world: World, **options: Any) -> AsyncIterator[VLLMServer]:
    """A client, with version 0 loaded. Few log-probs a token, since each costs vLLM much time."""
    await asyncio.to_thread(process.wait_ready)
    server = VLLMServer(process.url, vocab_size=VOCAB, **{"entropy_top_k": TOP_K, **options})
    try:
        await server.connect(0)
        await server.load_weights(world.paths[0], 0)
        yield server
    finally:
        await server.close()


@pytest.fixture
async def plain(servers: Servers) -> AsyncIterator[ServerSubject]:
    async with serving(servers.plain, servers.untied_world) as server:
        yield ServerSubject(server)


@pytest.fixture
async def tied(servers: Servers) -> AsyncIterator[ServerSubject]:
    async with serving(servers.tied, servers.tied_world) as server:
        yield ServerSubject(server)


async def test_a_connected_server_reports_its_version_and_features(servers: Servers) -> None:
    await asyncio.to_thread(servers.plain.wait_ready)
    server = VLLMServer(servers.plain.url + "/", vocab_size=VOCAB)
    info = await server.connect(5)
    assert (info.engine, info.model, info.max_model_len) == ("vllm", "policy", 512)
    assert info.features == {"sleep"}
    assert info.version.startswith("0.")
    assert server.name == servers.plain.url
    assert server.policy_version == 5
    assert await server.healthy()
    assert await server.keeps_label()
    load = await server.load()
    assert (load.num_running, load.num_waiting, load.kv_usage) == (0, 0, 0)
    await server.close()


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.promise), "tied"])
async def test_greedy_equals_transformers_before_and_after_each_update(
    kind: str, servers: Servers
) -> None:
    world = servers.tied_world if kind == "tied" else servers.untied_world
    process = servers.tied if kind == "tied" else servers.plain
    async with serving(process, world) as server:
        await contract.check_updates(ServerSubject(server), world)


async def test_log_probs_are_of_the_sampled_distribution(
    plain: ServerSubject, tied: ServerSubject, servers: Servers
) -> None:
    for subject, world in ((plain, servers.untied_world), (tied, servers.tied_world)):
        await contract.check_temperature(subject, world, 0)
        await contract.check_truncated(subject, world, 0)


async def test_the_plugin_gives_exact_entropies(tied: ServerSubject, servers: Servers) -> None:
    """Without requested alternatives."""
    ids = prompt(1, 20)
    done = await tied.generate(ids, SamplingParams(max_tokens=8, temperature=1.3, seed=3))
    assert done.entropy_kind == "exact"
    rows = distribution(servers.tied_world.models[0], ids, done.token_ids, 1.3)
    assert done.entropies == pytest.approx((-(rows.exp() * rows).sum(-1)).tolist(), abs=1e-4)


async def test_entropies_without_the_plugin_are_bounds_or_exact(servers: Servers) -> None:
    """Without the plugin: from the k largest they are lower bounds, from all they are exact, and
    are marked as such."""
    ids = prompt(1, 20)
    world = servers.untied_world
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    bounds = []
    for top_k, kind in ((1, "top_k"), (20, "top_k"), (VOCAB, "exact"), (-1, "exact")):
        async with serving(servers.plain, world, entropy_top_k=top_k) as server:
            done = await ServerSubject(server).generate(ids, sampling)
            assert done.entropy_kind == kind
            bounds.append(done.entropies)
    rows = distribution(world.models[0], ids, done.token_ids)
    exact = (-(rows.exp() * rows).sum(-1)).tolist()
    assert bounds[2] == bounds[3] == pytest.approx(exact, abs=1e-4)
    for one, twenty, all_of_them in zip(*bounds[:3], strict=True):
        assert one < twenty < all_of_them


async def test_a_turn_under_a_grammar(plain: ServerSubject, servers: Servers) -> None:
    await contract.check_guided(plain.server, servers.untied_world, 0)


@pytest.mark.usefixtures("plain")  # which waits for the server
async def test_scores_of_given_texts(servers: Servers) -> None:
    await contract.check_scoring("vllm", servers.plain.url, servers.untied_world)


async def test_streaming(plain: ServerSubject) -> None:
    await contract.check_streaming(plain)
    await contract.check_stream_interval(plain.server)


async def test_end_of_sequence(plain: ServerSubject, servers: Servers) -> None:
    await contract.check_end_of_sequence(plain, servers.untied_world, 0)


async def test_stop_strings(plain: ServerSubject, tied: ServerSubject, servers: Servers) -> None:
    for subject, world in ((plain, servers.untied_world), (tied, servers.tied_world)):
        await contract.check_stop_strings(subject, world, 0)
        await contract.check_stop_tokens(subject.server, world, 0)


@pytest.mark.usefixtures("plain")  # which waits for the server
@pytest.mark.parametrize("update_kv", ["recompute", "keep"])
async def test_prefixes_are_reused_and_never_across_versions(
    update_kv: str, servers: Servers
) -> None:
    world = servers.untied_world
    async with serving(servers.plain, world, update_kv=update_kv) as server:
        subject, recomputed = ServerSubject(server), update_kv == "recompute"
        await contract.check_prefixes(subject, world, 0, BLOCK, 8, recomputed=recomputed)


async def test_a_request_queued_in_the_server_starts_on_the_new_weights(
    plain: ServerSubject, servers: Servers
) -> None:
    """Its prompt was cached under the old ones, whose requests hold the cache."""
    world = servers.untied_world
    ids = prompt(12, 3 * BLOCK + 5)
    few = SamplingParams(max_tokens=3, temperature=0.0)
    await plain.generate(ids, few)
    others = Traffic(plain, ids, 8 * NUM_SEQS)
    while (await plain.server.load()).num_waiting < 2 * NUM_SEQS:  # noqa: ASYNC110 (it knows)
        await asyncio.sleep(0.02)
    waiting = asyncio.create_task(plain.generate(ids, few))
    await asyncio.sleep(0.1)
    await plain.load_weights(world.paths[1], 1)
    done = await waiting
    await others.cancel()
    assert done.version_spans == [VersionSpan(1, 0, 3)]
    check_sampled(world.models, ids, done, greedy=True)


async def test_requests_during_an_update_use_no_prefix_of_other_weights(
    plain: ServerSubject, servers: Servers
) -> None:
    """Whichever weights they get, no prefix of the other ones is in them."""
    world = servers.untied_world
    ids = prompt(12, 3 * BLOCK + 5)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    await plain.generate(ids, sampling)
    load = asyncio.create_task(plain.load_weights(world.paths[1], 1))
    calls = []
    while not load.done():
        calls.append(asyncio.create_task(plain.generate(ids, sampling)))
        await asyncio.sleep(0.003)
    await load
    for done in await asyncio.gather(*calls, plain.generate(ids, sampling)):
        check_sampled(world.models, ids, done, greedy=True)
    assert done.version_spans == [VersionSpan(1, 0, 1)]


async def test_an_update_within_a_request_gives_two_version_spans(
    plain: ServerSubject, servers: Servers
) -> None:
    """vLLM recomputes its prompt and the tokens sampled so far."""
    world = servers.untied_world
    await contract.check_update_within_a_request(plain, world, recomputed=True)


@pytest.mark.usefixtures("plain")  # which waits for the server
async def test_forks_reuse_prefixes_after_an_update_under_64_streams(servers: Servers) -> None:
    """Through the pool, four times as many as run at once. Log-probs are those of the weights that
    sampled each token; forks find all full blocks of the sampled tokens."""
    world = servers.untied_world
    prompts = [prompt(n, 2 * BLOCK + 5) for n in range(4 * NUM_SEQS)]
    server = VLLMServer(servers.plain.url, entropy_top_k=TOP_K, vocab_size=VOCAB)
    pool = pool_of([server], world.paths[0], name="streams")
    try:
        await pool.start(fresh=False)
        pending = [
            asyncio.create_task(pool.generate(ids, SamplingParams(256, seed=n), session=str(n)))
            for n, ids in enumerate(prompts)
        ]
        while pool.stats()["sampled_tokens"] < 20 * NUM_SEQS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await pool.load_weights(world.paths[1], 1)
        late = prompt(4 * NUM_SEQS, 2 * BLOCK + 5)  # on a slow machine no other one starts after it
        prompts.append(late)
        pending.append(
            asyncio.create_task(pool.generate(late, SamplingParams(256), session="late"))
        )
        turns = await asyncio.gather(*pending)
        for ids, done in zip(prompts, turns, strict=True):
            check_sampled(world.models, ids, done)
        versions = {tuple(span.version for span in done.version_spans) for done in turns}
        assert versions >= {(0, 1), (1,)}, "some were within the update, some after it"
        assert pool.stats()["retries"] == 0
        forks = [
            (n, [*ids, *done.token_ids, 20 + fork])
            for n, (ids, done) in enumerate(zip(prompts, turns, strict=True))
            for fork in range(2)
        ]
        found = await asyncio.gather(
            *(pool.generate(ids, SamplingParams(2), session=str(n)) for n, ids in forks)
        )
        for (n, ids), done in zip(forks, found, strict=True):
            if n % 8 == 0:
                check_sampled({1: world.models[1]}, ids, done)
            if turns[n].version_spans[-1].version == 1:  # turns that ended before it are dropped
                assert done.num_cached_tokens >= len(ids) - 2 * BLOCK
    finally:
        await pool.close()


async def test_a_cancelled_call_frees_the_server(plain: ServerSubject) -> None:
    await contract.check_abort(plain, num_requests=32)


async def test_concurrent_requests(plain: ServerSubject, servers: Servers) -> None:
    await contract.check_concurrency(plain, servers.untied_world, 0, 64, 16)


async def test_the_engine_serves_on_after_refused_requests(plain: ServerSubject) -> None:
    await contract.check_refusals(plain)


async def test_incompatible_directories_are_refused(
    plain: ServerSubject, servers: Servers, tmp_path: Path
) -> None:
    other = servers.tied_world.paths[0]
    await contract.check_bad_directories(plain, servers.untied_world, 0, other, tmp_path)


async def test_tokens_of_weights_with_another_label_are_refused(
    plain: ServerSubject, servers: Servers
) -> None:
    http = ServerClient(servers.plain.url)
    await http.call("POST", "/update_weight_version", {"new_version": "of someone else"})
    with pytest.raises(EngineError, match="of someone else"):
        await plain.generate([20], SamplingParams(max_tokens=1))
    await http.close()


async def test_a_paused_server_is_resumed_on_connect(servers: Servers) -> None:
    http = ServerClient(servers.plain.url)
    await asyncio.to_thread(servers.plain.wait_ready)
    await http.call("POST", "/pause", params={"mode": "keep"})
    async with serving(servers.plain, servers.untied_world) as server:
        await contract.check_greedy(ServerSubject(server), servers.untied_world, 0)
    await http.close()


@pytest.mark.parametrize("route", VLLM_NEEDED)
async def test_a_missing_route_is_named(
    route: str, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(servers.plain.wait_ready)
    http = ServerClient(servers.plain.url)
    found = await http.routes()

    async def fewer() -> frozenset[str]:
        return found - {route}

    monkeypatch.setattr(http, "routes", fewer)
    with pytest.raises(ConfigError, match=route):
        await probe_vllm(http, VOCAB, 20)
    await http.close()


async def test_a_server_without_scale_out_is_refused(servers: Servers) -> None:
    await asyncio.to_thread(servers.closed.wait_ready)
    server = VLLMServer(servers.closed.url, vocab_size=VOCAB)
    with pytest.raises(ConfigError, match="--enable-scale-out"):
        await server.connect(0)
    await server.close()


async def test_a_server_is_unusable_after_an_incomplete_load_until_the_next_one(
    tied: ServerSubject, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that only this process sees: the engine detects this after it has begun. It
    serves no request until another load has succeeded."""
    world = servers.tied_world
    (tmp_path / "weights").symlink_to(world.paths[1])
    monkeypatch.chdir(tmp_path)
    running = Traffic(tied, prompt(1, 9), 2 * NUM_SEQS)
    await asyncio.sleep(0.3)
    with pytest.raises(ServerLostError, match="not completed"):
        await tied.load_weights(Path("/proc/self/cwd/weights"), 1)
    await running.fail()
    with pytest.raises(ServerLostError, match="cannot be used"):
        await tied.generate([20], SamplingParams(max_tokens=1))
    await tied.server.connect(-1)  # as a pool does with a server that it has lost
    with pytest.raises(ServerLostError, match="cannot be used"):
        await tied.generate([20], SamplingParams(max_tokens=1))
    await tied.load_weights(world.paths[2], 2)
    await contract.check_greedy(tied, world, 2)


async def test_a_dead_engine_loses_requests_that_have_reported_their_tokens(
    tied: ServerSubject, servers: Servers
) -> None:
    """kill -9 of the engine process: a lost request has reported its tokens, later ones are lost at
    once. The last test, since the server does not restart."""
    running = Traffic(tied, prompt(1, 9), 2 * NUM_SEQS)
    http = ServerClient(servers.tied.url)
    while not any(running.reported):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    await http.call("POST", "/pause", params={"mode": "keep"})  # some are in the middle now
    await asyncio.sleep(0.3)
    os.kill(servers.tied.engine_pid(), 9)
    await running.fail()
    assert any(running.reported)
    await http.close()
    with pytest.raises(ServerLostError):
        await tied.generate([20], SamplingParams(max_tokens=1))
    assert not await tied.server.healthy()
