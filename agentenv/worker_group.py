"""Workers and their groups: handshake, heartbeat, shutdown.

worker                          supervisor
Hello, token     ----->         Reception: who knows the token is admitted
                 <-----         the frame that sets the worker up
Ready or Refusal ----->
messages, beats  ----->         WorkerGroup.join, until the worker is gone
                 <-----         messages
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from traceback import format_exception
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from agentenv import errors
from agentenv.errors import PACKAGES, AgentEnvError
from agentenv.link import Link

BEAT_S = 1.0  # between heartbeats
HELLO_S = 30.0  # from a connection to its Hello
HELLO_BYTES = 4096  # of a frame, until its sender is known
LAST_S = 20.0  # for workers to end after a close
NUM_LOSSES, NUM_TRIALS = 2, 3  # of PoisonTasks


class Hello(Struct, array_like=True, frozen=True):
    """The first frame of a worker. `code` is the digest of its sources (`own_code`)."""

    token: str
    number: int
    pid: int
    code: str = ""


class Ready(Struct, array_like=True, frozen=True, tag=1):
    """The worker is set up."""


class Refusal(Struct, array_like=True, frozen=True, tag=2):
    """The worker cannot be set up: an error (`named`)."""

    kind: str
    text: str


@cache
def own_code() -> str:
    """A digest of this project's sources on this machine; equal digests are equal code."""
    digest = hashlib.blake2b(digest_size=6)
    sources = (
        Path(folder, file)
        for folder, _, files in os.walk(PACKAGES / "agentenv", followlinks=True)
        for file in files
    )
    for path in sorted(path for path in sources if path.suffix == ".py"):
        digest.update(f"{path.relative_to(PACKAGES)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


class WorkerSpec(NamedTuple):
    """The workers of one kind: the module that each runs, its name before its number, a noun for
    people, their number, and the configuration table with the bounds. The rest is for placements
    that may have to wait: how many must be there at the start, for how long there may be none, the
    port of this process (0: any), variables to pass on, resources of each, the interpreter, and
    whether they see the GPUs."""

    module: str
    name: str
    one: str
    num: int
    start_timeout_s: float
    max_restarts: int
    table: str = ""
    min_num: int | None = None
    max_outage_s: float = 0.0
    port: int = 0
    env: Sequence[str] = ()
    resources: Mapping[str, float] = {}
    python: str = ""
    sees_gpus: bool = True

    @property
    def least(self) -> int:
        """Minimum number at the start."""
        return self.num if self.min_num is None else self.min_num

    def key(self, name: str) -> str:
        """The configuration key, for messages."""
        return f" ({self.table}.{name})" if self.table else ""


read_hello = msgspec.msgpack.Decoder(Hello).decode
read_first = msgspec.msgpack.Decoder(Ready | Refusal).decode


class Reception:
    """Listens for processes that connect. Each has HELLO_S to send a frame that `read` decodes,
    with the `token`; `admit` takes it and its link, or returns False."""

    def __init__(
        self, token: str, read: Callable[[bytes], Any], admit: Callable[[Any, Link], bool]
    ) -> None:
        self._token, self._read, self._admit = token, read, admit
        self._server: asyncio.Server | None = None
        self._waiting: set[asyncio.BaseTransport] = set()  # not admitted

    @property
    def port(self) -> int | None:
        """Where it listens; None before `open`."""
        if self._server is None or not self._server.sockets:
            return None
        return int(self._server.sockets[0].getsockname()[1])

    async def open(self, host: str, port: int) -> None:
        """Listen. Raises OSError."""
        waiting = self._waiting

        class Arriving(asyncio.StreamReaderProtocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                waiting.add(transport)
                super().connection_made(transport)

        # Not serving yet: a cancellation while it begins to would leave the socket open.
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Arriving(asyncio.StreamReader(), self._accept), host, port, start_serving=False
        )
        await self._server.start_serving()

    def close(self) -> None:
        """Stop listening; connections that were not admitted break. Idempotent."""
        if self._server is not None:
            self._server.close()
        while self._waiting:  # also those whose task has not begun
            self._waiting.pop().close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        link.max_bytes = HELLO_BYTES
        try:
            with suppress(EOFError, TimeoutError, msgspec.DecodeError):
                async with asyncio.timeout(HELLO_S):
                    hello = self._read(await link.receive())
                is_known = secrets.compare_digest(hello.token.encode(), self._token.encode())
                link.max_bytes = None
                if is_known and self._admit(hello, link):
                    return
            link.abort()
        finally:
            self._waiting.discard(writer.transport)


def named(error: BaseException) -> tuple[str, str]:
    """Kind and text of an error, the first one of a group, to travel. The kind is the name of its
    nearest base in `agentenv.errors`; empty: a bug, whose text is the traceback."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, AgentEnvError):
        return "", "".join(format_exception(error)).rstrip()
    names = [kind.__name__ for kind in type(error).__mro__]
    return next(name for name in names if hasattr(errors, name)), str(error)


def raised(kind: str, text: str) -> Exception:
    """The error again; a bug as a RuntimeError."""
    if not kind:
        return RuntimeError(f"in a rollout worker:\n{text}")
    found: Any = getattr(errors, kind, AgentEnvError)
    error: Exception = found(text)
    return error


async def serve(link: Link, take: Callable[[bytes], None], beat: Callable[[], bytes]) -> None:
    """In a worker: give each frame to `take` and send `beat()` every BEAT_S, until the other end
    is gone."""

    async def beats() -> None:
        while True:
            link.send(beat())
            await asyncio.sleep(BEAT_S)

    beating = asyncio.create_task(beats())
    try:
        while True:
            take(await link.receive())
    except EOFError:
        pass
    finally:
        beating.cancel()


class Worker:
    """A connected worker."""

    def __init__(self, name: str, link: Link) -> None:
        self.name, self.link = name, link
        self.heard = asyncio.get_running_loop().time()  # its last frame
        self.is_hanging = False


class Left(NamedTuple):
    """How a worker left: the reason, the number of jobs it ended, and where the rest goes; whether
    the end was announced, and whether unfinished work has come further."""

    why: str
    num_ended: int
    rest: str
    is_drained: bool = False
    has_come_further: bool = False


W = TypeVar("W", bound=Worker)


class WorkerGroup(Generic[W]):
    """A group of workers of one kind; each is served by a `join` of its own. A worker that
    sends nothing for `silence_s` hangs and is given up;
    None: a worker may be silent. `read` decodes a frame, `report` takes sentences for people."""

    read: Callable[[bytes], Any]
    silence_s: float | None = None

    def __init__(self, report: Callable[[str], None]) -> None:
        self.num_lost = 0
        self.report = report
        self.workers: dict[str, W] = {}
        self.changed = asyncio.Event()  # a worker came or went
        self.reason = ""  # why no worker will come any more
        self._is_closed = False

    # For each kind of workers

    def make_worker(self, name: str, link: Link) -> W:
        raise NotImplementedError

    def joined(self, worker: W) -> None:
        """A worker has come."""

    def take(self, worker: W, message: Any) -> None:
        """Handle a message of a worker."""
        raise NotImplementedError

    def left(self, worker: W, why: str) -> Left:
        """How a worker left whose work has not moved yet."""
        return Left(why, 1, "")

    async def lost(self, worker: W, why: str) -> None:
        """A worker is gone; free or move its work."""

    def dismiss(self, worker: W) -> None:
        """Ask a worker to end."""
        worker.link.close()

    # Laws of all kinds

    async def join(self, name: str, link: Link) -> Left:
        """Serve a worker until it is gone."""
        worker = self.workers[name] = self.make_worker(name, link)
        self.changed.set()
        listening = asyncio.create_task(self._listen(worker))
        why = "the run ends"
        try:
            if self._is_closed:
                self.dismiss(worker)
            self.joined(worker)
            loop = asyncio.get_running_loop()
            while True:
                message = self.read(await link.receive())
                worker.heard = loop.time()
                self.take(worker, message)
        except (EOFError, msgspec.DecodeError) as error:
            why = str(error)
            if isinstance(error, msgspec.DecodeError):
                why = f"it sent a message that cannot be read ({error})"
            elif worker.is_hanging:
                why = f"no heartbeat for {self.silence_s:g} s"
            return self.left(worker, why)
        finally:
            listening.cancel()
            link.abort()
            del self.workers[name]
            self.changed.set()
            await self.lost(worker, why)

    async def _listen(self, worker: W) -> None:
        """Break the link of a worker that hangs. This loop hears late after it was blocked itself:
        two polls in a row must find silence."""
        if self.silence_s is None:
            return
        loop, is_late = asyncio.get_running_loop(), False
        while True:
            await asyncio.sleep(BEAT_S)
            was_late, is_late = is_late, loop.time() - worker.heard > self.silence_s
            if was_late and is_late:
                worker.is_hanging = True
                worker.link.abort()

    def end(self, reason: str) -> None:
        """No worker will come any more."""
        self.reason = reason
        self.changed.set()

    async def close(self) -> None:
        """Let the workers end. Idempotent."""
        self.reason = self.reason or "the run ends"
        self._is_closed = True
        self.changed.set()
        for worker in self.workers.values():
            self.dismiss(worker)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                while self.workers:
                    self.changed.clear()
                    await self.changed.wait()


class PoisonTasks:
    """Finds the tree that kills workers: a prompt that takes all memory, or a tool that crashes its
    process, would take down one worker after the other.

    A tree is a poison task once its worker was lost NUM_LOSSES times in a row while it came no
    further, as are the trees that grew beside it. Poison tasks are tried one at a time: one that
    comes further is cleared, and one whose worker is lost NUM_TRIALS times more is a poison task.
    Trees are named by their indices.
    """

    def __init__(self) -> None:
        self._num_lost: dict[int, int] = {}
        self._tried: int | None = None

    def lost(self, index: int, *, has_come_further: bool) -> int:
        """The worker of a tree was lost; how many were lost in a row while it came no
        further."""
        num = self._num_lost[index] = 0 if has_come_further else self.num_lost(index) + 1
        return num

    def recall(self, index: int, num_lost: int) -> None:
        """An earlier process lost so many workers in a row with the tree."""
        if num_lost:
            self._num_lost[index] = num_lost

    def num_lost(self, index: int) -> int:
        """Workers that were lost in a row with the tree."""
        return self._num_lost.get(index, 0)

    def admits(self, index: int) -> bool:
        """Whether a tree may grow now; a poison task that may is on trial from then on."""
        if self.num_lost(index) < NUM_LOSSES:
            return True
        if self._tried is None:
            self._tried = index
        return self._tried == index

    def is_found(self, index: int) -> bool:
        """Whether the tree is a poison task."""
        return self.num_lost(index) >= NUM_LOSSES + NUM_TRIALS

    def clears(self, index: int) -> bool:
        """The tree progressed, or was cancelled. Whether another poison task may be tried."""
        self._num_lost.pop(index, None)
        if self._tried != index:
            return False
        self._tried = None
        return True
