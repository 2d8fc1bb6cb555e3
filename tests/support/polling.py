"""Waiting for what sets no event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LIMIT_S = 120  # of a wait that hangs


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.02)
