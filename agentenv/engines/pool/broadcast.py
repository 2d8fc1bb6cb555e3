"""One update of a pool by broadcast: all join, then one sends and all others receive.

Either side may fail while the other waits for it. So both run at the same time, and the first
failure aborts the sender, whose end of the connections ends the receivers'. Servers that are left
with unknown weights leave the pool, and come back with weights from a directory.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from agentenv.deadline import uncancelled
from agentenv.engines.pool.keeper import Keeper
from agentenv.engines.remote.weights import Group, Sender, TransferError
from agentenv.errors import EngineError

logger = logging.getLogger(__name__)

SETTLE_S = 30.0  # for servers to end a call after the sender has hung up


class Broadcast:
    """The group of sender and servers, and updates through it. A group lasts until a server comes,
    goes or fails."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._group: Group | None = None
        self._joined: list[tuple[Keeper, int]] = []

    async def update(self, sender: Sender, version: int, keepers: Sequence[Keeper]) -> None:
        """Send these weights to the servers that serve and can receive. Afterwards a server has the
        weights and serves, or is out since its weights are unknown, or has what it had before."""
        keepers = [k for k in keepers if k.server.serving and "broadcast" in k.server.features]
        if not keepers:
            return
        try:
            group = await self._form(sender, keepers)
            manifest = await sender.manifest()
        except EngineError as error:
            logger.warning("weights go by a directory this time: %s", error)
            return
        calls = [
            asyncio.create_task(keeper.receive(group, manifest, version)) for keeper in keepers
        ]
        try:
            await _together(sender, asyncio.create_task(sender.send()), calls)
        except EngineError as error:
            logger.warning("a broadcast of weights failed: %s", error)
            await self._disband(sender)

    async def _form(self, sender: Sender, keepers: Sequence[Keeper]) -> Group:
        """The group of these servers, which is kept for later updates."""
        wanted = [(keeper, keeper.server.epoch) for keeper in keepers]
        if self._group is not None and self._joined == wanted:
            return self._group
        await self._disband(sender)
        world_size, first_ranks = 1, []
        for keeper in keepers:
            first_ranks.append(world_size)
            world_size += await keeper.client.num_ranks()
        wires = {keeper.client.wire for keeper in keepers}
        if len(wires) > 1:
            raise EngineError("the servers cannot be in one group: their backends differ")
        address = await sender.open(wires.pop())
        group = Group(f"agentenv-{secrets.token_hex(8)}", address, world_size, self._timeout_s)
        self._group, self._joined = group, wanted
        joins = [
            asyncio.create_task(keeper.client.join(group, first_rank))
            for keeper, first_rank in zip(keepers, first_ranks, strict=True)
        ]
        try:
            await _together(sender, asyncio.create_task(sender.join(group)), joins)
        except BaseException:
            await self._disband(sender)
            raise
        return group

    async def _disband(self, sender: Sender) -> None:
        group, self._group = self._group, None
        joined, self._joined = self._joined, []
        if group is not None:
            await sender.leave()
            await asyncio.gather(
                *(k.client.leave(group) for k, epoch in joined if k.server.epoch == epoch)
            )


async def _together(
    sender: Sender, sending: asyncio.Task[None], others: Sequence[asyncio.Task[None]]
) -> None:
    """Wait for all, none longer than it may still succeed. Raises the first failure; the tasks
    are done then."""
    tasks: list[asyncio.Task[None]] = [sending, *others]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        first = next((error for task in tasks if (error := _error(task)) is not None), None)
        if not sending.done():
            await sender.abort()
            await asyncio.wait([sending])
        if _error(sending) is None:  # all was sent: the others are only slow
            await asyncio.wait(others)
        else:
            await sender.leave()  # receivers that wait see that it has gone
            await asyncio.wait(others, timeout=SETTLE_S)
    finally:
        await uncancelled(_call_off(sender, tasks))
    first = first or next((error for task in tasks if (error := _error(task)) is not None), None)
    if first is not None:
        raise first


async def _call_off(sender: Sender, tasks: Sequence[asyncio.Task[None]]) -> None:
    """End all, the first of which sends."""
    try:
        if not tasks[0].done():
            await sender.abort()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _error(task: asyncio.Task[Any]) -> BaseException | None:
    if not task.done():
        return None
    if task.cancelled():
        return TransferError("it did not end in time")
    return task.exception()
