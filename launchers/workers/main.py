"""What is common to the processes that launchers/workers/processes.py starts: each connects to whom
it works for, is set up, and ends with that connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Protocol

from agentenv.cluster.link import StreamLink
from agentenv.cluster.messages import Lost, named, pack
from agentenv.errors import AgentEnvError
from launchers.data import Say
from launchers.event_loop import rolling_out
from launchers.terminal import View, run_until_done, to_its_end
from launchers.workers.processes import (
    ADDRESS_VARIABLE,
    HELLO_S,
    NUMBER_VARIABLE,
    TOKEN_VARIABLE,
    Hello,
)


class Worker(Protocol):
    """What works."""

    async def serve(self) -> None:
        """Until the other end is gone."""
        ...

    def say(self, text: str) -> None:
        """To people, by the other end."""
        ...


# makes it of the frame that sets it up, its link, what closes its parts, and its number
Build = Callable[[bytes, StreamLink, AsyncExitStack, Say, int], Coroutine[Any, Any, Worker]]


class Errors(logging.Handler):
    """Tells the first line of each error of a part, such as the first crash of an environment."""

    def __init__(self, view: WorkerView) -> None:
        super().__init__(logging.ERROR)
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "run":  # that is a View's own
            self._view.tell(record.getMessage().partition("\n")[0])


class WorkerView(View):
    """What holds up the loop is told to the controller too."""

    def __init__(self) -> None:
        super().__init__()
        self.tell: Callable[[str], None] = lambda text: None  # from any thread

    def warn(self, text: str) -> None:
        super().warn(text)
        self.tell(text)


async def work(address: str, hello: Hello, view: WorkerView, build: Build) -> None:
    """Connect, be set up, and work until the other end is gone."""
    host, port = address.rsplit(":", 1)
    async with asyncio.timeout(HELLO_S):
        link = StreamLink(*await asyncio.open_connection(host, int(port)))
        link.send(pack(hello))
        setup = await link.receive()
    async with AsyncExitStack() as stack:
        stack.callback(link.close)
        try:
            worker = await build(setup, link, stack, view.say, hello.number)
        except AgentEnvError as error:
            link.send(pack(Lost(-1, *named(error))))
            raise
        loop = asyncio.get_running_loop()

        def tell(text: str) -> None:
            loop.call_soon_threadsafe(worker.say, text)

        view.tell = tell
        with rolling_out():
            await worker.serve()


def main(build: Build) -> int:
    """Returns the exit code, as other commands do."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    taken = [os.environ.pop(name) for name in (ADDRESS_VARIABLE, TOKEN_VARIABLE, NUMBER_VARIABLE)]
    address, token, number = taken
    view = WorkerView()
    logging.getLogger().addHandler(Errors(view))
    hello = Hello(token, int(number), os.getpid())
    return to_its_end(
        lambda: run_until_done(work(address, hello, view, build), view), view, writing="its log"
    )
