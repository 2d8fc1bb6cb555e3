"""The few figures of an evaluation that a training run follows; the report has all."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from msgspec import Struct

from agentenv.metrics import wilson_interval
from launchers.evaluation.rows import EvalRow


class Score(Struct, frozen=True):
    """Figures of one group of questions. `success` is the share of trajectories whose answer is
    right, with its 95 % Wilson interval; failed trajectories are counted apart, never as wrong."""

    num_trajectories: int
    num_failed: int
    success: float
    interval: tuple[float, float]
    reward: float
    tool_calls: float
    action_tokens: float


class Report(Struct, frozen=True):
    """The result of one evaluation: over all questions and by their kind. `policy_versions` are
    the oldest and newest that sampled."""

    name: str
    policy_versions: tuple[int, int]
    overall: Score
    by_kind: dict[str, Score]


def brief_report(name: str, rows: Sequence[EvalRow]) -> Report:
    """The figures of the rows of one set."""
    kinds = sorted({row.kind for row in rows})
    versions = [version for row in rows for version in row.policy_versions]
    return Report(
        name=name,
        policy_versions=(min(versions, default=0), max(versions, default=0)),
        overall=_score(rows),
        by_kind={kind: _score([row for row in rows if row.kind == kind]) for kind in kinds},
    )


def _score(rows: Sequence[EvalRow]) -> Score:
    done = [row for row in rows if row.end != "failed"]
    num_right = sum(row.success for row in done)
    return Score(
        num_trajectories=len(done),
        num_failed=len(rows) - len(done),
        success=num_right / len(done) if done else 0.0,
        interval=wilson_interval(num_right, len(done)),
        reward=fmean(row.reward for row in done) if done else 0.0,
        tool_calls=fmean(len(row.tool_calls) for row in done) if done else 0.0,
        action_tokens=fmean(row.action_tokens for row in done) if done else 0.0,
    )
