"""What a plan learns in a run: on the trees that begin later, in checkpoints, and once for each
tree, also if a process is killed. Whole runs under the virtual clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.run.checkpoints import load_state
from agentenv.base.errors import AgentEnvError, ConfigError
from agentenv.base.tree import PLAN, TrajectoryTree
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.check import check_algorithm
from agentenv.rollout.archive import steps_of
from agentenv.rollout.archive_reader import read_step
from agentenv.training.loop.state import RunState
from agentenv.training.reports.recorder import RunRecorder
from tests.commands.test_two_lines import killed, never, when
from tests.support.toy_run import ToyWorld


class Counting(ARPO, frozen=True, kw_only=True, tag="counting"):
    """Knows the trees of the run so far."""

    def learn(self, state: dict[str, Any], trees: Sequence[TrajectoryTree]) -> dict[str, float]:
        state["trees"] = [*state.get("trees", ()), *(tree.index for tree in trees)]
        state[PLAN] = {"seen": len(state["trees"])}
        return {"plan/seen": float(len(state["trees"]))}


def test_a_plan_learns_from_each_tree_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunRecorder, "draw", lambda self: [])
    keys = [f"algorithm.name={__name__}:Counting", "queue.groups_per_step=2"]
    first = killed(tmp_path / "run", ToyWorld(), when(lambda run: run.state.step == 3), *keys)
    done = killed(first, ToyWorld(), never, *keys)
    state = load_state(done / "checkpoints" / "step-000004", RunState)
    assert state.plan["trees"] == list(range(8))
    steps = {step: read_step(path).trees() for step, path in steps_of(done / "trees").items()}
    known = {
        step: [kept.tree.root.info.get(PLAN) for kept in trees] for step, trees in steps.items()
    }
    assert known[1] == [None, None]
    for step in (3, 4):  # begun after an update, at most one before the last
        assert {one["seen"] for one in known[step]} <= {2 * step - 4, 2 * step - 2}
    rows = map(json.loads, (done / "metrics.jsonl").read_text().splitlines())
    assert [row["plan/seen"] for row in rows if "plan/seen" in row] == [2, 4, 6, 8]


class Failing(Counting, frozen=True, kw_only=True, tag="failing"):
    def learn(self, state: dict[str, Any], trees: Sequence[TrajectoryTree]) -> dict[str, float]:
        metrics = super().learn(state, trees)
        if len(state["trees"]) == 4:
            raise ZeroDivisionError
        return metrics


class Unkept(Counting, frozen=True, kw_only=True, tag="unkept"):
    def learn(self, state: dict[str, Any], trees: Sequence[TrajectoryTree]) -> dict[str, float]:
        state["random"] = object()
        return {}


def test_a_plan_that_cannot_learn_ends_the_run_with_its_update_saved(tmp_path: Path) -> None:
    keys = [f"algorithm.name={__name__}:Failing", "queue.groups_per_step=2"]
    with pytest.raises(ExceptionGroup) as found:
        killed(tmp_path / "run", ToyWorld(), never, *keys)
    assert found.group_contains(AgentEnvError, match="Failing.learn")
    state = load_state(tmp_path / "run" / "checkpoints" / "step-000002", RunState)
    assert (state.step, state.position) == (2, 4)


def test_a_state_that_no_checkpoint_can_keep_is_refused_before_a_run() -> None:
    with pytest.raises(ConfigError, match=r"Unkept\.learn.*a checkpoint keeps"):
        check_algorithm(Unkept())
