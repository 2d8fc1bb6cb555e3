"""The figures of an evaluation, computed from its rows, over all questions and by group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import TypeVar

import numpy as np
from msgspec import Struct

from agentenv.assembly.keys.benchmarks import groups as benchmark_groups
from agentenv.assembly.reports.records import FAILED, EvalRow, judge_parts
from agentenv.evaluation import statistics
from agentenv.evaluation.scores import Scorer, Votes, count_votes, for_each, score_rows
from agentenv.evaluation.statistics import Floats, cohen_kappa, majority_at_k, pass_at_k
from agentenv.rollout.failures import faults_of
from agentenv.rollout.metrics import failure_kind_of, part_means
from agentenv.text.call_syntax import without_thoughts


class Estimate(Struct, kw_only=True):
    """A mean over questions with its 95 % interval (statistics.py). All are None if no question has
    the figure; `low` and `high` also if it is not a share and equal for all questions."""

    value: float | None
    low: float | None
    high: float | None
    num_questions: int


class Spread(Struct, kw_only=True):
    """A figure of single trajectories."""

    mean: float
    median: float
    p95: float


class ToolUse(Struct, kw_only=True):
    """Calls of one tool. `errors`: number of calls whose error the policy read. `num_same` of them
    have the same text except for numbers; `error` is an example."""

    calls: int
    errors: int
    num_same: int = 0
    error: str = ""


class Agreement(Struct, kw_only=True):
    """Agreement of judge and rules, over the trajectories that both graded; `share` is 0 if there
    are none. `num_unparsed`: number of other trajectories, where the judge's reply had no
    verdict."""

    both_right: int
    only_judge: int
    only_rules: int
    both_wrong: int
    share: float
    kappa: float | None
    num_unparsed: int = 0


class Figures(Struct, kw_only=True):
    """The figures of one group of questions. They exclude failed trajectories, except for
    `num_failed`, `failures` and `success_if_failed_wrong`. A trajectory failed if its last attempt
    did. `num_retries`: number of failed attempts that were retried, over all trajectories.
    `num_empty`: number of trajectories with an empty reply of the model; `num_padded`: of sampled
    ids beyond the tokenizer's; `num_valid`: of trajectories with an answer.
    `parts`: means of the parts of rewards, as in training.
    `num_misformatted`: number of answers that equal a gold (em) but are wrong because of their
    format.

    `estimates` contains success (of the environment's grader), reward, the scores, tool_calls (per
    trajectory), tool_productivity (correct trajectories / tool calls), tool_use (share of
    trajectories with tool calls), tool_efficiency (share of correct ones among these),
    action_tokens, tool_tokens, seconds. `pass_at` and `majority_at` are by k, over the questions
    with at least k finished samples.
    """

    num_questions: int
    num_trajectories: int
    num_failed: int
    failures: dict[str, int]
    estimates: dict[str, Estimate]
    success_if_failed_wrong: float
    pass_at: dict[int, Estimate]
    majority_at: dict[int, Estimate]
    # success * calls / (calls + 0.1) * 100, with calls per trajectory; None without calls
    arpo_tool_productivity: float | None
    spreads: dict[str, Spread]
    truncations: dict[str, int]
    tools: dict[str, ToolUse]
    agreement: Agreement | None
    assist: dict[str, float] = {}  # totals of EvalRow.assist
    endpoint: dict[str, float] = {}  # totals of EvalRow.endpoint, with failed trajectories
    parts: dict[str, float] = {}
    num_retries: int = 0
    num_misformatted: int = 0
    num_empty: int = 0
    num_padded: int = 0
    num_valid: int = 0


class Summary(Struct, kw_only=True):
    """The content of summary.json. `groups`: figures by field and value; fields are dataset, kind,
    and those of a benchmark, e.g. groups["gaia level"]["1"]. `average`: the unweighted mean of the
    datasets' success, as in the tables of the papers. `env`: counts of environments, as the metrics
    env/NAME of training, over all commands that sampled.
    """

    name: str
    compat: str
    num_samples: int
    average: float | None
    overall: Figures
    groups: dict[str, dict[str, Figures]]
    env: dict[str, float] = {}


T = TypeVar("T")
Ratios = dict[str, tuple[float, float]]  # figure -> numerator and denominator, of a question


FORMAT = "format"  # a part of a reward
COSTS = ("action_tokens", "tool_tokens", "seconds")  # fields of EvalRow
SCORES = ("em", "f1", "contains", "math", "rule", "judge")
CALLS_OFFSET = 0.1  # of ARPO's tool productivity
_NONE = (0.0, 0.0)


class QuestionRows(Struct, kw_only=True):
    """All samples of one question. `votes`: set if several samples finished."""

    rows: list[EvalRow]
    votes: Votes | None = None

    @property
    def done(self) -> list[EvalRow]:
        """The samples that did not fail."""
        return [row for row in self.rows if row.end != FAILED]


def questions_of(rows: Iterable[EvalRow]) -> list[QuestionRows]:
    """Rows grouped by question, in their order; samples sorted by number."""
    found: dict[tuple[str, str], QuestionRows] = {}
    for row in rows:
        found.setdefault((row.dataset, row.task), QuestionRows(rows=[])).rows.append(row)
    for question in found.values():
        question.rows.sort(key=lambda row: row.sample)
    return list(found.values())


def default_ks(questions: Iterable[QuestionRows]) -> tuple[int, ...]:
    """1, 2, 4, ..., and the largest number of samples of a question."""
    most = max((len(question.rows) for question in questions), default=1)
    return tuple(sorted({*(2**power for power in range(most.bit_length())), most}))


def figures_of(
    questions: Sequence[QuestionRows], ks: Sequence[int], known: Mapping[int, Ratios] | None = None
) -> Figures:
    """The figures of these questions. `known`: their ratios, by id() of the question."""
    rows = [row for question in questions for row in question.rows]
    done = [row for row in rows if row.end != FAILED]
    each = [known[id(one)] if known else ratios(one, ks) for one in questions]
    counts, estimates = np.array([len(one.done) for one in questions], np.float64), {}
    for name in ratios(QuestionRows(rows=[]), ks):
        above, below = np.array([one[name] for one in each], np.float64).reshape(-1, 2).T
        estimates[name] = estimate(name, above, below, counts)
    pass_at = {k: estimates.pop(f"pass@{k}") for k in ks}
    majority_at = {k: estimates.pop(f"maj@{k}") for k in ks}
    success, calls = estimates["success"].value or 0.0, estimates["tool_calls"].value or 0.0
    spreads = {"tool_calls": _spread([len(row.tool_calls) for row in done])}
    for name in ("turns", "prompt_tokens", *COSTS):
        key = "num_turns" if name == "turns" else name
        spreads[name] = _spread([getattr(row, key) for row in done])
    return Figures(
        num_questions=len(questions),
        num_trajectories=len(done),
        num_failed=len(rows) - len(done),
        failures=_counted(failure_kind_of(row.error) for row in rows if row.end == FAILED),
        estimates={name: one for name, one in estimates.items() if one.num_questions},
        success_if_failed_wrong=success_if_wrong(questions),
        pass_at={k: one for k, one in pass_at.items() if one.num_questions},
        majority_at={k: one for k, one in majority_at.items() if one.num_questions},
        arpo_tool_productivity=success * calls / (calls + CALLS_OFFSET) * 100 if calls else None,
        spreads=spreads,
        truncations=_counted(row.limit or "unknown" for row in done if row.end == "truncated"),
        tools=_tools(done),
        agreement=agreement_of(done),
        assist=_total(row.assist for row in done),
        endpoint=_total(row.endpoint for row in rows),
        parts=part_means([row.parts for row in done]),
        num_retries=sum(row.num_retries for row in rows),
        num_misformatted=sum(map(_is_misformatted, done)),
        num_padded=sum(row.padded_tokens for row in rows),
        num_empty=sum(map(_is_empty, done)),
        num_valid=sum(bool(row.prediction.strip()) for row in done),
    )


def success_if_wrong(questions: Sequence[QuestionRows]) -> float:
    """The mean success over questions if failed samples were wrong; 0 without questions."""
    lowest = [sum(row.success for row in one.done) / len(one.rows) for one in questions]
    return fmean(lowest) if lowest else 0.0


def _is_empty(row: EvalRow) -> bool:
    """Whether a turn has no text, or the last one, which no limit ended, has thoughts alone."""
    texts = [one["policy"] for one in row.segments if "policy" in one]
    texts += [without_thoughts(text) for text in texts[-1:] if row.end == "terminated"]
    return not all(text.strip() for text in texts)


def _is_misformatted(row: EvalRow) -> bool:
    """Whether only its format is wrong, by the part of `ToolReward`, also in a combined reward."""
    bad = any(key.split(".")[-1] == FORMAT and part < 0 for key, part in row.parts.items())
    return bad and not row.success and row.scores.get("em", 0.0) >= 1


def agreement_of(rows: Iterable[EvalRow]) -> Agreement | None:
    """The agreement over the rows with both verdicts; None if no judge graded."""
    judged = [parts for row in rows if (parts := judge_parts(row))]
    both = Counter(
        (parts["judge"] >= 1, parts["rule"] >= 1) for parts in judged if "judge" in parts
    )
    num_unparsed = sum(parts.get("judge_unparsed", 0) > 0 for parts in judged)
    if not both and not num_unparsed:
        return None
    cells = [both[True, True], both[True, False], both[False, True], both[False, False]]
    return Agreement(
        both_right=cells[0],
        only_judge=cells[1],
        only_rules=cells[2],
        both_wrong=cells[3],
        share=(cells[0] + cells[3]) / max(1, both.total()),
        kappa=cohen_kappa(*cells),
        num_unparsed=num_unparsed,
    )


def estimate(name: str, above: Floats, below: Floats, counts: Floats) -> Estimate:
    """sum(above) / sum(below) over questions, with its interval. Questions with 0 / 0 lack the
    figure. `counts`: their numbers of samples."""
    known = (below > 0) | (above > 0)
    above, below, counts = above[known], below[known], counts[known]
    if not below.any():
        return Estimate(value=None, low=None, high=None, num_questions=0)
    if is_share(name):
        samples = (
            below if name == "tool_efficiency" else statistics.independent_samples(name, counts)
        )
        found: Floats | None = statistics.share(above / below, samples, below)
    else:
        found = statistics.ratio(above, below)
    low, high = (None, None) if found is None else (float(found[0]), float(found[1]))
    value, num_questions = float(above.sum() / below.sum()), int((below > 0).sum())
    return Estimate(value=value, low=low, high=high, num_questions=num_questions)


def is_share(name: str) -> bool:
    """Whether a figure is a mean of values in [0, 1]."""
    return name in (*SCORES, "success", "tool_use", "tool_efficiency") or "@" in name


def ratios(question: QuestionRows, ks: Sequence[int]) -> Ratios:
    """Numerator and denominator of each figure of a question; (0, 0) if it lacks the figure. The
    denominator is 1 for a mean over samples, pass@k and maj@k."""
    done = question.done
    with_tools = [row for row in done if row.tool_calls]
    num_right, calls = sum(row.success for row in done), [len(row.tool_calls) for row in done]
    right_with_tools = sum(row.success for row in with_tools)
    found: Ratios = {
        "success": _mean([row.success for row in done]),
        "reward": _mean([row.reward for row in done]),
        **{
            name: _mean([row.scores[name] for row in done if name in row.scores]) for name in SCORES
        },
        "tool_calls": _mean(calls),
        "tool_use": _mean([bool(row.tool_calls) for row in done]),
        "tool_productivity": (num_right, sum(calls)),
        "tool_efficiency": (right_with_tools, len(with_tools)),
        **{name: _mean([getattr(row, name) for row in done]) for name in COSTS},
    }
    within = tuple(k for k in ks if k <= len(done))
    votes = question.votes
    if votes is None and len(done) == 1:  # a single vote
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
        return Spread(mean=0.0, median=0.0, p95=0.0)
    median, p95 = np.percentile(values, (50, 95))
    return Spread(mean=float(np.mean(values)), median=float(median), p95=float(p95))


def _tools(rows: Iterable[EvalRow]) -> dict[str, ToolUse]:
    every = [call for row in rows for call in row.tool_calls]
    calls = Counter(call["name"] for call in every)
    errors = Counter(call["name"] for call in every if not call.get("ok", True))
    faults = faults_of(every)
    found = {name: ToolUse(calls=calls[name], errors=errors[name]) for name in sorted(calls)}
    for name, fault in faults.items():
        found[name].num_same, found[name].error = fault.num_same, str(fault)
    return found


def _total(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


MAX_GROUPS = 40  # values of a field


async def summarize(
    name: str, rows: Sequence[EvalRow], scorer: Scorer, *, ks: Sequence[int] = ()
) -> Summary:
    """The summary of an evaluation. `ks`: values of k for pass@k and maj@k, by default
    `default_ks`."""
    await score_rows(rows, scorer)
    questions = questions_of(rows)

    async def vote(question: QuestionRows) -> None:
        question.votes = await count_votes(question.done, scorer)

    await for_each(vote, [question for question in questions if len(question.done) > 1])
    return summary_of(name, questions, ks, compat=scorer.compat)


def summary_of(
    name: str, questions: Sequence[QuestionRows], ks: Sequence[int] = (), *, compat: str = ""
) -> Summary:
    """The summary of questions whose rows already have scores; votes may be missing."""
    ks = tuple(sorted(set(ks))) or default_ks(questions)
    known = {id(question): ratios(question, ks) for question in questions}
    groups = {
        field: {value: figures_of(own, ks, known) for value, own in values.items()}
        for field, values in by_group(questions, lambda one: one.rows[0]).items()
    }
    found = [one.estimates.get("success") for one in groups.get("dataset", {}).values()]
    means = [one.value for one in found if one is not None and one.value is not None]
    return Summary(
        name=name,
        compat=compat,
        num_samples=max((len(question.rows) for question in questions), default=0),
        average=fmean(means) if means else None,
        overall=figures_of(questions, ks, known),
        groups=groups,
    )


def by_group(items: Sequence[T], row: Callable[[T], EvalRow]) -> dict[str, dict[str, list[T]]]:
    """Items, each with a row of its question, by field and value; without kinds if these coincide
    with the datasets. A field of a benchmark starts with the dataset's name."""
    found: dict[str, dict[str, list[T]]] = {}
    for item in items:
        one = row(item)
        groups = [("dataset", one.dataset), ("kind", one.kind)]
        groups += [(f"{one.dataset} {name}", text) for name, text in benchmark_groups(one.metadata)]
        for name, value in groups:
            found.setdefault(name, {}).setdefault(value, []).append(item)
    pairs = {(row(item).dataset, row(item).kind) for item in items}
    if len(pairs) == len(found.get("dataset", {})) == len(found.get("kind", {})):
        found.pop("kind", None)
    return {
        name: dict(sorted(values.items()))
        for name, values in found.items()
        if name == "dataset" or 1 < len(values) <= MAX_GROUPS
    }
