"""Trees start just in time: less stale at the same throughput, within the same bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from statistics import fmean

import pytest

from agentenv.base.tree import TrajectoryTree
from agentenv.rollout.queue import Pace, ReplayQueue, TreeTimes
from tests.support.virtual_clock import on_virtual_clock, run_virtual
from tests.test_queue import TASK, Ran, run_loop

GROUPS, BOUND, NUM_STEPS = 4, 3, 30


def both(
    grow: Callable[[int], Awaitable[None]],
    learner_s: Callable[[int], float] = lambda step: 10.0,
    refuse: Callable[[int], bool] = lambda index: False,
) -> tuple[Ran, Ran]:
    """As early as the bound allows, and just in time."""
    queues = [ReplayQueue(GROUPS, BOUND), ReplayQueue(GROUPS, BOUND)]
    queues[0]._pace = None
    early, timely = (
        run_virtual(run_loop(queue, NUM_STEPS, grow, learner_s, refuse)) for queue in queues
    )
    assert max(map(max, early.staleness + timely.staleness)) <= BOUND
    return early, timely


def test_with_a_slow_learner_trees_are_one_version_old_and_not_three() -> None:
    early, timely = both(lambda index: asyncio.sleep(2.0))
    assert early.means[BOUND:] == [BOUND] * (NUM_STEPS - BOUND)
    assert timely.means[-6:] == [1.0] * 6
    assert timely.seconds == early.seconds
    assert timely.early_s > 0 == early.early_s


def test_with_slow_tools_every_slot_is_filled_as_before() -> None:
    early, timely = both(lambda index: asyncio.sleep(40.0))
    assert timely == early
    assert timely.means[-1] == BOUND


def test_trees_for_two_updates_start_two_updates_ahead() -> None:
    early, timely = both(lambda index: asyncio.sleep(13.0))
    assert timely.seconds == early.seconds
    assert timely.means[-6:] == [2.0] * 6


def test_replacements_of_refused_trees_count_as_demand_of_the_learner() -> None:
    early, timely = both(lambda index: asyncio.sleep(2.0), refuse=lambda index: index % 4 == 0)
    assert timely.seconds <= early.seconds * 1.05
    assert fmean(timely.means[-4:]) < fmean(early.means[-4:])


def test_after_a_wait_the_learner_gets_its_trees_earlier() -> None:
    """Each eighth tree takes six times as long as the others: the margin learns that."""
    early, timely = both(lambda index: asyncio.sleep(18.0 if index % 32 == 7 else 3.0))
    assert timely.seconds <= early.seconds * 1.1
    assert fmean(timely.means[-6:]) < BOUND


def test_a_short_wait_does_not_fill_the_slots_of_a_shared_engine() -> None:
    """Trees take longer the more of them grow, and two updates are much shorter than the others."""
    growing = 0

    async def grow(index: int) -> None:
        nonlocal growing
        growing += 1
        left_s = 1.2
        while left_s > 0:
            await asyncio.sleep(0.1)
            left_s -= 0.1 * GROUPS / growing
        growing -= 1

    def learner_s(step: int) -> float:
        return 0.3 if step in (10, 11) else 2.5

    early, timely = both(grow, learner_s)
    assert timely.seconds <= early.seconds * 1.03
    assert max(timely.means[BOUND + 1 :]) == 2.0, timely.means
    assert timely.means[-4:] == [1.0] * 4
    assert fmean(early.means[BOUND:]) == BOUND


def test_trees_start_immediately_until_both_durations_are_known() -> None:
    pace = Pace(BOUND)
    assert pace.early_s(0.0, 3) == 0.0
    pace.learner_takes(2.0, [TreeTimes(1.0, 2.0, 1.0)])
    assert pace.early_s(2.0, 3) == 0.0
    pace.learner_requests(12.0)
    assert pace.early_s(12.0, 0) == 0.0
    assert pace.early_s(12.0, 1) > 8.0


def test_only_a_wait_widens_the_lead() -> None:
    pace, now_s = Pace(BOUND), 1.0

    def lead_s() -> float:
        return pace.due_s(now_s, 3) - now_s - pace.early_s(now_s, 3)

    def step(tree_s: float, wait_s: float) -> None:
        nonlocal now_s
        pace.learner_requests(requested_s := now_s + 10.0)
        now_s = requested_s + wait_s
        ended_s = now_s if wait_s else requested_s - 1.0
        pace.learner_takes(now_s, [TreeTimes(ended_s - tree_s, ended_s, requested_s)])

    pace.learner_takes(now_s, [TreeTimes(0.0, 1.0, 0.0)])
    step(5.0, 0.0)
    first_s = lead_s()
    step(9.0, 0.0)  # no wait for it
    assert lead_s() <= first_s
    step(6.0, 0.5)
    widest_s = lead_s()
    assert widest_s == pytest.approx(6.0)
    step(4.0, 0.0)
    assert 4.0 < lead_s() < widest_s


def test_the_duration_of_an_update_with_an_evaluation_is_ignored() -> None:
    pace = Pace(BOUND)
    for since_s, until_s in ((0.0, 10.0), (10.0, 20.0), (20.0, 110.0)):
        pace.learner_takes(since_s, [TreeTimes(since_s - 1.0, since_s, since_s)])
        pace.learner_requests(until_s)
    assert pace.early_s(110.0, 1) < 10.0


@on_virtual_clock
async def test_a_tree_of_an_earlier_process_starts_immediately_and_is_not_measured() -> None:
    queue = ReplayQueue(1, 2)

    async def rollout(seconds: float) -> TrajectoryTree:
        await asyncio.sleep(seconds)
        return TrajectoryTree(TASK, index=0, policy_version=0)

    for _ in range(2):
        await queue.reserve()
        queue.put(asyncio.ensure_future(rollout(1.0)))
        await queue.get()
        await asyncio.sleep(10.0)
        queue.release(1)
    for _ in range(2):
        assert await queue.reserve(at_once=True) == 0.0
        queue.put(asyncio.ensure_future(rollout(0.0)), is_new=False)

    async def learner() -> None:
        for _ in range(2):
            await queue.get()
            await asyncio.sleep(10.0)

    learning = asyncio.ensure_future(learner())
    await asyncio.sleep(0)
    assert 15.0 < await queue.reserve() < 20.0  # it has two steps of ten seconds before
    learning.cancel()
    for rest in queue.drain():
        rest.cancel()
