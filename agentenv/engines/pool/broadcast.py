"""One update of a pool by broadcast: everyone joins, then one sends and all others receive.

Each side may fail while the other waits for it, so that both run at the same time and the first
failure calls the sender off, whose end of the connections ends the receivers'. Servers that it
hurt are taken out of the pool, and come back with weights from a directory.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from agentenv.deadline import uncancelled
from agentenv.engines.pool.server_state import Member, Target
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
        self._joined: list[tuple[Member, int]] = []

    async def update(self, target: Target, members: Sequence[Member]) -> None:
        """Send the target's weights to those of the members that serve and can receive. Afterwards
        a member has the weights and serves, or is out since nobody knows what it has, or has what
        it had before."""
        sender = target.sender
        members = [m for m in members if m.serving and "broadcast" in m.features]
        if sender is None or not members:
            return
        try:
            group = await self._form(sender, members)
            manifest = await sender.manifest()
        except EngineError as error:
            logger.warning("weights go by a directory this time: %s", error)
            return
        calls = [
            asyncio.create_task(member.receive(group, manifest, target.policy_version))
            for member in members
        ]
        try:
            await _together(sender, asyncio.create_task(sender.send()), calls)
        except EngineError as error:
            logger.warning("a broadcast of weights failed: %s", error)
            await self._disband(sender)

    async def _form(self, sender: Sender, members: Sequence[Member]) -> Group:
        """The group of these servers, which is kept for later updates."""
        wanted = [(member, member.epoch) for member in members]
        if self._group is not None and self._joined == wanted:
            return self._group
        await self._disband(sender)
        world_size, places = 1, []
        for member in members:
            places.append(world_size)
            world_size += await member.server.num_ranks()
        wires = {member.server.wire for member in members}
        if len(wires) > 1:
            raise EngineError("the servers cannot be in one group: their backends differ")
        address = await sender.open(wires.pop())
        group = Group(f"agentenv-{secrets.token_hex(8)}", address, world_size, self._timeout_s)
        self._group, self._joined = group, wanted
        joins = [
            asyncio.create_task(member.server.join(group, place))
            for member, place in zip(members, places, strict=True)
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
                *(m.server.leave(group) for m, epoch in joined if m.epoch == epoch)
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
        if _error(sending) is None:  # all was sent: whoever is not done is only slow
            await asyncio.wait(others)
        else:
            await sender.leave()  # whoever waits for it sees that it has gone
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
