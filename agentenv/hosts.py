"""Rollouts in processes of their own: what a controller and a host of rollouts say to each other.

    controller  Grow(index, task, ..)  ----->  host    starts the rollout on its own actor
                                       <-----  Grown   the tree, when it has ended
                Drop(index)            ----->          nobody wants that tree any more
                                       <-----  Lost    what the rollout raised

A host is an actor with its event loop, its engine clients and its envs; feeder, queue and the bound
on staleness stay with the controller, where trees come back as frames. `Host` serves one actor, and
`HostedActor` is what the controller holds in place of it. Between them is a `Link`, which carries
frames; `linked` joins two ends within one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec import Struct

from agentenv import errors
from agentenv.actor import Actor
from agentenv.errors import AgentEnvError, EngineDeadError
from agentenv.plan import RolloutPlan
from agentenv.tree import TrajectoryTree, of_frame, to_frame
from agentenv.types import Task


class HostMessage(Struct, frozen=True, tag=True):
    """`index` is the tree's place in start order, which names its rollout."""

    index: int


class Grow(HostMessage, frozen=True, tag=True):
    """Start a rollout of the task; the arguments are those of `Actor.rollout`."""

    task: Task
    session: str = ""
    first_root: int = 0
    max_failures: int | None = None


class Drop(HostMessage, frozen=True, tag=True):
    """Cancel the rollout; not answered."""


class Grown(HostMessage, frozen=True, tag=True):
    """A tree that has ended, as `agentenv.tree.to_frame` packs it."""

    tree: bytes


class Lost(HostMessage, frozen=True, tag=True):
    """The rollout raised. `kind` names one of `agentenv.errors`; anything else is a bug."""

    kind: str
    text: str


Asked = Grow | Drop
Told = Grown | Lost

_read_asked = msgspec.msgpack.Decoder(Asked).decode
_read_told = msgspec.msgpack.Decoder(Told).decode


class Link(Protocol):
    """One end of a connection that carries frames in their order, each at least once."""

    def send(self, frame: bytes) -> None: ...
    async def receive(self) -> bytes:
        """The next frame of the other end. Raises EOFError when it is gone."""
        ...

    def close(self) -> None:
        """Let the other end receive what was sent, and then EOFError."""
        ...


class _End:
    """An end of a link within this process."""

    def __init__(
        self, ours: asyncio.Queue[bytes | None], theirs: asyncio.Queue[bytes | None]
    ) -> None:
        self._ours, self._theirs = ours, theirs

    def send(self, frame: bytes) -> None:
        self._theirs.put_nowait(frame)

    async def receive(self) -> bytes:
        frame = await self._ours.get()
        if frame is None:
            raise EOFError("the other end of the link is closed")
        return frame

    def close(self) -> None:
        self._theirs.put_nowait(None)


def linked() -> tuple[Link, Link]:
    """Two ends that are joined."""
    first: asyncio.Queue[bytes | None] = asyncio.Queue()
    second: asyncio.Queue[bytes | None] = asyncio.Queue()
    return _End(first, second), _End(second, first)


class Host:
    """Grows trees on an actor for whoever is at the other end of the link."""

    def __init__(self, actor: Actor, plan: RolloutPlan, link: Link) -> None:
        self._actor, self._plan, self._link = actor, plan, link
        self._rollouts: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Until the other end is gone; then the rollouts that are left are cancelled. A bug in one
        ends it, and ends here too."""
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    asked = _read_asked(await self._link.receive())
                    running = self._rollouts.get(asked.index)
                    goes_on = running is not None and not running.cancelling()
                    if isinstance(asked, Grow):
                        if not goes_on:  # else a link has carried the frame twice
                            task = group.create_task(self._grow(asked))
                            self._rollouts[asked.index] = task
                    elif running is not None and goes_on:
                        running.cancel()
            except EOFError:
                for task in self._rollouts.values():
                    task.cancel()

    async def _grow(self, asked: Grow) -> None:
        told: Told
        try:
            tree = await self._actor.rollout(
                asked.task,
                self._plan,
                index=asked.index,
                session=asked.session,
                first_root=asked.first_root,
                max_failures=asked.max_failures,
            )
            told = Grown(asked.index, to_frame(tree))
        except* AgentEnvError as group:
            told = Lost(asked.index, *_named(group))
        finally:
            if self._rollouts.get(asked.index) is asyncio.current_task():  # not asked for again
                del self._rollouts[asked.index]
        self._link.send(msgspec.msgpack.encode(told))


class HostedActor:
    """Asks a host for rollouts; `run` has to be running meanwhile."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: dict[int, asyncio.Future[TrajectoryTree]] = {}

    async def run(self) -> None:
        """Receive trees until the host is gone, which ends rollouts with EngineDeadError."""
        try:
            while True:
                told = _read_told(await self._link.receive())
                waiting = self._waiting.get(told.index)
                if waiting is None or waiting.done():  # dropped meanwhile
                    continue
                if isinstance(told, Grown):
                    waiting.set_result(of_frame(told.tree))
                else:
                    waiting.set_exception(_error(told))
        except EOFError:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(EngineDeadError("the host of the rollouts is gone"))

    async def rollout(
        self,
        task: Task,
        *,
        index: int,
        session: str = "",
        first_root: int = 0,
        max_failures: int | None = None,
    ) -> TrajectoryTree:
        """As `Actor.rollout`, under the host's plan. Cancelling it drops the rollout there, after
        which the same index may be asked for again."""
        waiting: asyncio.Future[TrajectoryTree] = asyncio.get_running_loop().create_future()
        self._waiting[index] = waiting
        asked = Grow(index, task, session, first_root, max_failures)
        self._link.send(msgspec.msgpack.encode(asked))
        try:
            return await waiting
        except asyncio.CancelledError:
            self._link.send(msgspec.msgpack.encode(Drop(index)))
            raise
        finally:
            if self._waiting.get(index) is waiting:  # not asked for again
                del self._waiting[index]

    def close(self) -> None:
        """The host cancels what is left."""
        self._link.close()


def _named(group: BaseExceptionGroup[AgentEnvError]) -> tuple[str, str]:
    """Kind and text of the first error."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return type(first).__name__, str(first)


def _error(lost: Lost) -> AgentEnvError:
    kind: Callable[[str], AgentEnvError] = getattr(errors, lost.kind, AgentEnvError)
    return kind(lost.text)
