"""Files and folders are whole whenever they are read."""

from __future__ import annotations

import pkgutil
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.run.rundir import RunDirectory
from agentenv.base.disk import finished_folder, own_folder, replace_folder, write_whole
from agentenv.base.disk_errors import explain
from agentenv.learners.ranks.checkpoint import write_tensors

ROOT = Path(__file__).parents[1]


def interrupted_lines() -> Iterator[bytes]:
    yield b"new, line 1\n"
    raise KeyboardInterrupt


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_keeps_its_content_until_the_new_one_is_complete(
    tmp_path: Path, durable: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    write_whole(path, "früher\n", durable=durable)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, interrupted_lines(), durable=durable)
    assert path.read_text(encoding="utf-8") == "früher\n"
    write_whole(path, (line for line in (b"1\n", b"2\n")), durable=durable)
    assert path.read_bytes() == b"1\n2\n"
    assert [one.name for one in tmp_path.iterdir()] == ["rows.jsonl"], "the torn one is reused"


def full(path: Path) -> None:
    """Any write to this file meets a full disk."""
    path.symlink_to("/dev/full")


def test_the_error_of_a_full_disk_names_file_and_remedy(tmp_path: Path) -> None:
    full(tmp_path / "rows.jsonl.partial")
    full(tmp_path / "metrics.jsonl")
    run = RunDirectory(tmp_path / "run", resume=False)
    full(run.path / "metrics.jsonl")
    writes: list[Callable[[], None]] = [
        lambda: write_whole(tmp_path / "rows.jsonl", "text"),
        lambda: write_tensors(tmp_path / "metrics.jsonl", [], [], {}),
        lambda: run.write_metrics({"step": 1}),
    ]
    for write, name in zip(writes, ("rows.jsonl", "metrics.jsonl", "metrics.jsonl"), strict=True):
        with pytest.raises(OSError, match="No space left") as raised:
            write()
        assert raised.value.filename.endswith(name)
        assert "free some" in explain(raised.value)


def test_files_have_ordinary_modes(tmp_path: Path) -> None:
    plain, whole, tensors = (tmp_path / name for name in "abc")
    plain.touch()
    write_whole(whole, "text", durable=True)
    write_tensors(tensors, [], [], {})
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {plain.stat().st_mode}


def test_after_a_crash_between_two_renames_the_older_folder_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "best"
    folder.mkdir()
    folder.rename(tmp_path / "best.old")
    assert finished_folder(folder) == tmp_path / "best.old"
    (tmp_path / "best.partial").mkdir()
    replace_folder(tmp_path / "best.partial", folder)
    assert finished_folder(folder) == folder
    assert not (tmp_path / "best.old").exists()


def test_after_every_step_the_older_or_the_new_folder_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill at any of these moments would leave them."""
    folder, partial = tmp_path / "best", tmp_path / "best.partial"
    for place, text in ((folder, "older"), (partial, "newer")):
        place.mkdir()
        (place / "file").write_text(text)
    found = []

    def watched(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            result = step(*arguments, **options)
            found.append((finished_folder(folder) / "file").read_text())
            return result

        return run

    monkeypatch.setattr(shutil, "rmtree", watched(shutil.rmtree))
    monkeypatch.setattr(Path, "rename", watched(Path.rename))
    replace_folder(partial, folder)
    assert found[0] == "older"
    assert found[-1] == "newer"
    monkeypatch.undo()
    partial.mkdir()
    replace_folder(partial, folder)
    assert [one.name for one in tmp_path.iterdir()] == ["best"]


HOLDING = """
import sys, time
from pathlib import Path
from agentenv.base.disk import own_folder
with own_folder(Path(sys.argv[1]), "own-") as folder:
    (folder / "file").write_text("of a session")
    print(folder, flush=True)
    time.sleep(600)
"""


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        held = Path(one.stdout.readline().strip())
        with own_folder(tmp_path, "own-"):
            assert held.is_dir(), "its process lives"
        one.kill()
        one.wait()
        with own_folder(tmp_path, "own-") as mine:
            assert list(tmp_path.iterdir()) == [mine]
    assert list(tmp_path.iterdir()) == []


def left_by_a_killed_process(place: Path) -> Path:
    """As young as can be."""
    folder = place / "own-left"
    (folder / "v1").mkdir(parents=True)
    return folder


def test_an_unlocked_folder_is_removed_before_another_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a recent one: its successor may need its space."""
    left, make = left_by_a_killed_process(tmp_path), tempfile.mkdtemp

    def seen(**keys: Any) -> str:
        assert not left.exists()
        return make(**keys)

    with own_folder(tmp_path, "own-") as other:
        left_by_a_killed_process(tmp_path)
        monkeypatch.setattr(tempfile, "mkdtemp", seen)
        with own_folder(tmp_path, "own-") as mine:
            assert set(tmp_path.iterdir()) == {other, mine}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["tempfile.mkdtemp", "os.open", "fcntl.flock", "os.rename"])
def test_a_folder_is_locked_before_other_processes_can_find_it(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process begins right before or after any of the steps by which one is made."""
    step = pkgutil.resolve_name(moment)

    def raced(*given: Any, **keys: Any) -> Any:
        monkeypatch.undo()
        with own_folder(tmp_path, "own-"):
            done = step(*given, **keys)
        with own_folder(tmp_path, "own-"):
            return done

    monkeypatch.setattr(moment, raced)
    with own_folder(tmp_path, "own-") as mine:
        assert step is pkgutil.resolve_name(moment), "it was one of the steps"
        assert list(tmp_path.iterdir()) == [mine]


@pytest.mark.usefixtures("without_file_locks")
def test_without_file_locks_folders_are_created_and_none_is_removed(tmp_path: Path) -> None:
    """It may be another process's."""
    left = left_by_a_killed_process(tmp_path)
    with own_folder(tmp_path, "own-") as mine:
        assert set(tmp_path.iterdir()) == {left, mine}
    assert list(tmp_path.iterdir()) == [left]
