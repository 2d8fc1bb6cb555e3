"""The checkpoints of a run: written beside their final name, renamed when whole, rotated.

checkpoints/step-000020           whole; nothing in it is ever changed
checkpoints/step-000020.partial   being written, or cut off by a crash; never read
checkpoints/best                  the best by `checkpoint.best_metric`; shares its files' disk space
checkpoints/set-aside/            newer ones than the one that a run was resumed from
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from agentenv.errors import ConfigError, DataError

STATE_FILE = "state.json"
BEST = "best"
LATEST = "latest"
PARTIAL, OLD, REMOVED = ".partial", ".old", ".removed"
SET_ASIDE = "set-aside"


class Checkpoints:
    """Those in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def finished(self) -> list[Path]:
        """Complete checkpoints of steps, oldest first."""
        return [p for p in sorted(self.folder.glob("step-*[0-9]")) if (p / STATE_FILE).is_file()]

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into."""
        partial = self.folder / f"{self.path(step).name}{PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def complete(self, partial: Path) -> Path:
        """Give what was written its name; from then on it is there, also after a power failure."""
        path = partial.with_name(partial.name.removesuffix(PARTIAL))
        _replace(partial, path)
        return path

    def prune(self, keep_last: int, needed: Collection[int] = ()) -> None:
        """Remove all but the newest and the steps that are needed, and what a crash has left
        behind."""
        for path in self.finished()[:-keep_last]:
            if path not in map(self.path, needed):
                path.rename(path.with_name(path.name + REMOVED))
        for suffix in (PARTIAL, OLD, REMOVED):
            for left in self.folder.glob(f"step-*{suffix}"):
                shutil.rmtree(left)

    def keep_best(self, step: int) -> None:
        """Make checkpoints/best the checkpoint of `step`; at every moment there is a whole one."""
        partial = self.folder / f"{BEST}{PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(self.path(step), partial, copy_function=_link_or_copy)
        _replace(partial, self.folder / BEST)

    def best(self) -> Path | None:
        """checkpoints/best, or what it was before if a crash cut its renaming in two."""
        for name in (BEST, BEST + OLD):
            if (self.folder / name / STATE_FILE).is_file():
                return self.folder / name
        return None

    def to_resume(self, wanted: str) -> Path | None:
        """latest, best, or a path; None if there is none yet and the latest was wanted."""
        if wanted == LATEST:
            return next(iter(self.finished()[::-1]), None)
        if wanted == BEST:
            found = self.best()
            if found is None:
                raise ConfigError(f"--resume best: {self.folder} holds no best checkpoint")
            return found
        path = Path(wanted)
        if not (path / STATE_FILE).is_file():
            raise ConfigError(
                f"--resume {wanted}: not a complete checkpoint ({STATE_FILE} is missing); expected "
                f"latest, best, or one of {[p.name for p in self.finished()]} in {self.folder}"
            )
        return path

    def set_aside_after(self, step: int) -> list[Path]:
        """Move newer checkpoints out of the way of a run that goes on from an older one."""
        moved = []
        for path in reversed(self.finished()):
            if path.name > self.path(step).name:
                aside = self.folder / SET_ASIDE
                aside.mkdir(exist_ok=True)
                number = len(list(aside.glob(f"{path.name}*")))
                name = f"{path.name}-{number}" if number else path.name
                moved.append(path.rename(aside / name))
        return moved


def find_checkpoint(path: Path, *, best: bool = False) -> Path:
    """A checkpoint or model directory itself, or the last or best one of a run.

    Raises DataError if there is none.
    """
    if not (path / "checkpoints").is_dir():
        return path
    checkpoints = Checkpoints(path / "checkpoints")
    found = checkpoints.best() if best else next(iter(checkpoints.finished()[::-1]), None)
    if found is None:
        kind = "best" if best else "finished"
        raise DataError(f"{path} holds no {kind} checkpoint yet")
    return found


def _replace(partial: Path, path: Path) -> None:
    for inside in partial.rglob("*"):
        _sync(inside)
    _sync(partial)
    old = path.with_name(path.name + OLD)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
