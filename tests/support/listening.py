"""An application that listens on a free port for a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from agentenv.endpoint.server import Listener


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    """Its URL."""
    listener = Listener()
    await listener.listen(app, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.port}"
    finally:
        await listener.close()
