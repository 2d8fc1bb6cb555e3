"""The directory of a run: its files, its lock, and its checkpoints.

runs/NAME/config.json  run.log  servers/*.log  metrics.jsonl  summary.json  curve.png  samples.txt
          entropy.png  entropy.csv               by token position, at the start and after results
          data/  model/                          made by the setup of the quick start
          inputs/                                rows and model passed in memory by a Python program
          journal/                               turns and trees as they happen, for a resume
          trees/STEP.frames                      every tree of training, with all its tokens
          trajectories/STEP.jsonl                every trajectory of training, as readable text
          eval/WHEN/                             evaluations, in the format of `agentenv evaluate`
          checkpoints/step-000020/               Hugging Face directory
          checkpoints/step-000020/trainer/       the learner's state, for a resume
          checkpoints/best/                      the best by `checkpoint.best_metric`
          lock                                   the process that trains in it now
          ctl/                                   the socket of agentenv ctl, while the run is alive
          starts                                 number of processes that started or resumed the run
          resumed/                               the model that a resumed run started from
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from agentenv.assembly.run.checkpoints import Checkpoints
from agentenv.assembly.run.lock import Lock
from agentenv.base.config import to_plain
from agentenv.base.disk import PARTIAL, append_whole, make_folder, write_whole
from agentenv.base.disk_errors import WEIGHTS_PREFIX, writing
from agentenv.base.errors import ConfigError
from agentenv.contract.monitoring import Monitoring, Row
from agentenv.rollout.archive import ARCHIVE

LOG_FILE = "run.log"
STARTS = "starts"
INPUTS = "inputs"
JOURNAL = "journal"  # folder of turns and trees
PROBE = ".writable"  # a temporary file
CONFIG_FILE = "config.json"  # written after all checks have passed; marks a run
LOGS = ("learner.log", "servers", "workers")  # of started processes
OURS = {
    "timings.jsonl", "checkpoints", "data", "eval", "model", INPUTS, LOG_FILE, *LOGS, JOURNAL,
    ARCHIVE, STARTS, "trajectories", "ctl", "metrics.jsonl", "skipped", "pairs", "reference.npz",
    "tensorboard", "wandb", "wandb.json",
}  # fmt: skip


class RunDirectory:
    """Creates or reopens the directory of a run."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Raises ConfigError if the directory is in use, holds something else, or cannot be
        written."""
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints")
        self._created = [one for one in (path, *path.parents) if not one.exists()]
        if resume and not (path / CONFIG_FILE).is_file():
            raise ConfigError(f"{path} contains no run to resume; start it without --resume")
        with writing(path):
            if not resume:
                self._refuse_used()
                make_folder(path)
            self._lock = Lock(path / "lock", "stop it, or choose another name with run.name=NAME")
            if not resume:
                self._claim()
            make_folder(self.checkpoints.folder)
        check_writable(path)
        self.monitors = Monitoring()

    def close(self) -> None:
        """Release the directory for other processes; idempotent."""
        self._lock.close()

    def _refuse_used(self) -> None:
        """Raises ConfigError for a directory with a run or foreign files."""
        found = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        prefixes = ("learner-", WEIGHTS_PREFIX)  # logs of ranks, weights of a killed run
        found -= {name for name in found if name.startswith(prefixes)}
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
        """Remove the files of an earlier attempt that never began."""
        self._refuse_used()  # again: from here on the lock keeps out other processes
        for entry in self.path.iterdir():
            if entry != self._lock.path:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def count_start(self, known: int) -> int:
        """The number of this start of the run, unique per process: two processes that resume from
        the same checkpoint, which counts `known` starts, train different weights. Raises
        ConfigError."""
        path = self.path / STARTS
        try:
            before = int(path.read_text())
        except (FileNotFoundError, ValueError):  # the first start
            before = 0
        number = max(before, known) + 1
        with writing(path):
            write_whole(path, f"{number}\n", durable=True)
        return number

    @property
    def has_begun(self) -> bool:
        return (self.path / CONFIG_FILE).is_file()

    def begin(self, config: Struct) -> None:
        """Mark the directory as a run, after all checks have passed."""
        self.write_json(CONFIG_FILE, to_plain(config))

    def forget_unless_begun(self) -> None:
        """Remove the folder of a run that failed its checks, including the output of its set-up and
        the parent folders created for it. A folder with a non-empty log stays: it may explain more
        than the error did."""
        if self.has_begun or any(map(_is_written_log, self.path.iterdir())):
            return
        shutil.rmtree(self.path, ignore_errors=True)  # an error here must not hide the first one
        for folder in self._created:
            if folder == self.path:
                continue
            if any(folder.iterdir()):
                return
            folder.rmdir()

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file atomically."""
        write_whole(self.path / name, json.dumps(value, indent=2) + "\n")

    def write_metrics(self, row: Row) -> None:
        """Add a row to metrics.jsonl. Blocks."""
        append_whole(self.path / "metrics.jsonl", json.dumps(row) + "\n")

    def forget_metrics_after(
        self, step: int, is_reported: Callable[[str], bool] = bool, sft_step: int | None = None
    ) -> None:
        """Remove the rows that a resumed run will write again: rows of steps after `step`, of steps
        of the cold start after `sft_step`, and of evaluations without a complete report:
        `is_reported(phase)` is false."""
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


def _is_written_log(entry: Path) -> bool:
    """Whether this is a non-empty log, or a folder that contains one."""
    if entry.name not in LOGS and not entry.name.startswith("learner-"):
        return False
    files = entry.rglob("*") if entry.is_dir() else [entry]
    return any(file.is_file() and file.stat().st_size > 0 for file in files)


def check_writable(path: Path) -> None:
    """Raises ConfigError unless a file can be written in the directory."""
    probe = path / PROBE
    with writing(path):
        probe.write_bytes(b"\0" * 65536)
        probe.unlink()
