"""The directory of a run: its files, its lock, and its checkpoints.

runs/NAME/config.json  run.log  servers/*.log  metrics.jsonl  summary.json  curve.png  samples.txt
          entropy.png  entropy.csv               by token position, at the start and after results
          data/  model/                          made by the setup of the quick start
          inputs/                                rows and model that a Python program gave in memory
          journal/                               turns and trees as they happen, for a resume
          trees/STEP.frames                      every tree of training, with all of its tokens
          trajectories/STEP.jsonl                every trajectory of training, as readable text
          eval/WHEN/                             evaluations, as of `agentenv evaluate`
          checkpoints/step-000020/               Hugging Face directory
          checkpoints/step-000020/trainer/       what a resume needs beside it
          checkpoints/best/                      the best by `checkpoint.best_metric`
          lock                                   who trains in it now
          ctl/                                   the socket of agentenv ctl, while it lives
          starts                                 how many processes have begun or gone on with it
          resumed/                               the model that a resumed run began with
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import Struct

from agentenv.archive import ARCHIVE
from agentenv.config import changes, resolver, to_plain, upgrade
from agentenv.disk import (
    DIR_KEY,
    PARTIAL,
    WEIGHTS_PREFIX,
    append_whole,
    explain,
    make_folder,
    write_whole,
)
from agentenv.errors import ConfigError
from agentenv.pipelines.run.checkpoints import COLD_START, Checkpoints
from agentenv.pipelines.run.monitors import MonitorConfig, Monitors

RATES = ("learning_rate", "muon_learning_rate", "weight_decay")  # set with an optimizer


JOB_VARIABLE = "AGENTENV_JOB"  # a name of the job that the process is of; nobody else has it


class Holder(Struct, frozen=True):
    """The process that has a directory, since a time of its clock. Of a job one process at a time
    is there, which may be started again on another host."""

    pid: int
    host: str
    since: str = ""
    job: str = ""

    @classmethod
    def me(cls) -> Holder:
        job, since = os.environ.get(JOB_VARIABLE, ""), time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(os.getpid(), socket.gethostname(), since, job)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lock:
    """That one process at a time trains in a directory; `close` lets go.

    The system lets go when the process dies. What is written says who has it, and holds where the
    file system knows no locks, or does not tell another machine of them.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if another process has it."""
        self.path = folder / "lock"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self._release = weakref.finalize(self, os.close, self._file)
        try:
            self._take(folder)
        except BaseException:
            self._release()
            raise

    def _take(self, folder: Path) -> None:
        """Lock the folder, or raise ConfigError that says who has it."""
        is_held, is_known = False, True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_held = True
        except OSError:
            is_known = False
        try:
            before = msgspec.json.decode(os.pread(self._file, 4096, 0), type=Holder)
        except msgspec.DecodeError:  # nobody, or cut off while it was written
            before = None
        me = Holder.me()
        if before is not None and before.host == me.host and not is_known:
            is_held = before.pid != me.pid and psutil.pid_exists(before.pid)
        if is_held:
            raise ConfigError(
                f"{folder} is in use by {before or 'another process'}; wait until it ends, stop "
                "it, or choose another name with run.name=NAME"
            )
        is_same_job = before is not None and bool(me.job) and before.job == me.job
        if before is not None and before.host != me.host and not is_same_job:
            raise ConfigError(
                f"{folder} is in use by {before}, which {me.host} cannot check; if it no longer "
                f"runs there, remove {self.path}"
            )
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, msgspec.json.encode(me), 0)

    def close(self) -> None:
        """Idempotent."""
        if self._release.alive:
            os.ftruncate(self._file, 0)
            self._release()


LOG_FILE = "run.log"
STARTS = "starts"
INPUTS = "inputs"
JOURNAL = "journal"  # folder of turns and trees
PROBE = ".writable"  # there for a moment, or left by a kill in it
CONFIG_FILE = "config.json"  # written when everything was found in order; marks a run
LOGS = ("learner.log", "servers", "workers")  # of what was started
OURS = {
    "timings.jsonl",
    *("checkpoints", "data", "eval", "model", INPUTS, LOG_FILE, *LOGS),
    *(JOURNAL, ARCHIVE, STARTS, "trajectories", "ctl"),
    "steering.jsonl",  # of an earlier version
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
            raise ConfigError(f"{path} contains no run to resume; start it without --resume")
        try:
            if not resume:
                self._refuse_used()
                make_folder(path)
            self._lock = Lock(path)
            if not resume:
                self._claim()
            make_folder(self.checkpoints.folder)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {explain(error, DIR_KEY)}") from error
        check_writable(path)
        self.monitors = Monitors(monitor or MonitorConfig(), path, settings or {})

    def close(self) -> None:
        """Others may have the directory from now on; idempotent."""
        self._lock.close()

    def _refuse_used(self) -> None:
        """Refuse a directory that holds a run or something else."""
        found = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        begun = ("learner-", WEIGHTS_PREFIX)  # logs of ranks, weights that a killed run has left
        found -= {name for name in found if name.startswith(begun)}
        found -= {CONFIG_FILE + PARTIAL, STARTS + PARTIAL, PROBE, "lock"}
        if CONFIG_FILE in found:
            raise ConfigError(
                f"{self.path} already contains a run; continue it with --resume, choose another "
                "name with run.name=NAME, or remove the directory"
            )
        if found - OURS:
            raise ConfigError(
                f"{self.path} is not empty and not a run: it contains {sorted(found - OURS)[0]!r}; "
                f"choose another name with run.name=NAME"
            )

    def _claim(self) -> None:
        """Clear what a run has left that never began."""
        self._refuse_used()  # again, now that nobody else changes it
        for entry in self.path.iterdir():
            if entry != self._lock.path:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def count_start(self, known: int) -> int:
        """The number of this start of the run, another one for each process: of two that go on
        from one checkpoint, which has `known` starts, the weights part. Raises ConfigError."""
        path = self.path / STARTS
        try:
            before = int(path.read_text())
        except (FileNotFoundError, ValueError):  # of a run that did not count them
            before = 0
        number = max(before, known) + 1
        try:
            write_whole(path, f"{number}\n", durable=True)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {explain(error, DIR_KEY)}") from error
        return number

    def resolve(self, text: str) -> Path:
        """A path of the configuration; {run} is this directory."""
        return resolver(self.path)(text)

    @property
    def has_begun(self) -> bool:
        return (self.path / CONFIG_FILE).is_file()

    def begin(self, config: Struct) -> None:
        """From here on this is a run: everything was found in order."""
        self.write_json(CONFIG_FILE, to_plain(config))

    def check_optimizer(self, name: str) -> None:
        """Raises ConfigError where the run began with another optimizer than this one, whose state
        its checkpoints hold: no other optimizer can resume from it."""
        path = self.path / CONFIG_FILE
        if not path.is_file():
            return
        held = json.loads(path.read_text(encoding="utf-8")).get("learner", {})
        began = held.get("optimizer", name)
        if began != name:
            rates = {key: held[key] for key in RATES if held.get(key) is not None}
            keys = " ".join(f"learner.{key}={value}" for key, value in rates.items())
            raise ConfigError(
                f"{path}: the checkpoints contain the state of learner.optimizer = {began!r}, but "
                f"the configuration has {name!r}; continue with learner.optimizer={began} {keys}, "
                "or start anew with another run.name"
            )

    def resume_from(
        self,
        config: Struct,
        step: int,
        say: Callable[[str], None],
        is_reported: Callable[[str], bool] = bool,
        sft_step: int | None = None,
    ) -> bool:
        """Put aside what the run did after the checkpoint of `step`, and say what has changed since
        it began. Whether there were newer checkpoints. The last two: see forget_metrics_after."""
        self.forget_metrics_after(step, is_reported, sft_step)
        place, after = f"step {step}", self.checkpoints.path(step)
        if sft_step is not None:
            place = f"step {sft_step} of the cold start"
            after = self.checkpoints.path(sft_step, COLD_START)
        say(f"resuming {self.path} after {place}")
        newer = self.checkpoints.set_aside_after(after)
        for path in newer:
            say(f"moved a newer checkpoint to {path}")
        saved = json.loads((self.path / CONFIG_FILE).read_text(encoding="utf-8"))
        upgrade(type(config), saved)
        for change in changes(saved, json.loads(json.dumps(to_plain(config)))):
            say(f"changed since the start: {change}")
        return bool(newer)

    def forget_unless_begun(self) -> None:
        """Remove the folder of a run that was refused, with what its set-up has made, and those
        above that were made for it, unless a log may say more than the refusal did."""
        if self.has_begun or any(map(_says_something, self.path.iterdir())):
            return
        shutil.rmtree(self.path, ignore_errors=True)  # the reported error is another
        for folder in self._made:
            if folder == self.path:
                continue
            if any(folder.iterdir()):
                return
            folder.rmdir()

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file at once, so that no reader ever sees half of it."""
        write_whole(self.path / name, json.dumps(value, indent=2) + "\n")

    def write_metrics(self, row: Row) -> None:
        """Add a row to metrics.jsonl. Blocks."""
        append_whole(self.path / "metrics.jsonl", json.dumps(row) + "\n")

    def forget_metrics_after(
        self, step: int, is_reported: Callable[[str], bool] = bool, sft_step: int | None = None
    ) -> None:
        """Drop the rows that a run which goes on will write again: of later steps, of later ones
        than `sft_step` of the cold start, and of evaluations that are not reported to the end:
        `is_reported` says so by their phase."""
        path = self.path / "metrics.jsonl"
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            rows = [(line, json.loads(line)) for line in lines if line.endswith("\n")]
            kept = [
                line
                for line, row in rows
                if row.get("step", 0) <= step
                and ("phase" not in row or is_reported(row["phase"]))
                and not (sft_step is not None and row.get("sft/step", 0) > sft_step)
            ]
            write_whole(path, "".join(kept))


def _says_something(entry: Path) -> bool:
    """Whether this is a log, or a folder of logs, of a process that was started and wrote."""
    if entry.name not in LOGS and not entry.name.startswith("learner-"):
        return False
    files = entry.rglob("*") if entry.is_dir() else [entry]
    return any(file.is_file() and file.stat().st_size > 0 for file in files)


def check_writable(path: Path) -> None:
    """Raises ConfigError unless the directory takes a file and has space for it."""
    probe = path / PROBE
    try:
        probe.write_bytes(b"\0" * 65536)
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {explain(error, DIR_KEY)}") from error
