"""Connecting to vLLM: servers that lack what a run needs, and several servers behind one URL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.remote.probes import GENERATE
from agentenv.engines.vllm import VLLMServer
from agentenv.errors import ConfigError
from agentenv.types import SamplingParams
from tests.engines import contract
from tests.engines.proxy import Change, Proxy, changed, proxy, without
from tests.engines.reference import EOS, VOCAB
from tests.engines.vllm_server import LOGPROBS, SCALE_OUT, VLLMProcess, require_vllm
from tests.engines.world import EngineSubject, ServerSubject, World

pytestmark = [pytest.mark.engine_vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def urls(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two servers."""
    require_vllm()
    logs = tmp_path_factory.mktemp("vllm")
    arguments = (*SCALE_OUT, *LOGPROBS)
    found = [VLLMProcess(world.paths[0], logs / f"{n}.log", arguments) for n in range(2)]
    try:
        for process in found:
            process.wait_ready()
        yield [process.url for process in found]
    finally:
        for process in found:
            process.kill()


# what is missing, as a proxy before a real server shows it

SETTINGS = ("vllm_config", "model_config")
BY_ANSWER: dict[str, tuple[str, Change, str]] = {
    "log-probs before temperature": (
        "/server_info",
        changed(*SETTINGS, "logprobs_mode", to="raw_logprobs"),
        "'raw_logprobs'.* start it with --logprobs-mode processed_logprobs",
    ),
    "too few log-probs": (
        "/server_info",
        changed(*SETTINGS, "max_logprobs", to=5),
        "at most 5 .* entropy_top_k is 20: start it with --max-logprobs 20",
    ),
    "no figures": ("/metrics", lambda text: "", "start it without --disable-log-stats"),
}
BY_REQUEST: dict[str, tuple[str, Change, str]] = {
    "log-probs that are not those asked for": (
        GENERATE,
        changed("sampling_params", "top_k", to=-1),
        "start it with --logprobs-mode processed_logprobs",
    ),
    "cached tokens not counted": (
        GENERATE,
        without("stream_options"),
        "start it with --enable-prompt-tokens-details",
    ),
    "tokens of other weights": (
        "/update_weight_version",
        changed("new_version", to="77"),
        "does not give back the label of its weights",
    ),
}


@pytest.mark.parametrize("kind", BY_ANSWER)
async def test_a_setting_that_is_wrong(kind: str, urls: list[str]) -> None:
    path, change, message = BY_ANSWER[kind]
    async with proxy(urls[:1], answers={path: change}) as server:
        await refused(server, message)


@pytest.mark.parametrize("kind", BY_REQUEST)
async def test_what_only_a_trial_shows(kind: str, urls: list[str]) -> None:
    path, change, message = BY_REQUEST[kind]
    async with proxy(urls[:1], requests={path: change}) as server:
        await refused(server, message)


async def test_a_tied_head_on_the_cpu(urls: list[str], tmp_path: Path) -> None:
    tied = World(tmp_path, tied=True, num_models=1).paths[0]
    named = changed("data", 0, "root", to=str(tied))
    async with proxy(urls[:1], answers={"/v1/models": named}) as server:
        await refused(server, "start it with --worker-extension-cls")


async def refused(server: Proxy, message: str) -> None:
    client = VLLMServer(server.url)
    with pytest.raises(ConfigError, match=message):
        await client.connect(0)
    await client.close()


# several behind one URL


@pytest.fixture
async def router(urls: list[str]) -> AsyncIterator[Proxy]:
    async with proxy(urls) as found:
        yield found


@pytest.fixture
async def behind(router: Proxy, urls: list[str], world: World) -> AsyncIterator[VLLMServer]:
    """A client of the one URL, at version 0."""
    client = VLLMServer(router.url, control_urls=urls)
    await client.connect(0)
    await client.load_weights(world.paths[0], 0)
    yield client
    await client.close()


async def test_requests_pass_through_one_url_and_weights_reach_each_worker(
    router: Proxy, urls: list[str], world: World
) -> None:
    """Through a pool, as in a run: both workers sample, and both have each update."""
    client = VLLMServer(router.url, control_urls=urls)
    pool = EnginePool([client], world.paths[0], 0, vocab_size=VOCAB, eos_ids={EOS})
    await pool.start(fresh=False)
    await contract.check_updates(EngineSubject(pool), world)
    await pool.close()  # which would take its servers back from those who name their weights anew
    for url in urls:
        assert router.counts[url, GENERATE] > 4
        alone = VLLMServer(url)
        assert (await alone.load()).num_running == 0
        await alone.connect(3)
        await contract.check_greedy(ServerSubject(alone), world, 3)
        await alone.close()
    paths = {path for _, path in router.counts}
    assert paths <= {GENERATE, "/health"}  # all else goes to the workers themselves


async def test_an_update_within_requests_on_both_workers(behind: VLLMServer, world: World) -> None:
    await contract.check_update_within_a_request(ServerSubject(behind), world, recomputed=True)


async def test_streams_pass_through(behind: VLLMServer) -> None:
    await contract.check_streaming(ServerSubject(behind))
    await contract.check_stream_interval(behind)


async def test_aborts_find_the_worker(behind: VLLMServer) -> None:
    """The router hides from it that the client has gone."""
    await contract.check_abort(ServerSubject(behind), num_requests=128)


async def test_load_is_that_of_both(behind: VLLMServer, urls: list[str]) -> None:
    """Figures may come late from a server that is busy, so the requests never end."""

    async def again_and_again() -> None:
        while True:
            await ServerSubject(behind).generate([20, 21, 22], SamplingParams(max_tokens=200))

    running = [asyncio.create_task(again_and_again()) for _ in range(48)]  # 24 on each
    seen = 0
    while seen <= 24:
        load = await behind.load()
        seen = load.num_running + load.num_waiting
        assert not any(task.done() for task in running)
        await asyncio.sleep(0.1)
    for task in running:
        task.cancel()
    await asyncio.wait(running)
