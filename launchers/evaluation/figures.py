"""The figures of an evaluation: what its rows say, over all questions and by group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct, field

from agentenv.metrics import wilson_interval
from launchers.evaluation.figure_types import Agreement, Estimate, Figures, Spread, ToolUse
from launchers.evaluation.rows import EvalRow
from launchers.evaluation.statistics import bootstrap, cohen_kappa, majority_at_k, pass_at_k
from launchers.evaluation.votes import Votes

SCORES = ("em", "f1", "contains", "math", "rule", "judge")
CALLS_OFFSET = 0.1  # of ARPO's tool productivity
MAX_KIND_CHARS = 60
_NONE = (0.0, 0.0)

QuestionKey = tuple[str, str]


class Question(Struct, kw_only=True):
    """All samples of one question; `votes` where there are several that ended."""

    rows: list[EvalRow]
    groups: list[tuple[str, str]] = field(default_factory=list)
    votes: Votes | None = None

    @property
    def done(self) -> list[EvalRow]:
        """Those that did not fail."""
        return [row for row in self.rows if row.end != "failed"]


def questions_of(
    rows: Iterable[EvalRow], groups: Mapping[QuestionKey, list[tuple[str, str]]] | None = None
) -> list[Question]:
    """Rows by question, in their order; samples in the order of their numbers."""
    found: dict[QuestionKey, Question] = {}
    for row in rows:
        key = (row.dataset, row.task)
        if key not in found:
            found[key] = Question(rows=[], groups=(groups or {}).get(key, []))
        found[key].rows.append(row)
    for question in found.values():
        question.rows.sort(key=lambda row: row.sample)
    return list(found.values())


def default_ks(questions: Iterable[Question]) -> tuple[int, ...]:
    """1, 2, 4, ... and the largest number of samples that a question has."""
    most = max((len(question.rows) for question in questions), default=1)
    powers = [2**power for power in range(most.bit_length()) if 2**power < most]
    return (*powers, most)


def figures_of(questions: Sequence[Question], ks: Sequence[int], *, seed: int = 0) -> Figures:
    """The figures of these questions."""
    rows = [row for question in questions for row in question.rows]
    done = [row for row in rows if row.end != "failed"]
    num_right = sum(row.success for row in done)
    estimates = _estimates(questions, ks, seed)
    pass_at = {k: estimates.pop(f"pass@{k}") for k in ks}
    majority_at = {k: estimates.pop(f"maj@{k}") for k in ks}
    success, calls = estimates["success"], estimates["tool_calls"].value or 0.0
    single = all(len(question.done) <= 1 for question in questions)
    if single and done:
        success.low, success.high = wilson_interval(num_right, len(done))
        success.interval = "wilson"
    by_question = [
        sum(row.success for row in question.done) / len(question.rows) for question in questions
    ]
    failed = [row for row in rows if row.end == "failed"]
    truncated = [row.limit or "unknown" for row in done if row.end == "truncated"]
    return Figures(
        num_questions=len(questions),
        num_trajectories=len(done),
        num_failed=len(failed),
        failures=_counted(failure_kind(row) for row in failed),
        estimates={name: one for name, one in estimates.items() if one.num_questions},
        success_if_failed_wrong=float(np.mean(by_question)) if by_question else 0.0,
        pass_at={k: one for k, one in pass_at.items() if one.num_questions},
        majority_at={k: one for k, one in majority_at.items() if one.num_questions},
        arpo_tool_productivity=(success.value or 0.0) * calls / (calls + CALLS_OFFSET) * 100,
        spreads={
            "tool_calls": _spread([len(row.tool_calls) for row in done]),
            "turns": _spread([row.num_turns for row in done]),
            "prompt_tokens": _spread([row.prompt_tokens for row in done]),
            "action_tokens": _spread([row.action_tokens for row in done]),
            "tool_tokens": _spread([row.tool_tokens for row in done]),
            "seconds": _spread([row.seconds for row in done]),
        },
        truncations=_counted(truncated),
        tools=_tools(done),
        agreement=agreement_of(done),
        assist=_total(row.assist for row in done),
    )


def failure_kind(row: EvalRow) -> str:
    """The class of the error, e.g. "EnvError"."""
    return (row.error or "unknown").partition(":")[0][:MAX_KIND_CHARS]


def agreement_of(rows: Iterable[EvalRow]) -> Agreement | None:
    """Of the rows whose grade holds both verdicts; None where no judge was asked."""
    asked = [row.parts for row in rows if {"judge", "judge_unparsed"} & row.parts.keys()]
    both = [
        (parts["judge"] >= 1, parts["rule"] >= 1)
        for parts in asked
        if "judge" in parts and "rule" in parts
    ]
    num_unparsed = sum(parts.get("judge_unparsed", 0) > 0 for parts in asked)
    if not both and not num_unparsed:
        return None
    counts = Counter(both)
    cells = [counts[True, True], counts[True, False], counts[False, True], counts[False, False]]
    return Agreement(
        both_right=cells[0],
        only_judge=cells[1],
        only_rules=cells[2],
        both_wrong=cells[3],
        share=(cells[0] + cells[3]) / max(1, len(both)),
        kappa=cohen_kappa(*cells) if both else None,
        num_unparsed=num_unparsed,
    )


def _estimates(questions: Sequence[Question], ks: Sequence[int], seed: int) -> dict[str, Estimate]:
    """Every ratio of the figures with its interval, all from the same resamples."""
    ratios = [_ratios(question, ks) for question in questions]
    names = list(_ratios(Question(rows=[]), ks))
    table = np.array(
        [[ratio[name] for name in names] for ratio in ratios], dtype=np.float64
    ).reshape(len(questions), len(names), 2)
    numerators, denominators = table[:, :, 0], table[:, :, 1]
    intervals = bootstrap(numerators, denominators, seed=seed)
    estimates = {}
    for place, name in enumerate(names):
        below = float(denominators[:, place].sum())
        known = below > 0
        low, high = intervals[place]
        estimates[name] = Estimate(
            value=float(numerators[:, place].sum()) / below if known else None,
            low=float(low) if known else None,
            high=float(high) if known else None,
            num_questions=int((denominators[:, place] > 0).sum()),
        )
    return estimates


def _ratios(question: Question, ks: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Numerator and denominator of each figure; (0, 0) where the question does not have it."""
    done = question.done
    with_tools = [row for row in done if row.tool_calls]
    found = {
        "success": _mean([row.success for row in done]),
        "reward": _mean([row.reward for row in done]),
        **{
            name: _mean([row.scores[name] for row in done if name in row.scores]) for name in SCORES
        },
        "tool_calls": _mean([len(row.tool_calls) for row in done]),
        "tool_productivity": (
            float(sum(row.success for row in done)),
            float(sum(len(row.tool_calls) for row in done)),
        ),
        "tool_efficiency": (float(sum(row.success for row in with_tools)), float(len(with_tools))),
        "action_tokens": _mean([row.action_tokens for row in done]),
        "tool_tokens": _mean([row.tool_tokens for row in done]),
        "seconds": _mean([row.seconds for row in done]),
    }
    num_right = sum(row.success for row in done)
    within = tuple(k for k in ks if k <= len(done))
    votes = question.votes
    if votes is None and len(done) == 1:  # nothing to vote about
        votes = Votes(num_right, (1,) * (1 - num_right), 0)
    majority = dict(zip(within, majority_at_k(*votes, within), strict=True)) if votes else {}
    for k in ks:
        found[f"pass@{k}"] = (pass_at_k(len(done), num_right, k), 1.0) if k in within else _NONE
        found[f"maj@{k}"] = (majority[k], 1.0) if k in majority else _NONE
    return found


def _mean(values: Sequence[float]) -> tuple[float, float]:
    return (sum(values) / len(values), 1.0) if values else _NONE


def _spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(mean=0.0, median=0.0, p95=0.0, total=0.0)
    found = np.array(values, dtype=np.float64)
    return Spread(
        mean=float(found.mean()),
        median=float(np.median(found)),
        p95=float(np.percentile(found, 95)),
        total=float(found.sum()),
    )


def _tools(rows: Iterable[EvalRow]) -> dict[str, ToolUse]:
    calls = Counter(call["name"] for row in rows for call in row.tool_calls)
    errors = Counter(
        call["name"] for row in rows for call in row.tool_calls if not call.get("ok", True)
    )
    return {name: ToolUse(calls=calls[name], errors=errors[name]) for name in sorted(calls)}


def _total(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())
