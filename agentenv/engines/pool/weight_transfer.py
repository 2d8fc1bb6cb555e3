"""Transfers of weights to all servers of a pool at once.

Broadcast         sends them through a group of sender and servers
share_weights     lets the servers read them from the learner's memory
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from agentenv.base.deadline import cancel_all, uncancelled
from agentenv.base.errors import SHOWN, EngineError
from agentenv.contract.weights import Group, Sender, SharedSender, TransferError
from agentenv.engines.pool.keeper import Keeper

logger = logging.getLogger(__name__)

Call = Coroutine[Any, Any, None]
HANG_UP_S = 30.0  # for servers to end a call after the sender has hung up


class Broadcast:
    """The group of sender and servers, and updates through it. A group lasts until a server joins,
    leaves or fails."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._group: Group | None = None
        self._joined: list[tuple[Keeper, int]] = []

    async def update(self, sender: Sender, version: int, keepers: Sequence[Keeper]) -> None:
        """Send these weights to the serving servers that can receive. Afterwards a server has the
        weights and serves, or is out because its weights are unknown, or has its old weights."""
        keepers = [k for k in keepers if k.server.serving and "broadcast" in k.server.features]
        if not keepers:
            return
        try:
            group = await self._form(sender, keepers)
            manifest = await sender.manifest()
        except EngineError as error:
            logger.warning("this update sends weights through a directory: %s", error)
            return
        calls = [keeper.receive(group, manifest, version) for keeper in keepers]
        try:
            await _together(sender, sender.send(), calls)
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
        joins = [k.client.join(group, rank) for k, rank in zip(keepers, first_ranks, strict=True)]
        try:
            await _together(sender, sender.join(group), joins)
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


async def share_weights(shared: SharedSender, version: int, keepers: Sequence[Keeper]) -> None:
    """Let capable servers read these weights from the learner's memory. Afterwards a server has the
    weights and serves, or is out because its weights are unknown, or has its old weights. The
    memory is released in any case."""
    able = [
        keeper
        for keeper in keepers
        if "ipc" in keeper.server.features and (keeper.server.serving or keeper.server.is_asleep)
    ]
    if not able:
        await shared.release()
        return
    reading, released = set(able), asyncio.Event()

    async def leave(keeper: Keeper) -> None:
        """A server has read everything, or has failed; returns once the memory is released, which
        follows the last server."""
        if keeper not in reading:
            return
        reading.remove(keeper)
        if not reading:
            try:
                await shared.release()
            finally:
                released.set()
        await released.wait()

    async def take(keeper: Keeper) -> bool:
        try:
            await keeper.take(shared, version, partial(leave, keeper))
        except EngineError as error:
            text = (
                "%s did not take policy version %d from the learner's memory: %s; it gets a "
                "directory"
            )
            logger.warning(text, keeper.server.name, version, error, extra=SHOWN)
            return False
        else:
            return True
        finally:
            await leave(keeper)

    succeeded = await asyncio.gather(*(take(keeper) for keeper in able))
    shared.num_failures = 0 if all(succeeded) else shared.num_failures + 1


async def _together(sender: Sender, work: Call, calls: Sequence[Call]) -> None:
    """Run the sender's `work` and the servers' calls, and wait for all while they can still
    succeed. Raises the first failure, after the end of all tasks."""
    others = [asyncio.create_task(call) for call in calls]
    sending = asyncio.create_task(work)
    tasks = [sending, *others]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        first = next((error for task in tasks if (error := _error(task)) is not None), None)
        if not sending.done():
            await sender.abort()
            await asyncio.wait([sending])
        if _error(sending) is None:  # everything was sent: the others are only slow
            await asyncio.wait(others)
        else:
            await sender.leave()  # waiting receivers detect its end
            await asyncio.wait(others, timeout=HANG_UP_S)
    finally:
        await uncancelled(_cancel_all(sender, tasks))
    first = first or next((error for task in tasks if (error := _error(task)) is not None), None)
    if first is not None:
        raise first


async def _cancel_all(sender: Sender, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel all tasks; the first one is the sender's."""
    try:
        if not tasks[0].done():
            await sender.abort()
    finally:
        await cancel_all(tasks)


def _error(task: asyncio.Task[Any]) -> BaseException | None:
    if not task.done():
        return None
    return TransferError("it did not end in time") if task.cancelled() else task.exception()
