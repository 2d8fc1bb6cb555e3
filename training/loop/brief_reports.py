"""Brief figures of evaluations; the report of a stored evaluation has all of them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from msgspec import Struct

from agentenv.assembly.reports.records import EvalRow
from agentenv.evaluation import statistics


class BriefFigures(Struct, frozen=True):
    """Figures of one group of questions. `success`: the share of trajectories with a correct
    answer, with its 95 % interval over questions. Failed trajectories are counted separately, never
    as wrong; if all failed, the means are None."""

    num_trajectories: int
    num_failed: int
    success: float | None
    interval: tuple[float, float]
    reward: float | None
    tool_calls: float | None
    action_tokens: float | None

    @property
    def failed_share(self) -> float:
        """Share of failed trajectories."""
        return self.num_failed / max(1, self.num_failed + self.num_trajectories)

    @property
    def success_if_failed_wrong(self) -> float:
        """The success if failed trajectories counted as wrong."""
        return (self.success or 0.0) * (1 - self.failed_share)


class BriefReport(Struct, frozen=True):
    """The result of one evaluation: over all questions and by their kind. `policy_versions`: the
    oldest and newest that sampled."""

    name: str
    policy_versions: tuple[int, int]
    overall: BriefFigures
    by_kind: dict[str, BriefFigures]


def brief_report(name: str, rows: Sequence[EvalRow]) -> BriefReport:
    """The figures of the rows of one set."""
    kinds = sorted({row.kind for row in rows})
    versions = [version for row in rows for version in row.policy_versions]
    return BriefReport(
        name=name,
        policy_versions=(min(versions, default=0), max(versions, default=0)),
        overall=_figures(rows),
        by_kind={kind: _figures([row for row in rows if row.kind == kind]) for kind in kinds},
    )


def _interval(done: Sequence[EvalRow]) -> tuple[float, float]:
    """95 % interval of the share of correct trajectories, clustered by question."""
    by_question: dict[str, list[bool]] = {}
    for row in done:
        by_question.setdefault(row.task, []).append(row.success)
    counts = [len(successes) for successes in by_question.values()]
    low, high = statistics.share(list(map(fmean, by_question.values())), counts, counts)
    return float(low), float(high)


def _figures(rows: Sequence[EvalRow]) -> BriefFigures:
    done = [row for row in rows if row.end != "failed"]
    num_right = sum(row.success for row in done)
    return BriefFigures(
        num_trajectories=len(done),
        num_failed=len(rows) - len(done),
        success=num_right / len(done) if done else None,
        interval=_interval(done),
        reward=fmean(row.reward for row in done) if done else None,
        tool_calls=fmean(len(row.tool_calls) for row in done) if done else None,
        action_tokens=fmean(row.action_tokens for row in done) if done else None,
    )
