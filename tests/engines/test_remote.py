"""What the clients of engine servers do on their own, without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from agentenv.engines.vllm import VLLMServer


async def test_a_server_sleeps_after_what_was_broken_off_has_been_let_go(tmp_path: Path) -> None:
    """A load of weights that is cancelled goes on in the background: the server is resumed, which
    one that sleeps must not be."""
    server, told = VLLMServer("http://nowhere:1"), []

    async def post(path: str, body: Any = None, timeout_s: Any = None, **params: str) -> None:
        told.append(path)

    async def call(method: str, path: str, *_: Any, **__: Any) -> bytes:
        await asyncio.sleep(0.01)
        told.append(path)
        return b""

    async def load() -> None:
        await asyncio.Event().wait()

    server._post = post  # type: ignore[method-assign]
    server._http.call = call  # type: ignore[method-assign]
    loading = asyncio.create_task(server._replace(load, 1))
    await asyncio.sleep(0.05)
    loading.cancel()
    await asyncio.wait({loading})
    await server.sleep()
    assert [path for path in told if path in ("/pause", "/resume", "/sleep")] == [
        "/pause",
        "/resume",
        "/sleep",
    ]
    await server.close()
