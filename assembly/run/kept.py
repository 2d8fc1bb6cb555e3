"""The checkpoint of a run that a command takes, and copies of models that outlive a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from agentenv.assembly.run.checkpoints import COLD_START, LATEST, STATE_FILE, Checkpoints
from agentenv.assembly.run.rundir import CONFIG_FILE, RunDirectory
from agentenv.base.config import changes, to_plain
from agentenv.base.disk import PARTIAL, finished_folder, replace_folder, sync
from agentenv.base.errors import ConfigError, DataError

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


# A run that goes on: the checkpoint from which, and what is set aside for it.

SET_ASIDE = "set-aside"
RATES = ("learning_rate", "muon_learning_rate", "weight_decay")  # keys that go with an optimizer


def checkpoint_to_resume(checkpoints: Checkpoints, wanted: str) -> Path | None:
    """The checkpoint to resume from: `wanted` is "latest", "best", or a path. None for "latest"
    without a checkpoint. Raises ConfigError."""
    if wanted == LATEST:
        return next(iter(checkpoints.finished()[::-1]), None)
    if wanted == BEST:
        found = best_checkpoint(checkpoints)
        if found is None:
            raise ConfigError(f"--resume best: {checkpoints.folder} contains no best checkpoint")
        return found
    path = Path(wanted)
    if not (path / STATE_FILE).is_file():
        raise ConfigError(
            f"--resume {wanted}: not a complete checkpoint ({STATE_FILE} is missing); expected "
            f"latest, best, or one of {[p.name for p in checkpoints.finished()]} in "
            f"{checkpoints.folder}"
        )
    return path


def set_aside_after(checkpoints: Checkpoints, oldest: Path) -> list[Path]:
    """Move the checkpoints after `oldest` to set-aside/; returns their new paths."""
    moved, aside = [], checkpoints.folder / SET_ASIDE
    for path in reversed(checkpoints.finished()):
        if path.name > oldest.name:
            aside.mkdir(exist_ok=True)
            number = len(list(aside.glob(f"{path.name}*")))
            name = f"{path.name}-{number}" if number else path.name
            moved.append(path.rename(aside / name))
    if moved:
        sync(aside)
        sync(checkpoints.folder)
    return moved


def check_optimizer(run: RunDirectory, name: str) -> None:
    """Raises ConfigError if the run began with another optimizer: no optimizer can resume from
    the state of another, which the checkpoints contain."""
    path = run.path / CONFIG_FILE
    saved = json.loads(path.read_text(encoding="utf-8")).get("learner", {})
    began = saved.get("optimizer", name)
    if began != name:
        rates = {key: saved[key] for key in RATES if saved.get(key) is not None}
        keys = " ".join(f"learner.{key}={value}" for key, value in rates.items())
        raise ConfigError(
            f"{path}: the checkpoints contain the state of learner.optimizer = {began!r}, but "
            f"the configuration has {name!r}; continue with learner.optimizer={began} {keys}, "
            "or start anew with another run.name"
        )


def resume_from(
    run: RunDirectory,
    config: Struct,
    step: int,
    report: Callable[[str], None],
    is_reported: Callable[[str], bool] = bool,
    sft_step: int | None = None,
) -> bool:
    """Set aside the results of the run after the checkpoint of `step`, and report the keys that
    have changed since its start. Returns whether there were newer checkpoints. The last two
    parameters: see `RunDirectory.forget_metrics_after`."""
    run.forget_metrics_after(step, is_reported, sft_step)
    place, checkpoint = f"step {step}", run.checkpoints.path(step)
    if sft_step is not None:
        place = f"step {sft_step} of the cold start"
        checkpoint = run.checkpoints.path(sft_step, COLD_START)
    report(f"resuming {run.path} after {place}")
    newer = set_aside_after(run.checkpoints, checkpoint)
    for path in newer:
        report(f"moved a newer checkpoint to {path}")
    saved = json.loads((run.path / CONFIG_FILE).read_text(encoding="utf-8"))
    for change in changes(saved, json.loads(json.dumps(to_plain(config)))):
        report(f"changed since the start: {change}")
    return bool(newer)
