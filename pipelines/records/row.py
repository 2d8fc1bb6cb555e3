"""One trajectory of an evaluation as it is stored, and back from it to the input of its grader.

Everything that is reported, compared or graded again is computed from these rows; nothing else has
to be kept.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

from msgspec import Struct, field

from agentenv.envs.grading.verdict import final_answer
from agentenv.renderer import THOUGHT_OPEN
from agentenv.tags import TAGS
from agentenv.types import Message, Task, ToolCall

FAILED = "failed"
MAX_KIND_CHARS = 60

Key = tuple[str, str, int]


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
    end-of-sequence token ended a turn, its text stands apart: {"policy": ..., "eos": ...}. A failed
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
        answered = place + 1 < len(row.segments) and "env" in row.segments[place + 1]
        called = next(calls, None) if answered else None
        tag = _CALL_TAG.search(text)
        name = called["name"] if called is not None else tag[1] if tag is not None else ""
        found = (ToolCall(name, {}),) if name else ()
        messages.append(Message("assistant", text, found))
    return messages


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
