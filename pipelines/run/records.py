"""One stored trajectory: as a row (of training, or `EvalRow` of an evaluation), as text for people,
as the input of a grader, and as a conversation for other formats.

Question     a task with its prompt, and everything that was tried on it
+-- Branch   a trajectory from where it leaves another one: a fork; or from the prompt
    +-- Turn the policy's text, its tool calls, and the observation after them

Everything that is reported, compared or graded again is computed from rows; nothing else has to be
kept.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct, field

from agentenv.archive import KeptTree
from agentenv.data_files import Row
from agentenv.disk import write_whole
from agentenv.encoder import fast_decoder
from agentenv.envs.grading.verdict import final_answer
from agentenv.failures import Redactor
from agentenv.renderer import THOUGHT_OPEN
from agentenv.tags import TAGS
from agentenv.tree import Node, Trajectory, TrajectoryTree, of_frame
from agentenv.types import Message, Task, ToolCall

FAILED = "failed"
MAX_KIND_CHARS = 60

Key = tuple[str, str, int]
Decode = Callable[[Sequence[int]], str]


class Wanted(NamedTuple):
    """One trajectory to ask for: sample number `sample` of a task, in the set `dataset`."""

    dataset: str
    task: Task
    sample: int

    @property
    def key(self) -> Key:
        """The key of its row."""
        return self.dataset, self.task.id, self.sample


class EvalRow(Struct, kw_only=True, omit_defaults=True):
    """One trajectory. `dataset`, `task` and `sample` (from 0) name it within an evaluation.

    `segments` is the text in order, {"policy": ...} or {"env": ...}, the prompt first; where an
    end-of-sequence token ended a turn, its text stands apart: {"policy": ..., "eos": ...}; a user's
    message after a turn is {"env": ..., "role": "user"}. A failed
    one (end "failed") has an `error` and no scores: it is counted by kind, never as wrong.
    `scores` holds every metric that was computed, each in [0, 1]: em, f1, contains, math, judge;
    `success` and `reward` are those of the environment's grader, `reason` is its explanation.
    `same_as` is the lowest number among the samples of the question that give the same wrong
    answer. Scores and `same_as` are filled in by the first report.
    """

    dataset: str
    task: str
    sample: int
    kind: str = "all"
    env_id: str = ""  # of the task; regrading asks this environment for its grader
    question: str = ""
    answers: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)  # of the dataset: level, category, ...
    seed: int | None = None
    segments: list[dict[str, str]] = field(default_factory=list)
    prediction: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # name, arguments, ok, error
    num_turns: int = 0
    num_retries: int = 0  # after failures, with the same seeds
    prompt_tokens: int = 0
    action_tokens: int = 0  # sampled by the policy
    tool_tokens: int = 0  # of tool results
    seconds: float = 0.0  # wall time of the trajectory
    end: str = ""  # terminated, truncated, failed
    limit: str | None = None
    error: str | None = None
    reward: float = 0.0
    success: bool = False
    reason: str = ""
    parts: dict[str, float] = field(default_factory=dict)  # of the reward
    scores: dict[str, float] = field(default_factory=dict)
    same_as: int | None = None
    assist: dict[str, float] = field(default_factory=dict)  # uses, successes, tokens of helpers
    abandoned: list[str] = field(default_factory=list)  # turns that the backtracer took again
    policy_versions: list[int] = field(default_factory=list)  # oldest and newest that sampled

    @property
    def key(self) -> Key:
        """The name of the trajectory within its evaluation."""
        return self.dataset, self.task, self.sample

    @property
    def failure_kind(self) -> str:
        """The class of the error of one that failed, e.g. "EnvError"."""
        return (self.error or "unknown").partition(":")[0][:MAX_KIND_CHARS]


# From a stored trajectory back to the input of its grader: the policy's own messages and calls.

_CALL_TAG = re.compile(rf"</(?!(?:{'|'.join(TAGS)})>)(\w+)>\Z")


def written(row: EvalRow) -> list[Message]:
    """The policy's messages in order, as the renderer parsed them: without end-of-sequence tokens;
    where the text before a turn ends with an open <think>, the message starts with it.

    A turn that the env answered, or that ends with a tool's tag, has a call; of several in one turn
    only one stands there, by name only: graders read the text.
    """
    messages: list[Message] = []
    before = ""
    calls = iter(row.tool_calls)
    for place, segment in enumerate(row.segments):
        text = segment.get("policy")
        if text is None:
            before = segment.get("env", "")
            continue
        if before.rstrip().endswith(THOUGHT_OPEN):
            text = f"{THOUGHT_OPEN}\n{text}"
        before = ""
        answered = place + 1 < len(row.segments) and is_result(row.segments[place + 1])
        called = next(calls, None) if answered else None
        tag = _CALL_TAG.search(text)
        name = called["name"] if called is not None else tag[1] if tag is not None else ""
        found = (ToolCall(name, {}),) if name else ()
        messages.append(Message("assistant", text, found))
    return messages


def observed(node: Node, decode: Decode) -> dict[str, str]:
    """The segment of an observation."""
    segment = {"env": decode(node.observation_ids)}
    return {**segment, "role": "user"} if node.is_of_user else segment


def is_result(segment: dict[str, str]) -> bool:
    """Whether a segment answers calls: it is of the environment and not of a user."""
    return "env" in segment and segment.get("role") != "user"


def calls_that_ran(row: EvalRow) -> Counter[str]:
    """How many calls of each tool ran without error."""
    return Counter(call["name"] for call in row.tool_calls if call.get("ok", True))


def prediction(messages: list[Message]) -> str:
    """The answer that the graders read: of the last message, tagged, boxed, or plain."""
    return final_answer(messages[-1].content) if messages else ""


def whole_text(row: EvalRow) -> str:
    """Everything after the prompt, tool results included."""
    texts = [segment.get("policy", segment.get("env", "")) for segment in row.segments]
    return "".join(texts[1:] if row.segments and "env" in row.segments[0] else texts)


class TrajectoryWriter:
    """Writes the trajectories of a step in a process of its own: the text of all tokens takes a
    good part of a second there, in which no rollout would go on. A handler of
    `agentenv.worker_pool.WorkerPool`; `tokenizer` is the path of its file."""

    def __init__(self, tokenizer: str) -> None:
        from tokenizers import Tokenizer

        self._decode = fast_decoder(Tokenizer.from_file(tokenizer))

    def __call__(self, job: dict[str, Any]) -> dict[str, Any]:
        """See `write_rows`, whose arguments a job holds; the trees as frames, the rows as JSON."""
        trees = map(of_frame, job["trees"])
        path = Path(job["path"]) if job["path"] else None
        num_chars, shown = write_rows(trees, self._decode, path, job["wanted"])
        return {"num_chars": num_chars, "shown": [json.dumps(row) for row in shown]}


def write_rows(
    trees: Iterable[TrajectoryTree], decode: Decode, path: Path | None, wanted: int
) -> tuple[int, list[Row]]:
    """Write each trajectory as a line of JSON, if there is a path; the characters that were
    written, and as many rows as wanted, the first."""
    every = chain.from_iterable(trajectory_rows(tree, decode) for tree in trees)
    if path is None:
        return 0, list(islice(every, wanted))
    num_chars, shown = 0, list[Row]()

    def lines() -> Iterator[bytes]:
        nonlocal num_chars
        for row in every:
            line = json.dumps(row, ensure_ascii=False) + "\n"
            num_chars += len(line)
            if len(shown) < wanted:
                shown.append(row)
            yield line.encode()

    write_whole(path, lines())
    return num_chars, shown


def trajectory_rows(tree: TrajectoryTree, decode: Decode) -> Iterator[Row]:
    """The trajectories of a tree, each as readable JSON: text by segment with who wrote it, calls,
    reward parts. What they share is decoded once."""
    texts: dict[int, list[Row]] = {}  # by node
    for trajectory in tree.trajectories():
        for node in trajectory.path:
            if node.index not in texts:
                said = [{"policy": decode(node.action_ids)}] if node.action_ids else []
                answer = [observed(node, decode)] if node.observation_ids else []
                texts[node.index] = [*said, *answer]
        yield _row(tree, trajectory, [one for node in trajectory.path for one in texts[node.index]])


def _row(tree: TrajectoryTree, trajectory: Trajectory, segments: list[Row]) -> Row:
    """A trajectory as a line of the file that people read."""
    leaf = trajectory.leaf
    return {
        "task": tree.task.id,
        "kind": tree.task.kind,
        "question": tree.task.question,
        "answers": list(tree.task.answers),
        "tree": tree.index,
        "branch": leaf.branch,
        "fork_parent": _fork_parent(trajectory),
        "segments": segments,
        "num_tokens": trajectory.num_tokens,
        "loss_mask": _runs(trajectory),
        "tool_calls": [
            call for node in trajectory.path for call in node.info.get("tool_calls", ())
        ],
        "reward": trajectory.reward,
        "parts": leaf.info.get("parts", {}),
        "success": trajectory.success,
        "end": leaf.end,
        "limit": leaf.limit,
        "policy_versions": sorted(
            {span.version for node in trajectory.path for span in node.version_spans}
        ),
    }


def readable(row: Row) -> str:
    """A row, of training or of an evaluation, as text: the question, the verdict, and each text
    with its author; without the prompt."""
    ended = f"{row['end']} by {row['limit']}" if row["limit"] is not None else row["end"]
    lines = [
        f"--- {row['kind']}: {row['question']}",
        f"    expected {' or '.join(row['answers'])}; {'right' if row['success'] else 'wrong'}, "
        f"reward {row['reward']:g}, {ended}",
    ]
    for segment in row["segments"][1:]:
        if "policy" in segment:
            lines.append(f"policy | {segment['policy']}")
        else:
            lines.append(f"{segment.get('role', 'env'):<6} | {segment['env'].strip()}")
    return "\n".join(lines)


def _fork_parent(trajectory: Trajectory) -> Row | None:
    """The branch and node this trajectory was forked from; None for a from-scratch one."""
    leaf = trajectory.leaf
    if "+" not in leaf.branch:
        return None
    shared = [node for node in trajectory.path if node.branch != leaf.branch]
    return {"branch": shared[-1].branch, "node": shared[-1].index}


def _runs(trajectory: Trajectory) -> list[int]:
    """Run lengths of the loss mask, beginning with the tokens that are not trained."""
    runs, current = [0], False
    for node in trajectory.path:
        for ids, sampled in ((node.action_ids, True), (node.observation_ids, False)):
            if ids and sampled != current:
                runs.append(0)
                current = sampled
            runs[-1] += len(ids)
    return runs


class Turn(Struct, kw_only=True):
    """One turn. `key` names it within its question. `calls` are the records of tools: name,
    arguments, ok, error, duration_s; `answer` is all that was read after them, `of_user` whether a
    user said it. `prompt_ids` are the
    tokens before it, `token_ids` and `logprobs` (nats) those that were sampled; empty where only
    text is known."""

    key: str
    text: str
    answer: str = ""
    of_user: bool = False
    calls: list[dict[str, Any]] = field(default_factory=list)
    num_context: int | None = None  # tokens before it
    num_tokens: int | None = None  # that were sampled
    facts: dict[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Branch(Struct, kw_only=True):
    """A trajectory without the turns that it shares with an earlier branch, `parent`, up to
    `forked_at`. Both are None of one that began from scratch. `facts` has how it ended."""

    name: str
    parent: str | None = None
    forked_at: str | None = None
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    success: bool = False
    end: str = ""
    limit: str | None = None
    error: str | None = None
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class Question(Struct, kw_only=True):
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
    branches: list[Branch] = field(default_factory=list)

    def path(self, branch: Branch) -> list[tuple[Branch, Turn]]:
        """All turns of a trajectory, each with the branch that has it."""
        before: list[tuple[Branch, Turn]] = []
        if branch.parent is not None:
            parent = next(one for one in self.branches if one.name == branch.parent)
            for owner, turn in self.path(parent):
                before.append((owner, turn))
                if turn.key == branch.forked_at:
                    break
        return before + [(branch, turn) for turn in branch.turns]


def of_tree(kept: KeptTree, decode: Decode, *, with_tokens: bool = False) -> Question:
    """A tree of the archive. Each turn stands once, in the branch that grew it."""
    return _Reader(kept, decode, with_tokens).question()


class _Reader:
    def __init__(self, kept: KeptTree, decode: Decode, with_tokens: bool) -> None:
        self._kept, self._tree, self._decode = kept, kept.tree, decode
        self._with_tokens = with_tokens
        self._owner: dict[int, str] = {}  # branch of a node that was read
        self._names: set[str] = set()

    def question(self) -> Question:
        """The tree as a question with a branch for each leaf."""
        tree, task, kept = self._tree, self._tree.task, self._kept
        branches = [self._branch(leaf) for leaf in sorted(tree.leaves(), key=_depth)]
        done = [(one.reward, one.success) for one in branches if one.reward is not None]
        means = [fmean(values) for values in zip(*done, strict=True)]
        versions = {"policy_version": tree.policy_version, "oldest_version": tree.oldest_version()}
        return Question(
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

    def _branch(self, leaf: Node) -> Branch:
        """The turns of a leaf: own ones, and those that it shares with a branch before."""
        tree, credit = self._tree, self._kept.credit
        path = [node for node in tree.history(leaf) if len(node.action_ids)]
        own = [node for node in path if node.index not in self._owner]
        shared = [node for node in path if node.index in self._owner]
        name = leaf.branch
        while name in self._names:  # of a trajectory that failed and was begun anew
            name += "'"
        self._names.add(name)
        parent = self._owner[shared[-1].index] if shared else None
        self._owner |= dict.fromkeys((node.index for node in own), name)
        facts: dict[str, Any] = {"parts": leaf.info.get("parts", {})}
        if credit is not None and not math.isnan(credit.advantages[leaf.index]):
            facts["advantage"] = credit.advantages[leaf.index]
        return Branch(
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

    def _turn(self, node: Node) -> Turn:
        before = [one for one in self._tree.path(node) if one is not node]
        ids = [token for one in before for token in one.action_ids + one.observation_ids]
        turn = Turn(
            key=f"node-{node.index}",
            text=self._decode(node.action_ids),
            answer=self._decode(node.observation_ids),
            of_user=node.is_of_user,
            calls=msgspec.to_builtins(node.info.get("tool_calls", []), enc_hook=str),
            num_context=len(ids),
            num_tokens=len(node.action_ids),
            facts=self._facts(node),
        )
        if self._with_tokens:
            turn.prompt_ids, turn.token_ids = ids, list(node.action_ids)
            turn.logprobs = list(node.logprobs)
        return turn

    def _facts(self, node: Node) -> dict[str, Any]:
        credit, scored = self._kept.credit, self._tree.scored
        versions = sorted({span.version for span in node.version_spans})
        facts: dict[str, Any] = {"node": node.index, "policy_versions": versions}
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
    """From-scratch ones first, each fork after its parent."""
    return leaf.branch.count("+"), leaf.index


_ENDED = ("success", "end", "limit", "error", "reason")
_FACTS = ("env_id", "seed", "metadata", "prompt_tokens", "action_tokens", "tool_tokens")


def of_row(row: EvalRow) -> Question:
    """A trajectory of an evaluation, of which only text is known."""
    prompt, turns = turns_of(row.segments, row.tool_calls)
    reward = None if row.end == FAILED else row.reward
    ended = {name: getattr(row, name) for name in _ENDED}
    branch = Branch(name="0", turns=turns, reward=reward, facts={"parts": row.parts}, **ended)
    facts = {name: getattr(row, name) for name in _FACTS}
    if row.policy_versions:
        facts["policy_versions"] = row.policy_versions
    scores = {} if reward is None else {"reward": reward, "success": float(row.success)}
    return Question(
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


def turns_of(
    segments: Iterable[dict[str, str]], calls: Sequence[dict[str, Any]]
) -> tuple[str, list[Turn]]:
    """Prompt and turns of the segments of a row. Which turn made which call is not written down:
    each turn that was answered has made one, and the last such turn the ones that are left."""
    prompt, turns, answered = "", list[Turn](), list[Turn]()
    for segment in segments:
        if "policy" in segment:
            text = segment["policy"] + segment.get("eos", "")
            turns.append(Turn(key=f"turn-{len(turns) + 1}", text=text))
        elif not turns:
            prompt += segment.get("env", "")
        else:
            turns[-1].answer += segment.get("env", "")
            turns[-1].of_user = not is_result(segment)
            if is_result(segment) and turns[-1] not in answered:
                answered.append(turns[-1])
    left = list(calls)
    for turn in answered:
        turn.calls = left[:1] if turn is not answered[-1] else left
        left = left[1:]
    if left and not answered and turns:  # a call whose result no turn read
        turns[-1].calls = left
    return prompt, turns


def redacted(question: Question, redactor: Redactor) -> Question:
    """The same without secrets, and without the tokens of a text that held one."""
    clean = msgspec.convert(redactor.tree(msgspec.to_builtins(question, enc_hook=str)), Question)
    turns = [turn for branch in clean.branches for turn in branch.turns]
    before = [turn for branch in question.branches for turn in branch.turns]
    texts, old = ([(turn.text, turn.answer) for turn in both] for both in (turns, before))
    if clean.prompt != question.prompt or texts != old:
        for turn in turns:
            turn.prompt_ids, turn.token_ids, turn.logprobs = [], [], []
    return clean
