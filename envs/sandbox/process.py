"""The host's view of sandbox processes: the zygote and its sessions.

Host and session exchange length-prefixed JSON over a socket; messages of a session are untrusted
and limited in size.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import struct
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.base.disk import own_folder
from agentenv.base.errors import ConfigError, ForeignError, InfraError
from agentenv.base.offload import check_outside, in_thread
from agentenv.base.untrusted import decode
from agentenv.envs.sandbox import confine
from agentenv.envs.sandbox.launch import (
    HERE,
    LANDLOCK_ADVICE,
    Rung,
    SandboxSetup,
    advised,
    bubblewrap,
    check_missing,
    environment,
    find_interpreter,
    settings_of,
)

logger = logging.getLogger(__name__)

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


class SessionChannel:
    """A non-blocking stream to one session; a cancelled call leaves it unusable."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    async def request(self, request: dict[str, Any], wake: Callable[[], None]) -> CellAnswer:
        """Send a request, and read its answer; `wake` is called when the answer has arrived, so
        that a stopped process resumes only once.

        Any other message violates the protocol and closes the channel.
        """
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
        await self._send(struct.pack("!I", len(data)) + data, wake)
        answer = await self.receive()
        if answer.number != number:
            raise ChannelClosedError("response id does not match the request")
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
        try:
            return decode(b"".join(pieces)[HEADER_BYTES:], CellAnswer)
        except ForeignError as error:
            raise ChannelClosedError(f"not an answer: {error}") from error

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._socket.close()

    async def _send(self, frame: bytes, wake: Callable[[], None]) -> None:
        try:
            try:
                num_sent = self._socket.send(frame)
            except BlockingIOError:
                num_sent = 0
            wake()
            if num_sent < len(frame):
                await asyncio.get_running_loop().sock_sendall(self._socket, frame[num_sent:])
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    async def _read(self, size: int) -> bytes:
        try:
            data = await asyncio.get_running_loop().sock_recv(self._socket, size)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if not data:
            raise ChannelClosedError("end of file")
        return data


class SessionProcess:
    """The process of one session, which is stopped except during calls: leftovers of a cell
    (timers, signals, threads, an early answer) run only within calls."""

    def __init__(
        self, zygote: ZygoteProcess, number: int, channel: SessionChannel, pidfd: int
    ) -> None:
        self.zygote = zygote
        self.number = number
        self._channel = channel
        self._pidfd = pidfd

    async def request(self, request: dict[str, Any]) -> CellAnswer:
        """The answer to a request. Raises ChannelClosedError; then, and after a cancellation, the
        process can only be killed."""
        answer = await self._channel.request(request, self._resume)
        self.stop()
        return answer

    def stop(self) -> None:
        """Stop the process until the next request."""
        send_signal(self._pidfd, signal.SIGSTOP)

    def _resume(self) -> None:
        send_signal(self._pidfd, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, without waiting; idempotent."""
        if self._pidfd >= 0:
            self._channel.close()
            kill(self._pidfd)
            self._pidfd = -1


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
    """The message of a ready zygote: the missing preload modules, and whether its sessions can be
    forked."""

    missing: list[str]
    live_forks: bool


class _News(Struct):
    """A zygote's message about one session: the attached descriptor is its process, or its fork
    failed."""

    born: int = 0
    failed: int = 0


START_TIMEOUT_S = 60.0  # for imports of preloaded modules, possibly from a cold disk
STOP_TIMEOUT_S = 5.0
PREFIX = "agentenv-sandbox-"  # of the folder for files without other confinement


class ZygoteProcess:
    """One running zygote; `rung` is the confinement of its sessions."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        rung: Rung,
        files: ExitStack,
    ) -> None:
        self.rung = rung
        self._process = process
        self._control = control
        self._files = files
        self._numbers = count(1)
        self.live_forks = False
        self._outgoing: deque[tuple[bytes, socket.socket | None]] = deque()
        self._born: dict[int, asyncio.Future[int]] = {}  # by number: descriptor of the process

    @classmethod
    async def launch(cls, setup: SandboxSetup, rung: Rung) -> ZygoteProcess:
        """Start one. Raises ConfigError if this machine or the interpreter lacks a requirement."""
        python = await find_interpreter(setup.interpreter)
        if rung == "landlock" and confine.landlock_abi() < 1:
            raise ConfigError(f"this kernel offers no Landlock. {LANDLOCK_ADVICE}")
        check_outside("the sandbox")
        prefix = bubblewrap(python) if rung == "namespaces" else []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        files = ExitStack()
        with theirs:
            script = "/sandbox/zygote.py" if rung == "namespaces" else str(HERE / "zygote.py")
            home = files.enter_context(own_folder(None, PREFIX)) if rung == "unsafe" else ""
            settings = settings_of(setup, python, rung, theirs.fileno(), str(home))
            try:
                # on the loop's own thread: the zygote dies with the thread that started it
                process = subprocess.Popen(  # noqa: ASYNC220 - a few ms, once
                    [*prefix, python.program, "-s", "-B", script, settings],
                    env={} if rung == "namespaces" else environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                files.close()
                raise ConfigError(f"the Python sandbox cannot start: {error}") from error
        zygote = cls(process, ours, rung, files)
        started = False
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                report = await asyncio.get_running_loop().sock_recv(ours, 1 << 16)
            if not report:
                await zygote._refuse()
            found = decode(report, _Report)
            check_missing(found.missing, python)
            zygote.live_forks = found.live_forks
            asyncio.get_running_loop().add_reader(ours, zygote._on_news)
            started = True
        except TimeoutError as error:
            raise InfraError(f"the sandbox did not start in {START_TIMEOUT_S:g} s") from error
        except ForeignError as error:  # preloaded modules may do anything
            raise InfraError(f"the sandbox did not start: {error}: {report[:200]!r}") from error
        finally:
            if not started:
                await zygote.stop()
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
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        channel = SessionChannel(ours)
        born = self._born[number] = asyncio.get_running_loop().create_future()
        self._post({"spawn": number, "seed": seed}, theirs)
        process = None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await channel.receive()
                if not answer.ready:
                    raise InfraError(f"a sandbox session did not start: {answer.error}")
                process = SessionProcess(self, number, channel, await born)
        except TimeoutError as error:
            raise InfraError(f"no sandbox session within {START_TIMEOUT_S:g} s") from error
        except ChannelClosedError as error:
            raise InfraError(f"a sandbox session died at its start: {error}") from error
        finally:
            if process is None:
                channel.close()
                self._disown(number, born)
        return process

    async def fork(self, parent: SessionProcess) -> SessionProcess | None:
        """A copy of an idle session, or None if it is impossible. Raises ChannelClosedError; then,
        and after a cancellation, the parent can only be killed."""
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        born = self._born[number] = asyncio.get_running_loop().create_future()
        self._post({"fork": parent.number, "child": number}, theirs)
        process = None
        try:
            answer = await parent.request({"fork": ""})
            if answer.forked:
                process = SessionProcess(self, number, SessionChannel(ours), await born)
                process.stop()
        except ForkRefusedError:
            pass
        finally:
            if process is None:
                ours.close()
                self._post({"forget": number}, None)
                self._disown(number, born)
        return process

    def _disown(self, number: int, born: asyncio.Future[int]) -> None:
        """Kill a session that is no longer awaited, now or when it starts."""
        self._born.pop(number, None)
        if born.done() and not born.cancelled() and not born.exception():
            kill(born.result())

    async def stop(self) -> None:
        """End the zygote and all its sessions, and wait for the processes."""
        loop = asyncio.get_running_loop()
        loop.remove_writer(self._control)
        self._stop_listening()
        while self._outgoing:
            self._drop_first()
        self._control.close()
        reaping = loop.run_in_executor(None, self._reap_group)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.shield(reaping)
        except TimeoutError:
            self._kill_group()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await asyncio.shield(reaping)
            except TimeoutError:
                logger.warning("cannot end the sandbox's process %d", self._process.pid)
        finally:
            if not reaping.done():  # cancelled: kill at once
                self._kill_group()

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
        elif news.failed:
            born.set_exception(ForkRefusedError())
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

    def _reap_group(self) -> None:
        """Wait for the end of the process, and kill the rest of its group. Blocks."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            self._kill_group()  # the group id is not reused before the leader is reaped
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._files.close()

    def _kill_group(self) -> None:
        """Kill the group; bubblewrap may not kill a zygote that has changed its user."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _refuse(self) -> None:
        """Raises ConfigError with the reason for an end before the process was ready."""
        try:
            _, errors = await in_thread(self._process.communicate, timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            errors = b"it closed its connection but does not exit"
        reason = errors.decode(errors="replace").strip()[-500:] or "no reason given"
        raise ConfigError(f"the Python sandbox cannot start: {advised(reason)}")
