"""Ranks of the learner that Ray places on two nodes, beside the embedded engine: what they train is
what ranks of this machine do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launchers import train
from tests.launchers.test_ray import Nodes
from tests.support.runs import rows_of
from tests.support.warehouse import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("here")]

CONFIG = ROOT / "tests" / "support" / "small_quickstart.toml"
KEYS = [
    *("sft.stages=[{rows='copy',num_steps=2}]", "sft.gate_threshold=0", "train.num_steps=2"),
    *("queue.groups_per_step=4", "learner.groups_per_minibatch=4", "learner.num_ranks=2"),
    *("learner.optimizer=adamw", "learner.zero_stage=1", "eval.sets={}", "queue.max_staleness=0"),
]


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
    return [row for row in rows_of(folder / "runs" / name) if "learner/loss" in row]


def test_ranks_on_two_nodes_train_as_those_of_one_machine_do(tmp_path: Path, nodes: Nodes) -> None:
    for _ in range(3):
        nodes.add()
    ray = ["cluster.kind=ray", f"cluster.address={nodes.address}", "cluster.host=127.0.0.1"]
    more = ["cluster.learner=true", "cluster.gpus_per_rank=0", "cluster.workers=1"]
    far = trained(tmp_path, "far", *ray, *more)
    here = trained(tmp_path, "here")
    assert len(far) == len(here) == 2
    for one, other in zip(far, here, strict=True):
        for name in ("learner/loss", "learner/grad_norm", "reward/mean"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    placed = (tmp_path / "runs" / "far" / "run.log").read_text()
    assert "rank-0" in placed or "rank" in placed
