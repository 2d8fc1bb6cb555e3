"""Connecting to vLLM: servers without a required feature, and several servers at one URL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agentenv.base.errors import ConfigError
from agentenv.engines.remote.probes import GENERATE
from agentenv.engines.vllm import VLLMServer
from tests.engines.proxy import Change, Proxy, changed, proxy, without
from tests.engines.reference import VOCAB
from tests.engines.vllm_server import vllm_servers
from tests.engines.world import World

pytestmark = pytest.mark.engine_vllm


@pytest.fixture(scope="module")
def urls(untied: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with vllm_servers(untied.paths[0], tmp_path_factory.mktemp("vllm"), 1) as found:
        yield found


# missing features, simulated by a proxy of a real server

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
        "does not return the label of its weights",
    ),
}


@pytest.mark.parametrize("kind", BY_ANSWER)
async def test_a_wrong_setting_is_refused(kind: str, urls: list[str]) -> None:
    path, change, message = BY_ANSWER[kind]
    async with proxy(urls, answers={path: change}) as server:
        await refused(server, message)


@pytest.mark.parametrize("kind", BY_REQUEST)
async def test_a_fault_that_only_trial_requests_show_is_refused(kind: str, urls: list[str]) -> None:
    path, change, message = BY_REQUEST[kind]
    async with proxy(urls, requests={path: change}) as server:
        await refused(server, message)


async def test_a_tied_head_on_the_cpu_requires_the_worker_extension(
    urls: list[str], tied: World
) -> None:
    named = changed("data", 0, "root", to=str(tied.paths[0]))
    async with proxy(urls, answers={"/v1/models": named}) as server:
        await refused(server, "start it with --worker-extension-cls")


async def refused(server: Proxy, message: str) -> None:
    client = VLLMServer(server.url, vocab_size=VOCAB)
    with pytest.raises(ConfigError, match=message):
        await client.connect(0)
    await client.close()
