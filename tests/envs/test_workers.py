"""Worker pools: a job is bounded by its own use of resources, under any load of the machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest

from agentenv.base.errors import ConfigError, InfraError
from agentenv.base.untrusted import decode, packed
from agentenv.envs.grading.equality import MathEquivalence
from agentenv.processes import worker_pool as workers
from agentenv.processes.worker_pool import (
    JobDiedError,
    JobRaisedError,
    JobStoppedError,
    Used,
    WorkerPool,
)
from tests.support.begun import closing
from tests.support.warehouse import ROOT

HANDLER = "tests.support.jobs:work"
ENOUGH_S = 60.0


@pytest.fixture
async def make_pool() -> AsyncIterator[Callable[..., WorkerPool]]:
    pools: list[WorkerPool] = []

    def make(**keys: Any) -> WorkerPool:
        pools.append(WorkerPool(HANDLER, name="jobs", **keys))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
        pool.close()
    _, alive = await asyncio.to_thread(psutil.wait_procs, _workers_of(os.getpid()), ENOUGH_S)
    assert not alive


def _workers_of(pid: int) -> list[psutil.Process]:
    """Fork servers and workers below a process; dead ones may still be listed."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if (
                "agentenv.processes.worker_pool" in process.cmdline()
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


async def test_the_limit_of_a_job_does_not_count_its_wait_for_a_core(
    make_pool: Callable[..., WorkerPool],
) -> None:
    num_jobs = 4 * len(os.sched_getaffinity(0))  # so each takes at least four times its CPU time
    pool = make_pool(max_jobs=num_jobs, max_asleep_s=1.0)
    jobs = [pool.run({"spin_s": 0.25}, 0.5) for _ in range(num_jobs)]
    assert await asyncio.gather(*jobs) == ["done"] * num_jobs


async def test_the_memory_of_the_machine_bounds_the_number_of_workers(
    make_pool: Callable[..., WorkerPool],
) -> None:
    pool = make_pool(memory_bytes=psutil.virtual_memory().total // 3)
    jobs = [pool.run({"sleep_s": 0.2}, 1.0) for _ in range(3)]
    assert await asyncio.gather(*jobs) == ["done"] * 3
    assert len(_workers_of(os.getpid())) == 2  # the fork server, and one


@pytest.mark.parametrize(
    ("payload", "limit_s", "error", "message"),
    [
        ({"spin_s": 99.0}, 0.3, JobStoppedError, r"stopped after 0\.3 s"),
        ({"sleep_s": 99.0}, 99.0, JobStoppedError, r"stopped after 0\.5 s"),
        ({"num_bytes": 1 << 31}, 9.0, JobRaisedError, "MemoryError"),
        ({"raises": "no \ud800 gold"}, 9.0, JobRaisedError, r"ValueError: no \\ud800 gold"),
        ({"exits": True}, 9.0, JobDiedError, "the worker process died"),
        ({"spin_s": "x"}, 9.0, JobRaisedError, "TypeError"),
    ],
)
async def test_a_failing_job_affects_no_other(
    make_pool: Callable[..., WorkerPool],
    payload: dict[str, Any],
    limit_s: float,
    error: type[Exception],
    message: str,
) -> None:
    pool = make_pool(max_jobs=1, memory_bytes=1 << 30, max_asleep_s=0.5)
    failing = asyncio.ensure_future(pool.run(payload, limit_s))
    others = [pool.run({}, 9.0) for _ in range(3)]
    assert await asyncio.gather(*others) == ["done"] * 3
    with pytest.raises(error, match=message):
        await failing
    is_killed = error is not JobRaisedError
    assert pool.stats() == {"jobs/num_jobs": 4, "jobs/num_killed": is_killed}


def test_values_that_messagepack_cannot_hold_become_text() -> None:
    """The policy may write any number into the arguments that a grader reads."""
    message = {"payload": [{"count": 10**30, "ratio": 0.5, "half": "a\ud800"}, -(2**63), -(10**30)]}
    found = decode(packed(message), packed=True)
    assert found["payload"][0] == {"count": str(10**30), "ratio": 0.5, "half": "a\\ud800"}
    assert found["payload"][1:] == [str(-(2**63)), str(-(10**30))]


async def test_a_cancelled_job_frees_its_worker(make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool(max_jobs=1)
    await pool.run({}, 9.0)
    job = asyncio.ensure_future(pool.run({"sleep_s": 99.0}, 9.0))
    await asyncio.sleep(0.1)
    job.cancel()
    await asyncio.wait({job})
    assert job.cancelled()
    assert await pool.run({}, 9.0) == "done"


async def test_a_pool_survives_the_death_of_its_processes(
    make_pool: Callable[..., WorkerPool],
) -> None:
    pool = make_pool()
    await pool.run({}, 9.0)
    job = asyncio.ensure_future(pool.run({"sleep_s": 0.5}, 9.0))
    await asyncio.sleep(0.2)
    for process in _workers_of(os.getpid()):  # as the kernel does where memory runs out
        process.kill()
    assert await job == "done"  # tried again
    pool.close()
    assert await pool.run({}, 9.0) == "done"
    job = asyncio.ensure_future(pool.run({"sleep_s": 99.0}, 9.0))
    await asyncio.sleep(0.2)
    pool.close()
    with pytest.raises(InfraError, match="were closed"):
        await job


async def test_a_dead_fork_server_that_is_not_yet_noticed_is_replaced(
    make_pool: Callable[..., WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()
    await pool.start()
    server = pool._server
    assert server is not None
    server.process.kill()
    monkeypatch.setattr(type(server), "alive", lambda self: True)  # it has not been noticed yet
    assert await pool.run({}, 9.0) == "done"
    assert pool._server is not server


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        ("tests.support.jobs:nothing", "nothing cannot be loaded: AttributeError"),
        ("a_module_that_is_nowhere:f", "ModuleNotFoundError: .*a_module_that_is_nowhere"),
    ],
)
async def test_a_handler_that_cannot_be_loaded_is_refused(handler: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await WorkerPool(handler, name="jobs").start()


async def test_the_start_of_a_worker_may_wait_for_a_free_core(
    make_pool: Callable[..., WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that waits for a core is not late; one that sleeps in an import is."""
    monkeypatch.setattr(workers, "START_TIMEOUT_S", 0.001)
    monkeypatch.setattr(workers, "_used", lambda pid: Used(0.0, time.monotonic(), True))
    pool = make_pool()
    await pool.start()
    monkeypatch.setattr(workers, "_used", lambda pid: Used(0.0, 0.0, False))
    with pytest.raises(InfraError, match=r"jobs:work.*0\.001"):
        await make_pool().start()


HOST = f"""
import asyncio
from agentenv.processes.worker_pool import WorkerPool

async def main():
    pool = WorkerPool({HANDLER!r}, name="jobs", max_jobs=2)
    await pool.run({{}}, 9.0)
    hanging = [asyncio.ensure_future(pool.run({{"spin_s": 99.0}}, 99.0)) for _ in range(2)]
    await asyncio.sleep(0.2)
    print("ready", flush=True)
    await asyncio.gather(*hanging)

asyncio.run(main())
"""


def test_workers_die_with_their_host() -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", HOST], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert host.stdout is not None
    assert host.stdout.readline() == "ready\n"
    found = _workers_of(host.pid)
    assert len(found) == 3
    host.send_signal(signal.SIGKILL)
    host.wait()
    host.stdout.close()
    gone, alive = psutil.wait_procs(found, timeout=ENOUGH_S)
    assert len(gone) == 3
    assert not alive


async def test_slow_expressions_do_not_stop_the_verdicts_of_other_answers() -> None:
    """64 right answers that only math-verify can decide, after 64 that it never finishes."""
    pytest.importorskip("math_verify")
    async with closing(MathEquivalence(limit_s=0.2)) as math:
        slow = [math.equal(rf"x^{{60}}+{n}x+1=0", rf"x^{{60}}+{n}x+2=0") for n in range(3, 67)]
        one, other = r"\frac{%d\sqrt{3}}{3}", r"\frac{%d}{\sqrt{3}}"
        right = [math.equal(one % k, other % k) for k in range(2, 66)]
        outcomes = await asyncio.gather(*slow, *right)
    assert [right for right, _ in outcomes] == [False] * 64 + [True] * 64
    assert all("0.2" in reason for _, reason in outcomes[:64])
