"""A rank started here as a process of its own, and the connection over which it obeys."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct

import learners
from agentenv.errors import LearnerError
from learners import messages as wire

CLOSE_TIMEOUT_S = 5.0
LOG_TAIL_BYTES = 2000
PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(learners.__file__)))


class RankProcess:
    """`start`, then `call` any number of times, then `close`.

    One command runs at a time; others wait for it. A rank that dies raises LearnerError at once,
    in the call that is waiting and in each later one, with its exit code or signal and the end
    of its log. A call that misses its deadline or is cancelled ends the process, since its
    answer would be taken for that of the next command.
    """

    def __init__(self, log_path: Path, num_threads: int) -> None:
        self.log_path = log_path
        self.num_threads = num_threads
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """None before the start and after close."""
        return None if self._process is None else self._process.pid

    async def start(self, timeout_s: float) -> None:
        """Start the process and wait until it has connected with our token."""
        token = secrets.token_hex(16)
        connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            hello = await _read_reply(reader)
            known = isinstance(hello, wire.Hello) and secrets.compare_digest(hello.token, token)
            if not known or connected.done():
                writer.close()
                return
            self._reader, self._writer = reader, writer
            connected.set_result(None)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        try:
            port = server.sockets[0].getsockname()[1]
            self._process = await self._spawn(f"127.0.0.1:{port}", token)
            died = asyncio.ensure_future(self._process.wait())
            either: set[asyncio.Future[Any]] = {connected, died}
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            server.close()
        died.cancel()
        if connected.done():
            return
        code = self._process.returncode
        await self.close()
        if code is None:
            raise self._error(f"did not connect in {timeout_s:.0f} s")
        raise self._error(_how(code))

    async def _spawn(self, address: str, token: str) -> asyncio.subprocess.Process:
        path = os.pathsep.join(filter(None, [PACKAGES, os.environ.get("PYTHONPATH")]))
        variables = {
            wire.ADDRESS_VARIABLE: address,
            wire.TOKEN_VARIABLE: token,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": str(self.num_threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve the rollouts beside them
        }
        with _open_log(self.log_path) as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "learners.deepspeed_worker",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **variables},
                start_new_session=True,
            )

    async def call(self, command: Struct, timeout_s: float) -> wire.Done:
        """Send one command and wait for its answer."""
        async with self._lock:
            if self._writer is None or self._reader is None or self._process is None:
                raise self._error("is closed")
            process = self._process
            try:
                async with asyncio.timeout(timeout_s):
                    self._writer.write(wire.pack_frame(command))
                    await self._writer.drain()
                    reply = await _read_reply(self._reader)
            except (ConnectionError, asyncio.IncompleteReadError):
                raise self._error(_how(await _exit_code(process))) from None
            except TimeoutError:
                await self.close()
                took = f"took longer than {timeout_s:.0f} s for {type(command).__name__}"
                raise self._error(f"{took} and was stopped") from None
            except asyncio.CancelledError:
                await self.close()
                raise
        if isinstance(reply, wire.Failed):
            raise LearnerError(f"{reply.error}\n{reply.traceback}".rstrip())
        if not isinstance(reply, wire.Done):
            raise self._error(f"gave an unexpected answer: {reply!r}")
        return reply

    async def close(self) -> None:
        """Ask an idle rank to stop, or kill a busy one; also ends calls that wait. Idempotent."""
        process, self._process = self._process, None
        writer, self._writer = self._writer, None
        idle = not self._lock.locked()
        if writer is not None:
            with contextlib.suppress(ConnectionError):
                if idle:
                    writer.write(wire.pack_frame(wire.Stop()))
                writer.close()
                await writer.wait_closed()
        if process is None:
            return
        if idle and writer is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await process.wait()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _error(self, what: str) -> LearnerError:
        text = f"the learner {what}; log {self.log_path}"
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - LOG_TAIL_BYTES))
            text += f":\n{log.read().decode(errors='replace').strip()}"
        return LearnerError(text)


def _open_log(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


async def _read_reply(reader: asyncio.StreamReader) -> wire.Reply:
    prefix = await reader.readexactly(wire.PREFIX_BYTES)
    return wire.unpack_reply(await reader.readexactly(int.from_bytes(prefix, "little")))


async def _exit_code(process: asyncio.subprocess.Process) -> int | None:
    """Of a process whose connection broke; None if it lives on."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            return await process.wait()
    return None


def _how(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
