"""Where processes run that work for this one: this machine, machines that somebody else starts
them on, or a Ray cluster (pipelines/cluster/ray_places.py).
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from msgspec import Struct

from agentenv.guard import guarded
from agentenv.offload import in_thread, kill, start_process

GRACE_S = 10.0  # from SIGTERM to SIGKILL


class Launch(Struct, array_like=True, frozen=True):
    """A process to start: its name, its command, variables on top of the machine's, the file of its
    output, and what it takes of a machine, as Ray counts it: {"CPU": 1}."""

    name: str
    command: list[str]
    env: dict[str, str]
    log: str
    resources: dict[str, float] = {}


class Places(Protocol):
    """`host` is the address of this process for those that it starts. `is_patient`: a place may
    have to be waited for, without a bound."""

    is_patient: bool

    @property
    def host(self) -> str: ...

    async def start(self, launch: Launch) -> None:
        """Returns when it runs, or is expected. Raises WorkerError where it cannot be."""
        ...

    async def ended(self, name: str) -> str:
        """Returns when the process has ended, with how."""
        ...

    async def stop(self, name: str) -> None:
        """See to it that the process has ended. Of one that is not there: nothing."""
        ...


def opened(log: str) -> BinaryIO:
    """To append to."""
    return Path(log).open("ab")


class Here:
    """This machine. Each process runs below a guard, which ends with this process."""

    host = "127.0.0.1"
    is_patient = False

    def __init__(self) -> None:
        self._guards: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, launch: Launch) -> None:
        with await in_thread(opened, launch.log) as log:
            self._guards[launch.name] = await start_process(
                *guarded(launch.command, GRACE_S),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | launch.env,
                start_new_session=True,
            )

    async def ended(self, name: str) -> str:
        return f"ended with status {await self._guards[name].wait()}"

    async def stop(self, name: str) -> None:
        guard = self._guards.get(name)
        if guard is None:
            return
        if guard.stdin is not None:
            guard.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S + 5.0):
                await guard.wait()
        await kill(guard)


class Elsewhere:
    """Machines on which somebody else starts the processes: Slurm, Kubernetes, or a person."""

    is_patient = True

    def __init__(self, host: str) -> None:
        self.host = host

    async def start(self, launch: Launch) -> None:
        """Expected from now on."""

    async def ended(self, name: str) -> str:
        """Nobody knows but by its link."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def stop(self, name: str) -> None:
        """It ends with its link."""
