"""A fault storm costs only time, and the counts of losses are right."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import msgspec
import pytest

from agentenv.base.installation import PACKAGES
from agentenv.rollout.frames import Began, Counts, Finished, Frame, Leased, Mark, Trained
from benchmarks import bench
from benchmarks.parts import chaos
from benchmarks.parts.chaos import Witness
from tests.support.forks import project
from tests.support.forkserver import Forked
from tests.support.killing import Plan


def start_training(arguments: Sequence[str], output: int) -> Forked:
    """As a fork, which imports nothing."""
    plan = msgspec.json.encode(Plan(own_rank=True)).decode()
    return Forked(
        project().fork(
            ["-m", "tests.support.killing", plan, *arguments],
            environment=os.environ | {"PYTHONPATH": str(PACKAGES)},
            folder=PACKAGES,
            output=output,
        )
    )


@pytest.mark.promise
def test_a_short_storm_loses_and_duplicates_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chaos, "start_training", start_training)
    assert bench.main(["chaos", "--short", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["lost"], found["duplicated"], found["wrong"]) == (0, 0, [])
    assert found["goodput"] > 0 < found["calm_goodput"]
    assert found["killed"] > 0
    events = {name for name, _ in chaos.EVENTS}
    assert {"controller killed": 2, "learner killed": 2}.items() <= found["ended"].items()
    assert events <= found["ended"].keys()


def seen(*starts: list[Frame]) -> Witness:
    witness = Witness()
    for frames in starts:
        witness.begin()
        for frame in frames:
            witness.add(frame)
    return witness


def begun(tree: int) -> list[Frame]:
    counts, marks = Counts(1, 1, 0, 0, 0), [Mark(1, tree, place) for place in (0, 1)]
    return [Began(tree, f"t{tree}", 0, "s", marks[0]), Finished(tree, 0, [], counts, marks[1])]


def test_a_repeated_step_is_not_a_duplicate() -> None:
    first = [*begun(0), *begun(1), Leased(0, [0]), Trained(0, 1, [0]), Leased(1, [1])]
    witness = seen(first, [Leased(0, [0]), Leased(1, [1])])
    assert witness.line() == [0, 1]
    assert witness.lost([0, 1]) == witness.duplicated() == []


def test_lost_and_duplicated_groups_are_detected() -> None:
    witness = seen([*begun(0), Leased(0, [0])], [*begun(0), Leased(1, [0]), Leased(2, [2])])
    assert witness.duplicated() == [0]
    assert witness.lost([0, 1, 2]) == [1, 0]
