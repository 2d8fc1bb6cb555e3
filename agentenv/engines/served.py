"""What a server serves, as far as its client knows, and who may ask for it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from agentenv.engines.checkpoint_layout import Layout, check_layout, read_layout
from agentenv.engines.server import ServerLostError

# Pauses the server, lets the function put other weights in place, names their version, resumes.
Replace = Callable[[Callable[[], Awaitable[None]], int], Awaitable[None]]


class Served:
    """The weights on one server.

    `layout` is that of the directory it was started from, None if unknown. Requests carry `salt`,
    so that none meets a prefix cache of other weights. `doubt` is why nobody knows what it serves;
    empty: it is known. `lock` is held by whoever changes the weights, `open` is cleared meanwhile.
    """

    def __init__(self, name: str) -> None:
        self.layout: Layout | None = None
        self.policy_version = 0
        self.salt = ""
        self.doubt = "connect was not called"
        self.lock = asyncio.Lock()
        self.open = asyncio.Event()
        self.open.set()
        self._name = name

    def adopt(self, policy_version: int) -> None:
        """Other weights are in place."""
        self.policy_version = policy_version
        # Not the version alone: a run that is resumed gives its number to other weights.
        self.salt = f"{policy_version}-{secrets.token_hex(8)}"

    def lost(self) -> ServerLostError:
        """What to raise for a request while it is in doubt."""
        return ServerLostError(f"{self._name} cannot be used: {self.doubt}")

    async def known(self) -> None:
        """Wait while weights are being replaced. ServerLostError if nobody knows them then."""
        await self.open.wait()
        if self.doubt:
            raise self.lost()

    async def check(self, source: Path) -> Layout:
        """The layout of other weights. EngineError if they are of another model."""
        layout = await asyncio.to_thread(read_layout, source)
        if self.layout is not None:
            check_layout(source, layout, self.layout)
        return layout
