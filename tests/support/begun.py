"""Environments and others that are closed at the end of a block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from agentenv.contract.env import Env

AnyEnv = TypeVar("AnyEnv", bound=Env)
T = TypeVar("T", bound=Any)


@asynccontextmanager
async def closing(one: T) -> AsyncIterator[T]:
    """As contextlib.aclosing, for objects with `close`."""
    try:
        yield one
    finally:
        await one.close()


@asynccontextmanager
async def begun(env: AnyEnv, seed: int | None = None) -> AsyncIterator[AnyEnv]:
    """The environment after its reset."""
    await env.reset(seed=seed)
    yield env
    await env.close()
