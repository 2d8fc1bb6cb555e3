"""A tree that kills its workers ends without another one, at any moment of its kills and through
any restart of the controller; so does a tree that a user cancels, with or without a worker."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.keys.cluster import ProcessesCluster
from agentenv.base.retries import Backoff, Restarts
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Task
from agentenv.contract.env import Env
from agentenv.processes.worker_group import NUM_LOSSES, NUM_TRIALS, Left
from agentenv.rollout.journal import Journal
from tests.support.polling import until
from tests.support.toy import CountingEnv
from tests.support.virtual_clock import on_virtual_clock, run_virtual
from tests.test_actor import TASK, make_actor
from tests.test_cluster import Cluster, alone, grown
from tests.test_journal import journal

KILLER = 2  # the index of the tree that kills
KILLER_TASK = Task("killer", "toy", "how many?", ("2",))
TRIALS = NUM_LOSSES + NUM_TRIALS
BREAK_S = 1.0  # until a worker is started again


pytestmark = pytest.mark.usefixtures("no_env_left_open")


class DeadlyEnv(CountingEnv):
    """Its process dies `delay_s` after a call of the method `where`."""

    cluster: DeadlyCluster
    worker: str

    async def reset(self, **keys: Any) -> Any:
        await self._die("reset")
        return await super().reset(**keys)

    async def step(self, action: Any) -> Any:
        await self._die("step")
        return await super().step(action)

    async def _die(self, method: str) -> None:
        if self.cluster.where == method:
            await asyncio.sleep(self.cluster.delay_s)
            self.cluster.die(self.worker)
            await asyncio.Event().wait()


class DeadlyCluster(Cluster):
    """Workers that one tree kills, time and again, and that are started again each time."""

    def __init__(self, where: str, delay_s: float = 0.0, **actor: Any) -> None:
        super().__init__(lambda: make_actor(**actor))
        self.where, self.delay_s = where, delay_s
        self.num_killed = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.names: list[str] = []
        self.left: list[Left] = []

    def add(self, name: str) -> None:
        super().add(name)
        actor = self.served[name].actor
        self.names.append(name)
        actor.make_env = partial(self._make_env, name, actor.make_env)

    def _make_env(self, worker: str, fine: Any, task: Task) -> Env:
        if task.id != "killer":
            made: Env = fine(task)
            return made
        if self.where == "make":
            self.die(worker)
            raise SystemError("its process is gone")  # not received
        env = DeadlyEnv(task)
        env.cluster, env.worker = self, worker
        return env

    def die(self, name: str) -> None:
        """At once, as by SIGKILL; it is started again."""
        if name not in self.names:
            return
        self.num_killed += 1
        assert self.num_killed < 30, "it goes on killing"
        self.names.remove(name)
        self.links[name].abort()
        self._serving[name].cancel()
        self._tasks.append(asyncio.create_task(self._again(name)))

    async def _again(self, name: str) -> None:
        await asyncio.gather(self._serving[name], return_exceptions=True)
        self.left.append(await self._joined[name])
        await asyncio.sleep(BREAK_S)
        self.add(name)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().close()

    def start(self, indices: Any, journal: Journal | None = None) -> list[asyncio.Task[Any]]:
        """Grow these trees, from the journal where it has them."""

        async def grow(index: int) -> TrajectoryTree:
            task = KILLER_TASK if index == KILLER else TASK
            recorded = None
            if journal is not None and journal.earlier.knows(index):
                recorded = journal.earlier.read(index, task)
            if recorded is not None and recorded.is_finished:
                return recorded.tree
            return await self.workers.rollout(task, index=index, recorded=recorded)

        return [asyncio.create_task(grow(index)) for index in indices]


KINDS = [("make", 0.0), ("reset", 0.0), ("reset", 0.02), ("reset", 0.2), ("step", 0.0)]


@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize(("where", "delay_s"), KINDS)
@pytest.mark.parametrize("latency_s", [0.01, 10.0])
def test_a_cancelled_tree_kills_no_more_workers(
    where: str, delay_s: float, names: str, latency_s: float
) -> None:
    """It would kill workers forever; all other trees end regularly."""
    keys: dict[str, Any] = {"engine": {"latency_s": latency_s}}

    async def main() -> tuple[list[TrajectoryTree], DeadlyCluster]:
        cluster = DeadlyCluster(where, delay_s, **keys)
        for name in names:
            cluster.add(name)
        found = await asyncio.gather(*cluster.start(range(4)))
        await cluster.close()
        return found, cluster

    found, cluster = run_virtual(main())
    # the first ones may have sent the beginning of the tree, which is progress
    assert TRIALS <= cluster.num_killed <= TRIALS + 2
    assert len([text for text in cluster.told if "is abandoned" in text]) == 1
    for index in (0, 1, 3):
        assert grown(found[index]) == grown(alone(index, **keys))
    leaves = found[KILLER].leaves()
    assert leaves
    assert all(f"cancelled: {TRIALS} workers" in (leaf.error or "") for leaf in leaves)
    assert found[KILLER].is_cancelled
    assert found[KILLER].num_live == 0


@pytest.mark.parametrize("where", ["make", "reset", "step"])
@pytest.mark.parametrize("num_before", [1, TRIALS - 1, TRIALS, TRIALS + 1])
def test_the_journal_records_the_workers_killed_by_a_tree(
    where: str, num_before: int, tmp_path: Path
) -> None:
    """A controller that ends after so many losses, and the next one, lose no more together."""

    async def first() -> int:
        cluster = DeadlyCluster(where)
        cluster.workers.journal = journal(tmp_path, incarnation=1)
        cluster.add("a")
        rollouts = cluster.start(range(4))
        await until(lambda: cluster.num_killed >= num_before or rollouts[KILLER].done())
        await asyncio.sleep(BREAK_S / 2)
        for one in rollouts:
            one.cancel()
        await asyncio.gather(*rollouts, return_exceptions=True)
        await cluster.close()
        return cluster.num_killed

    async def second() -> tuple[int, list[TrajectoryTree]]:
        cluster = DeadlyCluster(where)
        cluster.workers.journal = journal(tmp_path, incarnation=2)
        cluster.add("a")
        found = await asyncio.gather(*cluster.start(range(4), cluster.workers.journal))
        await cluster.close()
        return cluster.num_killed, found

    killed = run_virtual(first())
    more, found = run_virtual(second())
    assert TRIALS <= killed + more <= TRIALS + 2
    assert not more or killed < TRIALS + 2
    assert found[KILLER].is_cancelled
    for index in (0, 1, 3):
        assert grown(found[index]) == grown(alone(index))

    async def third() -> bool:
        """It has ended for every process to come."""
        again = journal(tmp_path, incarnation=3)
        recorded = again.earlier.read(KILLER, KILLER_TASK)
        await again.close()
        return recorded is not None and recorded.is_finished

    assert run_virtual(third())

    async def resume_older() -> int:
        """To an older checkpoint, whose trees grow again."""
        cluster = DeadlyCluster(where)
        cluster.workers.journal = journal(tmp_path, incarnation=4)
        await cluster.workers.journal.rotate(sys.maxsize)
        cluster.add("a")
        (tree,) = await asyncio.gather(*cluster.start([KILLER], cluster.workers.journal))
        assert tree.is_cancelled
        await cluster.close()
        return cluster.num_killed

    assert run_virtual(resume_older()) == 0
    assert run_virtual(resume_older()) == 0


@on_virtual_clock
async def test_losses_of_a_tree_that_made_progress_are_reset(tmp_path: Path) -> None:
    async def lose(cluster: Cluster) -> None:
        cluster.workers.journal = journal(tmp_path)
        cluster.add("a")
        growing = asyncio.create_task(cluster.rollout(0))
        for number in range(3):
            await asyncio.sleep(2.0)
            await cluster.kill("a" * (number + 1))
            cluster.add("a" * (number + 2))
        await asyncio.sleep(15.0)  # the first turn takes 10 s
        growing.cancel()
        await cluster.close()

    await lose(Cluster(lambda: make_actor(engine={"latency_s": 10.0})))
    again = journal(tmp_path)
    await again.close()
    assert again.earlier.losses == {}


@pytest.mark.parametrize("begins_s", [None, 0.0, 25.0], ids=["never began", "begins", "goes on"])
@on_virtual_clock
async def test_a_tree_without_a_worker_ends_when_a_user_cancels_it(
    begins_s: float | None, tmp_path: Path
) -> None:
    cluster = Cluster(lambda: make_actor(engine={"latency_s": 10.0}))
    cluster.workers.journal = Journal(tmp_path, settings="s", incarnation=1)
    if begins_s is not None:
        cluster.add("a")
    growing = asyncio.create_task(cluster.rollout(0))
    await asyncio.sleep(begins_s or 1.0)
    if begins_s is not None:
        await cluster.kill("a")
        await asyncio.sleep(1.0)
    before = 0 if begins_s is None else cluster.engine.stats()["requests"]
    assert cluster.workers.places()[0] == ""
    assert cluster.workers.cancel(0, "enough")
    assert not cluster.workers.places()
    tree = await asyncio.wait_for(growing, 1.0)
    assert not cluster.workers.cancel(0, "again")
    await cluster.close()
    again = Journal(tmp_path, settings="s", incarnation=2)
    recorded = again.earlier.read(0, TASK)
    await again.close()
    assert begins_s is None or cluster.engine.stats()["requests"] == before
    assert tree.is_cancelled
    assert tree.num_live == 0
    assert "enough" in str(tree.failures()[0].error)
    assert recorded is not None
    assert recorded.is_finished
    assert grown(recorded.tree) == grown(tree)


@on_virtual_clock
async def test_a_tree_queued_after_a_poison_task_ends_when_cancelled() -> None:
    cluster = DeadlyCluster("reset", engine={"latency_s": 10.0})
    for name in "ab":
        cluster.add(name)
    rollouts = cluster.start(range(4))
    for _ in range(100_000):
        await asyncio.sleep(0.1)
        if 0 < len(cluster.workers._waiting) < len(cluster.workers._wanted()):
            break
    (held, *_) = cluster.workers._waiting
    assert cluster.workers.cancel(held.index, "enough")
    await asyncio.wait({rollouts[held.index]}, timeout=1.0)
    assert rollouts[held.index].done()
    await asyncio.gather(*rollouts)
    await cluster.close()


@on_virtual_clock
async def test_a_cancelled_tree_does_not_delay_the_trees_queued_after_it() -> None:
    """The suspect that is tried and the next in line are cancelled at once."""
    cluster = DeadlyCluster("reset", engine={"latency_s": 10.0})
    workers = cluster.workers
    cluster.add("a")
    rollouts = cluster.start(range(5))
    for _ in range(100_000):
        await asyncio.sleep(0.1)
        if (tried := workers._poison._tried) is not None and len(workers._waiting) > 3:
            break
    assert tried is not None
    first, *others = [one.index for one in workers._waiting if one.index != tried]
    gone = [tried, first]
    for index in gone:
        rollouts[index].cancel()
    await asyncio.sleep(0.1)
    assert {one.index for one in workers._wanted()} == {*others}
    async with asyncio.timeout(1000.0):
        trees = await asyncio.gather(*(rollouts[index] for index in others))
    assert [tree.index for tree in trees] == others
    assert all(rollouts[index].cancelled() for index in gone)
    assert not workers._waiting
    await cluster.close()


@pytest.mark.parametrize(
    ("num_killers", "is_broken"), [(1, False), (2, False), (3, False), (6, True)]
)
def test_a_worker_is_restarted_after_each_of_a_few_trees_that_kill_it(
    num_killers: int, is_broken: bool
) -> None:
    """The only worker of a run. One that dies with every tree is broken itself."""

    async def main() -> list[Left]:
        cluster = DeadlyCluster("make")
        cluster.add("a")
        await asyncio.gather(
            *(cluster.workers.rollout(KILLER_TASK, index=index) for index in range(num_killers))
        )
        await cluster.close()
        return cluster.left

    restarts = Restarts(ProcessesCluster.max_restarts, "a", Backoff(1.0, 1.0))
    pauses = []
    for left in run_virtual(main()):
        if left.has_come_further:
            restarts.progressed()
        pauses.append(restarts.lost())
    assert len(pauses) >= NUM_LOSSES + NUM_TRIALS * num_killers - 1
    assert (None in pauses) is is_broken
