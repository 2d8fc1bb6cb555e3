"""Worker pools: slow jobs take turns, quick ones are done first, and nobody waits without bound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agentenv.errors import GraderError
from envs.grading.math import MathEquivalence
from envs.grading.workers import JobTimeoutError, WorkerPool

HANDLER = "tests.support.jobs:work"
PATIENCE_S = 100.0


@pytest.fixture
async def make_pool() -> AsyncIterator[Callable[..., WorkerPool]]:
    pools: list[WorkerPool] = []

    def make(**keys: Any) -> WorkerPool:
        pools.append(WorkerPool(HANDLER, **keys))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


async def test_a_quick_job_overtakes_any_number_of_slow_ones(
    make_pool: Callable[..., WorkerPool],
) -> None:
    pool = make_pool(max_jobs=16, share_cores=True)
    slow = [asyncio.ensure_future(pool.run({"spin_s": 1.0}, PATIENCE_S)) for _ in range(6)]
    await asyncio.sleep(0.5)
    for _ in range(5):
        assert await pool.run({"spin_s": 0.01}, PATIENCE_S) == "done"
        assert not any(job.done() for job in slow)
    assert set(await asyncio.gather(*slow)) == {"done"}  # none is left stopped


async def test_a_job_gives_way_to_one_that_waits(make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool(max_jobs=1, max_wait_s=PATIENCE_S)
    slow = asyncio.ensure_future(pool.run({"sleep_s": 99.0}, PATIENCE_S))
    await asyncio.sleep(0.1)
    assert await pool.run({}, PATIENCE_S) == "done"
    with pytest.raises(GraderError, match="gave way to others"):
        await slow


async def test_a_job_that_finds_no_place_is_refused(
    make_pool: Callable[..., WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.grading.workers.GIVE_WAY_AFTER_S", PATIENCE_S)
    pool = make_pool(max_jobs=1, max_wait_s=0.2)
    slow = asyncio.ensure_future(pool.run({"sleep_s": 5.0}, PATIENCE_S))
    await asyncio.sleep(0.1)
    with pytest.raises(GraderError, match=r"all 1 workers .* at work for 0\.2 s"):
        await pool.run({}, PATIENCE_S)
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    assert await pool.run({}, PATIENCE_S) == "done"


async def test_a_killed_job_says_how_much_it_computed(
    make_pool: Callable[..., WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.grading.workers.KILL_TIMEOUT_S", PATIENCE_S)
    pool = make_pool()
    await pool.run({}, PATIENCE_S)
    used = []
    for payload in ({"sleep_s": 99.0}, {"spin_s": 99.0}):
        with pytest.raises(JobTimeoutError, match="stopped after 1 s") as raised:
            await pool.run(payload, 1.0)
        assert raised.value.cpu_s is not None
        used.append(raised.value.cpu_s)
    assert used[0] < used[1]
    assert await pool.run({}, PATIENCE_S) == "done"


async def test_a_flood_of_slow_expressions_is_answered_or_refused() -> None:
    """Each comes back: as not equal, or as an error that says that the machine is too busy."""
    pytest.importorskip("math_verify")
    math = MathEquivalence()
    await math.start()
    asked = [math.equal(rf"(x+y+z+w+{n})^{{60}}", rf"(x+y+z+w+{n + 1})^{{60}}") for n in range(100)]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, GraderError):
            said = str(outcome)
            assert "too busy" in said or "have been at work" in said or "gave way" in said
        else:
            assert isinstance(outcome, tuple)
            assert outcome == (False, "math-verify did not finish within 1.5 s")
    assert sum(isinstance(outcome, GraderError) for outcome in outcomes) > 30
    for _ in range(20):  # and the flood leaves nothing that holds up what follows
        try:
            equal, _ = await math.equal("x + 5", "5 + x")
            break
        except GraderError:  # other programs may still keep the machine busy
            continue
    assert equal
    await math.close()
