"""One workspace for all launcher tests; each run has its own name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands.evaluating import first_prompts
from tests.support import pictures
from tests.support.golden import Golden, Said
from tests.support.warehouse import ROOT, make_workspace


@pytest.fixture(autouse=True, scope="module")
def _forked_ranks(forked_ranks: None) -> None:
    pass


@pytest.fixture(scope="module")
def here() -> Iterator[None]:
    """Learners of this module run in its own process; see `tests.support.rank_here`."""
    from tests.support.rank_here import rank_here  # loads torch

    with rank_here():
        yield


@pytest.fixture(scope="session")
def drawing() -> dict[str, Any]:
    """The drawing functions by name."""
    return pictures.drawing()


@pytest.fixture(autouse=True, scope="module")
def _no_pictures(drawing: dict[str, Any]) -> Iterator[None]:
    """Only `finished` has pictures, and modules that use `drawn`."""
    patch = pictures.disable()
    yield
    patch.undo()


@pytest.fixture(scope="module")
def drawn(_no_pictures: None, drawing: dict[str, Any]) -> Iterator[None]:
    """Runs and evaluations of this module have their pictures."""
    with pictures.enabled(drawing):
        yield


@pytest.fixture(scope="session")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Path of a configuration that trains on the README's environment with a scripted engine."""
    folder = tmp_path_factory.mktemp("warehouse")
    sys.path.insert(0, str(folder))
    yield make_workspace(folder)
    sys.path.remove(str(folder))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Of a synthesis."""
    from tests.commands.synthesizing import write_questions

    return write_questions(tmp_path / "ask.jsonl")


@pytest.fixture
def golden(
    request: pytest.FixtureRequest,
    warehouse: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Golden]:
    """What a test's commands print is compared with tests/golden/NAME.txt, by its `golden` mark."""
    monkeypatch.setenv("COLUMNS", "1000")
    found = Golden(capsys, {"WAREHOUSE": warehouse.parent, "FOLDER": tmp_path, "REPOSITORY": ROOT})
    yield found
    (name,) = request.node.get_closest_marker("golden").args
    found.compare(name, is_written=request.config.option.golden)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """The output of a command that ends with this status, or the error of one that fails."""

    def run(main: Callable[[list[str]], int], *arguments: object, status: int = 0) -> str:
        capsys.readouterr()
        found = main([*map(str, arguments)])
        captured = capsys.readouterr()
        assert found == status, captured.err
        return captured.err if status in (1, 2) else captured.out

    return run


SETS = [
    "eval.sets.a.path={folder}/a.jsonl", "eval.sets.a.every=1", "eval.sets.a.max_tasks=3",
    "eval.sets.b.path={folder}/b.jsonl", "eval.sets.b.every=3", "eval.sets.b.phases=false",
    "eval.sets.b.num_samples=2", "checkpoint.every=1", "checkpoint.keep_last=2",
    "checkpoint.best_metric=b/success",
]  # fmt: skip


@pytest.fixture(scope="session")
def finished(warehouse: Path, drawing: dict[str, Any]) -> Path:
    """A finished run of four steps, "finished", which is only read: with two evaluation sets, a
    checkpoint every step, of which the third is the best, and its pictures."""
    from agentenv.launchers import train
    from tests.support.rank_here import rank_here

    overrides = [text.format(folder=warehouse.parent) for text in SETS]
    with rank_here(), pictures.enabled(drawing):
        assert train.main([str(warehouse), "run.name=finished", *overrides]) == 0
    return warehouse.parent / "runs" / "finished"


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts of an evaluation's first turns."""
    return first_prompts(monkeypatch)
