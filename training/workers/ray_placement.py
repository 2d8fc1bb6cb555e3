"""Placement of processes on a Ray cluster. Ray only places and starts them: they connect to this
process themselves, have their own sessions, and outlive Ray.

    RayPlacement --TCP--> training/workers/ray_driver.py --Ray--> NodeHolder, on a node --> process
        PlaceProcess --------->                                   holds CPUs and GPUs, starts it
        <--- ProcessStarted, ProcessEnded, Leaves

Ray's client runs in a separate process: it ends with the head node of its cluster, which must not
end the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agentenv.base.deadline import at_most
from agentenv.base.errors import WorkerError
from agentenv.base.untrusted import packed
from agentenv.cluster.messages import Notice, WorkerFigures
from agentenv.processes.guard import guarded
from agentenv.processes.supervisor import GRACE_S, ProcessSpec, Supervisor
from agentenv.processes.worker_group import Left, Worker, WorkerGroup, WorkerSpec

MAX_RESTARTS = 100  # consecutive ones of the driver, a minute apart


class RaySetup(Struct, array_like=True, frozen=True):
    """The setup of the driver. `address`: of the cluster; "" starts a local one. `host`: address of
    the controller; "": automatic. `needed`: bundles that must fit at the start, each with the key
    that requires it. `wait_for_nodes_s`: how long nodes may still join."""

    address: str
    host: str
    needed: list[tuple[str, dict[str, float]]]
    wait_for_nodes_s: float


class StopProcess(Struct, array_like=True, frozen=True, tag=51):
    """End the process."""

    name: str


class Connected(Struct, array_like=True, frozen=True, tag=21):
    """The driver has connected. `text` describes the cluster; `host`: the address at which its
    nodes reach this machine."""

    host: str
    text: str


class ProcessStarted(Struct, array_like=True, frozen=True, tag=22):
    """A process runs on a node of Ray, under a guard with process id `pid`."""

    name: str
    node: str
    pid: int


class ProcessEnded(Struct, array_like=True, frozen=True, tag=23):
    """A process has ended, or was never started; `how` describes it."""

    name: str
    how: str


class Leaves(Struct, array_like=True, frozen=True, tag=24):
    """The node of a process is draining, and ends in `within_s` seconds."""

    name: str
    within_s: float


class PlaceProcess(Struct, array_like=True, frozen=True, tag=50):
    """Start a process."""

    spec: ProcessSpec


FromDriver = Connected | ProcessStarted | ProcessEnded | Leaves | WorkerFigures | Notice
pack = packed
read_setup = msgspec.msgpack.Decoder(RaySetup).decode
read_request = msgspec.msgpack.Decoder(PlaceProcess | StopProcess).decode
_read_answer = msgspec.msgpack.Decoder(FromDriver).decode


def left_over(
    needed: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]
) -> list[int]:
    """Indices of the bundles that do not fit on the nodes; greedy, the largest first."""
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
    """The resources as text, such as "2 CPUs and 1 GPU"."""
    parts = [f"{much:g} {name}{'s' * (much != 1)}" for name, much in resources.items() if much]
    return " and ".join(parts) or "nothing"


class _Placed:
    """A requested process."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.started: asyncio.Future[ProcessStarted] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        """Whether it waits for resources."""
        return not self.started.done() and not self.ended.done()


Leave = Callable[[str, float], None]


class RayPlacement(WorkerGroup[Worker]):
    """A Placement on Ray. Its worker group has one worker, the driver."""

    read = staticmethod(_read_answer)
    make_worker = Worker
    waits_for_room = True

    def __init__(self, setup: RaySetup, folder: Path, report: Callable[[str], None]) -> None:
        super().__init__(report)
        self._leave: dict[str, Leave] = {}  # by kind, a process's name without its number
        self._wanted: dict[str, _Placed] = {}
        self.host = ""
        self._connected = asyncio.Event()
        spec = WorkerSpec(
            "agentenv.training.workers.ray_driver",
            "ray",
            "Ray client process",
            1,
            setup.wait_for_nodes_s + 300.0,
            MAX_RESTARTS,
        )
        self._driver = Supervisor(spec, self, setup, folder, report)

    async def open(self) -> None:
        """Connect to the cluster. Raises ConfigError if the bundles do not fit."""
        await self._driver.start()
        async with asyncio.timeout(60.0):
            await self._connected.wait()

    async def shut(self) -> None:
        """Release the cluster; idempotent."""
        await self._driver.close()

    def follow(self, kind: str, leave: Leave) -> None:
        """Call `leave` with the name and remaining seconds of each process of this kind whose node
        is draining."""
        self._leave[kind] = leave

    # Placement

    async def start(self, spec: ProcessSpec) -> None:
        if self._is_closed or self.reason:
            raise WorkerError(self.reason)
        command = guarded(spec.command, GRACE_S, alone=True)
        command[0] = spec.command[0]  # the interpreter on the node
        placed = self._wanted[spec.name] = _Placed(replace(spec, command=command))
        self._send(PlaceProcess(placed.spec))
        either: set[asyncio.Future[Any]] = {placed.started, placed.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not placed.started.done():
            raise WorkerError(f"{spec.name} {placed.ended.result()}")

    async def ended(self, name: str) -> str:
        return await asyncio.shield(self._wanted[name].ended)

    async def stop(self, name: str) -> None:
        placed = self._wanted.pop(name, None)
        if placed is None or not self.workers:
            return
        self._send(StopProcess(name))
        await at_most(GRACE_S + 5.0, placed.ended)

    def _send(self, message: Struct) -> None:
        for driver in self.workers.values():
            driver.link.send(pack(message))

    # The driver; processes continue without it

    def joined(self, worker: Worker) -> None:
        for placed in self._wanted.values():
            if placed.is_open:
                worker.link.send(pack(PlaceProcess(placed.spec)))

    def take(self, worker: Worker, message: Any) -> None:
        placed = self._wanted.get(getattr(message, "name", ""))
        match message:
            case Connected():
                self.host = self.host or message.host  # processes use the first address
                self._connected.set()
                self.report(message.text)
            case ProcessStarted() if placed is not None and not placed.started.done():
                placed.started.set_result(message)
            case ProcessEnded() if placed is not None and not placed.ended.done():
                placed.ended.set_result(message.how)
            case Leaves():
                leave = self._leave.get(message.name.rpartition("-")[0])
                if leave is not None:
                    leave(message.name, message.within_s)
            case Notice():
                self.report(f"Ray: {message.text}")

    def left(self, worker: Worker, why: str) -> Left:
        return Left(why, 1, "its processes continue, and new ones are placed after Ray is back")

    def end(self, reason: str) -> None:
        """Give up on Ray: fail all processes that still wait for resources."""
        super().end(reason)
        for placed in self._wanted.values():
            if placed.is_open:
                placed.ended.set_result(f"is not placed: {reason}")
