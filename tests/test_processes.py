"""A process of this machine: its environment, its log, its end, and the end of all below it."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest

from agentenv.base.retries import Backoff, Restarts
from agentenv.processes import supervisor
from agentenv.processes.supervisor import (
    LocalPlacement,
    LocalProcess,
    ProcessSpec,
    how_it_ended,
    log_tail,
    open_log,
)
from tests.support.polling import until

FORK = "import os, time; os.fork(); print('there', flush=True); time.sleep(600)"
DIE = "import os; os.kill(os.getpid(), {number})"


def spec_of(folder: Path, code: str, **changes: object) -> ProcessSpec:
    keys = {"env": {}, "log": str(folder / "logs" / "one.log")} | changes
    return ProcessSpec("one", [sys.executable, "-c", code], **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGKILL, "was killed by SIGKILL (the system does this"), (signal.SIGSEGV, "SIGSEGV")],
)
async def test_the_signal_that_killed_a_process_is_named(
    tmp_path: Path, number: signal.Signals, how: str
) -> None:
    process = LocalProcess(spec_of(tmp_path, DIE.format(number=int(number))))
    await process.start()
    assert how in await process.ended()
    await process.stop()


async def test_a_cancelled_start_closes_a_log_that_opens_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, began, go_on = [], threading.Event(), threading.Event()

    def open_late(path: Path) -> BinaryIO:
        began.set()
        go_on.wait()
        opened.append(open_log(path))
        return opened[0]

    monkeypatch.setattr(supervisor, "open_log", open_late)
    start = asyncio.create_task(LocalProcess(spec_of(tmp_path, "pass")).start())
    await asyncio.to_thread(began.wait)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert opened == []
    go_on.set()
    await until(lambda: opened and opened[0].closed)


async def test_a_process_ends_with_all_its_descendants(tmp_path: Path) -> None:
    placement, spec = LocalPlacement(grace_s=0.0), spec_of(tmp_path, FORK)
    await placement.start(spec)
    await until(lambda: log_tail(Path(spec.log)).count("there") == 2)
    guard = psutil.Process(placement._processes["one"].pid)
    found = [guard, *guard.children(recursive=True)]
    assert len(found) == 3
    await placement.stop("one")
    await placement.stop("one")
    await placement.stop("another")
    gone, alive = await asyncio.to_thread(psutil.wait_procs, found, 30)
    assert (len(gone), alive) == (3, [])


def test_exit_statuses_are_described_in_words() -> None:
    assert how_it_ended(-15) == how_it_ended(128 + 15)
    assert "SIGTERM" in how_it_ended(-15)
    assert "255" in how_it_ended(255)


def test_pauses_between_restarts_grow_and_restarts_are_bounded() -> None:
    restarts = Restarts(3, "key", Backoff(1.0, 3.0))
    pauses = [restarts.lost() for _ in range(4)]
    assert pauses[-1] is None
    first, second, third = (pause or 0.0 for pause in pauses[:3])
    assert 1.0 <= first < 1.5 <= second / 4 * 3 < second < third <= 4.5
    restarts.progressed()
    assert restarts.lost() == first
