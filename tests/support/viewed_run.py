"""A small run for the viewer, written by the parts that write real ones: trees with forks, failures
and filters, metrics, evaluations. Texts of the policy and the tools in it are hostile."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentenv.assembly.reports.records import EvalRow
from agentenv.base.tree import Node, Scored, TrajectoryTree
from agentenv.base.types import Limit, Task, VersionSpan
from agentenv.rollout.archive import ARCHIVE, Archive, Credit, KeptTree, StepHeader
from agentenv.rollout.frames import ArchiveConfig
from tests.support.chat_models import bytes_tokenizer

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
RESULT = "</pre></div><iframe src=javascript:parent.hacked=1></iframe> héllo ✓ \u202eflip"


def make_tokenizer(folder: Path) -> Any:
    """One token a byte; its file in the folder, as a model has it."""
    tokenizer = bytes_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


class ViewedRun:
    """A run folder that grows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = make_tokenizer(folder / "model")
        self.num_steps = 0
        config = {"algorithm": {"name": "arpo"}, "env": {"id": "me/Shop-v0"}}
        config |= {"model": {"path": "{run}/model"}, "train": {"num_steps": 9}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "run.log").write_text("INFO began\n")
        self.row({"step": 0, "phase": "before_sft", **evaluated(0.25)})

    def row(self, row: dict[str, Any], *, torn: bool = False) -> None:
        """A row of metrics; `torn`: the first half of it."""
        text = json.dumps(row) + "\n"
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(text[: len(text) // 2] if torn else text)

    def step(self, *, num_trees: int = 3) -> int:
        """One more step, with its trees."""
        self.num_steps += 1
        step = self.num_steps
        header = StepHeader(step, step, 1, "settings", 256, num_trees, metrics(step))
        first = (step - 1) * num_trees
        trees = [self.tree(first + place, step) for place in range(num_trees)]
        Archive(self.folder / ARCHIVE, ArchiveConfig()).write(header, trees)
        self.row({"step": step, "policy_version": step, **metrics(step)})
        return step

    def tree(self, index: int, version: int) -> KeptTree:
        """By turns trained with a fork, filtered, and failed."""
        kind = ("trained", "filtered", "failed")[index % 3]
        task = Task(
            f"task-{index}", "me/Shop-v0", f"{HOSTILE} number {index}?", ("7", "seven"), "buy"
        )
        tree = TrajectoryTree(task, index=index, policy_version=version - 1, num_roots=2)
        root = tree.add(None, observation_ids=self.ids(f"user: {task.question}\n"))
        call = {"name": "shop", "arguments": {"query": HOSTILE}, "ok": True, "error": None}
        call |= {"duration_s": 0.25, "waited_s": 0.05, "info": {"cached": True}}
        first = self.turn(tree, root, "0", f"look {HOSTILE}", version, num_forks=1)
        first.observation_ids, first.info = self.ids(RESULT), {"tool_calls": [call]}
        self.end(tree, self.turn(tree, first, "0", "it is seven", version), 1.0)
        right = self.turn(tree, first, "0.1+1", "it is 8", version)
        self.end(tree, right, 1.0 if kind == "filtered" else -1.0)
        other = self.turn(tree, root, "1", "no idea", version)
        if kind == "failed":
            other.end, other.error = "failed", f"OutageError: the shop is closed {HOSTILE}"
        else:
            other.end, other.limit = "truncated", Limit.TURNS
            other.reward = 1.0 if kind == "filtered" else 0.0
        if kind != "trained":
            why = "with equal returns" if kind == "filtered" else "OutageError"
            return KeptTree(tree, kind, why)  # type: ignore[arg-type]
        tree.scored = [scored(node) for node in tree.nodes]
        nan = math.nan
        shares = [1.0, 1.0, 1.0, 0.0, 0.0], [-1.0, -1.0, 0.0, -1.0, 0.0], [3.0, 2.0, 1.0, 1.0, 1.0]
        of_leaves = [nan, nan, 1.0, -1.0, 0.0]
        credit = Credit(*shares, of_leaves, of_leaves)
        return KeptTree(tree, "trained", credit=credit)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def turn(
        self, tree: TrajectoryTree, parent: Node, branch: str, text: str, version: int, **more: Any
    ) -> Node:
        ids = self.ids(text)
        logprobs = [-0.1 * (place % 7) for place in range(len(ids))]
        entropies = [0.2 * (place % 5) for place in range(len(ids))]
        spans = [VersionSpan(version - 1, 0, 3), VersionSpan(version, 3, len(ids))]
        return tree.add(
            parent,
            branch=branch,
            action_ids=ids,
            logprobs=logprobs,
            entropies=entropies,
            version_spans=spans,
            **more,
        )

    @staticmethod
    def end(tree: TrajectoryTree, node: Node, reward: float) -> None:
        node.end, node.reward = "terminated", reward
        node.info = {"success": reward > 0, "parts": {"accuracy": reward}, "reason": HOSTILE}
        node.info["endpoint"] = {"calls": 3, "discarded": 0, f"refused/invalid/{HOSTILE}": 2}

    def evaluation(self, name: str, shares: Sequence[float], *, num_samples: int = 2) -> Path:
        """An evaluation with a question for each share of right samples."""
        folder = self.folder / "eval" / name
        folder.mkdir(parents=True)
        config = {"subject": {"name": "run", "step": 1}, "run": str(self.folder), "config": {}}
        (folder / "config.json").write_text(json.dumps(config))
        with (folder / "rows.jsonl").open("wb") as file:
            for number, share in enumerate(shares):
                for sample in range(num_samples):
                    is_right = sample < share * num_samples
                    file.write(msgspec.json.encode(row_of(number, sample, is_right)) + b"\n")
        return folder


def row_of(number: int, sample: int, is_right: bool) -> EvalRow:
    """With a tool call, and a judge's words."""
    prediction, score = ("7", 1.0) if is_right else (HOSTILE, 0.0)
    row = {
        "dataset": "held", "task": f"q-{number:05d}", "sample": sample, "answers": ["7"],
        "kind": ("buy", "sell")[number % 2], "question": f"{HOSTILE} question {number}",
        "segments": [
            {"env": "prompt"}, {"policy": HOSTILE}, {"env": RESULT}, {"policy": "it is 7"},
        ],
        "tool_calls": [
            {"name": "shop", "arguments": {"query": HOSTILE}, "ok": True, "error": None},
        ],
        "num_turns": 2, "action_tokens": 12, "seconds": 0.5, "end": "terminated",
        "prediction": prediction, "reward": score, "success": is_right,
        "reason": f"the judge said: {HOSTILE}", "parts": {"judge": score, "rule": score},
        "policy_versions": [1, 1],
    }  # fmt: skip
    return EvalRow(**row)


def metrics(step: int) -> dict[str, float]:
    return {
        "reward/mean": step / 10, "reward/success": step / 10, "trees/offered": 3.0 * step,
        "trees/trained": float(step), "trees/filtered": float(step), "trees/failed": float(step),
        "trees/in_flight": 2.0, "staleness/max": 1.0, "staleness/bound": 1.0, "queue/ready": 1.0,
        "time/wait_s": 0.5, "time/update_s": 1.0, "time/publish_s": 0.1,
        "time/sampled_tokens_per_s": 100.0 * step, "time/run_tokens_per_s": 180.0,
        "tool/shop/calls": 3.0, "tool/shop/errors": 0.0, "tool/shop/mean_s": 0.25,
        "failed/by_kind/OutageError": 1.0, "failed/trajectories": 1.0, "failed/share": 0.1,
        "reward/success_if_failed_wrong": 0.9 * step / 10, "rollout/trajectories": 9.0,
    }  # fmt: skip


def evaluated(share: float) -> dict[str, float]:
    place = "eval/held/success"
    figures = {"failed": 2.0, "trajectories": 8.0, "success_if_failed_wrong": 0.8 * share}
    more = {f"eval/held/{name}": value for name, value in figures.items()}
    return {place: share, f"{place}_low": share - 0.1, f"{place}_high": share + 0.1, **more}


def scored(node: Node) -> Scored:
    """The learner a hundredth of a nat above the engine."""
    logprobs = [value + 0.01 for value in node.logprobs]
    return Scored(logprobs=logprobs, proximal=logprobs)


def make_run(folder: Path, num_steps: int = 3) -> ViewedRun:
    """Finished, with two evaluations."""
    folder.mkdir(parents=True)
    run = ViewedRun(folder)
    for _ in range(num_steps):
        run.step()
    run.evaluation("before_sft", [0.0, 0.5, 0.0, 0.0])
    run.evaluation("after_rl", [1.0, 0.5, 0.0, 1.0])
    run.row({"step": num_steps, "phase": "after_rl", **evaluated(0.75)})
    (folder / "summary.json").write_text("{}")
    return run
