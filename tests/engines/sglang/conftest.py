"""Two SGLang servers for the tests of this folder: they start once and end with its last test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from agentenv.contract.http_client import ServerClient
from agentenv.engines.sglang import SGLangServer
from tests.engines.reference import VOCAB
from tests.engines.sglang.replies import STEP_S, Clients
from tests.engines.sglang_server import SGLangProcess, require_sglang
from tests.engines.world import World


@pytest.fixture(scope="package")
def processes(
    untied: World, tied: World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, SGLangProcess]]:
    """Both servers; they start side by side."""
    require_sglang()
    logs = tmp_path_factory.mktemp("sglang")
    found = {
        "untied": SGLangProcess(untied.paths[0], logs / "untied.log"),
        "tied": SGLangProcess(tied.paths[0], logs / "tied.log"),
    }
    try:
        for process in found.values():
            process.wait_ready()
        yield found
    finally:
        for process in found.values():
            process.kill()


@pytest.fixture
async def clients(processes: dict[str, SGLangProcess]) -> AsyncIterator[Clients]:
    """Makes clients of a server by its name; they are closed after the test."""
    made: list[SGLangServer] = []

    def make(kind: str, **options: Any) -> SGLangServer:
        made.append(SGLangServer(processes[kind].url, vocab_size=VOCAB, **options))
        return made[-1]

    yield make
    for client in made:
        await client.close()


@pytest.fixture
async def server(clients: Clients, untied: World) -> SGLangServer:
    """Connected to the untied server, which serves version 0 again."""
    client = clients("untied")
    await client.connect(0)
    await client.load_weights(untied.paths[0], 0)
    return client


@pytest.fixture
async def slow(processes: dict[str, SGLangProcess], server: SGLangServer) -> AsyncIterator[None]:
    """Requests of the untied server are still running when a test acts on them."""
    http = ServerClient(processes["untied"].url)
    await http.call("POST", "/slow_down", {"forward_sleep_time": STEP_S})
    yield
    await http.call("POST", "/slow_down", {"forward_sleep_time": None})
    await http.close()
