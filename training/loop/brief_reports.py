"""Brief figures of evaluations; the report of a stored evaluation has all of them."""

from __future__ import annotations

from msgspec import Struct


class BriefFigures(Struct, frozen=True):
    """Figures of one group of questions. `success`: the mean over questions of their shares of
    correct trajectories, with its 95 % interval. Failed trajectories are counted separately, never
    as wrong; if all failed, the means are None."""

    num_trajectories: int
    num_failed: int
    success: float | None
    interval: tuple[float, float]
    success_if_failed_wrong: float
    reward: float | None
    tool_calls: float | None
    action_tokens: float | None
    parts: dict[str, float] = {}  # means of the parts of the reward

    @property
    def failed_share(self) -> float:
        """Share of failed trajectories."""
        return self.num_failed / max(1, self.num_failed + self.num_trajectories)


class BriefReport(Struct, frozen=True):
    """The result of one evaluation: over all questions and by their kind. `policy_versions`: the
    oldest and newest that sampled."""

    name: str
    policy_versions: tuple[int, int]
    overall: BriefFigures
    by_kind: dict[str, BriefFigures]


EVALUATIONS = "eval"  # folder of a run
PHASES = ("before_sft", "after_sft", "after_rl")
TITLES = {
    "before_sft": "before cold start",
    "after_sft": "after cold start",
    "after_rl": "after RL",
}


def phase_title(when: str, *, cold_start: bool) -> str:
    """The title of a phase, or of a step ("step-000040"). Without a cold start, the phases before
    and after it share a title."""
    if when not in PHASES:
        what, _, number = when.rpartition("-")
        return f"after {what} {int(number)}" if number.isdigit() else when.replace("_", " ")
    return TITLES[when] if cold_start or when == "after_rl" else "before RL"
