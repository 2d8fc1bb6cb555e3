"""A journal of several processes that has lost a frame, whichever that is: its tree is one that was
there at some moment, or it is rolled out again."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.base.offload import in_thread
from agentenv.base.untrusted import packed
from agentenv.contract.plan import RolloutPlan
from agentenv.rollout.actor import Actor
from agentenv.rollout.frames import HEADER, Leased, TreeFrames, frames_of
from agentenv.rollout.journal import Journal
from tests.support.virtual_clock import run_virtual
from tests.test_cluster import Cluster
from tests.test_journal import PLANS, TASK, Failing, content, journal, make_actor, read

Frames = list[tuple[Path, int, int]]  # file, offset of the head, size with the head


def grow_for(
    folder: Path, plan: RolloutPlan, seconds: float, incarnation: int, actor: Actor | None = None
) -> None:
    """A process that ends after so many seconds, and resumes the state of the one before."""

    async def scenario() -> None:
        written = journal(folder, incarnation=incarnation)
        recorded = written.earlier.read(3, TASK)
        if recorded is None or not recorded.is_finished:
            written.append(Leased(0, [0]))
            work = (actor or make_actor()).rollout(
                TASK, plan, index=3, record=written.record(3), recorded=recorded
            )
            task = asyncio.ensure_future(work)
            await asyncio.wait({task}, timeout=seconds)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await written.close()

    run_virtual(scenario())


def frames_in(folder: Path) -> Frames:
    return [
        (path, offset - HEADER.size, size + HEADER.size)
        for path in sorted(folder.glob("*.frames"))
        for offset, size, _ in frames_of(path.read_bytes())
    ]


def state(folder: Path) -> bytes | None:
    """The state of the tree in the journal; it begins no new file."""
    found = read(folder)
    for path in folder.glob("*.frames"):
        if not path.stat().st_size:
            path.unlink()
    return None if found is None else packed(found)


def prefixes(folder: Path) -> set[bytes | None]:
    """All states that the tree was in."""
    found, frames, rest = {state(folder)}, frames_in(folder), folder.with_name("prefix")
    shutil.copytree(folder, rest)
    for path, offset, _ in reversed(frames):
        with (rest / path.name).open("r+b") as file:
            file.truncate(offset)
        found.add(state(rest))
    shutil.rmtree(rest)
    return found


def check_each_loss(folder: Path) -> int:
    """Lose each frame in turn, damaged or without a trace; how many of the trees were accepted."""
    right, num_accepted = prefixes(folder), 0
    for path, offset, size in frames_in(folder):
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[offset + size // 2] ^= 0xFF
        for data in (bytes(damaged), whole[:offset] + whole[offset + size :]):
            path.write_bytes(data)
            found = state(folder)
            assert found in right, f"{path.name} at {offset}"
            num_accepted += found is not None
        path.write_bytes(whole)
    return num_accepted


@settings(max_examples=settings.default.max_examples // 2)  # type: ignore[attr-defined]
@given(
    name=st.sampled_from(sorted(PLANS)),
    seconds=st.lists(st.floats(0.0, 12.0), min_size=2, max_size=3),
    fails=st.booleans(),
)
def test_a_tree_with_a_lost_frame_has_an_earlier_state_or_is_missing(
    tmp_path_factory: pytest.TempPathFactory, name: str, seconds: list[float], fails: bool
) -> None:
    folder = tmp_path_factory.mktemp("journal") / "whole"
    for number, one in enumerate(seconds):
        actor = make_actor(Failing) if fails else make_actor()
        grow_for(folder, PLANS[name], one, number + 1, actor)
    check_each_loss(folder)


def test_a_restarted_tree_without_its_first_frame_is_not_mixed(tmp_path: Path) -> None:
    """The first frame of the second process, at each moment at which the first one may end."""
    num_accepted = 0
    for number in range(26):
        folder = tmp_path / str(number)
        grow_for(folder, PLANS["forks"], 0.4 * number, 1)
        grow_for(folder, PLANS["forks"], 3.0, 2)
        files = sorted(folder.glob("*.frames"))
        if len(files) < 2:
            continue
        data = bytearray(files[1].read_bytes())
        for at, size, _ in list(frames_of(bytes(data)))[:2]:  # also that of another tree's lease
            data[at + size // 2] ^= 0xFF
        files[1].write_bytes(data)
        num_accepted += read(folder) is not None
    assert num_accepted == 0


def test_a_tree_that_changed_workers_and_lost_a_frame(tmp_path: Path) -> None:
    """One process of the controller: a restarted tree has the same incarnation."""

    async def main(folder: Path, seed: int) -> None:
        rng, cluster = Random(seed), Cluster(lambda: make_actor())
        cluster.workers.journal = journal(folder)
        cluster.add("a")
        growing = asyncio.create_task(cluster.workers.rollout(TASK, index=3))
        for number in range(3):
            await asyncio.sleep(rng.uniform(0.0, 4.0))
            await cluster.kill("a" * (number + 1))
            cluster.add("a" * (number + 2))
        await asyncio.sleep(rng.uniform(0.0, 8.0))
        growing.cancel()
        await cluster.close()

    for seed in range(6):
        folder = tmp_path / str(seed) / "whole"
        run_virtual(main(folder, seed))
        check_each_loss(folder)


def test_a_tree_restarted_in_its_worker_is_complete(tmp_path: Path) -> None:
    """Its task has another prompt by now; the controller requests it only once."""
    grow_for(tmp_path, PLANS["independent"], 4.0, 1)

    async def main() -> tuple[Any, list[str]]:
        cluster = Cluster(lambda: make_actor())
        again = cluster.workers.journal = journal(tmp_path, incarnation=2)
        recorded = again.earlier.read(3, TASK)
        assert recorded is not None
        recorded.tree.nodes[0].observation_ids.append(7)
        cluster.add("a")
        tree = await cluster.workers.rollout(TASK, index=3, recorded=recorded)
        await cluster.close()
        return tree, cluster.told

    tree, told = run_virtual(main())
    assert told == []
    found = read(tmp_path)
    assert found is not None
    assert found.is_finished
    assert content(found.tree) == content(tree)


def test_the_frames_of_a_tree_are_those_since_its_last_start() -> None:
    frames = TreeFrames()
    for tag in (1, 2, 2, 1, 2):
        frames.add(tag, b"")
    assert len(frames) == 2


# the end of a journal


@pytest.mark.parametrize("had_any", [True, False])
async def test_a_closed_journal_blocks_no_caller(tmp_path: Path, had_any: bool) -> None:
    written: Journal = journal(tmp_path)
    if had_any:
        written.append(Leased(1, [1]))
        await written.commit()
    await written.close()
    await written.commit()  # nothing is missing
    with pytest.raises(RuntimeError, match="is closed"):
        await written.rotate(1)
    written.append(Leased(2, [2]))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="is closed"):
            await written.commit()
    with pytest.raises(RuntimeError, match="is closed"):
        await written.rotate(1)
    await written.close()


async def test_a_commit_pending_at_the_close_of_the_journal_completes(tmp_path: Path) -> None:
    written: Journal = journal(tmp_path)
    written.append(Leased(1, [1]))
    waiting = asyncio.create_task(written.commit())
    await asyncio.sleep(0)
    await written.close()
    await waiting


async def test_the_journal_has_its_own_thread(tmp_path: Path) -> None:
    """Tools and files that hang may hold up all those that the loop shares."""
    ends = threading.Event()
    hanging = [asyncio.create_task(in_thread(ends.wait)) for _ in range(64)]
    await asyncio.sleep(0.1)
    written = Journal(tmp_path, settings="s", incarnation=1)
    try:
        written.append(Leased(1, [1]))
        await written.commit()
        await written.rotate(0)
        assert await written.recall(0, TASK) is None
        await written.close()
    finally:
        ends.set()
        await asyncio.gather(*hanging)
