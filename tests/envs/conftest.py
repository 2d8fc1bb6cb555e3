"""A sandbox and a session without leftovers; a web to search."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agentenv.base.retries import Backoff
from agentenv.envs.sandbox.keys import PythonConfig, SandboxLimits
from agentenv.envs.sandbox.sandbox import Sandbox, SandboxSession
from agentenv.lab.diagnosis.doctor import RUNGS
from tests.envs.search_server import serving
from tests.envs.search_site import Web
from tests.support.sandboxes import children, num_descriptors


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services and pages are requested again without a delay."""
    monkeypatch.setattr("agentenv.base.retries.REQUESTS", Backoff(0.0, 0.002))
    monkeypatch.setattr("agentenv.envs.search.upstream.MAX_PAUSE_S", 0.002)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """A sandbox that leaves no process, descriptor or task."""
    await asyncio.to_thread(int)  # the loop's own helper thread is no leak
    before = num_descriptors(), len(asyncio.all_tasks())
    one = Sandbox(PythonConfig(limits=SandboxLimits(memory_bytes=200 << 20), preload=()))
    yield one
    await one.close()
    assert children() == []
    assert (num_descriptors(), len(asyncio.all_tasks())) == before


@pytest.fixture(params=RUNGS)
async def on_each_rung(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """A sandbox on each rung offered here."""
    one = Sandbox(PythonConfig(preload=()), rungs=(request.param,))
    yield one
    await one.close()


@pytest.fixture
async def session(sandbox: Sandbox) -> SandboxSession:
    return sandbox.session(1)


@pytest.fixture
async def site(services: None) -> AsyncIterator[Web]:
    """A small web."""
    site = Web()
    async with serving(site) as site.url:
        yield site
