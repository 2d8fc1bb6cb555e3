"""Workers and their groups: handshake, heartbeat, shutdown.

worker                          supervisor
Hello, token     ----->         Reception: admits a worker that knows the token
                 <-----         the setup of the worker
Ready or Refusal ----->
messages, beats  ----->         WorkerGroup.join, until the worker is gone
                 <-----         messages
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from traceback import format_exception
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from agentenv.base import errors
from agentenv.base.errors import AgentEnvError
from agentenv.base.installation import package_folders
from agentenv.base.ports import open_server, stop_listening
from agentenv.processes.link import Link

BEAT_S = 1.0  # between heartbeats
HELLO_S = 30.0  # from a connection to its Hello
HELLO_BYTES = 4096  # limit of a frame before authentication
LAST_S = 20.0  # for workers to end after a close
NUM_LOSSES, NUM_TRIALS = 2, 3  # see PoisonTasks


class Hello(Struct, array_like=True, frozen=True):
    """The first frame of a worker, or of a learner's rank. `code` is the digest of its sources
    (`own_code`). Of a rank: `total` is the number of ranks, `store` the host:port of the rendezvous
    store that rank 0 of many opened."""

    token: str
    number: int
    pid: int
    code: str = ""
    total: int = 0
    host: str = ""
    store: str = ""


class Ready(Struct, array_like=True, frozen=True, tag=1):
    """The worker is set up."""


class Refusal(Struct, array_like=True, frozen=True, tag=2):
    """The error of a failed setup (`named`)."""

    kind: str
    text: str


@cache
def own_code() -> str:
    """A digest of this project's sources on this machine; equal digests mean equal code."""
    sources: dict[str, Path] = {}
    for package, folder in package_folders().items():
        for path in folder.rglob("*.py"):
            sources[f"{package.replace('.', '/')}/{path.relative_to(folder)}"] = path
    digest = hashlib.blake2b(digest_size=6)
    for name, path in sorted(sources.items()):
        digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


class WorkerSpec(NamedTuple):
    """The workers of one kind: their module, the prefix of their names, a noun for messages, their
    number, their limits, and the configuration table. The rest is for placements that may wait: the
    minimum number at the start, the longest time without any, the port of this process (0: any),
    environment variables to pass, resources of each, the interpreter, and whether they see the
    GPUs."""

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


_read_hello = msgspec.msgpack.Decoder(Hello).decode
read_first = msgspec.msgpack.Decoder(Ready | Refusal).decode


class Reception:
    """Listens for connecting processes. Each must send, within HELLO_S seconds, a Hello with the
    `token`; `admit` takes it and its link, or returns False."""

    def __init__(self, token: str, admit: Callable[[Hello, Link], bool]) -> None:
        self._token, self._admit = token, admit
        self._server: asyncio.Server | None = None
        self._waiting: set[asyncio.BaseTransport] = set()  # not admitted

    @property
    def port(self) -> int | None:
        """The port on which it listens; None before `open`."""
        if self._server is None or not self._server.sockets:
            return None
        return int(self._server.sockets[0].getsockname()[1])

    async def open(self, host: str, port: int) -> None:
        """Listen. Raises ConfigError."""
        waiting = self._waiting

        class Arriving(asyncio.StreamReaderProtocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                waiting.add(transport)
                super().connection_made(transport)

        self._server = await open_server(
            lambda: Arriving(asyncio.StreamReader(), self._accept), host, port, has_key=True
        )

    async def close(self) -> None:
        """Stop listening, and close connections that were not admitted. Idempotent."""
        if self._server is not None:
            await stop_listening(self._server)
        while self._waiting:  # including those whose task has not started
            self._waiting.pop().close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        link.max_bytes = HELLO_BYTES
        try:
            with suppress(EOFError, TimeoutError, msgspec.DecodeError):
                async with asyncio.timeout(HELLO_S):
                    hello = _read_hello(await link.receive())
                is_known = secrets.compare_digest(hello.token.encode(), self._token.encode())
                link.max_bytes = None
                if is_known and self._admit(hello, link):
                    return
            link.abort()
        finally:
            self._waiting.discard(writer.transport)


def named(error: BaseException) -> tuple[str, str]:
    """Kind and text of an error for the wire; of a group, its first error. The kind is the name of
    the nearest base in `agentenv.base.errors`; empty: a bug, whose text is the traceback."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, AgentEnvError):
        return "", "".join(format_exception(error)).rstrip()
    names = [kind.__name__ for kind in type(error).__mro__]
    return next(name for name in names if hasattr(errors, name)), str(error)


def raised(kind: str, text: str) -> Exception:
    """The error from kind and text; a bug becomes a RuntimeError."""
    if not kind:
        return RuntimeError(f"in a rollout worker:\n{text}")
    found: Any = getattr(errors, kind, AgentEnvError)
    error: Exception = found(text)
    return error


async def serve(link: Link, take: Callable[[bytes], None], beat: Callable[[], bytes]) -> None:
    """In a worker: pass each frame to `take`, and send `beat()` every BEAT_S seconds, until the
    link ends."""

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
        self.last_frame_s = asyncio.get_running_loop().time()  # its last frame
        self.is_hanging = False


class Left(NamedTuple):
    """The end of a worker: the reason, the number of jobs it finished, the destination of the
    rest, whether the end was announced, and whether unfinished work made progress."""

    why: str
    num_ended: int
    rest: str
    is_drained: bool = False
    has_come_further: bool = False


W = TypeVar("W", bound=Worker)


class WorkerGroup(Generic[W]):
    """A group of workers of one kind; a separate `join` serves each. A worker that sends nothing
    for `silence_s` seconds counts as hung and is dropped (None: no limit). `read` decodes a frame;
    `report` takes messages for the user."""

    read: Callable[[bytes], Any]
    silence_s: float | None = None

    def __init__(self, report: Callable[[str], None]) -> None:
        self.num_lost = 0
        self.report = report
        self.workers: dict[str, W] = {}
        self.changed = asyncio.Event()  # a worker joined or left
        self.reason = ""  # set when no more workers will join
        self._is_closed = False

    # Overridden for each kind of workers

    def make_worker(self, name: str, link: Link) -> W:
        raise NotImplementedError

    def joined(self, worker: W) -> None:
        """A worker has joined."""

    def take(self, worker: W, message: Any) -> None:
        """Handle a message of a worker."""
        raise NotImplementedError

    def left(self, worker: W, why: str) -> Left:
        """Describe the end of a worker, before its work is moved."""
        return Left(why, 1, "")

    async def lost(self, worker: W, why: str) -> None:
        """A worker is gone; free or move its work."""

    def dismiss(self, worker: W) -> None:
        """Request the end of a worker."""
        worker.link.close()

    # Common to all kinds

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
                worker.last_frame_s = loop.time()
                self.take(worker, message)
        except (EOFError, msgspec.DecodeError) as error:
            why = str(error)
            if isinstance(error, msgspec.DecodeError):
                why = f"it sent an invalid message ({error})"
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
        """Abort the link of a worker that hangs. Two polls in a row must find silence, since this
        loop reads late after it was blocked itself."""
        if self.silence_s is None:
            return
        loop, is_late = asyncio.get_running_loop(), False
        while True:
            await asyncio.sleep(BEAT_S)
            was_late, is_late = is_late, loop.time() - worker.last_frame_s > self.silence_s
            if was_late and is_late:
                worker.is_hanging = True
                worker.link.abort()

    def end(self, reason: str) -> None:
        """Accept no more workers."""
        self.reason = reason
        self.changed.set()

    async def close(self) -> None:
        """End the workers. Idempotent."""
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
    """Finds trees that kill workers: a prompt that exhausts the memory, or a tool that crashes its
    process, would take down one worker after another.

    A tree is suspicious once its worker was lost NUM_LOSSES times in a row without progress of the
    tree, as are the trees that grew on the same worker. Suspicious trees are tried one at a time:
    one that makes progress is cleared, and one whose worker is lost NUM_TRIALS more times is a
    poison task. Trees are identified by their indices.
    """

    def __init__(self) -> None:
        self._num_lost: dict[int, int] = {}
        self._tried: int | None = None

    def lost(self, index: int, *, has_come_further: bool) -> int:
        """Count the loss of a tree's worker; returns the consecutive losses without progress."""
        num = self._num_lost[index] = 0 if has_come_further else self.num_lost(index) + 1
        return num

    def recall(self, index: int, num_lost: int) -> None:
        """Restore the consecutive losses of an earlier process."""
        if num_lost:
            self._num_lost[index] = num_lost

    def num_lost(self, index: int) -> int:
        """The consecutive losses of the tree's workers."""
        return self._num_lost.get(index, 0)

    def admits(self, index: int) -> bool:
        """Whether a tree may grow now; a suspicious tree that may is then on trial."""
        if self.num_lost(index) < NUM_LOSSES:
            return True
        if self._tried is None:
            self._tried = index
        return self._tried == index

    def clears(self, index: int) -> bool:
        """The tree made progress, or was cancelled; returns whether another suspicious tree may be
        tried."""
        self._num_lost.pop(index, None)
        if self._tried != index:
            return False
        self._tried = None
        return True
