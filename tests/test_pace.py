"""Trees start just in time: less stale at the same throughput, within the same bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from agentenv.pace import Pace
from agentenv.replay import ReplayQueue
from agentenv.tree import TrajectoryTree
from agentenv.types import Task
from agentenv.virtual_clock import run_virtual

TASK = Task("t", "toy", "q", ("a",))
GROUPS, BOUND, NUM_STEPS = 4, 3, 30


class Shown(NamedTuple):
    """`staleness`: the mean of each step; `early_s`: how long starts were held back."""

    seconds: float
    staleness: list[float]
    early_s: float


async def shown(
    tree_s: Callable[[int], float],
    learner_s: float,
    *,
    just_in_time: bool,
    refuse: Callable[[int], bool] = lambda index: False,
) -> Shown:
    """A feeder, trees that take `tree_s` each, and a learner that takes `learner_s` a step."""
    queue = ReplayQueue(GROUPS, BOUND, just_in_time=just_in_time)
    version, early_s = 0, 0.0
    staleness: list[float] = []

    async def rollout(index: int) -> TrajectoryTree:
        tree = TrajectoryTree(TASK, index=index, policy_version=version)
        await asyncio.sleep(tree_s(index))
        return tree

    async def feed(group: asyncio.TaskGroup) -> None:
        index = 0
        while True:
            await queue.reserve()
            queue.put(group.create_task(rollout(index)))
            index += 1

    async with asyncio.TaskGroup() as group:
        feeder = group.create_task(feed(group))
        for _ in range(NUM_STEPS):
            trees = await queue.get(lambda tree: not refuse(tree.index))
            staleness.append(fmean(version - tree.policy_version for tree in trees))
            assert max(version - tree.policy_version for tree in trees) <= BOUND
            await asyncio.sleep(learner_s)
            version += 1
            queue.release(len(trees))
            early_s += queue.flow.take()["flow/producer_early_s"]
        feeder.cancel()
        for rest in queue.drain():
            rest.cancel()
    return Shown(asyncio.get_running_loop().time(), staleness, early_s)


def both(
    tree_s: Callable[[int], float],
    learner_s: float,
    refuse: Callable[[int], bool] = lambda index: False,
) -> tuple[Shown, Shown]:
    """As early as the bound allows, and just in time."""
    early, timely = (
        run_virtual(shown(tree_s, learner_s, just_in_time=one, refuse=refuse))
        for one in (False, True)
    )
    return early, timely


def test_with_a_slow_learner_trees_are_one_version_old_and_not_three() -> None:
    early, timely = both(lambda index: 2.0, 10.0)
    assert early.staleness[BOUND:] == [BOUND] * (NUM_STEPS - BOUND)
    assert timely.staleness[-6:] == [1.0] * 6
    assert timely.seconds == early.seconds
    assert timely.early_s > 0 == early.early_s


def test_with_slow_tools_every_slot_is_filled_as_before() -> None:
    early, timely = both(lambda index: 40.0, 10.0)
    assert timely == early
    assert timely.staleness[-1] == BOUND


def test_trees_of_two_updates_start_two_updates_ahead() -> None:
    early, timely = both(lambda index: 13.0, 10.0)
    assert timely.seconds == early.seconds
    assert timely.staleness[-6:] == [2.0] * 6


def test_replaced_trees_count_as_what_the_learner_needs() -> None:
    early, timely = both(lambda index: 2.0, 10.0, refuse=lambda index: index % 4 == 0)
    assert timely.seconds <= early.seconds * 1.05
    assert fmean(timely.staleness[-4:]) < fmean(early.staleness[-4:])


def test_a_learner_that_had_to_wait_gets_its_trees_earlier_from_then_on() -> None:
    """Each eighth tree takes six times as long as the others: the margin learns that."""
    early, timely = both(lambda index: 18.0 if index % 32 == 7 else 3.0, 10.0)
    assert timely.seconds <= early.seconds * 1.1
    assert fmean(timely.staleness[-6:]) < BOUND


def test_a_tree_starts_at_once_until_both_durations_are_known() -> None:
    pace = Pace()
    assert pace.early_s(0.0, 3, 0.0) == 0.0
    pace.tree_ended(1.0)
    pace.learner_takes(2.0)
    assert pace.early_s(2.0, 3, 0.0) == 0.0
    pace.learner_asks(12.0)
    assert pace.early_s(12.0, 0, 0.0) == 0.0
    assert pace.early_s(12.0, 1, 0.0) > 8.0
    assert pace.early_s(12.0, 1, 20.0) == 0.0  # a tree that still grows takes longer than it


def test_an_update_with_an_evaluation_in_it_is_no_measure() -> None:
    pace = Pace()
    pace.tree_ended(1.0)
    for since_s, until_s in ((0.0, 10.0), (10.0, 100.0)):
        pace.learner_takes(since_s)
        pace.learner_asks(until_s)
    assert pace.early_s(100.0, 1, 0.0) < 10.0


def test_a_tree_of_an_earlier_process_starts_at_once_and_is_no_measure() -> None:
    async def scenario() -> None:
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

    run_virtual(scenario())
