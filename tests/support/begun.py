"""An episode that has begun and is closed at the end of its block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from agentenv.contract.env import Env

AnyEnv = TypeVar("AnyEnv", bound=Env)


@asynccontextmanager
async def begun(env: AnyEnv, seed: int | None = None) -> AsyncIterator[AnyEnv]:
    """The environment after its reset."""
    await env.reset(seed=seed)
    yield env
    await env.close()
