"""The host's view of sandbox processes: the zygote and its sessions.

Host and session exchange length-prefixed JSON over a socket; messages of a session are untrusted
and limited in size.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import signal
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.base.disk import own_folder
from agentenv.base.errors import ConfigError, ForeignError, InfraError, reported_as
from agentenv.base.untrusted import decode
from agentenv.envs.sandbox import confine, launch
from agentenv.envs.sandbox.keys import PythonConfig

MAX_FRAME_BYTES = 1 << 20
HEADER_BYTES = 4
READ_BYTES = 1 << 16


class CellAnswer(Struct):
    """A message of a session: that it is ready, an error, the result of a cell, or the digest of
    its variables. `number` is that of the request.

    `lost`: its variables fill the memory, so that it cannot continue.
    """

    number: int = 0
    ready: bool = False
    error: str = ""
    output: str = ""
    problem: str = ""
    lost: bool = False
    digest: str = ""
    forked: bool = False


class ChannelClosedError(Exception):
    """The session has ended, or sent an invalid answer."""


class ForkRefusedError(Exception):
    """A session cannot be forked in its state, for instance because it shares files or memory."""


class SessionProcess:
    """The process of one session, and the socket to it. The process is stopped except during calls:
    leftovers of a cell (timers, signals, threads, an early answer) run only within calls. `pidfd`
    is its descriptor, once it is known."""

    def __init__(self, zygote: ZygoteProcess, number: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.zygote = zygote
        self.number = number
        self.pidfd = -1
        self._socket = sock

    async def request(self, request: dict[str, Any]) -> CellAnswer:
        """Send a request, and read its answer. Any other message violates the protocol. Raises
        ChannelClosedError; then, and after a cancellation, the process can only be killed."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        else:
            raise ChannelClosedError("it ended, or sent a message without a request")
        number = secrets.randbits(53)  # unpredictable, so that answers cannot be sent in advance
        data = msgspec.json.encode({**request, "number": number})
        await self._send(struct.pack("!I", len(data)) + data)
        answer = await self.receive()
        if answer.number != number:
            raise ChannelClosedError("response id does not match the request")
        self.stop()
        return answer

    async def receive(self) -> CellAnswer:
        """Read one frame."""
        data = await self._read(READ_BYTES)
        while len(data) < HEADER_BYTES:
            data += await self._read(READ_BYTES)
        end = HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES])
        if end - HEADER_BYTES > MAX_FRAME_BYTES:
            raise ChannelClosedError(f"an answer of {end - HEADER_BYTES} bytes")
        pieces, size = [data], len(data)
        while size < end:
            pieces.append(await self._read(end - size))
            size += len(pieces[-1])
        if size > end:
            raise ChannelClosedError("it sent a message without a request")
        with reported_as(ChannelClosedError, "not an answer", ForeignError):
            return decode(b"".join(pieces)[HEADER_BYTES:], CellAnswer)

    def stop(self) -> None:
        """Stop the process until the next request."""
        send_signal(self.pidfd, signal.SIGSTOP)

    def kill(self) -> None:
        """Kill it, without waiting; idempotent."""
        self._socket.close()
        if self.pidfd >= 0:
            kill(self.pidfd)
            self.pidfd = -1

    async def _send(self, frame: bytes) -> None:
        """Send it, and resume the process once its beginning has arrived."""
        with reported_as(ChannelClosedError, "", OSError):
            try:
                num_sent = self._socket.send(frame)
            except BlockingIOError:
                num_sent = 0
            send_signal(self.pidfd, signal.SIGCONT)
            if num_sent < len(frame):
                await asyncio.get_running_loop().sock_sendall(self._socket, frame[num_sent:])

    async def _read(self, size: int) -> bytes:
        with reported_as(ChannelClosedError, "", OSError):
            data = await asyncio.get_running_loop().sock_recv(self._socket, size)
        if not data:
            raise ChannelClosedError("end of file")
        return data


def send_signal(pidfd: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended. Raises InfraError without permission."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        pass
    except OSError as error:
        raise InfraError(
            f"cannot send signals to a sandbox session: {error}; a host process that runs as root "
            "needs CAP_KILL"
        ) from error


def kill(pidfd: int) -> None:
    """End the process, and close the descriptor."""
    try:
        send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)


# The parent process of all sessions.


class _Report(Struct):
    """The message of a ready zygote: the missing preload modules, the error of the prelude, and
    whether its sessions can be forked."""

    missing: list[str]
    problem: str
    live_forks: bool


class _News(Struct):
    """A zygote's message about one session: the attached descriptor is its process, or its fork
    failed."""

    born: int = 0
    failed: int = 0


PREFIX = "agentenv-sandbox-"  # of the folder for files without other confinement


class ZygoteProcess:
    """One running zygote; `rung` is the confinement of its sessions."""

    def __init__(self, process: launch.ControlledProcess, rung: launch.Rung) -> None:
        self.rung = rung
        self.live_forks = False
        self._process = process
        self._control = process.control
        self._numbers = count(1)
        self._outgoing: deque[tuple[bytes, socket.socket | None]] = deque()
        self._born: dict[int, asyncio.Future[int]] = {}  # by number: descriptor of the process

    @classmethod
    async def launch(cls, config: PythonConfig, rung: launch.Rung) -> ZygoteProcess:
        """Start one. Raises ConfigError if this machine or the interpreter lacks a requirement."""
        python = await launch.find_interpreter(config.interpreter)
        if rung == "landlock" and confine.landlock_abi() < 1:
            raise ConfigError(f"this kernel offers no Landlock. {launch.LANDLOCK_ADVICE}")
        isolated, files = rung == "namespaces", ExitStack()
        home = "/tmp" if isolated else "/"
        prefix = launch.bubblewrap(python) if isolated else []
        script = "/sandbox/zygote.py" if isolated else str(launch.HERE / "zygote.py")
        if rung == "unsafe":
            home = str(files.enter_context(own_folder(None, PREFIX)))
        command = [*prefix, python.program, "-s", "-B", script]
        variables = {} if isolated else launch.environment()
        settings = launch.settings_of(config, python, rung, home)
        try:
            process = launch.ControlledProcess(command, settings, variables, files)
        except OSError as error:
            files.close()
            raise ConfigError(launch.advised(f"the sandbox cannot start: {error}")) from error
        zygote = cls(process, rung)
        try:
            message = await process.started()
            if not message:
                reason = await process.stop() or f"it ended with {process.process.returncode}"
                reason = launch.advised(reason)
                raise ConfigError(f"the Python sandbox cannot start: {reason}")
            shown = f": {message[:200]!r}"  # preloaded modules may do anything
            with reported_as(InfraError, "the sandbox did not start", ForeignError, end=shown):
                report = decode(message, _Report)
            launch.check_prepared(report.missing, report.problem, python)
            zygote.live_forks = report.live_forks
            asyncio.get_running_loop().add_reader(process.control, zygote._on_news)
        except BaseException:
            await process.stop()
            raise
        return zygote

    def alive(self) -> bool:
        """False after the end of the zygote, even if its sessions still run."""
        try:
            return bool(self._control.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def spawn(self, seed: int) -> SessionProcess:
        """A new session, ready to run cells. Raises InfraError."""
        with self._expected({"seed": seed}, "spawn") as (process, born):
            try:
                async with asyncio.timeout(launch.START_S):
                    answer = await process.receive()
                    if not answer.ready:
                        problem = launch.advised(f"a sandbox session did not start: {answer.error}")
                        raise InfraError(problem)
                    process.pidfd = await born
            except TimeoutError as error:
                raise InfraError(f"no sandbox session within {launch.START_S:g} s") from error
            except ChannelClosedError as error:
                raise InfraError(f"a session died: {error}; {launch.MEMORY_ADVICE}") from error
        return process

    async def fork(self, parent: SessionProcess) -> SessionProcess | None:
        """A copy of an idle session, or None if it is impossible. Raises ChannelClosedError; then,
        and after a cancellation, the parent can only be killed."""
        with self._expected({"fork": parent.number}, "child") as (process, born):
            answer = await parent.request({"fork": ""})
            with suppress(ForkRefusedError):
                if answer.forked:
                    process.pidfd = await born
                    process.stop()
        return process if process.pidfd >= 0 else None

    @contextmanager
    def _expected(
        self, request: dict[str, int], key: str
    ) -> Iterator[tuple[SessionProcess, asyncio.Future[int]]]:
        """A requested session, and its future process, which is killed, now or when it starts,
        unless the block has awaited it."""
        number = next(self._numbers)
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise InfraError(launch.advised(f"no sandbox session: {error}")) from error
        process = SessionProcess(self, number, ours)
        born = self._born[number] = asyncio.get_running_loop().create_future()
        self._post({**request, key: number}, theirs)
        try:
            yield process, born
        finally:
            self._born.pop(number, None)
            if process.pidfd < 0:
                process.kill()
                self._post({"forget": number}, None)
                if born.done() and not born.cancelled() and not born.exception():
                    kill(born.result())

    async def stop(self) -> None:
        """End the zygote and all its sessions, and wait for the processes."""
        asyncio.get_running_loop().remove_writer(self._control)
        self._stop_listening()
        while self._outgoing:
            self._drop_first()
        await self._process.stop()

    # inner workings

    def _post(self, request: dict[str, int], attached: socket.socket | None) -> None:
        if self._control.fileno() < 0:  # the zygote is stopped
            if attached is not None:
                attached.close()
            return
        self._outgoing.append((msgspec.json.encode(request), attached))
        self._flush()

    def _on_news(self) -> None:
        """Handle the zygote's report of a session's process."""
        try:
            packet, fds, _, _ = socket.recv_fds(self._control, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            packet, fds = b"", []
        if not packet:
            self._stop_listening()
            return
        news = decode(packet, _News)
        born = self._born.pop(news.born or news.failed, None)
        if born is None or born.done():  # its caller was cancelled
            for pidfd in fds:
                kill(pidfd)
        elif news.failed or not fds:
            full = launch.advised(f"no sandbox session: {os.strerror(errno.EMFILE)}")
            born.set_exception(ForkRefusedError() if news.failed else InfraError(full))
            born.exception()  # mark as retrieved
        else:
            born.set_result(fds[0])

    def _stop_listening(self) -> None:
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control)
        for born in self._born.values():
            if not born.done():
                born.set_exception(ChannelClosedError("the sandbox died"))
                born.exception()  # mark as retrieved
        self._born.clear()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._outgoing:
            packet, attached = self._outgoing[0]
            fds = [] if attached is None else [attached.fileno()]
            try:
                socket.send_fds(self._control, [packet], fds)
            except BlockingIOError:
                loop.add_writer(self._control, self._flush)
                return
            except OSError:
                pass  # the zygote is gone; a call that waits for an answer reads the end of file
            self._drop_first()
        loop.remove_writer(self._control)

    def _drop_first(self) -> None:
        _, attached = self._outgoing.popleft()
        if attached is not None:
            attached.close()
