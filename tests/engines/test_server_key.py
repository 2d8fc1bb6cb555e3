"""A server that a run starts answers nobody without its key, beyond loopback too."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
import pytest

from agentenv.assembly.serving.servers import ServerFactory
from agentenv.contract.server_config import Served, ServersConfig
from agentenv.envs.quickstart.setup import build_model
from tests.engines import sglang_server, vllm_server

KEY = "a-key-of-this-test"
OPEN = ("/health", "/metrics", "/ready")


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("vllm", marks=pytest.mark.engine_vllm),
        pytest.param("sglang", marks=pytest.mark.engine_sglang),
    ],
)
async def test_every_route_needs_the_key(engine: str, tmp_path: Path) -> None:
    (sglang_server.require_sglang if engine == "sglang" else vllm_server.require_vllm)()
    python = (sglang_server if engine == "sglang" else vllm_server).PYTHON
    build_model(tmp_path / "model", seed=0)
    config = ServersConfig(python=str(python), host="0.0.0.0", device="cpu")
    served = Served(engine, tmp_path / "model", "policy", 512, trained=True, key=KEY)
    async with AsyncExitStack() as stack:
        factory = ServerFactory(tmp_path / "run", stack, lambda text: None)
        (url,) = await factory.start(served, config, "engine.servers")
        connector = aiohttp.TCPConnector(force_close=True)
        http = await stack.enter_async_context(aiohttp.ClientSession(url, connector=connector))

        async def ask(verb: str, path: str, key: str) -> tuple[int, bytes]:
            async with http.request(verb, path, headers={"Authorization": key}, json={}) as reply:
                return reply.status, await reply.read()

        _, schema = await ask("GET", "/openapi.json", f"Bearer {KEY}")
        routes = [
            (verb.upper(), path.replace("{", "").replace("}", ""))
            for path, verbs in msgspec.json.decode(schema)["paths"].items()
            for verb in verbs
            if not path.startswith(OPEN)
        ]
        assert {("POST", "/pause"), ("POST", "/pause_generation")} & {*routes}
        for key in ("", "Bearer another", KEY):
            assert {(await ask(*route, key))[0] for route in routes} == {401}
    for log in (tmp_path / "run").rglob("*.log"):
        assert KEY not in log.read_text()
