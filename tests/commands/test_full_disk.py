"""A full disk is a one-line error with path and remedy, for every file of a run."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv.assembly.reports import pictures
from agentenv.assembly.reports.records import write_rows
from agentenv.assembly.run.exits import reason_of
from agentenv.base.disk_errors import explain
from agentenv.training.reports.recorder import write_samples
from agentenv.training.supervised import run as supervised
from tests.learners.trees import random_tree

pytestmark = pytest.mark.usefixtures("drawn")


def full(path: Path) -> None:
    """Any write to this file, or to its partial file before the rename, meets a full disk."""
    for one in (path, path.with_name(f"{path.name}.partial")):
        one.symlink_to("/dev/full")


def plots(folder: Path) -> None:
    row = {"step": 1, "trees/offered": 1, "loss": 0.5}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    pictures.write_curve(folder)
    supervised.plot_losses(folder, "sft", ("loss",))


def entropy(folder: Path) -> None:
    pictures.write_entropy({}, folder, "run")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.jsonl", lambda path: write_rows([random_tree(Random(0))], str, path, 0)),
        ("samples.txt", lambda path: write_samples(path, "title", [], append=False)),
        ("entropy.csv", lambda path: entropy(path.parent)),
        ("entropy.png", lambda path: entropy(path.parent)),
        ("curve.png", lambda path: plots(path.parent)),
        ("loss.png", lambda path: plots(path.parent)),
    ],
)
def test_a_full_disk_names_the_file(
    name: str, write: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (pictures, supervised):
        monkeypatch.setattr(module, "png", lambda *_, **__: b"picture")
    full(tmp_path / name)
    with pytest.raises(OSError, match="No space left") as raised:
        write(tmp_path / name)
    assert raised.value.filename == str(tmp_path / name)
    assert "free some" in explain(raised.value)


def test_a_copy_to_a_full_disk_names_the_target(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    error = OSError(errno.ENOSPC, "No space left", str(source), None, str(target))  # of shutil
    said = str(reason_of(error, tmp_path, ""))
    assert said.startswith(f"{target}: no space left on the device; free some space and repeat")


def test_plots_use_the_rows_not_truncated_by_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Sequence[dict[str, Any]]] = []

    def series(rows: Sequence[dict[str, Any]], _: str) -> tuple[list[int], list[float]]:
        seen.append(rows)
        return [], []

    monkeypatch.setattr(pictures, "learning_curve", series)
    for module in (pictures, supervised):
        monkeypatch.setattr(module, "png", lambda *_: b"picture")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "sft/loss": 2.5}\n{"step": 2, "lo')
    pictures.write_curve(tmp_path)
    supervised.plot_losses(tmp_path, "sft", ("loss",))
    assert (tmp_path / "loss.png").read_bytes() == b"picture"
    assert seen == [[{"step": 1, "sft/loss": 2.5}]] * len(seen)
