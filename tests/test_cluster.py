"""Trees of rollout workers equal those of an actor in the controller's process, through any loss of
workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.base.deadline import WorkClock, waiting, working
from agentenv.base.errors import DataError, EngineDeadError, TooManyFailuresError, WorkerError
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Limits, Task
from agentenv.cluster.engines import LinkedEngine
from agentenv.cluster.messages import Notice, pack, read_request
from agentenv.cluster.workers import RolloutWorkers
from agentenv.processes.link import PREFIX_BYTES, Link, frame_of
from agentenv.processes.worker_group import BEAT_S, NUM_LOSSES, NUM_TRIALS, Left
from agentenv.rollout.actor import Actor
from agentenv.rollout.actor_parts import ActorParts
from agentenv.training.workers.rollout_worker import RolloutWorker
from tests.support.links import connected, linked
from tests.support.toy import CountingEnv
from tests.support.virtual_clock import on_virtual_clock, run_virtual
from tests.test_actor import TASK, AlwaysFork, make_actor
from tests.test_journal import journal

T = TypeVar("T")
PLAN = AlwaysFork(group_size=4)
SILENCE_S = 5.0


pytestmark = pytest.mark.usefixtures("no_env_left_open")


class Cluster:
    """A controller and its workers within one process. `make` creates the actor of a worker, and
    that of the controller, whose engine all of them use."""

    def __init__(self, make: Callable[[], Actor], *, linked_engine: bool = True) -> None:
        actor = make()
        self.engine, self.told = actor.engine, list[str]()
        self.workers = RolloutWorkers(actor, silence_s=SILENCE_S, report=self.told.append)
        self._make = make
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._joined: dict[str, asyncio.Task[Left]] = {}
        self.links: dict[str, Link] = {}
        self.ends: dict[str, Link] = {}
        self.served: dict[str, RolloutWorker] = {}

    def add(self, name: str) -> None:
        ours, theirs = linked()
        actor, engine = self._make(), LinkedEngine(theirs)
        actor.engine = engine
        worker = RolloutWorker(actor, PLAN, theirs, engine, settings="s", incarnation=1)
        self.links[name], self.ends[name], self.served[name] = ours, theirs, worker
        self._serving[name] = asyncio.create_task(worker.serve())
        self._joined[name] = asyncio.create_task(self.workers.join(name, ours))

    async def kill(self, name: str) -> None:
        """The worker dies immediately, as by SIGKILL."""
        self.links[name].abort()
        self._serving[name].cancel()
        await asyncio.gather(self._serving[name], return_exceptions=True)

    async def close(self) -> None:
        await self.workers.close()
        await asyncio.gather(*self._serving.values(), return_exceptions=True)
        await asyncio.gather(*self._joined.values())
        if self.workers.journal is not None:
            await self.workers.journal.close()

    async def rollout(self, index: int, task: Task = TASK) -> TrajectoryTree:
        return await self.workers.rollout(task, index=index)


def clustered(work: Callable[[Cluster], Awaitable[T]], names: str = "ab", **actor: Any) -> T:
    """The result of `work` with workers of these names, which are closed afterward."""

    async def main() -> T:
        cluster = Cluster(lambda: make_actor(**actor))
        for name in names:
            cluster.add(name)
        try:
            return await work(cluster)
        finally:
            await cluster.close()
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return run_virtual(main())


def alone(index: int, **actor: Any) -> TrajectoryTree:
    return run_virtual(make_actor(**actor).rollout(TASK, PLAN, index=index))


def grown(tree: TrajectoryTree) -> Any:
    """The content of a tree, independent of the order in which its branches grew."""
    nodes = tree.nodes
    return sorted(
        (
            node.branch,
            [list(one.action_ids) for one in tree.path(node)],
            [list(one.observation_ids) for one in tree.path(node)],
            (node.reward, node.end, node.num_forks),
        )
        for node in nodes
    )


def test_a_tree_is_assigned_to_the_worker_with_the_fewest_trees() -> None:
    async def work(cluster: Cluster) -> list[float]:
        rollouts = [asyncio.create_task(cluster.rollout(index)) for index in range(6)]
        await asyncio.sleep(1.0)
        found = [cluster.workers.stats()[f"{name}/trees"] for name in "abc"]
        for one in rollouts:
            one.cancel()
        return found

    assert clustered(work, "abc", latency_s=100.0) == [2, 2, 2]


def test_trees_wait_for_the_first_worker() -> None:
    async def work(cluster: Cluster) -> TrajectoryTree:
        growing = asyncio.create_task(cluster.rollout(0))
        await asyncio.sleep(10.0)
        cluster.add("a")
        return await growing

    assert grown(clustered(work, "")) == grown(alone(0))


def test_a_cancelled_rollout_is_dropped_by_its_worker() -> None:
    async def drop(cluster: Cluster) -> None:
        dropped = asyncio.create_task(cluster.rollout(0))
        await asyncio.sleep(1.0)
        assert CountingEnv.num_open == 1
        dropped.cancel()
        await asyncio.sleep(1.0)
        assert dropped.cancelled()
        assert CountingEnv.num_open == 0

    clustered(drop, "a", latency_s=100.0)


def test_an_error_of_a_rollout_is_raised_in_the_controller() -> None:
    async def ask(cluster: Cluster) -> None:
        with pytest.raises(DataError, match="prompt has 10"):
            await cluster.rollout(0)

    clustered(ask, limits=Limits(max_prompt_tokens=3))


def test_a_bug_in_a_worker_is_raised_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("a bug of the core")

    monkeypatch.setattr(ActorParts, "seed_of", broken)

    async def ask(cluster: Cluster) -> None:
        with pytest.raises(RuntimeError, match=r"(?s)in broken.*a bug of the core"):
            await cluster.rollout(0)

    clustered(ask)


@on_virtual_clock
async def test_crashes_of_all_workers_are_counted_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Four of each tree with a bug, and two such trees in one worker: ten are borne."""
    buggy = Task("buggy", "toy", "q", ("a",))

    def make() -> Actor:
        actor = make_actor(limits=Limits(max_failures=0, max_failed_share=0.05))
        fine = actor.make_env

        def make_env(task: Task) -> Any:
            return fine(task) if task.id != "buggy" else {}["price"]

        actor.make_env = make_env
        return actor

    cluster = Cluster(make)
    cluster.add("a")
    cluster.add("b")
    for index in range(2):
        await cluster.rollout(index)
        await cluster.rollout(10 + index, buggy)
    with pytest.raises(TooManyFailuresError, match="the last 19"):
        await cluster.rollout(12, buggy)
    await cluster.close()
    told = [one for one in caplog.records if "its rollout fails" in one.message]
    assert len(told) == 1, "the first of all"


def test_a_dead_engine_ends_rollouts() -> None:
    async def ask(cluster: Cluster) -> None:
        rollout = asyncio.create_task(cluster.rollout(0))
        await asyncio.sleep(1.0)
        await cluster.engine.close()
        with pytest.raises(EngineDeadError):
            await rollout

    clustered(ask, engine={"latency_s": 5.0})


@settings(max_examples=settings.default.max_examples // 4)  # type: ignore[attr-defined]
@given(
    seed=st.integers(0, 10**6),
    kills=st.lists(
        st.sampled_from([0.0, 0.3, 1.0, 2.5, 7.0]), max_size=NUM_LOSSES + NUM_TRIALS - 1
    ),
)
def test_trees_of_killed_workers_equal_those_of_uninterrupted_ones(
    seed: int, kills: list[float]
) -> None:
    """Each tree is returned once, and its journaled turns are not sampled again."""
    CountingEnv.num_open = 0
    rng = Random(seed)

    async def work(cluster: Cluster) -> list[TrajectoryTree]:
        rollouts = [asyncio.create_task(cluster.rollout(index)) for index in range(4)]
        for number, seconds in enumerate(kills):
            await asyncio.sleep(seconds)
            victim = rng.choice(sorted(cluster.links))
            await cluster.kill(victim)
            del cluster.links[victim]
            await asyncio.sleep(rng.choice([0.0, 1.0]))
            cluster.add(f"again-{number}")
        return await asyncio.gather(*rollouts)

    keys: dict[str, Any] = {"latency_s": 1.0, "engine": {"latency_s": 0.5, "tokens_per_s": 50.0}}
    found = clustered(work, **keys)
    for index, tree in enumerate(found):
        assert tree.index == index
        assert grown(tree) == grown(alone(index, **keys))


def test_a_tree_resumes_on_another_worker_from_its_last_turn() -> None:
    """Only turns in progress are sampled again."""

    async def work(cluster: Cluster) -> tuple[float, float]:
        growing = asyncio.create_task(cluster.rollout(0))
        await asyncio.sleep(25.0)  # the third turn of the first branch
        under_way = cluster.engine.stats()["running"]
        await cluster.kill("a")
        await growing
        return under_way, cluster.engine.stats()["requests"]

    keys: dict[str, Any] = {"engine": {"latency_s": 10.0}}
    under_way, asked = clustered(work, **keys)
    assert under_way > 0
    assert asked == clustered(count_requests, "a", **keys) + under_way


async def count_requests(cluster: Cluster) -> float:
    await cluster.rollout(0)
    return cluster.engine.stats()["requests"]


def test_a_worker_without_heartbeats_is_lost() -> None:
    async def work(cluster: Cluster) -> tuple[str, TrajectoryTree]:
        serving, joined = cluster._serving["a"], cluster._joined["a"]
        growing = asyncio.create_task(cluster.rollout(0))
        await asyncio.sleep(1.0)
        cluster.ends["a"].send = lambda frame: None  # type: ignore[method-assign]  # SIGSTOP
        begin = asyncio.get_running_loop().time()
        why = await joined
        assert SILENCE_S < asyncio.get_running_loop().time() - begin < SILENCE_S + 4 * BEAT_S
        serving.cancel()
        assert "trees 0 " in why.rest
        return why.why, await growing

    why, tree = clustered(work, "ab", latency_s=100.0)
    assert "heartbeat for 5" in why
    assert grown(tree) == grown(alone(0, latency_s=100.0))


def test_without_workers_rollouts_end() -> None:
    async def work(cluster: Cluster) -> None:
        growing = asyncio.create_task(cluster.rollout(0))
        await asyncio.sleep(1.0)
        await cluster.kill("a")
        await asyncio.sleep(1.0)
        cluster.workers.end("each worker died")
        with pytest.raises(WorkerError, match="each worker died"):
            await growing
        with pytest.raises(WorkerError, match="each worker died"):
            await cluster.rollout(1)

    clustered(work, "a", latency_s=100.0)


def test_the_journal_of_the_controller_has_the_trees_of_all_workers(tmp_path: Path) -> None:
    async def work(cluster: Cluster) -> list[TrajectoryTree]:
        cluster.workers.journal = journal(tmp_path)
        rollouts = [asyncio.create_task(cluster.rollout(index)) for index in range(3)]
        await asyncio.sleep(2.0)
        await cluster.kill("a")
        return await asyncio.gather(*rollouts)

    async def read() -> list[TrajectoryTree]:
        again = journal(tmp_path)
        found = [again.earlier.read(index, TASK) for index in range(3)]
        assert all(one is not None and one.is_finished for one in found)
        await again.close()
        return [one.tree for one in found if one is not None]

    assert clustered(work, latency_s=1.0) == run_virtual(read())


def test_a_tree_begun_by_an_earlier_process_resumes_in_a_worker(tmp_path: Path) -> None:
    async def begin() -> None:
        first = journal(tmp_path)
        rollout = make_actor(latency_s=1.0).rollout(TASK, PLAN, index=0, record=first.record(0))
        task = asyncio.create_task(rollout)
        await asyncio.sleep(12.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await first.close()

    async def go_on(cluster: Cluster) -> TrajectoryTree:
        again = cluster.workers.journal = journal(tmp_path)
        recorded = again.earlier.read(0, TASK)
        assert recorded is not None
        assert len(recorded.tree.nodes) > 1
        return await cluster.workers.rollout(TASK, index=0, recorded=recorded)

    run_virtual(begin())
    assert grown(clustered(go_on, latency_s=1.0)) == grown(alone(0, latency_s=1.0))


def test_the_wait_of_a_linked_turn_does_not_count_as_work() -> None:
    class Waiting:
        policy_version = 0

        async def generate(self, *_: Any, **__: Any) -> Any:
            await asyncio.sleep(1.0)
            with waiting("a place"):
                await asyncio.sleep(2.0)
            await asyncio.sleep(0.5)
            raise EngineDeadError("done")

    async def work(cluster: Cluster) -> float:
        cluster.workers._actor.engine = Waiting()  # type: ignore[assignment]
        ours, theirs = linked()
        joined = asyncio.create_task(cluster.workers.join("z", ours))
        engine, clock = LinkedEngine(theirs), WorkClock()

        async def receive() -> None:
            with suppress(EOFError):
                while True:
                    engine.handle(read_request(await theirs.receive()))  # type: ignore[arg-type]

        receiving = asyncio.create_task(receive())
        with working(clock), pytest.raises(EngineDeadError):
            await engine.generate([1], make_actor().sampling, session="s")
        ours.close()
        theirs.close()
        await asyncio.gather(joined, receiving)
        return clock()

    assert clustered(work, "") == 1.5


def test_counters_of_the_workers_are_added_to_those_of_the_controller() -> None:
    async def work(cluster: Cluster) -> dict[str, float]:
        await asyncio.gather(*map(cluster.rollout, range(3)))
        await asyncio.sleep(2 * BEAT_S)
        return cluster.workers._actor.prefixes.take()

    assert clustered(work).keys() == {"prefix/turn_hits", "prefix/fork_hits"}


def test_messages_of_a_worker_are_reported_with_its_name() -> None:
    async def work(cluster: Cluster) -> list[str]:
        cluster.served["b"].link.send(pack(Notice("slow")))
        await asyncio.sleep(1.0)
        return cluster.told

    assert clustered(work) == ["b: slow"]


def test_an_undecodable_frame_of_a_worker_costs_no_tree() -> None:
    async def work(cluster: Cluster) -> list[TrajectoryTree]:
        growing = [asyncio.create_task(cluster.rollout(index)) for index in range(4)]
        await asyncio.sleep(1.0)
        cluster.ends["a"].send(b"\xc1 no message")
        found = await asyncio.gather(*growing)
        assert "a/trees" not in cluster.workers.stats()
        return found

    found = clustered(work, latency_s=1.0)
    assert list(map(grown, found)) == [grown(alone(index, latency_s=1.0)) for index in range(4)]


async def test_frames_of_any_size_arrive_in_their_order() -> None:
    read = 1 << 18  # bytes that an event loop reads at once
    sizes = [0, 5, 1, read - 3, 7, 3 * read + 11, 2, read] * 3
    frames = [bytes([n % 251]) * size for n, size in enumerate(sizes)]
    received: list[bytes] = []
    done = asyncio.Event()

    async def serve(link: Link) -> None:
        with suppress(EOFError):
            while True:
                received.append(await link.receive())
        link.close()
        done.set()

    async with connected(serve) as link:
        for frame in frames:
            link.send(frame)
            if len(frame) < 3:
                await asyncio.sleep(0.01)
        link.close()
        await done.wait()
    assert received == frames


@pytest.mark.parametrize("received", [3, 10])
async def test_a_cancelled_call_loses_no_part_of_a_frame(received: int) -> None:
    reader, frame = asyncio.StreamReader(), frame_of(b"whole")
    link = Link(reader, None)  # type: ignore[arg-type]
    reader.feed_data(frame[:received])
    receiving = asyncio.create_task(link.receive())
    await asyncio.sleep(0)
    receiving.cancel()
    reader.feed_data(frame[received:])
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert await link.receive() == b"whole"


class Writer:
    """Keeps the data written."""

    transport = SimpleNamespace(is_closing=lambda: False)

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


async def test_frames_in_quick_succession_are_sent_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first at once, the others as soon as the time is over in which they are gathered."""
    monkeypatch.setattr("agentenv.processes.link.GATHER_S", 0.3)
    writer: Any = Writer()

    def written() -> list[int]:
        return [len(data) // (PREFIX_BYTES + 1) for data in writer.written]

    link = Link(asyncio.StreamReader(), writer)
    for _ in range(100):
        link.send(b"x")
        await asyncio.sleep(0)
    assert written() == [1]
    await asyncio.sleep(0.4)
    assert written() == [1, 99]

    link.send(b"x")
    link.flush()  # an urgent frame is flushed
    assert written() == [1, 99, 1]
