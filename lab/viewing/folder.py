"""The viewed folder: a run, or an evaluation. Every part of the page is the response to a path,
which the server computes on request and an export writes to files:

    run                           kind, state, list of contents
    state                         figures that change whenever there is new data
    metrics?from=N                rows of metrics.jsonl from number N on
    log                           the end of run.log
    steps?from=N                  the index of all trees
    steps/N                       one step; steps/N/search?q=TEXT: trees that contain a text
    steps/N/trees/I               one tree
    evaluations/E                 the index of an evaluation; also .../search?q=TEXT
    evaluations/E/figures         its figures, with intervals
    evaluations/E/rows/C          some whole rows
    compare/E/F                   the difference of two evaluations

Responses can take long, in proportion to the size of files, and are computed in threads.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from agentenv.assembly.run.checkpoints import Checkpoints
from agentenv.assembly.run.lock import LockHolder
from agentenv.assembly.run.rundir import CONFIG_FILE, LOG_FILE
from agentenv.base.config import resolver
from agentenv.base.errors import DataError, ForeignError
from agentenv.base.untrusted import decode_loose
from agentenv.evaluation.store import ROWS_FILE
from agentenv.lab.viewing.evaluations import Evaluation, JsonLines, compare, size_of
from agentenv.lab.viewing.trees import Trees
from agentenv.processes.supervisor import log_tail

METRICS, SUMMARY = "metrics.jsonl", "summary.json"
EVALUATIONS = "eval"
Figures = dict[str, Any]
TAIL_BYTES = 64_000


class Folder:
    """A run or an evaluation, with other evaluations to compare with."""

    def __init__(self, path: Path, others: Sequence[Path] = ()) -> None:
        """`others`: evaluations to compare with. Raises DataError."""
        self.path = path
        self.is_run = not (path / ROWS_FILE).is_file()
        if self.is_run:
            _check_run(path)
        for other in others:
            if not (other / ROWS_FILE).is_file():
                raise DataError(f"{other} contains no evaluation")
        self.others = list(others)
        self.trees = Trees(path, partial(tokenizers_of, path))
        self._lock = threading.Lock()
        self._metrics = JsonLines(path / METRICS)
        self._rows: list[Any] = []
        self._num_unreadable = 0
        self._epoch = 0  # incremented whenever earlier rows become invalid
        self._evaluations: dict[Path, Evaluation] = {}

    def answer(self, path: str, query: Mapping[str, str] = {}) -> Any:
        """The response to a path. Raises DataError for an unknown path."""
        parts = [part for part in path.split("/") if part]
        match parts:
            case ["run"]:
                return self.run()
            case ["state"]:
                return self.state()
            case ["metrics"]:
                return self.metrics(_number(query.get("from", "0")), query.get("epoch", ""))
            case ["log"]:
                return {"text": tail(self.path / LOG_FILE)}
            case ["steps"]:
                return self.trees.index(_number(query.get("from", "0")))
            case ["steps", step]:
                return self.trees.step(_number(step))
            case ["steps", step, "search"]:
                return self.trees.search(_number(step), query.get("q", ""))
            case ["steps", step, "trees", tree]:
                return self.trees.tree(_number(step), _number(tree))
            case ["evaluations", name]:
                return self.evaluation(name).index()
            case ["evaluations", name, "search"]:
                return self.evaluation(name).search(query.get("q", ""))
            case ["evaluations", name, "figures"]:
                return self.evaluation(name).figures()
            case ["evaluations", name, "rows", chunk]:
                return self.evaluation(name).chunk(_number(chunk))
            case ["compare", first, second]:
                return compare(self.evaluation(first), self.evaluation(second))
        raise DataError(f"no such page: {path!r}")

    def run(self) -> Figures:
        """The content of the first page; reads no trees and no rows."""
        checkpoints = Checkpoints(self.path / "checkpoints").finished() if self.is_run else []
        return {
            "name": self.path.resolve().name,
            "folder": str(self.path),
            "is_run": self.is_run,
            "config": _json(self.path / CONFIG_FILE) if self.is_run else None,
            "summary": _json(self.path / SUMMARY) if self.is_run else None,
            "status": self.status(),
            "checkpoints": [path.name for path in checkpoints],
            "steps": self.trees.steps(),
            "has_texts": any(path.is_file() for path in tokenizers_of(self.path)),
            "has_metrics": size_of(self.path / METRICS) > 0,
            "evaluations": [
                {"id": key, **one.about(), "bytes": one.state()}
                for key, one in self.evaluations().items()
            ],
        }

    def status(self) -> Figures:
        """The state (running, finished, stopped, or elsewhere: held by another machine, whose
        processes are unknown), and the holder."""
        holder = _json(self.path / "lock")
        if not isinstance(holder, dict) or not isinstance(holder.get("pid"), int):
            done = (self.path / SUMMARY).is_file() or not self.is_run
            return {"is": "finished" if done else "stopped", "holder": None}
        if holder.get("host") != LockHolder.me().host:
            return {"is": "elsewhere", "holder": holder}
        is_alive = psutil.pid_exists(holder["pid"])
        return {"is": "running" if is_alive else "stopped", "holder": holder}

    def state(self) -> Figures:
        return {
            "status": self.status()["is"],
            "metrics": size_of(self.path / METRICS),
            "log": size_of(self.path / LOG_FILE),
            "summary": size_of(self.path / SUMMARY),
            "trees": self.trees.state(),
            "evaluations": {key: one.state() for key, one in self.evaluations().items()},
        }

    def metrics(self, since: int = 0, epoch: str = "") -> Figures:
        """Rows from number `since` on; all rows if the file has changed since the `epoch` of the
        reader."""
        with self._lock:
            is_void, lines = self._metrics.new()
            if is_void:
                self._rows, self._num_unreadable = [], 0
                self._epoch += 1
            for line in lines:
                try:
                    self._rows.append(decode_loose(line))
                except ForeignError:
                    self._num_unreadable += 1
            if epoch != str(self._epoch):
                since = 0
            return {
                "from": since,
                "epoch": self._epoch,
                "rows": self._rows[since:],
                "num_unreadable": self._num_unreadable,
            }

    def evaluations(self) -> dict[str, Evaluation]:
        """All evaluations by a name for URLs: those of the run in order, then the others."""
        found: dict[str, Evaluation] = {}
        for folder in (*(_within(self.path) if self.is_run else [self.path]), *self.others):
            name = folder.resolve().name
            with self._lock:
                one = self._evaluations.setdefault(folder, Evaluation(folder, name))
            slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".") or "evaluation"
            keys = (slug, *(f"{slug}-{number}" for number in range(2, len(found) + 3)))
            found[next(key for key in keys if key not in found)] = one
        return found

    def evaluation(self, key: str) -> Evaluation:
        """The evaluation with this name. Raises DataError."""
        found = self.evaluations().get(key)
        if found is None:
            raise DataError(f"{self.path}: unknown evaluation {key!r}")
        return found


def tokenizers_of(run: Path) -> Iterator[Path]:
    """The files that may have the tokenizer of a run, the best first."""
    folders = [*reversed(Checkpoints(run / "checkpoints").finished())]
    folders += [run / "model", run / "resumed"]
    config = _json(run / CONFIG_FILE)
    model = config.get("model") if isinstance(config, dict) else None
    named = model if isinstance(model, dict) else {}
    for key in ("tokenizer", "path"):
        if isinstance(found := named.get(key), str) and found:
            folders.append(resolver(run)(found))
    yield from (folder / "tokenizer.json" for folder in folders)


def _check_run(path: Path) -> None:
    if (path / CONFIG_FILE).is_file() or (path / METRICS).is_file():
        return
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; expected a run or an evaluation")
    within = [*path.glob(f"*/{METRICS}"), *path.glob(f"*/{ROWS_FILE}")]
    within.sort(key=lambda one: one.stat().st_mtime)
    hint = f"; {within[-1].parent} contains one" if within else ""
    raise DataError(
        f"{path}: contains neither a run ({CONFIG_FILE}) nor an evaluation ({ROWS_FILE}){hint}"
    )


def _within(run: Path) -> list[Path]:
    """The evaluations of a run, in the order of their start."""
    folders = [path.parent for path in (run / EVALUATIONS).glob(f"*/{ROWS_FILE}")]
    order = {"before_sft": 0, "after_sft": 1}

    def place(folder: Path) -> tuple[int, list[int], str]:
        numbers = [int(one) for one in re.findall(r"\d+", folder.name)]
        return order.get(folder.name, 3 if folder.name == "after_rl" else 2), numbers, folder.name

    return sorted(folders, key=place)


def _json(path: Path) -> Any:
    """The content of a JSON file; None if it cannot be read."""
    with suppress(OSError, ForeignError):
        return decode_loose(path.read_bytes())
    return None


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 12:
        raise DataError(f"{text!r}: expected a number")
    return int(text)


def tail(path: Path) -> str:
    """The last lines of a text file."""
    text = log_tail(path, TAIL_BYTES)
    return text.partition("\n")[2] if size_of(path) > TAIL_BYTES else text
