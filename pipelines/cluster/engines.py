"""Engine servers on nodes of a cluster: each is started there by a process of ours, which tells its
URL, starts it again when it dies, and ends with the controller.

A server whose node is lost is started on another one, and the pool of the engine is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.cluster.link import Link
from agentenv.cluster.messages import Say, read_answer
from agentenv.cluster.workers import Left
from agentenv.errors import WorkerError
from agentenv.offload import in_thread
from agentenv.pipelines.cluster.places import Places
from agentenv.pipelines.cluster.processes import Kind, WorkerProcesses
from agentenv.server_config import LaunchConfig, Served, ServersConfig

URL = "serves at "  # begins what a process says first
SLACK_S = 120.0  # for a process to be placed, beside what the server takes


class EngineSetup(Struct, array_like=True, frozen=True):
    """What a process on a node is told: a Served and a ServersConfig, plain, the setting that
    errors name, and the run's folder."""

    served: dict[str, Any]
    config: dict[str, Any]
    key: str
    folder: str


read_engine_setup = msgspec.msgpack.Decoder(EngineSetup).decode


class ClusterServers:
    """Starts engine servers in `places`, a ServerStarter. `resources` are those of one server."""

    def __init__(
        self,
        places: Places,
        folder: Path,
        kind: Callable[[LaunchConfig], Kind],
        tell: Callable[[str], None],
    ) -> None:
        self.num_lost = 0
        self._places, self._folder, self._kind, self._tell = places, folder, kind, tell
        self._urls: dict[str, str] = {}  # of those that are there
        self._links: dict[str, Link] = {}
        self._come = asyncio.Event()
        self._added: Callable[[str], None] = lambda url: None
        self._removed: Callable[[str], None] = lambda url: None
        self._processes: WorkerProcesses | None = None

    async def start(self, served: Served, config: LaunchConfig, key: str) -> list[str]:
        """See ServerStarter."""
        plain = msgspec.to_builtins(served, enc_hook=str) | {"model": str(served.model.absolute())}
        setup = EngineSetup(plain, msgspec.to_builtins(config), key, str(self._folder.absolute()))
        kind = self._kind(config)
        self._processes = WorkerProcesses(kind, self, setup, self._folder, self._tell, self._places)
        await self._processes.start()
        while len(self._urls) < kind.num:
            self._come.clear()
            async with asyncio.timeout(SLACK_S):
                await self._come.wait()
        return [*self._urls.values()]

    def follow(self, added: Callable[[str], None], removed: Callable[[str], None]) -> None:
        """Tell from now on which URLs come and go."""
        self._added, self._removed = added, removed

    # Members

    async def join(self, name: str, link: Link) -> Left:
        """Know the server of this process until its link is gone."""
        self._links[name] = link
        try:
            while True:
                told = read_answer(await link.receive())
                if isinstance(told, Say) and told.text.startswith(URL):
                    self._urls[name] = told.text.removeprefix(URL)
                    self._come.set()
                    self._added(self._urls[name])
                elif isinstance(told, Say):
                    self._tell(f"{name}: {told.text}")
        except (EOFError, msgspec.DecodeError) as error:
            return Left(str(error), 1, "turns that it had go on at other servers")
        finally:
            link.abort()
            del self._links[name]
            if (url := self._urls.pop(name, None)) is not None:
                self._removed(url)

    def end(self, reason: str) -> None:
        """None will come any more: the pool ends when it has none (engine.pool.max_outage_s)."""
        self._tell(f"engine servers: {reason}")

    def leave(self, name: str, within_s: float) -> None:
        """The node of a server is going to end: its turns go on elsewhere, and so does it."""
        if (link := self._links.get(name)) is not None:
            self._tell(f"{name} leaves with its node, within {within_s:.0f} s")
            link.close()

    async def close(self) -> None:
        """Let the servers end."""
        for link in self._links.values():
            link.close()

    async def shut(self) -> None:
        """End all of it. Idempotent."""
        if self._processes is not None:
            await self._processes.close()


def served_of(setup: EngineSetup) -> tuple[Served, ServersConfig]:
    """What a process on a node is to start."""
    served = msgspec.convert(setup.served, Served, dec_hook=lambda kind, text: kind(text))
    return served, msgspec.convert(setup.config, ServersConfig)


async def check_model(served: Served) -> None:
    """Raises WorkerError where a node does not see the model."""
    if not await in_thread(served.model.is_dir):
        raise WorkerError(
            f"{served.model} is no model directory on this node: it has to be at the same path on "
            "every node"
        )
