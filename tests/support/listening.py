"""An application that listens on a free port for a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    """Its URL."""
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"
        for site in [*server.runner.sites]:
            await site.stop()
        for _ in range(3):  # steps in which an accepted connection reaches the server, to be closed
            await asyncio.sleep(0)
    await asyncio.sleep(0)
