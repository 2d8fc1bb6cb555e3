"""The benchmarks that compare schedulers, forms of trees and starts measure what they say."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv.actor import Actor
from agentenv.errors import ConfigError
from agentenv.reference.algorithms import ReleasedARPO
from agentenv.tree import TrajectoryTree
from agentenv.types import Completion, SamplingParams, Task
from agentenv.virtual_clock import run_virtual
from benchmarks import bench
from benchmarks.parts import makespan, transport

GROUP = 8


class Watched(makespan.MadeUpEngine):
    """Knows when each turn began and ended."""

    def __init__(self, pool: makespan.Pool) -> None:
        super().__init__(pool)
        self.turns: list[tuple[float, float]] = []

    async def generate(self, *arguments: Any, **keys: Any) -> Completion:
        begin = asyncio.get_running_loop().time()
        done = await super().generate(*arguments, **keys)
        self.turns.append((begin, asyncio.get_running_loop().time()))
        return done


def lockstep(num_tasks: int) -> tuple[list[TrajectoryTree], Watched]:
    async def grow() -> tuple[list[TrajectoryTree], Watched]:
        pool = makespan.Pool(makespan.PLENTY)
        engine = Watched(pool)
        made, rng = [], Random(1)

        def make(task: Task) -> Any:
            made.append(makespan.MadeUpEnv(pool, Random(rng.random())))
            return made[-1]

        renderer: Any = makespan.MadeUpRenderer()
        actor = Actor(engine, renderer, make, makespan.LIMITS, SamplingParams(max_tokens=1), 0)
        plan = ReleasedARPO(group_size=GROUP, initial_rollouts=4).plan(makespan.VOCABULARY)
        tasks = [Task(str(place), "made-up", "?", ("",)) for place in range(num_tasks)]
        return await makespan.LockStep(actor, plan).rollout(tasks), engine

    return run_virtual(grow())


def test_the_barrier_grows_whole_groups() -> None:
    trees, _ = lockstep(4)
    for tree in trees:
        assert len(tree.leaves()) == GROUP == tree.num_started
        assert tree.num_live == 0
        assert {leaf.end for leaf in tree.leaves()} == {"terminated"}
    assert sum(tree.num_forks for tree in trees) > 0


def test_nobody_passes_the_barrier() -> None:
    _, engine = lockstep(4)
    begins = sorted({begin for begin, _ in engine.turns})
    for before, after in pairwise(begins):
        ends = [end for begin, end in engine.turns if begin == before]
        assert max(ends) <= after


def test_a_trajectory_is_a_path_of_what_was_sampled() -> None:
    trees, engine = lockstep(2)
    nodes = [node for tree in trees for node in tree.nodes[1:]]
    assert len(nodes) == len(engine.turns)
    assert all(len(node.action_ids) == len(node.entropies) for node in nodes)


def test_without_slots_to_wait_for_ours_is_the_bound_and_the_barrier_is_not() -> None:
    size = makespan.Size(prompts=4, slots=makespan.PLENTY, places=makespan.PLENTY)
    figures = makespan.measure(size, [0])
    assert figures.ours_s == figures.bound_s
    assert figures.lockstep_s > figures.bound_s


def test_forms_hold_the_same_tree() -> None:
    tree = transport.recorded_trees()[0]
    forms = transport.forms()
    pack, read = forms["frame"]
    assert read(pack(tree)) == tree
    pack, read = forms["pickle"]
    assert read(pack(tree)) == tree
    flat = forms["flat"][1](forms["flat"][0](tree))
    paths = list(tree.trajectories())
    assert [len(one.token_ids) // 4 for one in flat] == [path.num_tokens for path in paths]
    lists = forms["lists"][1](forms["lists"][0](tree))
    assert [one["token_ids"] for one in lists] == [path.token_ids for path in paths]
    learner = forms["learner"][1](forms["learner"][0](tree))
    assert len(learner.tree.token_ids) == 4 * tree.num_tokens  # int32


def test_figures_alone_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["transport", "--repeats", "1", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flat"]["bytes_a_token"] > found["frame"]["bytes_a_token"]
    assert found["json"]["bytes_over_frame"] > 2


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("folder", "--json folder: Is a directory; name a file that can be written"),
        ("loop", "--json loop: Too many levels of symbolic links; name a file that can be"),
        ("nowhere/figures.json", "--json nowhere/figures.json: there is no such folder"),
        ("old.json", "measured"),
        ("new.json", "measured"),
    ],
)
def test_what_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    told: str,
) -> None:
    """And what can be is left as it was until there are figures."""

    def measure(*_: Any) -> int:
        raise ConfigError("measured")

    monkeypatch.setattr(bench, "run_plain", measure)
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    Path("old.json").write_text("of another day")
    assert bench.main(["transport", "--json", file]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert Path("old.json").read_text() == "of another day"
    assert not Path("new.json").exists()


def test_places_go_to_the_smallest_order_and_none_is_lost_to_who_is_cancelled() -> None:
    async def main() -> list[str]:
        pool, came = makespan.Pool(1), list[str]()

        async def take(name: str, order: makespan.Order) -> None:
            async with pool.place("a slot", order):
                came.append(name)
                await asyncio.sleep(1)

        orders = {"root": (1, 1), "new": (0, 5), "old": (0, 2), "oldest": (0, 1)}
        async with pool.place("a slot"):
            tasks = {name: asyncio.create_task(take(name, order)) for name, order in orders.items()}
            await asyncio.sleep(1)
            tasks["new"].cancel()  # while it waits
        tasks["oldest"].cancel()  # when it has just been given
        await asyncio.wait(tasks.values())
        return came

    assert run_virtual(main()) == ["old", "root"]
