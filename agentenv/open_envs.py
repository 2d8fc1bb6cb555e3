"""The envs of an actor that are open: each call has a deadline, each env is closed once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentenv.env import Env
from agentenv.errors import EnvError
from agentenv.types import Info, Limit, Message

logger = logging.getLogger(__name__)


class OpenEnvs:
    """All methods but `close` raise EnvError after `timeout_s` seconds."""

    def __init__(self, timeout_s: float) -> None:
        self.count = 0
        self._timeout_s = timeout_s

    async def reset(self, env: Env, seed: int) -> tuple[list[Message], Info]:
        """Begin the episode of a new env. It is open from now on, even if this fails."""
        self.count += 1
        async with self._deadline("reset"):
            return await env.reset(seed=seed)

    async def fork(self, env: Env) -> Env:
        """A copy, which is open."""
        async with self._deadline("fork"):
            copy = await env.fork()
        self.count += 1
        return copy

    async def finish(self, env: Env, limit: Limit, action: Message | None) -> tuple[float, Info]:
        """The reward of an episode that a limit ends."""
        async with self._deadline("finish"):
            return await env.finish(limit, action)

    async def close(self, env: Env, task_id: str) -> None:
        """To its end, even while being cancelled. An env that does not close is only logged."""
        closing = asyncio.ensure_future(self._close(env, task_id))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    async def _close(self, env: Env, task_id: str) -> None:
        try:
            async with self._deadline("close"):
                await env.close()
        except EnvError as error:
            logger.warning("task %s: %s", task_id, error)
        finally:
            self.count -= 1

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[None]:
        timeout = asyncio.timeout(self._timeout_s)
        try:
            async with timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise EnvError(f"env.{what} took over {self._timeout_s} s") from error
