from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentenv.assembly.run.checkpoints import Checkpoints
from agentenv.assembly.run.kept import checkpoint_to_resume, keep_best, set_aside_after
from agentenv.base.disk import finished_folder
from agentenv.base.errors import ConfigError, DataError, LearnerError
from agentenv.learners.keys import SAVED_FILE
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.checkpoint import save
from agentenv.learners.ranks.rank import Rank
from agentenv.learners.ranks.saved_checkpoint import Checkpoint, restore
from agentenv.learners.ranks.trainer import Trainer
from tests.learners import ranks
from tests.support.forks import Command
from tests.support.toy_rank import saved_meta

ROOT = Path(__file__).parents[2]
CONFIG = ranks.two_ranks(num_ranks=1)


def load(trainer: Trainer, directory: Path) -> None:
    saved = Checkpoint(directory)
    restore(trainer.backend, saved)
    trainer.moved = saved.meta.moved


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(
    model_dir: Path, tmp_path: Path
) -> None:
    whole, stopped = (ranks.plain_torch(model_dir, CONFIG, torch.float32) for _ in range(2))
    ranks.train(stopped, ranks.uneven_trees(4), 3)
    save(stopped.backend, saved_meta(moved=True), tmp_path / "checkpoint")
    resumed = ranks.plain_torch(model_dir, CONFIG, torch.float32)
    load(resumed, tmp_path / "checkpoint")
    ranks.train(whole, ranks.uneven_trees(4), 3)
    for trainer in (whole, resumed):
        ranks.train(trainer, ranks.uneven_trees(6), 3)
    for name, weight in ranks.weights_of(whole).items():
        assert torch.equal(ranks.weights_of(resumed)[name], weight)


def test_a_resumed_rank_detects_whether_its_weights_are_published(
    model_dir: Path, tmp_path: Path
) -> None:
    """Else it takes the engine's log-probs for its own, or hands out weights under another's
    version."""
    init = wire.Init.of(
        ranks.two_ranks(num_ranks=1, zero_stage=0), ranks.ALGORITHM, str(model_dir), seed=0
    )
    rank, resumed = Rank(init), Rank(init)
    published = wire.WriteModel(str(tmp_path / "copy"), publish=False, unmoved=True)
    rank.run(wire.Update([ranks.encoded(ranks.uneven_trees(4))], 1.0))
    for moved in (True, False):
        rank.run(wire.Save(str(tmp_path / f"moved-{moved}")))
        resumed.run(wire.Load(str(tmp_path / f"moved-{moved}")))
        if moved:
            with pytest.raises(LearnerError, match="longer the published"):
                resumed.run(published)
        else:
            resumed.run(published)
        rank.count_version()


@pytest.mark.timeout(3600)  # a machine that is busy with other things kills as well
@pytest.mark.parametrize(
    ("kills", "stage"), [(6, ()), (2, ("2",)), (2, ("3",))], ids=["one rank", "zero-2", "zero-3"]
)
def test_kill_9_at_random_moments_of_saving_loses_nothing(
    kills: int, stage: tuple[str, ...], tmp_path: Path, repeats: int
) -> None:
    kills *= repeats
    command = ("-m", "tests.learners.saving_forever", str(tmp_path), str(kills), *stage)
    with Command(*command, log=tmp_path / "log") as saving:
        output = saving.read_log()
    assert saving.returncode == 0, output
    steps, half = map(int, output.splitlines()[-1].split())
    assert steps >= kills
    assert half, "no kill fell into a save"


def test_an_incomplete_checkpoint_is_detected(model_dir: Path, tmp_path: Path) -> None:
    trainer = ranks.plain_torch(model_dir, CONFIG, torch.float32)
    path = tmp_path / "checkpoint"
    save(trainer.backend, saved_meta(num_ranks=2), path)
    with pytest.raises(DataError, match=r"rank-0000.-of-00002\.safetensors"):
        Checkpoint(path)
    (path / SAVED_FILE).write_text('{"num_ranks"')
    with pytest.raises(DataError, match="readable learner checkpoint"):
        Checkpoint(path)


def test_the_older_checkpoint_is_used_between_the_two_renames(
    model_dir: Path, tmp_path: Path
) -> None:
    trainer = ranks.plain_torch(model_dir, CONFIG, torch.float32)
    path = tmp_path / "checkpoint"
    save(trainer.backend, saved_meta(policy_version=1), path)
    path.rename(tmp_path / "checkpoint.old")
    assert finished_folder(path) == tmp_path / "checkpoint.old"
    assert Checkpoint(path).meta.policy_version == 1
    save(trainer.backend, saved_meta(policy_version=2), path)
    assert Checkpoint(path).meta.policy_version == 2


def test_another_optimizer_cannot_resume_the_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    trainer = ranks.plain_torch(model_dir, ranks.two_ranks(num_ranks=1), torch.float32)
    ranks.train(trainer, ranks.uneven_trees(2), 3)
    save(trainer.backend, saved_meta(), tmp_path / "checkpoint")
    saved = Checkpoint(tmp_path / "checkpoint")
    with pytest.raises(DataError, match=r"momentum_buffer.*model\.path"):
        saved.read("model.embed_tokens.weight", "momentum_buffer", 0, 4)


def make(checkpoints: Checkpoints, step: int) -> None:
    partial = checkpoints.begin(checkpoints.path(step))
    (partial / "model.safetensors").write_text(str(step))
    (partial / "state.json").write_text("{}")
    checkpoints.complete(partial)


def test_the_latest_best_or_named_checkpoint_is_resumed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoint_to_resume(checkpoints, "latest") is None
    with pytest.raises(ConfigError, match="no best checkpoint"):
        checkpoint_to_resume(checkpoints, "best")
    for step in (1, 2, 10):
        make(checkpoints, step)
    checkpoints.begin(checkpoints.path(11))
    keep_best(checkpoints, 2)
    assert checkpoint_to_resume(checkpoints, "latest") == checkpoints.path(10)
    best = checkpoint_to_resume(checkpoints, "best")
    assert best is not None
    assert (best / "model.safetensors").read_text() == "2"
    assert checkpoint_to_resume(checkpoints, str(checkpoints.path(1))) == checkpoints.path(1)
    with pytest.raises(ConfigError, match=r"step-000011\.partial"):
        checkpoint_to_resume(checkpoints, str(tmp_path / "step-000011.partial"))


KILLED = """
import os, signal, sys
from pathlib import Path
from agentenv.assembly.run.checkpoints import Checkpoints
from agentenv.assembly.run.kept import keep_best

rename = Path.rename
def killing(path, target):
    rename(path, target)
    os.kill(os.getpid(), signal.SIGKILL)
Path.rename = killing
keep_best(Checkpoints(Path(sys.argv[1])), 2)
"""


def test_kill_9_during_the_renames_of_the_best_checkpoint_leaves_a_complete_one(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        make(checkpoints, step)
    keep_best(checkpoints, 1)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "best").exists(), "the kill fell into the window"
    found = checkpoint_to_resume(checkpoints, "best")
    assert found is not None
    assert (found / "model.safetensors").read_text() == "1"
    keep_best(checkpoints, 2)
    found = checkpoint_to_resume(checkpoints, "best")
    assert found == tmp_path / "best"
    assert (found / "model.safetensors").read_text() == "2"


def test_checkpoints_are_rotated_and_newer_ones_set_aside(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 3, 4):
        make(checkpoints, step)
    checkpoints.begin(checkpoints.path(5))
    checkpoints.prune(3)
    assert [p.name for p in checkpoints.finished()] == ["step-000002", "step-000003", "step-000004"]
    assert not list(tmp_path.glob("*.partial"))
    moved = set_aside_after(checkpoints, checkpoints.path(2))
    assert [path.name for path in moved] == ["step-000004", "step-000003"]
    make(checkpoints, 3)
    assert [path.name for path in set_aside_after(checkpoints, checkpoints.path(2))] == [
        "step-000003-1"
    ]
    assert [path.name for path in checkpoints.finished()] == ["step-000002"]
