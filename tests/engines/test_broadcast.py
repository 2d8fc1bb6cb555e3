"""Weights by broadcast into real servers, on gloo; the code path of NCCL but for the backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.contract.http_client import ServerClient
from agentenv.engines.sglang import SGLangServer
from tests.engines.broadcast_checks import (
    TWO_RANKS,
    Absent,
    Breaking,
    Misdescribing,
    Misnaming,
    bench,
    check_failure,
    check_spans,
    check_updates,
    clients,
    until,
)
from tests.engines.reference import MAX_LENGTH, VOCAB
from tests.engines.sglang_server import SGLangProcess, require_sglang
from tests.engines.vllm_server import EXTENSION, vllm_servers
from tests.engines.world import World

pytestmark = pytest.mark.usefixtures("forked_ranks")

BACKEND = ("--weight-transfer-config", '{"backend": "agentenv_gloo"}')


@pytest.fixture(scope="module")
def vllm(tied: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    logs = tmp_path_factory.mktemp("vllm")
    with vllm_servers(tied.paths[0], logs, 2, *EXTENSION, *BACKEND) as urls:
        yield urls


@pytest.fixture(scope="module")
def sglang(tied: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    require_sglang()
    process = SGLangProcess(tied.paths[0], tmp_path_factory.mktemp("sglang") / "log")
    try:
        process.wait_ready()
        yield process.url
    finally:
        process.kill()


@pytest.mark.engine_vllm
async def test_vllm_receives_three_updates_one_of_them_during_a_request(
    vllm: list[str], tied: World, tmp_path: Path
) -> None:
    """Tied embeddings; two servers in one group with the learner."""
    async with bench(clients(vllm), tied.paths[1], tmp_path) as b:
        await check_updates(b)
        await check_spans(b, MAX_LENGTH - 40, recomputes=False)


@pytest.mark.engine_vllm
async def test_vllm_receives_merged_adapters_from_ranks_with_sharded_weights(
    vllm: list[str], tied: World, tmp_path: Path
) -> None:
    async with bench(clients(vllm[:1]), tied.paths[1], tmp_path, TWO_RANKS) as b:
        await check_updates(b, num_updates=1)


@pytest.mark.engine_vllm
async def test_vllm_survives_each_failure_of_a_broadcast(
    vllm: list[str], tied: World, tmp_path: Path
) -> None:
    """A trainer that never joins, one that disappears, a description of another model, and one on
    which the servers fail while the trainer sends: no process hangs, no weights are mixed."""
    async with bench(clients(vllm), tied.paths[1], tmp_path) as b:
        await check_failure(b, Absent, max_s=60)  # first: it needs that there is no group
        for kind in (Breaking, Misnaming, Misdescribing):
            await check_failure(b, kind, max_s=60)


@pytest.mark.engine_vllm
async def test_a_late_server_gets_a_directory_then_broadcasts(
    vllm: list[str], tied: World, tmp_path: Path
) -> None:
    """It has missed an update, so that the learner writes that one for it."""
    first, late = clients(vllm)
    async with bench([first], tied.paths[1], tmp_path) as b:
        version = await b.update(b.sender())
        b.pool.add_server(late)
        await until(lambda: b.pool.stats()["servers_up"] == 2)
        assert (tmp_path / "published" / f"v{version}").is_dir()
        version = await b.update(b.sender())
        assert not (tmp_path / "published" / f"v{version}").exists()
        assert late.policy_version == version
        for name in (first.name, late.name):
            http = ServerClient(name)
            weight_info = await http.call_json("GET", "/weight_info")
            await http.close()
            assert weight_info["weight_version"].startswith(f"{version}-")


@pytest.mark.engine_sglang
async def test_sglang_receives_updates_and_survives_a_failed_one(
    sglang: str, tied: World, tmp_path: Path
) -> None:
    """Requests that run during an update are recomputed under the new weights."""
    async with bench([SGLangServer(sglang, vocab_size=VOCAB)], tied.paths[1], tmp_path) as b:
        await check_failure(b, Absent, max_s=60)
        await check_updates(b, num_updates=2)
        await check_spans(b, 60, recomputes=True)
        for kind in (Breaking, Misnaming, Misdescribing):
            await check_failure(b, kind, max_s=60)
