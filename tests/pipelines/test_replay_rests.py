"""launchers/replay.py with what a killed run leaves: files that are empty, or a journal alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from agentenv.archive import KeptTree, Step
from agentenv.config import load_config, to_plain
from agentenv.frames import JournalConfig
from agentenv.journal import Journal
from agentenv.launchers import replay
from agentenv.launchers.replay import Regrowing
from agentenv.offload import run_virtual
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.rl.training import rollout_settings
from agentenv.tree import TrajectoryTree
from tests.support.warehouse import ROOT
from tests.test_actor import AlwaysFork
from tests.test_archive import kept, written
from tests.test_journal import TASK, here, make_actor

VOCAB = 512


@pytest.fixture
def config() -> TrainConfig:
    return load_config(TrainConfig, ROOT / "configs" / "quickstart.toml", [])


@pytest.fixture
def run(tmp_path: Path, config: TrainConfig) -> Path:
    """The folder of a run that has done no step; its model is {run}/model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(to_plain(config)))
    return tmp_path


@pytest.fixture
def grown_again(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The trees that are grown again, and the plan."""
    seen: list[tuple[int, str]] = []

    def grow(self: Regrowing, kept: KeptTree, found: list[str], notes: list[str]) -> None:
        seen.append((kept.tree.index, repr(self.plan)))

    monkeypatch.setattr(Regrowing, "grow", grow)
    return seen


def journaled(run: Path, settings: str, index: int) -> TrajectoryTree:
    """A tree that is finished in the journal of the run."""

    async def scenario() -> TrajectoryTree:
        journal = Journal(
            run / "journal", JournalConfig(), settings=settings, incarnation=1, offload=here
        )
        actor, plan = make_actor(), AlwaysFork(group_size=2)
        tree = await actor.rollout(TASK, plan, index=index, record=journal.record(index))
        await journal.close()
        return tree

    return run_virtual(scenario())


def test_a_file_of_the_archive_that_cannot_be_read_is_named_and_left_out(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kill leaves an empty one, or one without a whole header."""
    compared: list[int] = []

    class Replay:
        def __init__(self, step: Step, config: TrainConfig) -> None:
            compared.append(step.header.step)

        def compare(self, *_: object, **__: object) -> tuple[list[str], list[str]]:
            return [], []

    monkeypatch.setattr(replay, "Replay", Replay)
    for step in (1, 2, 3):
        written(run / "trees", [kept(step)], step)
    for step, size in ((2, 9), (3, 0)):
        os.truncate(run / "trees" / f"step-{step:06d}.frames", size)
    assert replay.main([str(run)]) == 0
    assert compared == [1]
    said = capsys.readouterr().out
    for step in (2, 3):
        path = run / "trees" / f"step-{step:06d}.frames"
        assert f"{path}: not a file of trees that this version reads; it is left out" in said
    assert "1 step, 1 tree: all" in said
    assert replay.main([str(run), "--step", "3"]) == 2, "which was asked for"


def test_a_run_without_a_step_is_replayed_from_its_journal(
    run: Path,
    config: TrainConfig,
    grown_again: list[tuple[int, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the vocabulary of its model."""
    journaled(run, rollout_settings(config), 0)
    journaled(run, "others", 1)
    assert replay.main([str(run)]) == 0
    assert grown_again == [(0, repr(config.algorithm.plan(VOCAB)))]
    assert "0 steps, 1 tree: all that was computed again is equal" in capsys.readouterr().out
    (run / "model" / "config.json").unlink()
    assert replay.main([str(run)]) == 2
    assert f"{run / 'model' / 'config.json'}: not a readable" in capsys.readouterr().err


def test_a_run_with_neither_a_step_nor_a_finished_tree_says_so(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journaled(run, "others", 0)
    assert replay.main([str(run)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "holds no step: none was done yet, or archive.max_gb = 0 keeps none" in said
    assert "holds no finished tree that was begun under this configuration" in said
    assert replay.main([str(run), "--step", "1"]) == 2
    assert "step 1 is not there; there is none" in " ".join(capsys.readouterr().err.split())
