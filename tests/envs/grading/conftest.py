"""A scripted judge."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentenv.contract.env import close_shared
from tests.support.judge_server import JudgeServer, judge_server


@pytest.fixture
async def server() -> AsyncIterator[JudgeServer]:
    async with judge_server() as scripted:
        yield scripted
        await close_shared()
