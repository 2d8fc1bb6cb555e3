"""One rank as the controller sees it: its process, its log, and the connection it obeys over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import psutil
from msgspec import Struct

import learners
from learners import messages as wire

CLOSE_TIMEOUT_S = 5.0
LOG_TAIL_BYTES = 2000
PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(learners.__file__)))
CHOSEN_ELSEWHERE = ("MASTER_ADDR", "MASTER_PORT")  # of another job that this one was started in


class RankLink:
    """A rank that said Hello. `process` is None for one that was started elsewhere."""

    def __init__(
        self,
        hello: wire.Hello,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.rank = hello.rank
        self.pid = hello.pid
        self.host = hello.host
        self.store = hello.store
        self.process: asyncio.subprocess.Process | None = None
        self.log_path: Path | None = None
        self._reader = reader
        self._writer = writer

    async def exchange(self, command: Struct) -> wire.Done | wire.Failed:
        """Send a command and wait for its answer. Raises OSError or EOFError if it is lost."""
        self._writer.write(wire.pack_frame(command))
        await self._writer.drain()
        reply = await read_reply(self._reader)
        if not isinstance(reply, wire.Done | wire.Failed):
            raise ConnectionError(f"unexpected answer {reply!r}")
        return reply

    def interrupt(self) -> None:
        """Tell a rank that is at work to break off; see `learners.messages.Abort`."""
        self._writer.write(wire.pack_frame(wire.Abort()))

    async def close(self, *, idle: bool) -> None:
        """Ask an idle rank to stop, or kill a busy one. A rank elsewhere ends by itself when its
        connection does."""
        with contextlib.suppress(OSError):
            if idle:
                self._writer.write(wire.pack_frame(wire.Stop()))
            self._writer.close()
            await self._writer.wait_closed()
        if self.process is None:
            return
        if idle:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self.process.wait()
        await kill(self.process)

    async def how_it_ended(self) -> str:
        """Of a rank whose connection broke."""
        if self.process is None:
            return f"(process {self.pid} on {self.host}) closed its connection"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return how(await self.process.wait())
        return "closed its connection"

    def state(self) -> str:
        """What the system says about a process that does not answer."""
        if self.process is None:
            return f"process {self.pid} on {self.host}"
        with contextlib.suppress(psutil.Error):
            return f"process {self.pid}, {psutil.Process(self.pid).status()}"
        return f"process {self.pid}"

    def show_stack(self) -> None:
        """Let the rank write where it is into its log."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGUSR1)


async def spawn(
    rank: int,
    num_ranks: int,
    log_path: Path,
    num_threads: int,
    address: str,
    token: str,
    gpus: Sequence[str] = (),
) -> asyncio.subprocess.Process:
    """Start a rank on this machine, in a session of its own."""
    path = os.pathsep.join(filter(None, [PACKAGES, os.environ.get("PYTHONPATH")]))
    environment = {k: v for k, v in os.environ.items() if k not in CHOSEN_ELSEWHERE}
    environment |= {
        wire.ADDRESS_VARIABLE: address,
        wire.TOKEN_VARIABLE: token,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve the rollouts beside them
    }
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    with open_log(log_path) as log:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "learners.deepspeed_worker",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


async def kill(process: asyncio.subprocess.Process) -> None:
    """End it now, if it has not ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def read_reply(reader: asyncio.StreamReader) -> wire.Reply:
    prefix = await reader.readexactly(wire.PREFIX_BYTES)
    return wire.unpack_reply(await reader.readexactly(int.from_bytes(prefix, "little")))


def open_log(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


def log_tail(path: Path) -> str:
    """The end of a rank's log; empty if there is none."""
    with contextlib.suppress(OSError), path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - LOG_TAIL_BYTES))
        return log.read().decode(errors="replace").strip()
    return ""


def how(code: int) -> str:
    """How a process with this exit code ended."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (the system does that when memory runs out: see dmesg)" if code == -9 else ""
        return f"was killed by {name}{hint}"
    return f"ended with exit code {code}"
