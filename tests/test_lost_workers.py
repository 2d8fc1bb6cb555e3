"""The trees and messages of a worker that is lost or leaves."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from agentenv.base.errors import TooManyFailuresError
from agentenv.base.types import Limits
from agentenv.cluster.engines import _Held
from agentenv.cluster.messages import Notice, RolloutEnded, WorkerFigures, pack
from agentenv.cluster.workers import RolloutWorkers
from agentenv.processes.link import Link
from agentenv.processes.supervisor import LocalPlacement, Supervisor
from agentenv.processes.worker_group import Left, WorkerGroup, WorkerSpec
from agentenv.rollout.failure_log import Failure
from tests.support.links import connected, linked
from tests.support.polling import until
from tests.support.virtual_clock import on_virtual_clock
from tests.test_actor import make_actor
from tests.test_cluster import Cluster, Writer

pytestmark = pytest.mark.usefixtures("no_env_left_open")


@on_virtual_clock
async def test_a_lost_worker_may_have_made_progress_without_a_finished_tree() -> None:
    cluster = Cluster(lambda: make_actor(engine={"latency_s": 10.0}))
    left = list[Left]()
    cluster.add("a")
    growing = asyncio.create_task(cluster.rollout(0))
    for name, seconds in (("a", 15.0), ("b", 1.0)):
        await asyncio.sleep(seconds)
        await cluster.kill(name)
        left.append(await cluster._joined[name])
        cluster.add(chr(ord(name) + 1))
    growing.cancel()
    await cluster.close()
    assert [one.num_ended for one in left] == [0, 0]
    assert [one.has_come_further for one in left] == [True, False]


class Kept(Supervisor):
    """Its processes come up at once."""

    async def _start(self, number: int) -> Link:
        await asyncio.sleep(0)
        return cast(Link, linked()[0])


class NullPlacement(LocalPlacement):
    async def ended(self, name: str) -> str:
        return "is gone"

    async def stop(self, name: str) -> None:
        pass


@pytest.mark.parametrize("has_come_further", [True, False])
@on_virtual_clock
async def test_only_consecutive_losses_without_progress_count(
    has_come_further: bool, tmp_path: Path
) -> None:
    """A machine preempted every half hour, with trees of an hour, is not a broken worker."""

    class Lost(WorkerGroup[Any]):
        async def join(self, name: str, link: Link) -> Left:
            await asyncio.sleep(1800.0)
            return Left("it is gone", 0, "", has_come_further=has_come_further)

    members = Lost(lambda text: None)
    spec = WorkerSpec("module", "worker", "worker", 1, 10.0, 3, "cluster")
    setup = msgspec.defstruct("Setup", [])()
    workers = Kept(spec, members, setup, tmp_path, lambda text: None, NullPlacement())
    workers._kept = {0}
    starting = asyncio.create_task(workers._start(0))
    keeping = asyncio.create_task(workers._keep(0, starting))
    await asyncio.sleep(12 * 3600.0)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert members.num_lost == 4 if not has_come_further else members.num_lost > 20
    assert bool(members.reason) is not has_come_further


async def test_frames_of_a_drained_worker_are_received_until_it_ends() -> None:
    """Its last turns are on their way when its time is over."""
    told: list[str] = []
    workers = RolloutWorkers(make_actor(), silence_s=60.0, report=told.append)
    left: list[Left] = []

    async def serve(link: Link) -> None:
        left.append(await workers.join("a", link))

    async with connected(serve) as link:
        link.send(pack(WorkerFigures()))
        await asyncio.sleep(0.1)
        workers.leave("a", 0.2)
        with suppress(EOFError):
            while True:
                await link.receive()
        for number in range(3):
            link.send(pack(Notice(f"frame {number}")))
            await asyncio.sleep(0.03)
        link.close()
        await until(lambda: left)
    assert told[1:] == [f"a: frame {number}" for number in range(3)]
    assert left[0].is_drained


async def test_a_drained_worker_that_does_not_end_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentenv.processes.link.LAST_S", 0.3)
    ends: list[str] = []

    async def serve(link: Link) -> None:
        link.close(receives=True)
        link.send(b"is lost")
        try:
            await link.receive()
        except EOFError as error:
            ends.append(str(error))

    async with connected(serve) as link:
        with pytest.raises(EOFError):
            await link.receive()
        await until(lambda: ends)
        link.abort()
    assert len(ends) == 1


async def test_the_version_of_a_server_is_sent_before_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not wait for other frames to go with."""
    monkeypatch.setattr("agentenv.processes.link.GATHER_S", 10.0)
    writer, server = cast(Any, Writer()), cast(Any, SimpleNamespace(policy_version=3))
    link = Link(asyncio.StreamReader(), writer)
    link.send(b"x")
    await asyncio.sleep(0)
    assert len(writer.written) == 1
    held = _Held(cast(Any, None), link, 7, server)
    for begin_or_end in (held.begin, held.end):
        before = len(writer.written)
        begin_or_end()
        assert len(writer.written) == before + 1


@on_virtual_clock
async def test_trees_of_a_lost_worker_resume_before_its_turns_have_ended() -> None:
    """An engine may take long to abort its requests."""
    cluster = Cluster(make_actor)
    slow = asyncio.Event()

    class Slow:
        policy_version = 0

        async def generate(self, *_: Any, **__: Any) -> Any:
            try:
                await asyncio.sleep(1000.0)
            finally:
                await slow.wait()

    cluster.workers._actor.engine = Slow()  # type: ignore[assignment]
    cluster.add("a")
    growing = asyncio.create_task(cluster.rollout(0))
    await asyncio.sleep(1.0)
    await cluster.kill("a")
    await asyncio.sleep(1.0)
    assert cluster.workers.places()[0] == ""
    cluster.add("b")
    await asyncio.sleep(1.0)
    assert cluster.workers.places()[0] == "b"
    assert cluster.workers.cancel(0, "enough")
    slow.set()
    assert (await growing).is_cancelled
    await cluster.close()


@on_virtual_clock
async def test_too_many_failures_end_the_run_even_without_a_live_tree() -> None:
    """The last failure comes from a tree that has ended, in a worker that has no other."""
    a_bug = Failure("buggy", "CrashError", "a bug", "env.py:1", "", "bug", True, True)
    cluster = Cluster(lambda: make_actor(limits=Limits(max_failures=0)))
    problem = TooManyFailuresError("too many")

    def add(failure: Failure | None, **_: Any) -> None:
        if failure is not None and failure.task_id == "buggy":
            raise problem

    cluster.workers._actor.failures.add = add  # type: ignore[method-assign]
    cluster.add("a")
    await cluster.rollout(0)
    (worker,) = cluster.workers.workers.values()
    assert not worker.trees
    cluster.ends["a"].send(pack(RolloutEnded(a_bug)))
    await asyncio.sleep(1.0)
    with pytest.raises(TooManyFailuresError, match="too many"):
        await cluster.rollout(1)
    growing = asyncio.create_task(cluster.rollout(2))
    with pytest.raises(TooManyFailuresError, match="too many"):
        await growing
    await cluster.close()
