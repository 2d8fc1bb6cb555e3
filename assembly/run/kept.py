"""The checkpoint of a run that a command takes, and copies of models that outlive a checkpoint."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from agentenv.assembly.run.checkpoints import STATE_FILE, Checkpoints
from agentenv.base.disk import PARTIAL, finished_folder, replace_folder
from agentenv.base.errors import DataError

BEST = "best"


def best_checkpoint(checkpoints: Checkpoints) -> Path | None:
    """checkpoints/best, or its predecessor if a crash interrupted the rename; None if there is
    neither."""
    found = finished_folder(checkpoints.folder / BEST)
    return found if (found / STATE_FILE).is_file() else None


def keep_best(checkpoints: Checkpoints, step: int) -> None:
    """Make checkpoints/best the checkpoint of `step`; a complete one exists at all times."""
    partial = checkpoints.folder / f"{BEST}{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(checkpoints.path(step), partial, copy_function=_link_or_copy)
        replace_folder(partial, checkpoints.folder / BEST)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def link_model(checkpoint: Path, folder: Path) -> Path:
    """Link the model of a checkpoint, without the learner's state, into `folder`, where it survives
    the removal of the checkpoint. Weights are hard links and need no extra space until then."""
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("trainer", STATE_FILE)
    return Path(shutil.copytree(checkpoint, folder, copy_function=_link_or_copy, ignore=ignored))


def find_checkpoint(path: Path, *, best: bool = False) -> Path:
    """`path` itself if it is a checkpoint or model directory; of a run, its last or best
    checkpoint. Raises DataError if the run has none.
    """
    if not (path / "checkpoints").is_dir():
        return path
    checkpoints = Checkpoints(path / "checkpoints")
    found = best_checkpoint(checkpoints) if best else next(iter(checkpoints.finished()[::-1]), None)
    if found is None:
        kind = "best" if best else "finished"
        raise DataError(f"{path} contains no {kind} checkpoint yet")
    return found


WEIGHTS = (".safetensors", ".bin")


def _link_or_copy(source: str, target: str) -> None:
    """Hard-link weights, which nothing modifies in place, if the file system can; copy other files.
    Symbolic links are resolved: a hard link to a relative one would be broken."""
    if source.endswith(WEIGHTS):
        with suppress(OSError):  # another file system, or one without links
            return os.link(os.path.realpath(source), target)
    shutil.copyfile(source, target)
