"""Copies of environments at tool results, for siblings that a plan adds after a path ended."""

from __future__ import annotations

import asyncio
import logging

from agentenv.branch import Branch, OpenEnvs
from agentenv.deadline import uncancelled
from agentenv.env import Env
from agentenv.errors import AgentEnvError

logger = logging.getLogger(__name__)


class KeptCopies:
    """At most `most` copies of a tree. When it is full, it drops the shallowest copy, which takes
    the fewest calls to reproduce. Environments that fork by replay are not kept."""

    def __init__(self, envs: OpenEnvs, task_id: str, most: int) -> None:
        self._envs, self._task_id, self._most = envs, task_id, most
        self._kept: dict[int, tuple[Branch, Env]] = {}  # by node, with the branch's state there
        self._lock = asyncio.Lock()  # prevents closing a copy during its fork

    def wants(self, env: Env) -> bool:
        """Whether copies of this environment are kept."""
        return self._most > 0 and env.fork_mode in ("pure", "snapshot")

    async def keep(self, place: Branch, env: Env) -> None:
        """Keep a copy of `env`, which is at `place`. A failed copy is only logged."""
        async with self._lock:
            is_full = len(self._kept) >= self._most
            if is_full and self._depth(self._shallowest()) >= place.num_tool_calls:
                return
            try:
                copy = await self._envs.fork(env)
            except AgentEnvError as error:
                logger.warning("task %s: copying an env failed: %r", self._task_id, error)
                return
            self._kept[place.cursor.index] = place, copy
            if is_full:
                await self._envs.close(self._kept.pop(self._shallowest())[1], self._task_id)

    def _shallowest(self) -> int:
        return min(self._kept, key=self._depth)

    def _depth(self, index: int) -> int:
        return self._kept[index][0].num_tool_calls

    async def lend(self, branch: Branch) -> bool:
        """Give a branch a fork of the copy at its place; False if there is none."""
        async with self._lock:
            if branch.cursor.index not in self._kept:
                return False
            place, env = self._kept[branch.cursor.index]
            try:
                branch.env = await self._envs.fork(env)
            except AgentEnvError as error:
                logger.warning("task %s: forking a kept env failed: %r", self._task_id, error)
                return False
        branch.start_at(place)
        return True

    async def close(self) -> None:
        """Close all copies, even while being cancelled."""
        kept, self._kept = self._kept, {}
        if kept:
            await uncancelled(self._close([env for _, env in kept.values()]))

    async def _close(self, envs: list[Env]) -> None:
        for env in envs:
            await self._envs.close(env, self._task_id)
