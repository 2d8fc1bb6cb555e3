"""Runtime control of a run: the requests of `agentenv ctl`, and their socket.

    agentenv ctl  --a request, a line of JSON-->  RUN/ctl/socket   the training process
                      <--a Reply, a line of JSON----

The socket is in a folder that only its owner can enter (mode 0700), and has mode 0600. Each end
asks the system for the user of the other. A killed process leaves its socket, which the next
process replaces.

A connection carries one request. Its size and its time to arrive are limited, so that no client
can delay the run.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from agentenv.base.deadline import uncancelled
from agentenv.base.disk import short_path
from agentenv.base.errors import AgentEnvError, ConfigError, ForeignError
from agentenv.base.offload import in_thread
from agentenv.base.secrets import SECRETS
from agentenv.base.untrusted import decode

FOLDER, SOCKET = "ctl", "socket"
MAX_REQUEST, MAX_REPLY = 1 << 16, 1 << 22  # bytes
MAX_CLIENTS = 16  # at a time
READ_S, WRITE_S = 5.0, 5.0
ANSWER_S = 10.0  # for an immediate reply
LONG_S = 4 * 3600.0  # for a reply after a checkpoint

_PEER = struct.Struct("3i")  # pid, uid, gid


# Requests.

Command = Literal["status", "why", "cancel", "pause", "resume", "checkpoint"]


class ControlRequest(Struct, forbid_unknown_fields=True):
    """A command: `status` of the run; `why`: the waits of all rollouts, or of one of `trees` in
    detail; `cancel` trees, which fail with the kind `cancelled`; `pause`: start no further tree,
    turn or update until `resume`; `checkpoint`: write one between two updates, then reply."""

    command: Command
    trees: list[int] = []

    @property
    def limit_s(self) -> float:
        """The deadline of the reply."""
        return LONG_S if self.command == "checkpoint" else ANSWER_S


# Replies.


class ControlRefused(Struct, tag="refused"):
    """The request was rejected, with the reason."""

    why: str


class RequestDone(Struct, tag="done"):
    """The result of a request: lines of text, and facts as data, of which lists are rows of a
    table."""

    lines: list[str]
    facts: dict[str, Any] = {}


Reply = ControlRefused | RequestDone
Answer = Callable[[ControlRequest], Awaitable[Reply]]


def _user_of(connection: Any) -> int:
    """The user of the process at the other end, as the system reports it."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    uid: int = _PEER.unpack(found)[1]
    return uid


def _listener(run: Path) -> socket.socket:
    """A listening socket in a folder that only the owner can enter; replaces a leftover one."""
    shutil.rmtree(run / FOLDER, ignore_errors=True)
    (run / FOLDER).mkdir(mode=0o700)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with short_path(run / FOLDER / SOCKET) as path:
            listener.bind(path)
            os.chmod(path, 0o600)
    except OSError:
        listener.close()
        raise
    return listener


# Server: in the training process.


@asynccontextmanager
async def listening(run: Path, answer: Answer, warn: Callable[[str], None]) -> AsyncIterator[None]:
    """Inside, answer requests. On a file system without sockets, the run continues without control,
    after a warning."""
    server = None
    try:
        listener = await in_thread(_listener, run)
        serve = ControlServer(answer).serve
        server = await asyncio.start_unix_server(serve, sock=listener, limit=MAX_REQUEST)
    except OSError as error:
        warn(f"agentenv ctl cannot reach this run: {error}")
    try:
        yield
    finally:
        if server is not None:
            server.close()
        await uncancelled(in_thread(partial(shutil.rmtree, run / FOLDER, ignore_errors=True)))


class ControlServer:
    """Serves at most MAX_CLIENTS connections at a time."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._num_clients = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection; its failures do not affect the run."""
        self._num_clients += 1
        try:
            reply = await self._reply(reader, writer)
            writer.write(SECRETS.encoded(msgspec.json.encode(reply)) + b"\n")
            async with asyncio.timeout(WRITE_S):
                await writer.drain()
        except (OSError, TimeoutError):  # the client is gone, or does not read
            pass
        finally:
            self._num_clients -= 1
            writer.close()

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Reply:
        user = _user_of(writer.get_extra_info("socket"))
        if user != os.geteuid():
            return ControlRefused(f"this run belongs to user {os.geteuid()}, not to user {user}")
        if self._num_clients > MAX_CLIENTS:
            return ControlRefused(f"{MAX_CLIENTS} other requests are in progress; retry later")
        try:
            async with asyncio.timeout(READ_S):
                line = await reader.readuntil(b"\n")
            request = decode(line, ControlRequest)
        except TimeoutError:
            return ControlRefused(f"no request within {READ_S:g} s")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return ControlRefused(f"expected one line of JSON of at most {MAX_REQUEST} bytes")
        except ForeignError as error:
            return ControlRefused(f"{error}; does agentenv ctl have the same version as the run?")
        try:
            async with asyncio.timeout(request.limit_s):
                return await self._answer(request)
        except TimeoutError:
            return ControlRefused("the run did not answer in time")
        except (AgentEnvError, OSError) as error:  # of a disk, for instance
            return ControlRefused(str(error))


# Client: in `agentenv ctl`.


class UnreachableError(AgentEnvError):
    """No process answers for this run; the message has the reason."""


def send(run: Path, request: ControlRequest, timeout_s: float | None = None) -> RequestDone:
    """The reply of the process that trains in `run`. `timeout_s` defaults to the limit of the
    request. Raises UnreachableError, and ConfigError if the run rejects the request."""
    timeout_s = timeout_s or request.limit_s + READ_S
    path = run / FOLDER / SOCKET
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            with short_path(path) as short:
                connection.connect(short)
            user = _user_of(connection)
            if user != os.geteuid():
                raise UnreachableError(f"{path} belongs to user {user}, not to you")
            with suppress(BrokenPipeError):  # the reply is already here
                connection.sendall(msgspec.json.encode(request) + b"\n")
            with connection.makefile("rb") as file:
                data = file.read(MAX_REPLY + 1)
            if len(data) > MAX_REPLY:
                raise OSError("its answer is too long")
        except TimeoutError as error:
            raise UnreachableError(
                f"the run gave no answer within {timeout_s:g} s: its event loop is blocked, which "
                f"{run / 'run.log'} reports after a while, or the run is ending"
            ) from error
        except PermissionError as error:
            raise UnreachableError(f"{path} belongs to another user: {error.strerror}") from error
        except OSError as error:
            raise UnreachableError(
                f"no process listens at {path}: {error.strerror or error}"
            ) from error
    try:
        reply: Reply = decode(data, Reply)
    except ForeignError as error:
        raise UnreachableError(
            f"the run's answer cannot be decoded ({error}); the run has ended, or has another "
            "version"
        ) from error
    if isinstance(reply, ControlRefused):
        raise ConfigError(reply.why)
    return reply
