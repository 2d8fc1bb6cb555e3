"""The tables of an evaluation's report, and the narrower ones of the terminal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from agentenv.assist.helpers import HELPERS
from agentenv.pipelines.evaluation.figures import Agreement, Estimate, Figures, Summary
from agentenv.pipelines.run.tables import Table, number


def interval(estimate: Estimate | None) -> str:
    """A value with its 95 % interval."""
    if estimate is None or estimate.value is None:
        return "-"
    if estimate.low is None:
        return number(estimate.value)
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"


# The table of helpers: debugger, backtracer, refiner, browser agent.


def assist_table(figures: Figures) -> Table:
    """Uses, successes and tokens of each helper that was used, over all trajectories."""
    total, counts = figures.num_trajectories, figures.assist
    rows = []
    for helper in HELPERS:
        uses, ok = counts.get(f"{helper}_uses", 0.0), counts.get(f"{helper}_ok", 0.0)
        if uses:
            tokens = counts.get(f"{helper}_tokens", 0.0)
            share = f"{ok / uses:.1%}"
            rows.append([helper, f"{uses:.0f}", number(uses / total), share, f"{tokens:.0f}"])
    return Table(
        title="Helpers",
        columns=["helper", "uses", "a trajectory", "helped", "its tokens"],
        rows=rows,
        note=_note(figures),
    )


def _note(figures: Figures) -> str:
    counts = figures.assist
    notes = []
    if "abandoned_calls" in counts:
        notes.append(
            f"Taken back: {counts['abandoned_calls']:.0f} calls and "
            f"{counts['abandoned_tokens']:.0f} sampled tokens, which no other table counts."
        )
    if "backtracer_refused" in counts:
        notes.append(
            f"{counts['backtracer_refused']:.0f} turns could not be taken back: their "
            "environment could not be copied."
        )
    return " ".join(notes)


# The tables of a report for Markdown and HTML, and the narrower ones of the terminal.

ALL = "all"
SCORE_TITLES = {
    "reward": "reward",
    "em": "EM",
    "f1": "F1",
    "contains": "contains",
    "math": "math",
    "rule": "rules",
    "judge": "judge",
}


def tables_of(summary: Summary) -> list[Table]:
    """All tables of the report that have something to say."""
    tables = [_scores(summary)]
    if summary.num_samples > 1:
        tables.append(_by_k(summary, "pass@k", lambda figures: figures.pass_at))
        tables.append(_by_k(summary, "maj@k", lambda figures: figures.majority_at))
    tables.append(_cost(summary))
    overall = summary.overall
    if overall.tools:
        tables.append(_tools(overall))
    if overall.assist:
        tables.append(assist_table(overall))
    if overall.truncations or overall.num_failed:
        tables.append(_ends(overall))
    if overall.agreement is not None:
        tables.append(_agreement(overall.agreement))
    return tables


def terminal_tables_of(summary: Summary) -> list[Table]:
    """What fits into a terminal."""
    tables = [_scores(summary, short=True)]
    if summary.num_samples > 1:
        tables.append(_overall_by_k(summary.overall))
    tables.append(_cost(summary, short=True))
    return [*tables, assist_table(summary.overall)] if summary.overall.assist else tables


def groups_of(summary: Summary) -> Iterator[tuple[str, str, Figures]]:
    """(field, value, figures), all questions last."""
    for field_name, values in summary.groups.items():
        if field_name == "dataset" and len(values) == 1:
            continue
        for value, figures in values.items():
            yield field_name, value, figures
    yield "", ALL, summary.overall


def _grouped(
    summary: Summary, cells: Callable[[Figures], list[str]], fields: Collection[str] = ()
) -> tuple[list[list[str]], list[int]]:
    """Rows by group, of these fields only if any are given, and where sections begin."""
    rows, sections, before = [], [], None
    for name, value, figures in groups_of(summary):
        if fields and name not in fields:
            continue
        if before is not None and name != before:
            sections.append(len(rows))
        before = name
        label = value if name in ("", "dataset", "kind") else f"{name} {value}"
        rows.append([label, *cells(figures)])
    return rows, sections


def _scores(summary: Summary, short: bool = False) -> Table:
    """The scores of each set; `short` leaves out those of single graders."""
    own = summary.overall.estimates
    same = own.get("math") == own.get("rule")
    known = [name for name in SCORE_TITLES if name in own and not (same and name == "rule")]
    if short:
        known = [name for name in known if name not in ("reward", "contains", "rule")]

    def cells(figures: Figures) -> list[str]:
        own = figures.estimates
        return [
            *([] if short else [str(figures.num_questions)]),
            str(figures.num_trajectories),
            interval(own.get("success")),
            *(number(own[name].value) if name in own else "-" for name in known),
            str(figures.num_failed),
        ]

    rows, sections = _grouped(summary, cells)
    datasets = summary.groups.get("dataset", {})
    if len(datasets) > 1:
        blank = [""] * (len(known) + 1)
        before = [""] if short else ["", ""]
        rows.append(["mean of datasets", *before, number(summary.average), *blank])
    asked = [] if short else ["asked"]
    return Table(
        title=f"Scores of {summary.name}",
        columns=[
            "questions",
            *asked,
            "graded",
            "success [95 %]",
            *(SCORE_TITLES[name] for name in known),
            "failed",
        ],
        rows=rows,
        note=_scores_note(summary),
        sections=sections,
    )


def _scores_note(summary: Summary) -> str:
    overall = summary.overall
    note = "95 % intervals are over questions; the other scores have theirs in summary.json."
    if overall.num_failed:
        kinds = ", ".join(f"{kind} {count}" for kind, count in overall.failures.items())
        note += (
            f" {overall.num_failed} failed trajectories ({kinds}) are in no score; were all of "
            f"them wrong, success would be {number(overall.success_if_failed_wrong)}."
        )
    if summary.compat:
        note += " em, F1, contains and math are those of the published code."
    return note


def _overall_by_k(figures: Figures) -> Table:
    rows = [
        [str(k), interval(one), interval(figures.majority_at.get(k)), str(one.num_questions)]
        for k, one in figures.pass_at.items()
    ]
    columns = ["k", "pass@k [95 %]", "maj@k [95 %]", "questions"]
    return Table(title="Right within k samples, and by a vote among k", columns=columns, rows=rows)


def _by_k(summary: Summary, title: str, of: Callable[[Figures], dict[int, Estimate]]) -> Table:
    ks = list(of(summary.overall))
    rows, sections = _grouped(summary, lambda one: [interval(of(one).get(k)) for k in ks])
    least = {k: of(summary.overall)[k].num_questions for k in ks}
    few = {k: count for k, count in least.items() if count < summary.overall.num_questions}
    short = ", ".join(f"k = {k}: {count}" for k, count in few.items())
    return Table(
        title=title,
        columns=["questions", *(f"k = {k}" for k in ks)],
        rows=rows,
        note=f"Questions with k samples that ended: {short}." if short else "",
        sections=sections,
    )


def _cost(summary: Summary, short: bool = False) -> Table:
    fields = ("", "dataset") if short else ()
    columns = {name: cell for name, cell in _COST.items() if not short or name in _SHORT_COST}
    rows, sections = _grouped(summary, lambda one: [cell(one) for cell in columns.values()], fields)
    note = (
        "right / call: all right answers over all tool calls. right with tools: share of right "
        "ones among the trajectories that used a tool. ARPO productivity: success * calls / "
        "(calls + 0.1) * 100."
    )
    return Table(
        title="Cost of a trajectory",
        columns=["questions", *columns],
        rows=rows,
        note="" if short else note,
        sections=sections,
    )


def _value_of(name: str) -> Callable[[Figures], str]:
    def cell(figures: Figures) -> str:
        estimate = figures.estimates.get(name)
        return "-" if estimate is None else number(estimate.value)

    return cell


def _spread_of(name: str, *of: str) -> Callable[[Figures], str]:
    return lambda figures: " / ".join(number(getattr(figures.spreads[name], one)) for one in of)


_COST: dict[str, Callable[[Figures], str]] = {
    "tool calls": _spread_of("tool_calls", "mean"),
    "right / call": _value_of("tool_productivity"),
    "right with tools": _value_of("tool_efficiency"),
    "ARPO productivity": lambda figures: number(figures.arpo_tool_productivity),
    "turns": _spread_of("turns", "mean"),
    "tokens": _spread_of("action_tokens", "mean"),
    "tokens median / p95": _spread_of("action_tokens", "median", "p95"),
    "tool tokens": _spread_of("tool_tokens", "mean"),
    "seconds median / p95": _spread_of("seconds", "median", "p95"),
}
_SHORT_COST = ("tool calls", "right / call", "tokens", "seconds median / p95")


def _tools(figures: Figures) -> Table:
    rows = [
        [name, str(use.calls), str(use.errors), f"{use.errors / use.calls:.1%}"]
        for name, use in figures.tools.items()
    ]
    return Table(title="Tools", columns=["tool", "calls", "errors", "share"], rows=rows)


def _ends(figures: Figures) -> Table:
    total = figures.num_trajectories + figures.num_failed
    counts = [(f"limit {name}", count) for name, count in figures.truncations.items()]
    counts += [(f"failed {name}", count) for name, count in figures.failures.items()]
    rows = [[name, str(count), f"{count / total:.1%}"] for name, count in counts]
    return Table(
        title="Cut off and failed",
        columns=["end", "trajectories", "share"],
        rows=rows,
        note="Cut off by a limit: graded by what is there. Failed: in no score.",
    )


MAX_UNREADABLE_SHARE = 0.05  # of the replies of a judge, above which the report warns


def _agreement(found: Agreement) -> Table:
    """How often judge and rules say the same."""
    kappa = "not defined" if found.kappa is None else f"{found.kappa:.3f}"
    total = found.both_right + found.only_judge + found.only_rules + found.both_wrong
    note = f"They agree on {found.share:.1%} of the {total} both graded; Cohen's kappa {kappa}."
    if not total:
        note = "The judge gave no verdict."
    elif not found.both_right + found.only_rules:
        note = (
            "Of the answers that both graded the rules found none right, the judge "
            f'{found.only_judge} of {total}; only grader.judge.when = "always" asks it about those '
            "that the rules find right, too."
        )
    if found.num_unparsed:
        share = found.num_unparsed / (total + found.num_unparsed)
        note += (
            f" {found.num_unparsed} replies of the judge ({share:.1%}) were no verdict; where the "
            "rules did not find the answer right, it counts as wrong."
        )
        if share > MAX_UNREADABLE_SHARE:
            note += (
                f" More than {MAX_UNREADABLE_SHARE:.0%} are unreadable: these scores are too low. "
                "Give a thinking model a higher grader.judge.max_tokens, or choose another judge."
            )
    return Table(
        title="Judge against rules",
        columns=["", "rules: right", "rules: wrong"],
        rows=[
            ["judge: right", str(found.both_right), str(found.only_judge)],
            ["judge: wrong", str(found.only_rules), str(found.both_wrong)],
        ],
        note=note,
    )
