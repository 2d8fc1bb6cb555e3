"""The host's view of sandbox processes: the zygote and its sessions.

Host and session speak length-prefixed JSON over a socket; what a session says is capped and never
trusted.
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

from agentenv.disk import own_folder
from agentenv.envs.sandbox.launch import (
    HERE,
    NAMESPACES_ADVICE,
    Rung,
    SandboxSetup,
    bubblewrap,
    check_missing,
    check_rung,
    environment,
    find_interpreter,
    settings_of,
)
from agentenv.errors import ConfigError, ForeignError, InfraError
from agentenv.offload import check_outside, in_thread
from agentenv.untrusted import decode

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 20
HEADER_BYTES = 4
READ_BYTES = 1 << 16


class CellAnswer(Struct):
    """What a session may say: that it is ready, why it is not, how a cell went, or the digest of
    its variables. `number` is that of the request.

    `lost`: its variables fill the memory, so it cannot go on.
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
    """The session is gone, or its answer is none that a session gives."""


class ForkRefusedError(Exception):
    """A session cannot be forked as it is: it shares files or memory, say."""


class Channel:
    """A non-blocking stream to one session; a cancelled call leaves it unusable."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    async def ask(
        self, request: dict[str, Any], wake: Callable[[], None] | None = None
    ) -> CellAnswer:
        """Send a request, and read the answer to it; `wake` is called once that is there to be
        read, so that who sleeps wakes once.

        Whatever else was said, before or instead, is nothing that a session says: it is closed.
        """
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        else:
            raise ChannelClosedError("it ended, or sent a message without a request")
        number = secrets.randbits(53)  # so that none can be answered before it is asked
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

    async def _send(self, frame: bytes, wake: Callable[[], None] | None) -> None:
        try:
            try:
                num_sent = self._socket.send(frame)
            except BlockingIOError:
                num_sent = 0
            if wake is not None:
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
    """The process of one session, which is stopped but while it answers: whatever a cell leaves
    behind (timers, signals, threads, an answer that came too early) runs only within calls."""

    def __init__(self, zygote: ZygoteProcess, number: int, channel: Channel, pidfd: int) -> None:
        self.zygote = zygote
        self.number = number
        self._channel = channel
        self._pidfd = pidfd

    async def ask(self, request: dict[str, Any]) -> CellAnswer:
        """One request and its answer. Raises ChannelClosedError; then, and when cancelled, the
        process can only be killed."""
        answer = await self._channel.ask(request, self._resume)
        self.stop()
        return answer

    def stop(self) -> None:
        """Until the next request."""
        send_signal(self._pidfd, signal.SIGSTOP)

    def _resume(self) -> None:
        send_signal(self._pidfd, signal.SIGCONT)

    def kill(self) -> None:
        """End it, whatever its cell is doing; never waits; idempotent."""
        if self._pidfd >= 0:
            self._channel.close()
            kill(self._pidfd)
            self._pidfd = -1


def send_signal(pidfd: int, number: signal.Signals) -> None:
    """To a process that may be gone. Raises InfraError when it is not ours to signal."""
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


# The process behind all sessions.


class _Report(Struct):
    """The message of a zygote when it is ready: the missing preload modules, and whether
    its sessions can be forked."""

    missing: list[str]
    live_forks: bool


class _News(Struct):
    """What a zygote says of one session: the attached descriptor is its process, or that it could
    not be forked."""

    born: int = 0
    failed: int = 0


START_TIMEOUT_S = 60.0  # imports what is preloaded, perhaps from a cold disk
STOP_TIMEOUT_S = 5.0
PREFIX = "agentenv-sandbox-"  # of the folder for files, where there is no other confinement


class ZygoteProcess:
    """One running zygote; `rung` says what confines its sessions."""

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
        """Start one. A ConfigError says what this machine, or the interpreter, lacks."""
        python = await find_interpreter(setup.interpreter)
        check_rung(setup.limits, rung)
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
        except ForeignError as error:  # a module that is preloaded may do anything
            raise InfraError(f"the sandbox did not start: {error}: {report[:200]!r}") from error
        finally:
            if not started:
                await zygote.stop()
        return zygote

    def alive(self) -> bool:
        """False once the zygote is gone, even before any of its sessions is."""
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
        channel = Channel(ours)
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
        """A copy of a session at rest, or None where none can be had. Raises ChannelClosedError,
        and then, as when cancelled, the parent can only be killed."""
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        born = self._born[number] = asyncio.get_running_loop().create_future()
        self._post({"fork": parent.number, "child": number}, theirs)
        process = None
        try:
            answer = await parent.ask({"fork": ""})
            if answer.forked:
                process = SessionProcess(self, number, Channel(ours), await born)
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
        """Nobody waits for this session any more; it is killed, now or when it is born."""
        self._born.pop(number, None)
        if born.done() and not born.cancelled() and not born.exception():
            kill(born.result())

    async def stop(self) -> None:
        """End the zygote and all its sessions, and wait until the processes are gone."""
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
            if not reaping.done():  # cancelled: no time to be polite
                self._kill_group()

    # inner workings

    def _post(self, request: dict[str, int], attached: socket.socket | None) -> None:
        if self._control.fileno() < 0:  # stopped: there is nobody to tell
            if attached is not None:
                attached.close()
            return
        self._outgoing.append((msgspec.json.encode(request), attached))
        self._flush()

    def _on_news(self) -> None:
        """The zygote reports the process of a session."""
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
        if born is None or born.done():  # who asked for it has turned away
            for pidfd in fds:
                kill(pidfd)
        elif news.failed:
            born.set_exception(ForkRefusedError())
            born.exception()  # whether or not anybody still waits for it
        else:
            born.set_result(fds[0])

    def _stop_listening(self) -> None:
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control)
        for born in self._born.values():
            if not born.done():
                born.set_exception(ChannelClosedError("the sandbox died"))
                born.exception()  # whether or not anybody still waits for it
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
        """Blocks until the process is gone, then sees that nothing of its group is left."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            self._kill_group()  # while the dead leader is not reaped, the group's id is ours
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._files.close()

    def _kill_group(self) -> None:
        """bubblewrap itself may not kill a zygote that is another user by now."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _refuse(self) -> None:
        """The process ended before it was ready: say why."""
        try:
            _, errors = await in_thread(self._process.communicate, timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            errors = b"it closed its connection but does not exit"
        reason = errors.decode(errors="replace").strip()[-500:] or "no reason given"
        forbidden = "namespace" in reason or "ermi" in reason
        advice = f". {NAMESPACES_ADVICE}" if forbidden else ""
        raise ConfigError(f"the Python sandbox cannot start: {reason}{advice}")
