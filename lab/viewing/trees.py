"""RUN/trees in the viewer: the index of all steps, one step, one tree token by token."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from agentenv.assembly.reports.records import noted
from agentenv.base.errors import DataError
from agentenv.base.tree import Node, Scored, TrajectoryTree
from agentenv.lab.viewing.evaluations import search
from agentenv.rollout.archive import ARCHIVE, Entry, KeptTree, changed_forks, steps_of
from agentenv.rollout.archive_reader import Step, read_step
from agentenv.rollout.metrics import failure_kind_of
from agentenv.text.encoder import token_texts

COLUMNS = (
    *("step", "tree", "task", "kind", "fate", "why", "rewards", "leaves", "failed", "truncated"),
    *("roots", "forks", "tokens", "sampled", "version", "staleness", "changed"),
)
MAX_QUESTION_CHARS = 400
EMPTY = np.zeros(0, np.float32)
NUM_STEPS_KEPT = 32  # number of steps with cached details
Texts = Callable[[Sequence[int]], list[str]]
Figures = dict[str, Any]


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

    def index(self, since: int = 0) -> Figures:
        """A row for each tree from step `since` on; reads no tree."""
        rows, cut_off = list[list[Any]](), []
        for number, path in steps_of(self.folder).items():
            if number < since:
                continue
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
            "incarnation": step.header.incarnation,
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
        *(step.header.step, entry.tree, entry.task_id, entry.kind, entry.fate, entry.why),
        *(entry.rewards, entry.num_leaves, entry.num_failed, entry.num_truncated),
        *(entry.num_roots, entry.num_forks, entry.num_tokens, entry.num_action_tokens),
        *(entry.policy_version, step.header.policy_version - entry.oldest_version),
        entry.num_changed,
    ]


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
        "limits": dict(Counter(str(leaf.limit) for leaf in leaves if leaf.end == "truncated")),
        "calls": len(calls),
        "call_errors": sum(not call.get("ok", True) for call in calls),
        "tool_s": sum(float(call.get("duration_s") or 0.0) for call in calls),
        "entropy": _mean(np.concatenate([EMPTY, *(node.entropies for node in tree.nodes)])),
        "gap": _mean(np.abs(_gaps(tree))),
        "retaken": tree.num_retaken,
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
            yield "".join(texts([*node.action_ids, *node.observation_ids]))


_TREE = ("num_roots", "num_forks", "num_retries", "num_retaken", "policy_version")
_NODE = ("index", "parent", "continues", "branch", "end", "limit", "error", "num_forks", "reward")
_CREDIT = {"adv_pos": "adv_pos", "adv_neg": "adv_neg", "weight": "weight"}
_CREDIT |= {"return": "returns", "advantage": "advantages"}  # name on the page -> field


def _tree(kept: KeptTree, entry: Entry, texts: Texts | None) -> Figures:
    """A tree for the page, with its nodes and its fate."""
    tree, task = kept.tree, kept.tree.task
    described = {name: getattr(task, name) for name in ("id", "kind", "question", "metadata")}
    return {
        "tree": tree.index,
        "fate": kept.fate,
        "why": kept.why,
        "has_texts": texts is not None,
        "has_credit": kept.credit is not None,
        "has_learner": bool(tree.scored),
        "num_tokens": entry.num_tokens,
        "num_sampled": entry.num_action_tokens,
        **{name: getattr(tree, name) for name in _TREE},
        "task": {**described, "env": task.env_id, "answers": list(task.answers)},
        "nodes": [_node(kept, node, texts) for node in tree.nodes],
    }


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
        "entropies": _rounded(scored.entropies if len(scored.entropies) else node.entropies),
        "versions": [[span.version, span.start, span.end] for span in node.version_spans],
        "observation": "".join(_texts(node.observation_ids, texts)),
        "num_observed": len(node.observation_ids),
    }
    if credit is not None:
        found |= {key: getattr(credit, name)[at] for key, name in _CREDIT.items()}
    return found


def _texts(ids: Sequence[int], texts: Texts | None) -> list[str]:
    return texts(ids) if texts is not None else [f"⟨{token}⟩" for token in ids]


def _rounded(values: Any) -> list[float]:
    return [round(float(value), 4) for value in values]  # nan is null in JSON
