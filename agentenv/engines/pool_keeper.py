"""The tasks that look after the servers of a pool, one each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from random import Random

from agentenv.engines.pool_config import PoolConfig
from agentenv.engines.pool_member import Member, backoff
from agentenv.errors import EngineError

logger = logging.getLogger(__name__)


class Keepers:
    """Each asks its server for health and load, and lets a lost one back in.

    `try_to_serve` says whether a member serves again, `on_change` is called after each look at
    one that serves, `on_loss` when one is found gone, `on_end` if a keeper itself fails. While the
    pool `is_asleep` they leave the servers alone.
    """

    def __init__(
        self,
        config: PoolConfig,
        rng: Random,
        *,
        try_to_serve: Callable[[Member], Awaitable[bool]],
        is_asleep: Callable[[], bool],
        on_change: Callable[[], None],
        on_loss: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._config, self._rng = config, rng
        self._try_to_serve, self._is_asleep = try_to_serve, is_asleep
        self._on_change, self._on_loss, self._on_end = on_change, on_loss, on_end
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, member: Member) -> None:
        """From now on until the member leaves."""
        task = asyncio.create_task(self._tend(member))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def cancel(self) -> set[asyncio.Task[None]]:
        """The tasks, whose end is to be awaited."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        return tasks

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a keeper of the engine pool failed", exc_info=error)
            self._on_end(f"a keeper of the engine pool failed: {error!r}")

    async def _tend(self, member: Member) -> None:
        """Look after one server until it leaves, then let it finish what it has."""
        failures = 0
        while not member.leaving:
            if self._is_asleep():
                await member.rest(self._config.poll_interval_s)
                continue
            pause = self._config.poll_interval_s
            if member.serving:
                failures = 0
                await self._look(member)
            elif await self._try_to_serve(member):
                continue
            else:
                failures += 1
                pause = backoff(self._config, failures, self._rng)
            if member.serving or failures:
                await member.rest(pause)
        while member.attempts:
            await asyncio.wait(set(member.attempts))
        await member.server.close()

    async def _look(self, member: Member) -> None:
        try:
            await member.poll()
            self._on_change()  # its limit may have grown
        except EngineError as error:
            if not self._is_asleep():
                member.suspend(str(error))
                self._on_loss()
