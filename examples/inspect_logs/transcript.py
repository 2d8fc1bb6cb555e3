"""A question with its branches and turns, of an archived tree or of a row of an evaluation."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, field

from agentenv.assembly.reports.records import FAILED, Decode, EvalRow
from agentenv.base.tree import Node
from agentenv.rollout.archive import KeptTree
from examples.monitors.turns import TranscriptTurn, turns_of


class TranscriptBranch(Struct, kw_only=True):
    """A trajectory without the turns up to `forked_at` that it shares with an earlier branch,
    `parent`. Both are None for a from-scratch trajectory."""

    name: str
    parent: str | None = None
    forked_at: str | None = None
    turns: list[TranscriptTurn] = field(default_factory=list)
    reward: float | None = None
    success: bool = False
    end: str = ""
    limit: str | None = None
    error: str | None = None
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class TranscriptQuestion(Struct, kw_only=True):
    """A task and its trajectories. `sample` counts repetitions of the same task, from 1."""

    id: str
    task: str
    sample: int = 1
    question: str
    answers: list[str]
    kind: str = ""
    prompt: str = ""
    prediction: str = ""
    seconds: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    branches: list[TranscriptBranch] = field(default_factory=list)

    def path(self, branch: TranscriptBranch) -> list[tuple[TranscriptBranch, TranscriptTurn]]:
        """All turns of a trajectory, each with the branch that contains it."""
        before: list[tuple[TranscriptBranch, TranscriptTurn]] = []
        if branch.parent is not None:
            parent = next(one for one in self.branches if one.name == branch.parent)
            for owner, turn in self.path(parent):
                before.append((owner, turn))
                if turn.key == branch.forked_at:
                    break
        return before + [(branch, turn) for turn in branch.turns]


def of_tree(kept: KeptTree, decode: Decode) -> TranscriptQuestion:
    """The question of an archived tree. Each turn appears once, in the branch that sampled it."""
    return _Reader(kept, decode).question()


class _Reader:
    def __init__(self, kept: KeptTree, decode: Decode) -> None:
        self._kept, self._tree, self._decode = kept, kept.tree, decode
        self._owner: dict[int, str] = {}  # node -> its branch
        self._names: set[str] = set()

    def question(self) -> TranscriptQuestion:
        """The tree as a question with a branch for each leaf."""
        tree, task, kept = self._tree, self._tree.task, self._kept
        branches = [self._branch(leaf) for leaf in sorted(tree.leaves(), key=_depth)]
        done = [(one.reward, one.success) for one in branches if one.reward is not None]
        means = [fmean(values) for values in zip(*done, strict=True)]
        versions = {"policy_version": tree.policy_version, "oldest_version": tree.oldest_version()}
        return TranscriptQuestion(
            id=f"tree-{tree.index:06d}",
            task=task.id,
            question=task.question,
            answers=list(task.answers),
            kind=task.kind,
            prompt=self._decode(tree.root.observation_ids),
            scores=dict(zip(("reward", "success"), means, strict=False)),
            branches=branches,
            facts={
                "tree": tree.index,
                "fate": kept.fate,
                "why": kept.why,
                "env_id": task.env_id,
                **versions,
                "num_roots": tree.num_roots,
                "num_forks": tree.num_forks,
                "metadata": msgspec.to_builtins(task.metadata, enc_hook=str),
            },
        )

    def _branch(self, leaf: Node) -> TranscriptBranch:
        """The branch of a leaf; its shared turns belong to an earlier branch."""
        tree, credit = self._tree, self._kept.credit
        path = [node for node in tree.history(leaf) if len(node.action_ids)]
        own = [node for node in path if node.index not in self._owner]
        shared = [node for node in path if node.index in self._owner]
        name = leaf.branch
        while name in self._names:  # of a failed trajectory and its replacement
            name += "'"
        self._names.add(name)
        parent = self._owner[shared[-1].index] if shared else None
        self._owner |= dict.fromkeys((node.index for node in own), name)
        facts: dict[str, Any] = {"parts": leaf.info.get("parts", {})}
        if credit is not None and not math.isnan(credit.advantages[leaf.index]):
            facts["advantage"] = credit.advantages[leaf.index]
        return TranscriptBranch(
            name=name,
            parent=parent,
            forked_at=f"node-{shared[-1].index}" if shared else None,
            turns=[self._turn(node) for node in own],
            reward=None if leaf.end == FAILED else sum(node.reward for node in tree.history(leaf)),
            success=bool(leaf.info.get("success", False)),
            end=leaf.end or "",
            limit=leaf.limit,
            error=leaf.error,
            reason=str(leaf.info.get("reason", "")),
            facts=facts,
        )

    def _turn(self, node: Node) -> TranscriptTurn:
        before = [one for one in self._tree.path(node) if one is not node]
        return TranscriptTurn(
            key=f"node-{node.index}",
            text=self._decode(node.action_ids),
            answer=self._decode(node.observation_ids),
            calls=msgspec.to_builtins(node.info.get("tool_calls", []), enc_hook=str),
            num_context=sum(len(one.action_ids) + len(one.observation_ids) for one in before),
            num_tokens=len(node.action_ids),
            facts=self._facts(node),
        )

    def _facts(self, node: Node) -> dict[str, Any]:
        credit, scored = self._kept.credit, self._tree.scored
        versions = sorted({span.version for span in node.version_spans})
        facts: dict[str, Any] = {"node": node.index, "policy_versions": versions}
        if node.reward:
            facts["reward"] = node.reward
        if node.num_forks is not None:
            facts["num_forks"] = node.num_forks
        if credit is not None:
            facts["adv_pos"] = credit.adv_pos[node.index]
            facts["adv_neg"] = credit.adv_neg[node.index]
            facts["shared_by"] = credit.weight[node.index]
        entropies = (scored[node.index].entropies if scored else None) or node.entropies
        facts |= _mean("entropy", np.asarray(entropies))
        if scored and len(scored[node.index].logprobs) == len(node.logprobs):
            gap = np.abs(np.asarray(scored[node.index].logprobs) - np.asarray(node.logprobs))
            facts |= _mean("engine_learner_gap", gap)
        return facts


def _mean(name: str, values: Any) -> dict[str, float]:
    known = values[~np.isnan(values)]
    return {name: round(float(known.mean()), 6)} if len(known) else {}


def _depth(leaf: Node) -> tuple[int, int]:
    """Sort key: from-scratch leaves first, each fork after its parent."""
    return leaf.branch.count("+"), leaf.index


_ENDED = ("success", "end", "limit", "error", "reason")
_FACTS = ("env_id", "seed", "metadata", "prompt_tokens", "action_tokens", "tool_tokens")


def of_row(row: EvalRow) -> TranscriptQuestion:
    """The question of a row of an evaluation, with text but without tokens."""
    prompt, turns = turns_of(row.segments, row.tool_calls)
    reward = None if row.end == FAILED else row.reward
    ended = {name: getattr(row, name) for name in _ENDED}
    branch = TranscriptBranch(
        name="0", turns=turns, reward=reward, facts={"parts": row.parts}, **ended
    )
    facts = {name: getattr(row, name) for name in _FACTS}
    if row.policy_versions:
        facts["policy_versions"] = row.policy_versions
    scores = {} if reward is None else {"reward": reward, "success": float(row.success)}
    return TranscriptQuestion(
        id=f"{row.task}-{row.sample}",
        task=row.task,
        sample=row.sample + 1,
        question=row.question,
        answers=list(row.answers),
        kind=row.kind,
        prompt=prompt,
        prediction=row.prediction,
        seconds=row.seconds,
        scores=scores and {**scores, **row.scores},
        branches=[branch],
        facts=facts,
    )
