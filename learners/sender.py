"""The controller's handle on the trainer's side of a broadcast; see `agentenv.engines.transfer`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentenv.engines.transfer import Address, Group, Manifest, TransferError
from agentenv.errors import EngineError, LearnerError
from learners import messages as wire
from learners.deepspeed_learner import DeepSpeedLearner

SLACK_S = 60.0  # the ranks end by themselves before they are ended


class LearnerSender:
    """A Sender. `publish` comes first, once an update; directories go below `folder`."""

    def __init__(self, learner: DeepSpeedLearner, folder: Path, timeout_s: float) -> None:
        self.learner = learner
        self.folder = folder.absolute()
        self.timeout_s = timeout_s
        self._manifest = Manifest([])
        self._written: Path | None = None
        self._writing = asyncio.Lock()

    async def publish(self) -> int:
        """Make the learner's weights its next policy version; the number."""
        reply = (await self.learner.call_all(wire.Announce()))[0]
        self._manifest = Manifest(reply.buckets)
        self._written = None
        return reply.policy_version

    async def manifest(self) -> Manifest:
        return self._manifest

    async def open(self) -> Address:
        reply = (await self.learner.call_all(wire.OpenGroup(self.timeout_s)))[0]
        assert reply.address is not None
        return reply.address

    async def join(self, group: Group) -> None:
        limit = 2 * self.timeout_s + SLACK_S  # the store's deadline, then the group's
        replies = await self.learner.call_all(wire.JoinGroup(group), limit)
        _check(replies[0])

    async def send(self) -> None:
        _check((await self.learner.call_all(wire.SendWeights()))[0])

    async def leave(self) -> None:
        await self.learner.call_all(wire.LeaveGroup())

    async def abort(self) -> None:
        self.learner.ranks.interrupt()

    async def write(self) -> Path:
        async with self._writing:
            if self._written is None:
                path = self.folder / f"v{self.learner.policy_version}"
                command = wire.WriteModel(str(path), publish=False, unmoved=True)
                try:
                    await self.learner.call_all(command)
                except LearnerError as error:  # whoever trains will see it if it is gone
                    raise EngineError(f"the learner wrote no directory: {error}") from error
                self._written = path
            return self._written


def _check(reply: wire.Done) -> None:
    if reply.problem:
        raise TransferError(reply.problem)
