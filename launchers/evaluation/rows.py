"""What an evaluation stores: one `EvalRow` a trajectory, one JSON line each.

Everything that is reported, compared or graded again is computed from these rows; nothing else
has to be kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Struct, field

from agentenv.types import Task

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
        """What names the trajectory within its evaluation."""
        return self.dataset, self.task, self.sample
