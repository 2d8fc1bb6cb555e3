"""The viewed folder: a run, or an evaluation. Every part of the page is the response to a path,
which the server computes on request and an export writes to files:

    run                           kind, state, list of contents
    state                         figures that change whenever there is new data
    metrics?from=N                rows of metrics.jsonl from number N on
    log                           the end of run.log
    steps                         the index of all trees
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from agentenv.assembly.reports.records import noted
from agentenv.assembly.run.checkpoints import Checkpoints
from agentenv.assembly.run.lock import LockHolder
from agentenv.assembly.run.rundir import CONFIG_FILE, LOG_FILE
from agentenv.base.config import resolver
from agentenv.base.errors import DataError, ForeignError
from agentenv.base.secrets import SECRETS
from agentenv.base.tree import Node, Scored, TrajectoryTree
from agentenv.base.untrusted import decode_loose
from agentenv.evaluation.store import ROWS_FILE
from agentenv.lab.viewing.evaluations import (
    Evaluation,
    Figures,
    JsonLines,
    compare,
    search,
    size_of,
)
from agentenv.processes.supervisor import log_tail
from agentenv.rollout.archive import ARCHIVE, Entry, KeptTree, changed_forks, steps_of
from agentenv.rollout.archive_reader import Step, read_step
from agentenv.rollout.metrics import failure_kind_of
from agentenv.text.encoder import token_texts

# RUN/trees in the viewer: the index of all steps, one step, one tree token by token.

COLUMNS = (
    "step", "tree", "task", "kind", "fate", "why", "rewards", "leaves", "failed", "truncated",
    "roots", "forks", "tokens", "sampled", "version", "staleness", "changed",
)  # fmt: skip
MAX_QUESTION_CHARS = 400
EMPTY = np.zeros(0, np.float32)
NUM_STEPS_KEPT = 32  # number of steps with cached details
Texts = Callable[[Sequence[int]], list[str]]


class Trees:
    """The trees of a run, read on demand from any thread."""

    def __init__(self, run: Path, tokenizers: Callable[[], Iterator[Path]]) -> None:
        """`tokenizers` yields candidate files, the best first."""
        self.folder = run / ARCHIVE
        self._tokenizers = tokenizers
        self._texts: Texts | None = None
        self._lock = threading.Lock()

    def state(self) -> list[int]:
        """Number of files, number of the last one, and its size: changes with new data."""
        paths = steps_of(self.folder)
        if not paths:
            return [0, 0, 0]
        last = max(paths)
        return [len(paths), last, paths[last].stat().st_size]

    def steps(self) -> list[int]:
        return list(steps_of(self.folder))

    def index(self) -> Figures:
        """A row for each tree; reads no tree."""
        rows, cut_off = list[list[Any]](), []
        for number, path in steps_of(self.folder).items():
            try:
                step = _step(path, _state(path))
            except DataError:
                cut_off.append(number)
                continue
            if not step.is_whole:
                cut_off.append(number)
            rows += (_index_row(step, entry) for entry in step.entries)
        return {"columns": COLUMNS, "rows": rows, "cut_off": cut_off}

    def step(self, number: int) -> Figures:
        """The metrics of a step, and the details of its trees, which are read for this. Raises
        DataError if the step is missing."""
        file = self._file(number)
        step = _step(*file)
        return {
            "step": number,
            "policy_version": step.header.policy_version,
            "num_trees": step.header.num_trees,
            "is_whole": step.is_whole,
            "metrics": step.header.metrics,
            "trees": _step_details(*file),
        }

    def tree(self, number: int, tree: int) -> Figures:
        """A whole tree. Raises DataError."""
        step = _step(*self._file(number))
        entry = next((one for one in step.entries if one.tree == tree), None)
        if entry is None:
            raise DataError(f"{step.path}: no tree {tree}")
        kept = step.tree(entry)
        return {
            "step": number,
            "learner_version": step.header.policy_version,
            "trees": [one.tree for one in step.entries],
            **_tree(kept, entry, self.texts()),
        }

    def search(self, number: int, text: str) -> Figures:
        """The trees of a step that contain a text (ignoring case) in question, answers, or texts of
        policy and environment."""
        step = _step(*self._file(number))
        decode = self.texts()

        def texts(entry: Entry) -> Iterator[str]:
            with suppress(DataError):
                yield from _all_texts(step.tree(entry).tree, decode)

        found, num_searched = search(step.entries, texts, text)
        trees = [entry.tree for entry in found]
        return {"trees": trees, "num_searched": num_searched, "num_trees": len(step.entries)}

    def texts(self) -> Texts | None:
        """The decoder of single tokens; None without a tokenizer."""
        with self._lock:
            path = None if self._texts else next(filter(Path.is_file, self._tokenizers()), None)
            if path is not None:
                from tokenizers import Tokenizer

                self._texts = token_texts(Tokenizer.from_file(str(path)))
            return self._texts

    def _file(self, number: int) -> tuple[Path, tuple[int, int]]:
        """The file of a step, and its state. Raises DataError if the step is missing."""
        path = steps_of(self.folder).get(number)
        if path is None:
            raise DataError(f"{self.folder}: no step {number}")
        return path, _state(path)


@cache
def _step(path: Path, state: tuple[int, int]) -> Step:
    """The index of a file of trees in this state."""
    return read_step(path)


@lru_cache(NUM_STEPS_KEPT)
def _step_details(path: Path, state: tuple[int, int]) -> list[Figures]:
    """The details of all trees in a file in this state."""
    step, details = _step(path, state), []
    for entry in step.entries:
        try:
            details.append(_details(entry, step.tree(entry)))
        except DataError as error:
            details.append({"tree": entry.tree, "damaged": str(error)})
    return details


def _state(path: Path) -> tuple[int, int]:
    """Modification time (ns) and size of a file. Raises DataError if it is missing."""
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    return found.st_mtime_ns, found.st_size


def _index_row(step: Step, entry: Entry) -> list[Any]:
    return [
        step.header.step, entry.tree, entry.task_id, entry.kind, entry.fate, entry.why,
        entry.rewards, entry.num_leaves, entry.num_failed, entry.num_truncated, entry.num_roots,
        entry.num_forks, entry.num_tokens, entry.num_action_tokens, entry.policy_version,
        step.header.policy_version - entry.oldest_version, entry.num_changed,
    ]  # fmt: skip


def _details(entry: Entry, kept: KeptTree) -> Figures:
    tree = kept.tree
    leaves = tree.leaves()
    calls = [call for node in tree.nodes for call in node.info.get("tool_calls", ())]
    return {
        "tree": entry.tree,
        "question": tree.task.question[:MAX_QUESTION_CHARS],
        "env": tree.task.env_id,
        "right": sum(bool(leaf.info.get("success")) for leaf in leaves if leaf.end != "failed"),
        "failures": dict(Counter(failure_kind_of(leaf.error) for leaf in tree.failures())),
        "calls": len(calls),
        "call_errors": sum(not call.get("ok", True) for call in calls),
        "tool_s": sum(float(call.get("duration_s") or 0.0) for call in calls),
        "entropy": _mean(np.concatenate([EMPTY, *(node.entropies for node in tree.nodes)])),
        "gap": _mean(np.abs(_gaps(tree))),
        "changed": changed_forks(tree),
    }


def _gaps(tree: TrajectoryTree) -> Any:
    """Log-probs of the learner minus the engine's, for sampled tokens with both."""
    parts = [EMPTY]
    for node, scored in zip(tree.nodes, tree.scored, strict=False):
        if len(scored.logprobs) and len(scored.logprobs) == len(node.logprobs):
            parts.append(np.asarray(scored.logprobs) - np.asarray(node.logprobs))
    return np.concatenate(parts)


def _mean(values: Any) -> float | None:
    known = values[np.isfinite(values)]
    return round(float(known.mean()), 5) if len(known) else None


def _all_texts(tree: TrajectoryTree, texts: Texts | None) -> Iterator[str]:
    yield tree.task.question
    yield from tree.task.answers
    for node in tree.nodes:
        if node.error:
            yield node.error
        if texts is not None:
            yield SECRETS.known("".join(texts([*node.action_ids, *node.observation_ids])))


_TREE = ("num_roots", "num_forks", "num_retries", "num_retaken", "policy_version")
_NODE = ("index", "parent", "continues", "branch", "end", "limit", "error", "num_forks", "reward")
_CREDIT = {"adv_pos": "adv_pos", "adv_neg": "adv_neg", "weight": "weight"}
_CREDIT |= {"return": "returns", "advantage": "advantages"}  # name on the page -> field


def _tree(kept: KeptTree, entry: Entry, texts: Texts | None) -> Figures:
    """A tree for the page, with its nodes and its fate."""
    tree, task = kept.tree, kept.tree.task
    described = {name: getattr(task, name) for name in ("id", "kind", "question", "metadata")}
    has_texts, has_credit = texts is not None, kept.credit is not None
    found: Figures = {
        "tree": tree.index, "fate": kept.fate, "why": kept.why, "has_texts": has_texts,
        "has_credit": has_credit, "has_learner": bool(tree.scored),
        "num_tokens": entry.num_tokens, "num_sampled": entry.num_action_tokens,
        "task": {**described, "env": task.env_id, "answers": list(task.answers)},
    }  # fmt: skip
    found |= {name: getattr(tree, name) for name in _TREE}
    return {**found, "nodes": [_node(kept, node, texts) for node in tree.nodes]}


def _node(kept: KeptTree, node: Node, texts: Texts | None) -> Figures:
    """A node for the page: its place, tokens with their figures, and tool calls."""
    tree, at, credit = kept.tree, node.index, kept.credit
    scored = tree.scored[at] if at < len(tree.scored) else Scored()
    found: Figures = {
        **{name: getattr(node, name) for name in _NODE},
        "info": {key: value for key, value in node.info.items() if key != "tool_calls"},
        "calls": list(node.info.get("tool_calls", ())),
        "noted": noted(node),
        "ids": list(node.action_ids),
        "texts": _texts(node.action_ids, texts),
        "logprobs": _rounded(node.logprobs),
        "proximal": _rounded(scored.proximal),
        "learner": _rounded(scored.logprobs),
        "teacher": _rounded(scored.teacher),
        "entropies": _rounded(scored.entropies if len(scored.entropies) else node.entropies),
        "versions": [[span.version, span.start, span.end] for span in node.version_spans],
        "observation": "".join(_texts(node.observation_ids, texts)),
        "num_observed": len(node.observation_ids),
    }
    if credit is not None:
        found |= {key: getattr(credit, name)[at] for key, name in _CREDIT.items()}
    return found


def _texts(ids: Sequence[int], texts: Texts | None) -> list[str]:
    return SECRETS.pieces(texts(ids)) if texts is not None else [f"⟨{token}⟩" for token in ids]


def _rounded(values: Any) -> list[float]:
    return [round(float(value), 4) for value in values]  # nan is null in JSON


METRICS, SUMMARY = "metrics.jsonl", "summary.json"
EVALUATIONS = "eval"
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
        self._metrics = JsonLines[Any](path / METRICS, decode_loose)
        self._rows: list[Any] = []
        self._epoch = 0  # incremented whenever earlier rows become invalid
        self._evaluations: dict[Path, Evaluation] = {}

    def answer(self, path: str, query: Mapping[str, str] = {}) -> Any:
        """The response to a path. Raises DataError for an unknown path."""
        match [part for part in path.split("/") if part]:
            case ["run"]:
                return self.run()
            case ["state"]:
                return self.state()
            case ["metrics"]:
                return self.metrics(_number(query.get("from", "0")), query.get("epoch", ""))
            case ["log"]:
                return {"text": tail(self.path / LOG_FILE)}
            case ["steps"]:
                return self.trees.index()
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
            "config": SECRETS.tree(_json(self.path / CONFIG_FILE)) if self.is_run else None,
            "summary": _json(self.path / SUMMARY) if self.is_run else None,
            "status": self.status(),
            "checkpoints": [path.name for path in checkpoints],
            "steps": self.trees.steps(),
            "has_texts": any(path.is_file() for path in tokenizers_of(self.path)),
            "evaluations": [{"id": key, **one.about()} for key, one in self.evaluations().items()],
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
            is_void, rows = self._metrics.new()
            if is_void:
                self._rows = []
                self._epoch += 1
            self._rows += (row for row, *_ in rows)
            if epoch != str(self._epoch):
                since = 0
            return {
                "from": since,
                "epoch": self._epoch,
                "rows": self._rows[since:],
                "num_unreadable": self._metrics.num_unreadable,
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
    with suppress(LookupError, TypeError):  # damaged, or of an evaluation
        folders.append(resolver(run)(str(_json(run / CONFIG_FILE)["model"]["path"])))
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
