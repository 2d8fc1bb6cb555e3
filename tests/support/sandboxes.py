"""Sandboxes from outside: their processes, and the output of a session."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from agentenv.envs.sandbox.sandbox import Sandbox, SandboxSession
from tests.support import forkserver
from tests.support.polling import until

# on the rung "namespaces": bubblewrap, the zygote, the initializer of forks, and its child that
# waits for a fork
RESIDENTS = 4


def children() -> list[psutil.Process]:
    """All processes below this one, less the fork servers of other tests and those below them."""
    found = psutil.Process().children(recursive=True)
    for pid in forkserver.pids():
        one = psutil.Process(pid)
        found = [child for child in found if child not in (one, *one.children(recursive=True))]
    return found


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def zygote_of(sandbox: Sandbox) -> psutil.Process:
    assert sandbox._zygote is not None
    process = psutil.Process(sandbox._zygote._process.process.pid)
    return process.children()[0] if sandbox.rung == "namespaces" else process  # below bubblewrap


def process_of(session: SandboxSession) -> psutil.Process:
    """Its own, which the kernel names by the descriptor that the host has of it."""
    assert session._live is not None
    info = Path(f"/proc/self/fdinfo/{session._live.pidfd}").read_text()
    return psutil.Process(int(info.partition("\nPid:")[2].split()[0]))


async def until_processes(count: int) -> None:
    await until(lambda: len(children()) == count)


async def until_gone(process: psutil.Process) -> None:
    await until(lambda: not process.is_running())


async def output_of(session: SandboxSession, code: str, timeout_s: float = 10.0) -> str:
    return (await session.run(code, timeout_s)).output
