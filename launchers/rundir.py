"""The directory of a run: what is written where, and which checkpoints are kept.

runs/NAME/config.json  run.log  servers/*.log  metrics.jsonl  summary.json  curve.png  samples.txt
          entropy.png  entropy.csv               by token position, at the start and after results
          data/  model/                          made by the setup of the quick start
          trajectories/STEP.jsonl                every trajectory of training, as readable text
          eval/WHEN/                             evaluations, as of `launchers/evaluate.py`
          checkpoints/step-000020/               Hugging Face directory
          checkpoints/step-000020/trainer/       what a resume needs beside it
          checkpoints/best/                      the best by `checkpoint.best_metric`
          skipped/                               batches whose step was not finite
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.config import changes, resolver, to_plain, upgrade
from agentenv.disk import OLD, PARTIAL, replace_folder, write_whole
from agentenv.errors import ConfigError, DataError
from launchers.monitors import MonitorConfig, Monitors
from learners.learner import Learner

STATE_FILE = "state.json"
BEST = "best"
LATEST = "latest"
REMOVED, SET_ASIDE = ".removed", "set-aside"


class Checkpoints:
    """The checkpoints of a run: written beside their final name, renamed when whole, rotated.

    step-000020           whole; nothing in it is ever changed
    step-000020.partial   being written, or cut off by a crash; never read
    best                  the best by `checkpoint.best_metric`; hard links
    set-aside/            newer checkpoints than the one that a run was resumed from
    """

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
        replace_folder(partial, path)
        return path

    async def save(
        self,
        step: int,
        learner: Learner,
        state: msgspec.Struct,
        keep_last: int,
        needed: Collection[int] = (),
    ) -> None:
        """The checkpoint of `step`, unless there is one: model, learner and `state`, whole or not
        at all; then the old ones are removed as `prune` says."""
        if self.path(step) in self.finished():
            return
        partial = await asyncio.to_thread(self.begin, step)
        await learner.export(partial)
        await learner.save(partial / "trainer")
        save_state(partial, state)
        await asyncio.to_thread(self.complete, partial)
        await asyncio.to_thread(self.prune, keep_last, needed)

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
        replace_folder(partial, self.folder / BEST)

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


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


LOG_FILE = "run.log"
CONFIG_FILE = "config.json"  # written when everything was found in order; marks a run
OURS = {
    *("checkpoints", "data", "eval", "model", LOG_FILE, "learner.log", "servers"),
    *("trajectories",),
    *("metrics.jsonl", "skipped", "pairs", "reference.npz", "tensorboard", "wandb", "wandb.json"),
}
Row = dict[str, Any]


class RunDirectory:
    """Creates or reopens the directory of a run; rows of metrics go to the monitors too."""

    def __init__(
        self,
        path: Path,
        *,
        resume: bool,
        monitor: MonitorConfig | None = None,
        settings: Row | None = None,
    ) -> None:
        """`settings` is the whole configuration, which the monitors show."""
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints")
        self._made = [one for one in (path, *path.parents) if not one.exists()]
        if resume and not (path / CONFIG_FILE).is_file():
            raise ConfigError(f"{path} holds no run to resume; start it without --resume")
        try:
            if not resume:
                self._claim()
            self.checkpoints.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {explain(error)}") from error
        check_writable(path)
        self.monitors = Monitors(monitor or MonitorConfig(), path, settings or {})

    def _claim(self) -> None:
        """Refuse a directory that holds a run or something else; leftovers of a run that never
        began are cleared."""
        found = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        found -= {name for name in found if name.startswith("learner-")}  # logs of ranks
        found -= {CONFIG_FILE + PARTIAL}
        if CONFIG_FILE in found:
            raise ConfigError(
                f"{self.path} already holds a run; continue it with --resume, choose another name "
                f"with run.name=NAME, or remove the directory"
            )
        if found - OURS:
            raise ConfigError(
                f"{self.path} is not empty and no run: it holds {sorted(found - OURS)[0]!r}; "
                f"choose another name with run.name=NAME"
            )
        if self.path.exists():
            shutil.rmtree(self.path)

    def resolve(self, text: str) -> Path:
        """A path of the configuration; {run} is this directory."""
        return resolver(self.path)(text)

    def begin(self, config: Struct) -> None:
        """From here on this is a run: everything was found in order."""
        self.write_json(CONFIG_FILE, to_plain(config))

    def go_on(self, config: Struct, step: int, say: Callable[[str], None], phase: str = "") -> None:
        """Put aside what the run did after the checkpoint of `step`, evaluations of `phase` among
        it, and say what has changed since it began."""
        self.forget_metrics_after(step, phase)
        say(f"resuming {self.path} after step {step}")
        for path in self.checkpoints.set_aside_after(step):
            say(f"a newer checkpoint is moved to {path}")
        saved = json.loads((self.path / CONFIG_FILE).read_text(encoding="utf-8"))
        upgrade(type(config), saved)
        for change in changes(saved, json.loads(json.dumps(to_plain(config)))):
            say(f"changed since the start: {change}")

    def forget_unless_begun(self) -> None:
        """Remove the folder of a run that was refused, and those above that were made for it,
        unless something was written that may say more than the refusal did."""
        found = {entry.name for entry in self.path.iterdir()}
        if found - {self.checkpoints.folder.name, LOG_FILE}:
            return
        (self.path / LOG_FILE).unlink(missing_ok=True)
        for folder in dict.fromkeys((self.checkpoints.folder, self.path, *self._made)):
            if any(folder.iterdir()):
                return
            folder.rmdir()

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file at once, so that no reader ever sees half of it."""
        write_whole(self.path / name, json.dumps(value, indent=2) + "\n")

    def log_metrics(self, row: Row) -> None:
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.monitors.log(row)

    def forget_metrics_after(self, step: int, phase: str = "") -> None:
        """Drop the rows that a resumed run will write again: of later steps, and the evaluations
        of `phase`."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            rows = [(line, json.loads(line)) for line in lines if line.endswith("\n")]
            kept = [
                line
                for line, row in rows
                if row.get("step", 0) <= step and not (phase and row.get("phase") == phase)
            ]
            path.write_text("".join(kept), encoding="utf-8")


def check_writable(path: Path) -> None:
    """Raises ConfigError unless the directory takes a file and has space for it."""
    probe = path / ".writable"
    try:
        probe.write_bytes(b"\0" * 65536)
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {explain(error)}") from error


def load_state(checkpoint: Path, kind: type[Any]) -> Any:
    """The state beside a checkpoint."""
    path = checkpoint / STATE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def save_state(checkpoint: Path, state: msgspec.Struct) -> None:
    """Write the state last and durably: its presence says that the checkpoint is complete."""
    write_whole(checkpoint / STATE_FILE, msgspec.json.encode(state), durable=True)


def explain(error: OSError) -> str:
    """A reason a user can act on."""
    if error.errno == errno.ENOSPC:
        return "no space is left on the device; free some and resume"
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"no permission ({error.strerror}); choose another place with run.dir=DIR"
    return error.strerror or str(error)
