"""Engine servers on nodes of a cluster. `ClusterServers` starts a process on each node: this file,
`python -m agentenv.training.workers.engine_worker`, which starts its server, reports its URL,
restarts it when it dies, and ends with the controller.

A server whose node is lost restarts on another node, and the engine's pool is updated.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agentenv.assembly.keys.cluster import RayCluster
from agentenv.assembly.serving.servers import MAX_RESTARTS, ServerFactory
from agentenv.base.errors import WorkerError
from agentenv.base.offload import in_thread
from agentenv.base.ports import is_loopback
from agentenv.cluster.messages import Notice, WorkerFigures, pack, read_answer
from agentenv.contract.server_config import LaunchConfig, Served, ServersConfig
from agentenv.processes.link import Link
from agentenv.processes.supervisor import Placement, Supervisor
from agentenv.processes.worker_group import Left, Worker, WorkerGroup, WorkerSpec, serve
from agentenv.training.workers.worker_process import main

URL = "serves at "  # prefix of the first message of a process
SLACK_S = 120.0  # for the placement of a process, in addition to the server's start-up


class EngineSetup(Struct, array_like=True, frozen=True):
    """The setup of a process on a node. `served`, `config`: a Served and a ServersConfig as plain
    data. `key`: the setting that errors name. `folder`: that of the run."""

    served: dict[str, Any]
    config: dict[str, Any]
    key: str
    folder: str


read_engine_setup = msgspec.msgpack.Decoder(EngineSetup).decode


class ClusterServers(WorkerGroup[Worker]):
    """A ServerStarter that starts engine servers in `placement`."""

    read = staticmethod(read_answer)
    make_worker = Worker

    def __init__(
        self, placement: Placement, folder: Path, cluster: RayCluster, report: Callable[[str], None]
    ) -> None:
        super().__init__(report)
        self._placement, self._folder, self._cluster = placement, folder, cluster
        self._urls: dict[str, str] = {}  # of connected workers
        self._joined = asyncio.Event()
        self._added: Callable[[str], None] = lambda url: None
        self._removed: Callable[[str], None] = lambda url: None
        self._supervisor: Supervisor | None = None

    async def start(self, served: Served, config: LaunchConfig, key: str) -> list[str]:
        """See ServerStarter."""
        plain = msgspec.to_builtins(served, enc_hook=str) | {"model": str(served.model.absolute())}
        setup = EngineSetup(plain, msgspec.to_builtins(config), key, str(self._folder.absolute()))
        spec = WorkerSpec(
            "agentenv.training.workers.engine_worker",
            "engine",
            "engine server",
            config.num_servers,
            config.start_timeout_s + SLACK_S,
            MAX_RESTARTS,
            "engine.servers",
            env=self._cluster.env,
            resources=self._cluster.of_engine(config),
            python=self._cluster.python,
        )
        self._supervisor = Supervisor(spec, self, setup, self._folder, self.report, self._placement)
        await self._supervisor.start()
        while len(self._urls) < spec.num:
            self._joined.clear()
            async with asyncio.timeout(SLACK_S):
                await self._joined.wait()
        return [*self._urls.values()]

    def follow(self, added: Callable[[str], None], removed: Callable[[str], None]) -> None:
        """Call `added` and `removed` with the URL of each server that joins or is lost."""
        self._added, self._removed = added, removed

    def take(self, worker: Worker, message: Any) -> None:
        if isinstance(message, Notice) and message.text.startswith(URL):
            self._urls[worker.name] = message.text.removeprefix(URL)
            self._joined.set()
            self._added(self._urls[worker.name])
        elif isinstance(message, Notice):
            self.report(f"{worker.name}: {message.text}")

    def left(self, worker: Worker, why: str) -> Left:
        return Left(why, 1, "its turns resume on other servers")

    async def lost(self, worker: Worker, why: str) -> None:
        if (url := self._urls.pop(worker.name, None)) is not None:
            self._removed(url)

    def end(self, reason: str) -> None:
        """No more servers will join: the pool ends some time after its last one."""
        super().end(reason)
        self.report(f"engine servers: {reason}")

    def leave(self, name: str, within_s: float) -> None:
        """The node of a server is about to end: move the server and its turns to another node."""
        if (worker := self.workers.get(name)) is not None:
            self.report(f"{name} leaves with its node, within {within_s:.0f} s")
            worker.link.close()

    async def shut(self) -> None:
        """Stop the supervisor and its workers; idempotent."""
        if self._supervisor is not None:
            await self._supervisor.close()


# The process on a node


class EngineHolder:
    """Keeps a server running until the connection to the controller ends."""

    def __init__(self, link: Link, url: str) -> None:
        self._link, self._url = link, url

    async def serve(self) -> None:
        """Report the URL, then send heartbeats."""
        self._link.send(pack(Notice(f"{URL}{self._url}")))
        await serve(self._link, lambda frame: None, lambda: pack(WorkerFigures()))


async def build(
    frame: bytes, link: Link, stack: AsyncExitStack, report: Callable[[str], None], number: int
) -> EngineHolder:
    """Start the server and wait until it responds."""
    setup = read_engine_setup(frame)
    served = msgspec.convert(setup.served, Served, dec_hook=lambda kind, text: kind(text))
    config = msgspec.convert(setup.config, ServersConfig)
    if not await in_thread(served.model.is_dir):
        raise WorkerError(
            f"{served.model} is not a model directory on this node: it must be at the same path on "
            "every node"
        )
    host = link.own if is_loopback(config.host) else config.host
    port = config.port + number if config.port else 0
    config = replace(config, num_servers=1, gpus=[], host=host, port=port)
    folder = Path(setup.folder) / f"of-engine-{number}"
    (url,) = await ServerFactory(folder, stack, report).start(served, config, setup.key)
    return EngineHolder(link, url)


if __name__ == "__main__":
    sys.exit(main(build))
