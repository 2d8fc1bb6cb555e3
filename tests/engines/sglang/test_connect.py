"""Connecting to SGLang: servers without a required feature, or with a better setting."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.base.errors import ConfigError
from agentenv.engines.sglang import SGLangServer
from tests.engines.proxy import Change, changed, proxy, without
from tests.engines.reference import MAX_LENGTH, VOCAB
from tests.engines.sglang.replies import PROMPT, Reply
from tests.engines.sglang_server import SGLangProcess

pytestmark = pytest.mark.engine_sglang


async def test_a_connected_server_reports_its_version_and_features(server: SGLangServer) -> None:
    info = await server.connect(0)
    assert (info.engine, info.version) == ("sglang", "0.5.23")
    assert MAX_LENGTH - 8 < info.max_model_len <= MAX_LENGTH
    assert info.features == {"broadcast"}  # sleep needs a flag; without it, sleep is the end
    assert await server.healthy()


LACKING: dict[str, tuple[str, Change, str]] = {
    "a route": (
        "/openapi.json",
        without("paths", "/abort_request"),
        "lacks POST /abort_request; expected SGLang 0.5.23 or newer",
    ),
    "a field": (
        "/openapi.json",
        without("components", "schemas", "GenerateReqInput", "properties", "cache_salt"),
        "does not know cache_salt; expected SGLang 0.5.23 or newer",
    ),
    "its version": ("/server_info", without("version"), "cannot read /server_info"),
    "stop strings": (
        "/server_info",
        changed("skip_tokenizer_init", to=True),
        "start it without --skip-tokenizer-init",
    ),
    "events with new tokens alone": (
        "/server_info",
        changed("incremental_streaming_output", to=False),
        "start it with --incremental-streaming-output",
    ),
    "the sampling that is asked for": (
        "/server_info",
        changed("preferred_sampling_params", to={"frequency_penalty": 0.5}),
        "changes requests through --preferred-sampling-params",
    ),
    "generation": ("/model_info", changed("is_generation", to=False), "embedding model"),
}


@pytest.mark.parametrize("what", LACKING)
async def test_a_server_without_a_required_feature_is_refused(
    what: str, processes: dict[str, SGLangProcess]
) -> None:
    """As a proxy before the real one shows it."""
    path, change, message = LACKING[what]
    async with proxy([processes["untied"].url], answers={path: change}) as before:
        await refused(before.url, message)


async def refused(url: str, message: str) -> None:
    client = SGLangServer(url, vocab_size=VOCAB)
    with pytest.raises(ConfigError, match=message):
        await client.connect(0)
    await client.close()


async def test_a_server_without_preemption_counts_is_warned_about(
    processes: dict[str, SGLangProcess], caplog: pytest.LogCaptureFixture
) -> None:
    off = changed("enable_metrics", to=False)
    async with proxy([processes["untied"].url], answers={"/server_info": off}) as before:
        client = SGLangServer(before.url, vocab_size=VOCAB)
        await client.connect(0)
        await client.close()
    assert "--enable-metrics" in caplog.text


async def test_a_paused_server_is_resumed_on_connect(server: SGLangServer) -> None:
    await server._http.call("POST", "/pause_generation", {"mode": "retract"})
    waiting = Reply(server, PROMPT, 3)
    await asyncio.sleep(0.3)
    assert not waiting.chunks
    assert await server.healthy()
    await server.connect(0)
    assert len((await waiting.task).token_ids) == 3
