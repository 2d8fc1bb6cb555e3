"""The life cycle of worker processes: connect to the controller, set up, and end with the
connection (agentenv/processes/supervisor.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Protocol

import msgspec

from agentenv.assembly.run.exits import exit_code_of, run_until_done
from agentenv.assembly.run.terminal import ErrorLines, View
from agentenv.assembly.run.watchdog import rolling_out
from agentenv.base.config import Reporter
from agentenv.base.errors import AgentEnvError, ConfigError, WorkerError, reported_as
from agentenv.base.installation import PACKAGES
from agentenv.base.untrusted import packed
from agentenv.cluster.messages import Notice
from agentenv.processes.link import Link
from agentenv.processes.supervisor import ADDRESS_VARIABLE, NUMBER_VARIABLE, TOKEN_VARIABLE
from agentenv.processes.worker_group import HELLO_S, Hello, Ready, Refusal, named, own_code


class WorkerTask(Protocol):
    """The work of a process."""

    async def serve(self) -> bool | None:
        """Work until the connection ends. False: the run is not over."""


# Variables for externally started workers, in seconds: how long to try to reach the controller, and
# how long trees may continue after SIGTERM.
WAIT_VARIABLE, DRAIN_VARIABLE = "AGENTENV_WORKER_WAIT_S", "AGENTENV_WORKER_DRAIN_S"
# Variables with the number of this worker, from its launcher.
NUMBERS = (NUMBER_VARIABLE, "SLURM_PROCID", "JOB_COMPLETION_INDEX")
RETRY_S = 2.0

# (setup frame, link, stack that closes the parts, report, number of the worker) -> worker
Build = Callable[[bytes, Link, AsyncExitStack, Reporter, int], Coroutine[Any, Any, WorkerTask]]


class WorkerView(View):
    """A view that also sends warnings to the controller."""

    def __init__(self) -> None:
        super().__init__()
        self.report: Callable[[str], None] = lambda text: None  # from any thread

    def warn(self, text: str) -> None:
        super().warn(text)
        self.report(text)


async def connect(address: str, hello: Hello, wait_s: float) -> tuple[Link, bytes]:
    """Connect to the controller; returns the link and the setup frame. Retries for `wait_s`, then
    raises WorkerError."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    end = loop.time() + wait_s
    while True:
        try:
            async with asyncio.timeout(HELLO_S):
                reader, writer = await asyncio.open_connection(host, int(port))
                link = Link(reader, writer)
                link.keep_alive()
                link.send(packed(hello))
                return link, await link.receive()
        except (OSError, EOFError, TimeoutError) as error:
            if loop.time() >= end:
                raise WorkerError(
                    f"the controller at {address} ({ADDRESS_VARIABLE}) rejects this worker: "
                    f"{error or 'no answer'}; is it running, are fewer than cluster.workers "
                    f"connected, and does it have the same {TOKEN_VARIABLE}?"
                ) from error
        await asyncio.sleep(RETRY_S)


def drain_on_signal(leave: Callable[[float], None], drain_s: float) -> None:
    """Let the first SIGTERM notify the controller; the second ends this process."""
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)

    def on_signal(*_: object) -> None:
        signal.signal(signal.SIGTERM, before)
        loop.call_soon_threadsafe(leave, drain_s)

    signal.signal(signal.SIGTERM, on_signal)


async def work(
    address: str, hello: Hello, view: WorkerView, build: Build, wait_s: float, drain_s: float
) -> None:
    """Connect, set up, and work until the connection ends. Raises WorkerError if the controller may
    need this process again, so that its launcher restarts it."""
    link, setup = await connect(address, hello, wait_s)
    async with AsyncExitStack() as stack:
        stack.callback(link.close)
        problem = f"the messages of {address} cannot be decoded"
        remedy = f"; does it have the same version of agentenv as this machine ({PACKAGES})?"
        try:
            with reported_as(ConfigError, problem, msgspec.DecodeError, end=remedy):
                worker = await build(setup, link, stack, view.log, hello.number)
        except AgentEnvError as error:
            link.send(packed(Refusal(*named(error))))
            raise
        link.send(packed(Ready()))
        loop = asyncio.get_running_loop()

        def report(text: str) -> None:
            loop.call_soon_threadsafe(link.send, packed(Notice(text)))

        view.report = report
        leave: Callable[[float], None] | None = getattr(worker, "leave", None)
        if drain_s and leave is not None:
            drain_on_signal(leave, drain_s)
        with rolling_out():
            if await worker.serve() is False:
                raise WorkerError(
                    f"the controller at {address} is lost, or has dropped this worker, without "
                    "reporting the end of its run"
                )


def main(build: Build) -> int:
    """Run a worker; returns the exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    view = WorkerView()
    logging.getLogger().addHandler(ErrorLines(lambda line, is_error: view.report(line)))

    def begin() -> Coroutine[Any, Any, None]:
        missing = {ADDRESS_VARIABLE, TOKEN_VARIABLE} - set(os.environ)
        if missing:
            raise ConfigError(
                f"{' and '.join(sorted(missing))} not set: host:port of the controller, and its "
                "secret (docs/clusters.md)"
            )
        address, token = os.environ.pop(ADDRESS_VARIABLE), os.environ.pop(TOKEN_VARIABLE)
        number = next((os.environ[name] for name in NUMBERS if name in os.environ), os.getpid())
        seconds = [float(os.environ.get(name, 0)) for name in (WAIT_VARIABLE, DRAIN_VARIABLE)]
        hello = Hello(token, int(number), os.getpid(), own_code())
        return work(address, hello, view, build, *seconds)

    return exit_code_of(lambda _: run_until_done(begin(), view), "its log", view=view)
