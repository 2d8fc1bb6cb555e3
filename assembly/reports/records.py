"""A stored trajectory: as a row (of training, or `EvalRow` of an evaluation), as readable text, and
as the input of a grader.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from agentenv.base.disk import write_whole
from agentenv.base.secrets import SECRETS
from agentenv.base.tree import Node, Trajectory, TrajectoryTree, of_frame
from agentenv.base.types import Message, Task, ToolCall
from agentenv.data.data_files import Row
from agentenv.envs.grading.verdict import final_answer
from agentenv.text.call_syntax import THOUGHT_OPEN
from agentenv.text.encoder import fast_decoder
from agentenv.text.tags import TAGS

FAILED = "failed"

Key = tuple[str, str, int]
Decode = Callable[[Sequence[int]], str]


class Wanted(NamedTuple):
    """A trajectory to sample: sample number `sample` of a task in the set `dataset`."""

    dataset: str
    task: Task
    sample: int

    @property
    def key(self) -> Key:
        """The key of the trajectory's row."""
        return self.dataset, self.task.id, self.sample


class EvalRow(Struct, kw_only=True):
    """A trajectory of an evaluation: a line with all keys, identified by `dataset`, `task` and
    `sample` (from 0).

    `segments` is the text in order, {"policy": ...} or {"env": ...}, the prompt first. The text of
    an end-of-sequence token that ended a turn is separate: {"policy": ..., "eos": ...}. A user's
    message after a turn is {"env": ..., "role": "user"}.

    A failed trajectory (end "failed") has an `error` and no scores: it counts by kind of failure,
    never as wrong. `scores` contains the computed metrics, each in [0, 1]: em, f1, contains, math,
    judge. `success`, `reward` and `reason` (an explanation) come from the environment's grader.
    The first report computes scores.
    """

    dataset: str
    task: str
    sample: int
    kind: str = "all"
    env_id: str = ""  # of the task; regrading uses the grader of this environment
    question: str = ""
    answers: list[str] = []
    metadata: dict[str, Any] = {}  # of the dataset: level, category, ...
    seed: int | None = None
    segments: list[dict[str, str]] = []
    prediction: str = ""
    tool_calls: list[dict[str, Any]] = []  # name, arguments, ok, error
    num_turns: int = 0
    num_retries: int = 0  # after failures; with the same seeds
    prompt_tokens: int = 0
    action_tokens: int = 0  # sampled by the policy
    padded_tokens: int = 0  # of these, ids beyond the tokenizer's
    tool_tokens: int = 0  # of tool results
    seconds: float = 0.0  # wall time of the trajectory
    end: str = ""  # terminated, truncated, failed
    limit: str | None = None
    error: str | None = None
    reward: float = 0.0
    success: bool = False
    reason: str = ""
    parts: dict[str, float] = {}  # of the reward
    scores: dict[str, float] = {}
    assist: dict[str, float] = {}  # uses, successes, tokens of helpers
    abandoned: list[str] = []  # turns that the backtracer discarded
    endpoint: dict[str, int] = {}  # counts of a program's calls (`noted`)
    policy_versions: list[int] = []  # oldest and newest policy

    @property
    def key(self) -> Key:
        """The identity of the trajectory within its evaluation."""
        return self.dataset, self.task, self.sample


# The input of a grader, recovered from a stored trajectory: the policy's messages and calls.

_CALL_TAG = re.compile(rf"</(?!(?:{'|'.join(TAGS)})>)(\w+)>\Z")


def written(row: EvalRow) -> list[Message]:
    """The policy's messages in order, as the renderer parsed them: without end-of-sequence tokens,
    and starting with <think> if the text before the turn ends with an open <think>.

    A turn that the env answered, or that ends with a tool's tag, has one call, with only its name,
    even if it made several: graders read the text.
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
    """The segment of the node's observation."""
    segment = {"env": decode(node.observation_ids)}
    return {**segment, "role": "user"} if node.is_of_user else segment


def is_result(segment: dict[str, str]) -> bool:
    """Whether a segment is the result of calls: from the environment, and not a user's message."""
    return "env" in segment and segment.get("role") != "user"


def calls_that_ran(row: EvalRow) -> Counter[str]:
    """Number of successful calls of each tool."""
    return Counter(call["name"] for call in row.tool_calls if call.get("ok", True))


def prediction(row: EvalRow) -> str:
    """The final answer, as graders read it: from the last message, tagged, boxed, or plain."""
    messages = written(row)
    return final_answer(messages[-1].content) if messages else ""


def whole_text(row: EvalRow) -> str:
    """Everything after the prompt, tool results included."""
    texts = [segment.get("policy", segment.get("env", "")) for segment in row.segments]
    return "".join(texts[1:] if row.segments and "env" in row.segments[0] else texts)


class TrajectoryWriter:
    """Writes the trajectories of a step in a separate process: decoding all tokens takes a large
    part of a second, which would block the rollouts. A handler of
    `agentenv.processes.worker_pool.WorkerPool`; `tokenizer` is the path of the tokenizer's file."""

    def __init__(self, tokenizer: str, secrets: Sequence[str] = ()) -> None:
        from tokenizers import Tokenizer

        SECRETS.add(*secrets)
        self._decode = fast_decoder(Tokenizer.from_file(tokenizer))

    def __call__(self, job: dict[str, Any]) -> dict[str, Any]:
        """`write_rows` with the arguments in `job`; trees are frames, rows are JSON."""
        trees = map(of_frame, job["trees"])
        path = Path(job["path"]) if job["path"] else None
        num_bytes, shown = write_rows(trees, self._decode, path, job["wanted"])
        return {"num_bytes": num_bytes, "shown": [json.dumps(row) for row in shown]}


def write_rows(
    trees: Iterable[TrajectoryTree], decode: Decode, path: Path | None, wanted: int
) -> tuple[int, list[Row]]:
    """Write each trajectory as a line of JSON, if `path` is given. Returns the number of bytes
    written, and the first `wanted` rows."""
    found = ([*trajectory_rows(tree, decode)] for tree in trees)
    every = chain.from_iterable(SECRETS.tree(rows, only_known=True) for rows in found)
    if path is None:
        return 0, list(islice(every, wanted))
    shown = list[Row]()

    def lines() -> Iterator[bytes]:
        for row in every:
            if len(shown) < wanted:
                shown.append(row)
            yield f"{json.dumps(row, ensure_ascii=False)}\n".encode()

    write_whole(path, lines())
    return path.stat().st_size, shown


def trajectory_rows(tree: TrajectoryTree, decode: Decode) -> Iterator[Row]:
    """The trajectories of a tree, also failed ones, each as readable JSON: text by segment with its
    author, calls, reward parts. Shared nodes are decoded once."""
    texts: dict[int, list[Row]] = {}  # by node
    for trajectory in tree.trajectories(failed=True):
        for node in trajectory.path:
            if node.index not in texts:
                action = [{"policy": decode(node.action_ids)}] if node.action_ids else []
                answer = [observed(node, decode)] if node.observation_ids else []
                texts[node.index] = [*action, *answer]
        yield _row(tree, trajectory, [one for node in trajectory.path for one in texts[node.index]])


def facts(task: Task, trajectory: Trajectory) -> Row:
    """The fields that rows of training and of evaluations share."""
    leaf = trajectory.leaf
    return {
        "task": task.id,
        "kind": task.kind,
        "question": task.question,
        "answers": list(task.answers),
        "tool_calls": [
            call for node in trajectory.path for call in node.info.get("tool_calls", ())
        ],
        "parts": dict(leaf.info.get("parts", {})),
        "success": trajectory.success and leaf.end != FAILED,
        "end": str(leaf.end),
        "limit": leaf.limit and str(leaf.limit),
        "error": leaf.error,
        "endpoint": noted(leaf),
    }


def _row(tree: TrajectoryTree, trajectory: Trajectory, segments: list[Row]) -> Row:
    """A trajectory as a row of trajectories/STEP.jsonl."""
    leaf = trajectory.leaf
    temperatures = [node.temperature for node in trajectory.turns if node.action_ids]
    return {
        **facts(tree.task, trajectory),
        "tree": tree.index,
        "branch": leaf.branch,
        "fork_parent": _fork_parent(trajectory),
        "segments": segments,
        "num_tokens": trajectory.num_tokens,
        "loss_mask": _runs(trajectory),
        "reward": None if leaf.end == FAILED else trajectory.reward,
        "policy_versions": sorted(
            {span.version for node in trajectory.path for span in node.version_spans}
        ),
        **({"temperatures": temperatures} if {*temperatures} - {1.0} else {}),
    }


# counts of a program's calls (agentenv/endpoint) that say where it got less than it asked for
NOTED = ("refused/", "ignored/", "calls_in_text/", "invalid_output", "discarded", "abandoned")


def noted(leaf: Node) -> dict[str, int]:
    """Of the calls of a captured program: how many were refused, ignored, not trained, or remained
    in the text, by kind."""
    counts = sorted(leaf.info.get("endpoint", {}).items())
    return {name: count for name, count in counts if count and name.startswith(NOTED)}


def readable(row: Row) -> str:
    """A row of training or of an evaluation as text: the question, the result, and each text with
    its author; without the prompt."""
    ended = f"{row['end']} by {row['limit']}" if row["limit"] is not None else row["end"]
    graded = row.get("error") or (
        f"{'correct' if row['success'] else 'wrong'}, reward {row['reward']:g}, {ended}"
    )
    golds = f"expected {' or '.join(row['answers'])}; " if row["answers"] else ""
    lines = [f"--- {row['kind']}: {row['question']}", f"    {golds}{graded}"]
    for segment in row["segments"][1:]:
        if "policy" in segment:
            lines.append(f"policy | {segment['policy']}")
        else:
            lines.append(f"{segment.get('role', 'env'):<6} | {segment['env'].strip()}")
    return "\n".join(lines)


def _fork_parent(trajectory: Trajectory) -> Row | None:
    """The branch and node from which the trajectory was forked; None for a from-scratch one."""
    leaf = trajectory.leaf
    if "+" not in leaf.branch:
        return None
    shared = [node for node in trajectory.path if node.branch != leaf.branch]
    return {"branch": shared[-1].branch, "node": shared[-1].index}


def _runs(trajectory: Trajectory) -> list[int]:
    """Run lengths of the loss mask, alternating, the first for tokens without loss."""
    runs, current = [0], False
    for node in trajectory.path:
        for ids, sampled in ((node.action_ids, True), (node.observation_ids, False)):
            if ids and sampled != current:
                runs.append(0)
                current = sampled
            runs[-1] += len(ids)
    return runs


def judge_parts(row: EvalRow) -> dict[str, float]:
    """The parts of the judge that was asked about an answer, also of one in a combined grader,
    whose own parts have no dot: rule, judge or judge_unparsed; empty without one."""
    own = {key.rpartition(".")[2]: part for key, part in row.parts.items() if "." in key}
    found = own or row.parts
    is_asked = "rule" in found and {"judge", "judge_unparsed"} & found.keys()
    return found if is_asked else {}
