"""The name of a new file is as durable as its content, and failed writes leave no file."""

from __future__ import annotations

import os
import resource
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentenv.assembly.run.checkpoints import Checkpoints, save_state
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.base.disk import append_whole, make_folder, write_whole
from agentenv.base.errors import ConfigError
from agentenv.learners.ranks.checkpoint import write_tensors
from agentenv.rollout.archive import Archive
from agentenv.rollout.frames import ArchiveConfig, Began, Mark
from agentenv.rollout.journal import Journal
from tests.test_archive import header, kept


class Synced:
    """Which folders were synced since a name in them was last made or changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folders: dict[Path, int] = {}  # moment of the last sync
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def run(descriptor: int) -> None:
            sync(descriptor)
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                folder = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
                self.folders[folder] = time.time_ns()

        return run

    def has(self, path: Path) -> bool:
        """The name of a path is durable: nothing in its folder has changed since its sync."""
        folder = path.parent.resolve()
        return self.folders.get(folder, -1) >= folder.stat().st_mtime_ns


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Synced:
    return Synced(monkeypatch)


def test_the_name_of_a_durable_file_is_durable(tmp_path: Path, synced: Synced) -> None:
    write_whole(tmp_path / "plain", "x")
    assert not synced.has(tmp_path / "plain")
    write_whole(tmp_path / "whole", "x", durable=True)
    assert synced.has(tmp_path / "whole")
    make_folder(tmp_path / "a" / "b" / "c")
    for name in ("a", "a/b", "a/b/c"):
        assert synced.has(tmp_path / name), name


async def test_the_names_of_journal_files_are_durable(tmp_path: Path, synced: Synced) -> None:
    folder = tmp_path / "run" / "journal"
    journal = Journal(folder, settings="s", incarnation=1)
    assert synced.has(folder)
    assert synced.has(folder / "000001.frames")
    journal.append(Began(0, "t", 0, "s", Mark(1, 0, 0)))
    await journal.rotate(0)
    assert synced.has(folder / "000002.frames")
    await journal.close()


def test_the_name_of_a_step_in_the_archive_is_durable(tmp_path: Path, synced: Synced) -> None:
    folder = tmp_path / "run" / "trees"
    Archive(folder, ArchiveConfig()).write(header(1, 1), [kept(1)])
    assert synced.has(folder)
    assert synced.has(folder / "step-000001.frames")


def test_the_names_of_a_checkpoint_and_its_run_are_durable(tmp_path: Path, synced: Synced) -> None:
    run = RunDirectory(tmp_path / "runs" / "first", resume=False)
    assert synced.has(tmp_path / "runs")
    assert synced.has(run.path)
    checkpoints = Checkpoints(run.path / "checkpoints")
    assert run.path.resolve() in synced.folders
    partial = checkpoints.begin(checkpoints.path(1))
    save_state(partial, msgspec.defstruct("State", [])())
    assert synced.has(checkpoints.complete(partial))
    run.close()


# failed writes


@contextmanager
def full_after(num_bytes: int) -> Iterator[None]:
    """No file becomes larger, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("durable", [False, True])
def test_a_failed_write_leaves_no_file(tmp_path: Path, durable: bool) -> None:
    write_whole(tmp_path / "state", "before")
    append_whole(tmp_path / "rows", "1\n")
    tensors, folder = tmp_path / "weights.partial", tmp_path / "trees"
    with full_after(4096):
        with pytest.raises(OSError, match="too large") as raised:
            write_whole(tmp_path / "state", b"x" * 10_000, durable=durable)
        assert raised.value.filename == str(tmp_path / "state")
        with pytest.raises(OSError, match="too large"):
            append_whole(tmp_path / "rows", b"2" * 10_000)
        with pytest.raises(OSError, match="too large"):
            write_tensors(tensors, [], [], {"text": "x" * 10_000})
        with pytest.raises(ConfigError, match="cannot be written"):
            Archive(folder, ArchiveConfig()).write(header(1, 40), [kept(1)] * 40)
    assert (tmp_path / "state").read_text() == "before"
    assert (tmp_path / "rows").read_text() == "1\n"
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["rows", "state", "trees"]


def test_an_exception_during_a_write_leaves_no_file(tmp_path: Path) -> None:
    def rows() -> Iterator[bytes]:
        yield b"1\n"
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        write_whole(tmp_path / "rows", rows())
    assert not list(tmp_path.iterdir())


async def test_a_journal_that_cannot_create_a_file_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, settings="s", incarnation=1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("agentenv.rollout.journal.sync", full)
        with pytest.raises(ConfigError, match="No space left"):
            await journal.rotate(0)
    assert os.listdir(tmp_path) == ["000001.frames"]
    await journal.close()
