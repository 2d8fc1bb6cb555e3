"""Ranks of the learner that Ray places on two nodes, with the embedded engine: they train like
ranks of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.launchers import train
from tests.commands.test_ray import Nodes
from tests.support.runs import rows_of
from tests.support.warehouse import ROOT

pytestmark = pytest.mark.usefixtures("here")

CONFIG = ROOT / "tests" / "support" / "small_quickstart.toml"
KEYS = [
    "sft.stages=[{rows='copy',num_steps=2}]", "sft.gate_threshold=0", "train.num_steps=2",
    "queue.groups_per_step=4", "learner.groups_per_minibatch=4", "learner.num_ranks=2",
    "learner.optimizer=adamw", "sft.optimizer.optimizer=adamw", "learner.zero_stage=1",
    "eval.sets={}", "queue.max_staleness=0", "env.kwargs={}", "limits.max_turns=1",
    "env.id=benchmarks.parts.overhead:LookUpEnv", "env.trial=false",
]  # fmt: skip


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = Nodes()
    yield found
    found.close()


def trained(folder: Path, name: str, *overrides: str) -> list[dict[str, float]]:
    """The rows of a run that ended well."""
    keys = [*KEYS, f"run.dir={folder}/runs", f"run.name={name}", *overrides]
    assert train.main([str(CONFIG), *keys]) == 0
    return rows_of(folder / "runs" / name)


def test_ranks_on_two_nodes_train_like_those_of_one_machine(tmp_path: Path, nodes: Nodes) -> None:
    """The cold start is equal; then, on an environment whose grader draws lots, both ranks take
    part in updates, whose weights the engine serves."""
    for _ in range(3):
        nodes.add()
    ray = ["cluster.kind=ray", f"cluster.address={nodes.address}", "cluster.host=127.0.0.1"]
    more = ["cluster.learner=true", "cluster.gpus_per_rank=0", "cluster.workers=1"]
    far = trained(tmp_path, "far", *ray, *more)
    here = trained(tmp_path, "here", "train.num_steps=0")
    losses = [[row["sft/loss"] for row in rows if "sft/loss" in row] for rows in (far, here)]
    assert len(losses[0]) == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    steps = [row for row in far if "learner/loss" in row]
    assert [row["policy_version"] for row in steps] == [2, 3]  # the cold start made the first
    assert all(row["learner/grad_norm"] > 0 for row in steps)
    assert steps[1]["parity/logprob_gap_max"] < 1e-3
