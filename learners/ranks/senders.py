"""The controller's side of the transfer of weights to engines; see `agentenv.contract.weights`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from agentenv.base.errors import EngineError, LearnerError, reported_as
from agentenv.contract.weights import Address, Group, Manifest, SharedWeights, TransferError, Wire
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.learner import DeepSpeedLearner

SLACK_S = 60.0  # added to deadlines, so that ranks time out by themselves first


class _Sender:
    """Base of both: writes a directory of the published weights in `folder`, once per version."""

    def __init__(self, learner: DeepSpeedLearner, folder: Path) -> None:
        self.learner, self.folder = learner, folder.absolute()
        self._version = 0
        self._written: Path | None = None
        self._writing = asyncio.Lock()

    def _published(self, version: int) -> int:
        self._version, self._written = version, None
        return version

    async def write(self) -> Path:
        async with self._writing:
            if self._written is None:
                version = self._version
                path = self.folder / f"v{version}"
                with reported_as(EngineError, "writing the weights failed", LearnerError):
                    await self._write(str(path), version)  # training reports a lost learner
                if version != self._version:
                    raise EngineError("the learner has moved on to newer weights")
                self._written = path
            return self._written

    async def _write(self, path: str, version: int) -> None:
        raise NotImplementedError


class LearnerSender(_Sender):
    """A Sender. Call `publish` first, once per update; directories are created in `folder`."""

    def __init__(self, learner: DeepSpeedLearner, folder: Path, timeout_s: float) -> None:
        super().__init__(learner, folder)
        self.timeout_s = timeout_s
        self._manifest: Manifest = []

    async def publish(self) -> int:
        """Make the learner's weights its next policy version; returns the number."""
        reply = (await self.learner.call_all(wire.Announce()))[0]
        self._manifest = reply.buckets
        return self._published(reply.policy_version)

    async def manifest(self) -> Manifest:
        return self._manifest

    async def open(self, kind: Wire = "torch") -> Address:
        replies = await self.learner.call_all(wire.OpenGroup(self.timeout_s, kind))
        address = _checked(replies).address
        assert address is not None
        return address

    async def join(self, group: Group) -> None:
        limit = 2 * self.timeout_s + SLACK_S  # the store's deadline, then the group's
        _checked(await self.learner.call_all(wire.JoinGroup(group), limit))

    async def send(self) -> None:
        _checked(await self.learner.call_all(wire.SendWeights()))

    async def leave(self) -> None:
        await self.learner.call_all(wire.LeaveGroup())

    async def abort(self) -> None:
        self.learner.ranks.interrupt()

    async def _write(self, path: str, version: int) -> None:
        await self.learner.call_all(wire.WriteModel(path, publish=False, unmoved=True))


class MemorySender(_Sender):
    """A SharedSender: ranks share weights in memory with servers of their machine. Call `publish`
    first, once per update; directories are created in `folder`; `num_readers` servers share each
    GPU."""

    def __init__(self, learner: DeepSpeedLearner, folder: Path, num_readers: int = 1) -> None:
        super().__init__(learner, folder)
        self._num_readers = num_readers
        self.weights = SharedWeights([], [], [], [], 0, {})
        self.num_failures = 0
        self.falling_asleep: asyncio.Future[None] | None = None  # the learner's

    async def publish(self, *, sleeps_next: bool) -> int:
        """Make the learner's weights its next policy version; returns the number. Raises
        TransferError, without a new version, if they cannot be shared."""
        replies = await self.learner.call_all(wire.ShareWeights(sleeps_next, self._num_readers))
        _checked(replies)
        found = [reply.shared for reply in replies if reply.shared is not None]
        memory = {name: handle for one in reversed(found) for name, handle in one.memory.items()}
        has_room = all(one.has_room for one in found)
        self.weights = replace(found[0], memory=memory, has_room=has_room)
        return self._published(replies[0].policy_version)

    async def release(self) -> None:
        if self.falling_asleep is not None:
            await asyncio.shield(self.falling_asleep)
        await self.learner.call_asleep(wire.ReleaseShared())

    async def _write(self, path: str, version: int) -> None:
        await self.learner.call_asleep(wire.WriteShared(path, version))


def _checked(replies: Sequence[wire.RankTransfer]) -> wire.RankTransfer:
    """The reply of rank 0. Raises TransferError for its problem."""
    if replies[0].problem:
        raise TransferError(replies[0].problem)
    return replies[0]
