"""The directory of an evaluation, from which an interrupted evaluation resumes.

DIR/config.json    the subject and the configuration; any other evaluation is rejected
DIR/rows.jsonl     an EvalRow per line, written when its trajectory ends
DIR/env.json       counts of environments
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from threading import Lock as ThreadLock
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.assembly.reports.records import FAILED, EvalRow, Key, Wanted
from agentenv.assembly.run.lock import Lock
from agentenv.base.config import Tree, changes
from agentenv.base.disk import PARTIAL, append_whole, write_whole
from agentenv.base.disk_errors import writing
from agentenv.base.errors import ConfigError, DataError
from agentenv.base.model_files import read_object
from agentenv.base.secrets import SECRETS

LOCK_FILE = ".lock"


def lock(folder: Path) -> Lock:
    """Create the directory if it is missing, and lock it. Raises ConfigError if another command
    holds the lock, or the directory is not writable."""
    with writing(folder, "--out"):
        folder.mkdir(parents=True, exist_ok=True)
        return Lock(folder / LOCK_FILE, "or stop it", takes_over=True)


CONFIG_FILE, ROWS_FILE, ENV_FILE = "config.json", "rows.jsonl", "env.json"

# Keys without effect on a trajectory: speed, number of questions and samples, paths.
_FREE = {"concurrency", "num_samples", "roles", "engine"}
_FREE_OF_SET = {"path", "max_tasks", "num_samples"}
_FREE_LIMITS = {"engine_timeout_s", "env_timeout_s", "max_tree_seconds", "outage_s", "strict"}
_FREE_LIMITS |= {"max_crashed_share", "max_failed_share", "max_failures", "max_turn_retries"}
_FREE_HELPER = {"url", "api_key_env", "timeout_s", "num_retries", "max_concurrency"}
_ENGINE_KEYS = ("name", "model", "dtype", "tokenizer", "script", "continuation", "extra_body")


class Saved(Struct, kw_only=True):
    """The content of config.json. `subject`: the evaluated model and its weights. `config`: the
    EvaluateConfig as plain data, with all tables of all sets. `run`: the directory that {run} in it
    stands for."""

    subject: dict[str, Any]
    run: str
    config: dict[str, Any]


class Store:
    """Opens or creates the directory, and locks it: one command at a time writes there.

    Raises ConfigError for a directory with another evaluation or other files, and DataError for
    unreadable rows.
    """

    def __init__(self, path: Path, saved: Saved) -> None:
        self.path = path
        self.rows: dict[Key, EvalRow] = {}
        self._one_at_a_time = ThreadLock()
        self._lock = lock(path)
        try:
            self._claim(saved)
            # without an incomplete last line, which a killed command may leave
            with suppress(FileNotFoundError), (path / ROWS_FILE).open("rb+") as file:
                file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
            self.rows = {row.key: row for row in read_rows(path)}
            (path / ROWS_FILE).touch()
        except BaseException:
            self._lock.close()
            raise

    def add(self, row: EvalRow) -> None:
        """Write a row, from any thread; it survives the end of the process, but not a crash of the
        machine."""
        line = msgspec.json.encode(SECRETS.tree(row, only_known=True), enc_hook=str) + b"\n"
        with self._one_at_a_time:
            append_whole(self.path / ROWS_FILE, line)
            self.rows[row.key] = row

    def count(self, stats: Mapping[str, float]) -> None:
        """Add the counts of environments of this command (`shared_stats`)."""
        total = Counter(read_env(self.path))
        total.update(stats)
        write_whole(self.path / ENV_FILE, msgspec.json.encode(total, order="sorted"))

    def missing(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        """The trajectories still to sample, including failed ones. Raises ConfigError if a stored
        row with the same key has another question."""
        found = []
        for one in wanted:
            row = self.rows.get(one.key)
            if row is not None and row.question != SECRETS.known(one.task.question):
                raise ConfigError(
                    f"{self.path}: sets.{one.dataset}: question {one.task.id} differs from the "
                    "recorded one: the file has changed; choose another --out"
                )
            if row is None or row.end == FAILED:
                found.append(one)
        return found

    def close(self) -> None:
        """Release the lock; idempotent."""
        self._lock.close()

    def _claim(self, saved: Saved) -> None:
        found = {entry.name for entry in self.path.iterdir()} - {LOCK_FILE}
        if CONFIG_FILE not in found:
            if found - {CONFIG_FILE + PARTIAL}:
                problem = f"is not empty and not an evaluation: it contains {min(found)!r}"
                raise ConfigError(f"{self.path} {problem}; choose another --out")
        else:
            before = load_saved(self.path)
            saved = msgspec.json.decode(msgspec.json.encode(saved), type=Saved)  # tuples are lists
            _refuse_changes(self.path, before, saved)
            saved.config["sets"] = {**before.config.get("sets", {}), **saved.config["sets"]}
        save(self.path, saved)


def read_env(folder: Path) -> dict[str, float]:
    """The counts of environments of an evaluation, over all its commands."""
    path = folder / ENV_FILE
    return read_object(path, "counts of environments") if path.exists() else {}


def replace_rows(folder: Path, rows: Sequence[EvalRow], keep_as: str = "") -> None:
    """Replace the rows atomically; `keep_as`: a file for the old ones. The caller must hold the
    lock."""
    encoder = msgspec.json.Encoder(enc_hook=str)
    if keep_as:
        with (folder / ROWS_FILE).open("rb") as old:
            write_whole(folder / keep_as, old)
    lines = (encoder.encode(SECRETS.tree(row, only_known=True)) + b"\n" for row in rows)
    write_whole(folder / ROWS_FILE, lines, durable=True)


def read_rows(folder: Path) -> list[EvalRow]:
    """The rows of an evaluation, the last one per key, sorted by key, so that figures do not depend
    on the order of completion. Ignores an incomplete last line. Raises DataError with file and
    line."""
    path, decoder = folder / ROWS_FILE, msgspec.json.Decoder(EvalRow)
    rows: dict[Key, EvalRow] = {}
    with suppress(FileNotFoundError), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = decoder.decode(line)
            except msgspec.DecodeError as error:
                where = f"{path}, line {number}"
                raise DataError(f"{where}: not a row of an evaluation: {error}") from None
            rows[row.key] = row
    return [rows[key] for key in sorted(rows)]


def load_rows(folder: Path) -> list[EvalRow]:
    """The rows of an evaluation. Raises DataError if there are none."""
    load_saved(folder)  # raises if the folder is no evaluation
    rows = read_rows(folder)
    if not rows:
        raise DataError(f"{folder} contains no evaluation rows")
    return rows


def save(folder: Path, saved: Saved) -> None:
    """Write config.json."""
    text = msgspec.json.format(msgspec.json.encode(saved), indent=2) + b"\n"
    write_whole(folder / CONFIG_FILE, text)


def load_saved(folder: Path) -> Saved:
    """Read config.json of an evaluation. Raises DataError."""
    path = folder / CONFIG_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Saved)
    except (OSError, msgspec.DecodeError) as error:
        within = [*folder.glob(f"*/{ROWS_FILE}"), *folder.glob(f"eval/*/{ROWS_FILE}")]
        within.sort(key=lambda rows: rows.stat().st_mtime)
        hint = f"; {within[-1].parent} contains one" if within else ""
        trained = (folder / "checkpoints").is_dir()
        reason = getattr(error, "strerror", None) or error
        why = "it is a training run" if trained else f"{path.name}: {reason}"
        raise DataError(f"{folder} contains no evaluation: {why}{hint}") from error


def load_run_config(run: Path) -> Tree:
    """Read config.json of a training run. Raises DataError."""
    return read_object(run / CONFIG_FILE, "configuration, expected in the folder of a run")


def identity(saved: Saved) -> Tree:
    """The keys that must be equal for rows to belong to the same evaluation."""
    config = saved.config
    tree: Tree = {key: value for key, value in config.items() if key not in _FREE}
    tree["engine"] = {key: config["engine"].get(key) for key in _ENGINE_KEYS}
    tree["roles"] = {name: role.get("model") for name, role in config.get("roles", {}).items()}
    tree["limits"] = _without(config["limits"], _FREE_LIMITS)
    helpers = config.get("assist") or {}
    tree["assist"] = {name: _without(one or {}, _FREE_HELPER) for name, one in helpers.items()}
    tree["sets"] = {name: _without(one, _FREE_OF_SET) for name, one in config["sets"].items()}
    for one in tree["sets"].values():
        one["limits"] = _without(one["limits"] or {}, _FREE_LIMITS)
    subject = {key: value for key, value in saved.subject.items() if key not in ("name", "path")}
    return {"subject": subject, **tree}


def _refuse_changes(path: Path, before: Saved, now: Saved) -> None:
    old, new = identity(before), identity(now)
    shared = old["sets"].keys() & new["sets"].keys()
    for tree in (old, new):
        tree["sets"] = {name: tree["sets"][name] for name in shared}
        if shared:  # only the tables of the sets count
            for name in ("env", "python", "search", "grader", "prompt", "limits", "sampling"):
                tree.pop(name, None)
    found = list(changes(old, new))
    if found:
        listed = "\n  ".join(found[:10]) + (f"\n  and {len(found) - 10} more" if found[10:] else "")
        raise ConfigError(
            f"{path} contains an evaluation with a different configuration:\n  {listed}\n"
            "choose another --out, or remove the directory; a changed grader alone is `agentenv "
            "evaluate regrade DIR grader.key=value`"
        )


def _without(tree: Tree, keys: Iterable[str]) -> Tree:
    return {key: value for key, value in tree.items() if key not in keys}


# Scores, stored by the first report so that no answer is scored twice.


def keep_scores(folder: Path, rows: Sequence[EvalRow]) -> None:
    """Store the scores of these rows, except rows that another command has changed since. If the
    directory is locked or not writable, nothing is stored, and the next report computes them
    again."""
    known = {row.key: row for row in rows}
    with suppress(ConfigError), closing(lock(folder)):
        now = read_rows(folder)
        for row in now:
            one = known.get(row.key)
            if one is not None and _graded(one) == _graded(row):
                row.scores = one.scores
        replace_rows(folder, now)


def _graded(row: EvalRow) -> tuple[str, str, bool]:
    return row.end, row.prediction, row.success
