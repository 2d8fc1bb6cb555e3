"""What the servers of a pool should hold."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from agentenv.engines.transfer import Sender


class Target(Struct, frozen=True):
    """The weights that every server of the pool should have: in a directory, or with a sender
    that can also write one."""

    source: Path | None
    policy_version: int
    sender: Sender | None = None

    async def directory(self) -> Path:
        """Raises EngineError if the sender has gone on to other weights."""
        if self.source is not None:
            return self.source
        assert self.sender is not None
        return await self.sender.write()
