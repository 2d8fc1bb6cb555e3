"""A Ray cluster as the place of processes. Ray places and starts them, and nothing more: they
connect to this process by themselves, live in sessions of their own, and outlive Ray.

    RayPlaces --TCP--> pipelines/workers/ray_driver.py --Ray--> Holder, on some node --> process
        Launch ---------------->                                   holds CPUs and GPUs, starts it
        <--- Started, Ended, Leaving

Ray's client lives in a process of its own, since it ends with the head node of its cluster, and
what is needed for a run must not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agentenv.cluster.link import Link
from agentenv.cluster.messages import Alive, Say
from agentenv.cluster.workers import Left
from agentenv.errors import WorkerError
from agentenv.guard import guarded
from agentenv.pipelines.cluster.places import GRACE_S, Launch
from agentenv.pipelines.cluster.processes import Kind, WorkerProcesses
from agentenv.untrusted import packed

MAX_RESTARTS = 100  # of the driver, in a row: with breaks of a minute
LOG_BYTES = 2000


class RaySetup(Struct, array_like=True, frozen=True):
    """What the driver is told: the address of the cluster, "" to start one here with memory for
    objects of so many bytes; the address of the controller, "" to find it; what has to fit at the
    start, each with the key that asks for it, and how long nodes may still join for it."""

    address: str
    object_store_bytes: int
    host: str
    needed: list[tuple[str, dict[str, float]]]
    wait_for_nodes_s: float


class Stop(Struct, array_like=True, frozen=True, tag=51):
    """See to it that the process has ended."""

    name: str


class Connected(Struct, array_like=True, frozen=True, tag=21):
    """The cluster is there, in words, and by which address its nodes reach this machine."""

    host: str
    told: str


class Started(Struct, array_like=True, frozen=True, tag=22):
    """A process runs on a node of Ray, below a guard with this id."""

    name: str
    host: str
    node: str
    pid: int


class Ended(Struct, array_like=True, frozen=True, tag=23):
    """A process has ended, or was never started; how, and the end of its log if that is on a disk
    of its node only."""

    name: str
    how: str


class Leaves(Struct, array_like=True, frozen=True, tag=24):
    """The node of a process is drained."""

    name: str
    within_s: float


class Place(Struct, array_like=True, frozen=True, tag=50):
    """Start a process."""

    launch: Launch


FromDriver = Connected | Started | Ended | Leaves | Alive | Say
pack = packed
read_setup = msgspec.msgpack.Decoder(RaySetup).decode
read_asked = msgspec.msgpack.Decoder(Place | Stop).decode
_read_told = msgspec.msgpack.Decoder(FromDriver).decode


def left_over(
    needed: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]
) -> list[int]:
    """Which of the bundles do not fit on the nodes, the largest dealt first."""
    free = [dict(node) for node in nodes]
    missing = []
    for number in sorted(range(len(needed)), key=lambda one: -sum(needed[one].values())):
        wanted = needed[number]
        for node in free:
            if all(node.get(name, 0.0) >= much - 1e-9 for name, much in wanted.items()):
                for name, much in wanted.items():
                    node[name] -= much
                break
        else:
            missing.append(number)
    return sorted(missing)


def in_words(resources: Mapping[str, float]) -> str:
    """2 CPUs and 1 GPU"""
    parts = [f"{much:g} {name}{'s' * (much != 1)}" for name, much in resources.items() if much]
    return " and ".join(parts) or "nothing"


def total(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each resource."""
    found: dict[str, float] = {}
    for bundle in bundles:
        for name, much in bundle.items():
            found[name] = found.get(name, 0.0) + much
    return found


class _Placed:
    """A process that is wanted."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.started: asyncio.Future[Started] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()


Leave = Callable[[str, float], None]


class RayPlaces:
    """See Places."""

    is_patient = True

    def __init__(self, setup: RaySetup, folder: Path, tell: Callable[[str], None]) -> None:
        self.num_lost = 0
        self._leave: dict[str, Leave] = {}  # by the names before their numbers
        self.placed: dict[str, Started] = {}
        self._tell = tell
        self._link: Link | None = None
        self._wanted: dict[str, _Placed] = {}
        self._host = ""
        self._reason = ""  # why nothing is placed any more
        self._connected = asyncio.Event()
        kind = Kind(
            "agentenv.pipelines.workers.ray_driver",
            "ray",
            "process that asks Ray",
            1,
            setup.wait_for_nodes_s + 300.0,
            MAX_RESTARTS,
        )
        self._driver = WorkerProcesses(kind, self, setup, folder, tell)

    @property
    def host(self) -> str:
        return self._host

    async def open(self) -> None:
        """Connect to the cluster. Raises ConfigError for what does not fit there."""
        await self._driver.start()
        async with asyncio.timeout(60.0):
            await self._connected.wait()

    async def shut(self) -> None:
        """Let go of the cluster. Idempotent."""
        await self._driver.close()

    def follow(self, kind: str, leave: Leave) -> None:
        """Tell from now on which processes of this kind are to be drained, and within how long."""
        self._leave[kind] = leave

    # Places

    async def start(self, launch: Launch) -> None:
        if self._reason:
            raise WorkerError(self._reason)
        command = guarded(launch.command, GRACE_S, alone=True)
        command[0] = launch.command[0]  # an interpreter that is there
        placed = self._wanted[launch.name] = _Placed(replace(launch, command=command))
        if self._link is not None:
            self._link.send(pack(Place(placed.launch)))
        either: set[asyncio.Future[Any]] = {placed.started, placed.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not placed.started.done():
            raise WorkerError(f"{launch.name} {placed.ended.result()}")

    async def ended(self, name: str) -> str:
        return await asyncio.shield(self._wanted[name].ended)

    async def stop(self, name: str) -> None:
        placed = self._wanted.pop(name, None)
        self.placed.pop(name, None)
        if placed is None or self._link is None:
            return
        self._link.send(pack(Stop(name)))
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S + 5.0):
                await placed.ended

    # Members, of which the driver is the only one

    async def join(self, name: str, link: Link) -> Left:
        """Serve the driver until it is gone; processes go on without it."""
        self._link = link
        for placed in self._wanted.values():
            if not placed.started.done() and not placed.ended.done():
                link.send(pack(Place(placed.launch)))
        try:
            while True:
                self._take(_read_told(await link.receive()))
        except (EOFError, msgspec.DecodeError) as error:
            rest = "what it has placed goes on, and nothing is placed until Ray is there again"
            return Left(str(error), 1, rest)
        finally:
            link.abort()
            self._link = None

    def _take(self, told: Any) -> None:
        if isinstance(told, Connected):
            self._host = self._host or told.host  # processes know the first one
            self._connected.set()
            self._tell(told.told)
        elif isinstance(told, Started):
            placed = self._wanted.get(told.name)
            if placed is not None and not placed.started.done():
                self.placed[told.name] = told
                placed.started.set_result(told)
        elif isinstance(told, Ended):
            placed = self._wanted.get(told.name)
            if placed is not None and not placed.ended.done():
                placed.ended.set_result(told.how)
        elif isinstance(told, Leaves):
            leave = self._leave.get(told.name.rpartition("-")[0])
            if leave is not None:
                leave(told.name, told.within_s)
        elif isinstance(told, Say):
            self._tell(f"Ray: {told.text}")

    def end(self, reason: str) -> None:
        """Ray is given up."""
        self._reason = reason
        for placed in self._wanted.values():
            if not placed.started.done() and not placed.ended.done():
                placed.ended.set_result(f"is not placed: {reason}")

    async def close(self) -> None:
        """Let the driver end."""
        if self._link is not None:
            self._link.close()
