"""What an evaluation reports: estimates with intervals, spreads, tool use, agreement."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Estimate(Struct, kw_only=True):
    """A mean over questions with its 95 % interval: by bootstrap over questions, or Wilson's for a
    share with one sample a question. None where no question has the figure."""

    value: float | None
    low: float | None
    high: float | None
    num_questions: int
    interval: Literal["bootstrap", "wilson"] = "bootstrap"


class Spread(Struct, kw_only=True):
    """A figure of single trajectories."""

    mean: float
    median: float
    p95: float
    total: float


class ToolUse(Struct, kw_only=True):
    """Calls of one tool; an error is one that the policy read as such."""

    calls: int
    errors: int


class Agreement(Struct, kw_only=True):
    """Judge against rules, over the trajectories that both graded; `num_unparsed` more were asked
    about, and the judge's reply was no verdict. Without any that both graded, `share` is 0."""

    both_right: int
    only_judge: int
    only_rules: int
    both_wrong: int
    share: float
    kappa: float | None
    num_unparsed: int = 0


class Figures(Struct, kw_only=True):
    """The figures of one group of questions. Failed trajectories are in none of them but
    `num_failed`, `failures` and `success_if_failed_wrong`.

    `estimates` holds success (of the environment's grader), reward, the scores, tool_calls (a
    trajectory), tool_productivity (right ones / tool calls), tool_efficiency (right ones among
    those that used a tool), action_tokens, tool_tokens, seconds. `pass_at` and `majority_at` are
    by k, over the questions with at least k samples that ended.
    """

    num_questions: int
    num_trajectories: int
    num_failed: int
    failures: dict[str, int]
    estimates: dict[str, Estimate]
    success_if_failed_wrong: float
    pass_at: dict[int, Estimate]
    majority_at: dict[int, Estimate]
    arpo_tool_productivity: float  # success * calls / (calls + 0.1) * 100, calls a trajectory
    spreads: dict[str, Spread]
    truncations: dict[str, int]
    tools: dict[str, ToolUse]
    agreement: Agreement | None
    assist: dict[str, float] = {}  # totals of EvalRow.assist


class Summary(Struct, kw_only=True):
    """The content of summary.json. `groups` are figures by field and value: dataset, kind, and what
    a benchmark is split by, e.g. groups["gaia level"]["1"]. `average` is the plain mean of the
    datasets' success, as the papers average their tables.

    `num_unscored` counts trajectories without scores, since the machine was too busy for
    math-verify: their scores are missing, their success is not.
    """

    name: str
    compat: str
    num_samples: int
    policy_versions: list[int]
    num_unscored: int
    average: float | None
    overall: Figures
    groups: dict[str, dict[str, Figures]]
