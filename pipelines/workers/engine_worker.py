"""A process that runs an engine server on a node: `python -m
agentenv.pipelines.workers.engine_worker`, which pipelines/cluster/engines.py starts.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from pathlib import Path

from msgspec.structs import replace

from agentenv.cluster.messages import Alive, Figures, Say, pack
from agentenv.link import StreamLink
from agentenv.pipelines.cluster.engines import URL, check_model, read_engine_setup, served_of
from agentenv.pipelines.serving.servers import ServerFactory
from agentenv.pipelines.setup import data
from agentenv.pipelines.workers.main import main
from agentenv.worker_group import serve

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class EngineHolder:
    """Holds a server until the other end is gone."""

    def __init__(self, link: StreamLink, url: str) -> None:
        self._link, self._url = link, url

    def say(self, text: str) -> None:
        self._link.send(pack(Say(text)))

    async def serve(self) -> None:
        """Report the URL, and from then on that this process is there."""
        self.say(f"{URL}{self._url}")
        await serve(self._link, lambda frame: None, lambda: pack(Alive(Figures())))


async def build(
    frame: bytes, link: StreamLink, stack: AsyncExitStack, say: data.Say, number: int
) -> EngineHolder:
    """The server answers."""
    setup = read_engine_setup(frame)
    served, config = served_of(setup)
    await check_model(served)
    own = link.own if config.host in LOOPBACK else config.host
    port = config.port + number if config.port else 0
    config = replace(config, num_servers=1, gpus=[], host=own, port=port)
    folder = Path(setup.folder) / f"of-engine-{number}"
    (url,) = await ServerFactory(folder, stack, say).start(served, config, setup.key)
    return EngineHolder(link, url)


if __name__ == "__main__":
    sys.exit(main(build))
