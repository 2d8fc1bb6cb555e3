"""The archive of the trees of a run."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from agentenv.launchers import train
from agentenv.rollout.archive import steps_of
from agentenv.rollout.archive_reader import columns_of, read_step
from tests.support.runs import rows_of, trees_of


def test_every_tree_of_each_step_is_kept(finished: Path) -> None:
    steps = [read_step(path) for path in steps_of(finished / "trees").values()]
    rows = {row["step"]: row for row in rows_of(finished) if "learner/loss" in row}
    assert [step.header.step for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert step.is_whole
        number = step.header.step
        assert sorted(entry.tree for entry in step.entries) == trees_of(finished, number)
        fates = [entry.fate for entry in step.entries]
        for entry, kept in zip(step.entries, step.trees(), strict=True):
            is_equal = kept.credit is not None and not any(kept.credit.adv_pos)
            assert entry.why == ("with equal returns" if is_equal else "")
            assert entry.fate == "trained"
            assert kept.tree.task.id == entry.task_id
            assert bool(kept.tree.scored) == (entry.fate == "trained")
        if number in rows:
            row = rows[number]
            assert step.header.metrics["learner/loss"] == row["learner/loss"]
            assert fates.count("trained") == row["learner/num_trained"]


def test_the_learners_logprobs_are_of_the_same_tokens(finished: Path) -> None:
    """The first step trains the untouched model; its scripted engine makes log-probs up."""
    trained = [
        kept
        for path in steps_of(finished / "trees").values()
        for kept in read_step(path).trees()
        if kept.fate == "trained" and not kept.why  # no pass has computed the others
    ]
    assert trained
    for kept in trained:
        assert kept.credit is not None
        for path in kept.tree.trajectories():
            columns = columns_of(kept, path.leaf)
            counted = columns.weight > 0
            assert np.isfinite(columns.learner_logprobs[counted]).all()
            assert (columns.learner_logprobs[counted] < 0).all()
            assert np.isnan(columns.learner_logprobs[~counted]).all()
            credit = columns.adv_pos + columns.adv_neg
            total = sum(kept.credit.advantages[path.leaf.index : path.leaf.index + 1])
            alone = counted & (columns.weight == 1)
            assert all(math.isclose(one, total) for one in credit[alone])


@pytest.mark.parametrize("algorithm", ["arpo", "reinforce_pp"])
@pytest.mark.parametrize("equal", ["count", "drop"])
def test_the_number_of_optimizer_steps_matches_the_announced_one(
    warehouse: Path, here: None, capsys: pytest.CaptureFixture[str], algorithm: str, equal: str
) -> None:
    """Groups of two, of which some have equal returns; of a step perhaps all."""
    keys = ["algorithm.group_size=2", "learner.groups_per_minibatch=1", "train.num_steps=6"]
    name = f"steps-{algorithm}-{equal}"
    keys += [f"algorithm.name={algorithm}", f"queue.equal_groups={equal}", f"run.name={name}"]
    assert train.main([str(warehouse), *keys]) == 0
    run = warehouse.parent / "runs" / name
    captured = capsys.readouterr()
    said = " ".join((captured.out + captured.err).split())
    said_at_start = re.search(r"trajectories in (up to )?(\d+) optimizer steps", said)
    assert said_at_start is not None
    rows = [row for row in rows_of(run) if "trees/offered" in row]
    taken = [row.get("learner/num_steps", 0) for row in rows]
    steps = map(read_step, steps_of(run / "trees").values())
    fates = [entry.fate for step in steps for entry in step.entries]
    if equal == "count":
        assert said_at_start.groups() == (None, "2")
        assert taken == [2.0] * 6
        assert fates == ["trained"] * 12
        assert rows[-1]["trees/equal"] == sum(row["learner/num_equal_groups"] for row in rows)
        assert rows[-1]["trees/equal"] > 0
    else:
        assert said_at_start.groups() == ("up to ", "2")
        assert taken == [row.get("learner/num_trained", 0) for row in rows]
        assert set(fates) == {"trained", "filtered"}
