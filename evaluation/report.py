"""The report of a stored evaluation: tables in the terminal, DIR/summary.json and report.md."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from agentenv.assembly.reports.records import EvalRow
from agentenv.assembly.run.tables import Table, lines_of, markdown, number
from agentenv.assembly.run.terminal import View
from agentenv.base.disk import write_whole
from agentenv.base.offload import in_thread
from agentenv.contract.env import close_shared
from agentenv.evaluation.figures import SCORES, Agreement, Estimate, Figures, Summary, summarize
from agentenv.evaluation.scores import Compat, Scorer, make_scorer, stored_rows
from agentenv.evaluation.store import load_saved, read_env
from agentenv.reference.helpers import HELPERS
from agentenv.rollout.metrics import PADDED

SUMMARY_FILE, MARKDOWN_FILE = "summary.json", "report.md"


async def report_of(
    folder: Path, view: View, *, ks: Sequence[int] = (), compat: Compat = ""
) -> Summary:
    """Compute the figures of the rows in `folder`, show the tables and write the files. `ks`:
    values of k for pass@k and maj@k. Raises DataError without rows."""
    try:
        scorer = make_scorer(view.log, compat)
        async with stored_rows(folder, scorer) as rows:
            found = await figures(folder, rows, scorer, ks)
        return await show_report(folder, found, view)
    finally:
        await close_shared()


async def figures(
    folder: Path, rows: Sequence[EvalRow], scorer: Scorer, ks: Sequence[int] = ()
) -> Summary:
    """The summary of these rows of the evaluation in `folder`. Also writes scores into the rows."""
    saved = load_saved(folder)
    name = f"{folder.name}: {saved.subject.get('name', '')}".rstrip(": ")
    found = await summarize(name, rows, scorer, ks=ks)
    found.env = read_env(folder)
    return found


async def show_report(folder: Path, summary: Summary, view: View) -> Summary:
    """Show the tables and write the files. They must be newer than the rows: else the viewer does
    not use summary.json."""
    for table in tables_of(summary, short=True):
        view.show(table)
    for line in hints_of(summary, str(folder)):
        view.warn(line)
    await in_thread(_write, folder, summary)
    view.log(f"wrote {SUMMARY_FILE} and {MARKDOWN_FILE} to {folder}")
    return summary


def _write(folder: Path, summary: Summary) -> None:
    overall, subject = summary.overall, load_saved(folder).subject
    after = ""
    if "step" in subject:
        after = f", after step {subject['step']} (policy version {subject['policy_version']})"
    subtitle = (
        f"{overall.num_questions} questions, {overall.num_trajectories} graded trajectories, "
        f"{overall.num_failed} failed{after}"
    )
    lines = (subtitle, *hints_of(summary, folder.name))
    head = "\n\n".join([f"# {markdown(summary.name)}", *map(markdown, lines)])
    text = f"{head}\n\n{lines_of(tables_of(summary))}\n"
    write_whole(folder / MARKDOWN_FILE, text.encode("utf-8", "replace"))
    encoded = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    write_whole(folder / SUMMARY_FILE, encoded + b"\n")


def hints_of(summary: Summary, folder: str) -> list[str]:
    """Warnings about misleading figures, with remedies, a line each."""
    hints = [
        f"{use.num_same} of {use.calls} calls of the tool {name!r} failed with the same text, "
        f"which the policy read: {use.error}; is that an answer to its call, or should the tool "
        "raise InfraError (retried) or ConfigError (ends the command)?"
        for name, use in summary.overall.tools.items()
        if use.calls >= FEW_CALLS and use.num_same > use.calls / 2
    ]
    empty, total = summary.overall.num_empty, summary.overall.num_trajectories
    if empty > MAX_EMPTY_SHARE * total:
        hints.append(
            f"empty replies: {empty} ({100 * empty / total:.1f} %), graded as they are: some "
            "gateways answer so under load (lower engine.max_concurrency); thoughts may fill "
            "limits.max_turn_tokens"
        )
    found = summary.overall.agreement
    kappa = found.kappa if found and found.both_right + found.only_rules else None
    if found and kappa is not None and kappa < LOW_KAPPA:
        hints.append(
            f"judge and rules agree little, Cohen's kappa {kappa:.2f}: the judge alone accepts "
            f"{found.only_judge} answers, the rules alone {found.only_rules}; read some of both"
        )
    if summary.overall.num_padded:
        hints.append(f"{summary.overall.num_padded} {PADDED}")
    if noted := [f"{name} {count:.0f}" for name, count in summary.overall.endpoint.items()]:
        hints.append(f"counted of the program's calls (docs/metrics.md): {', '.join(noted)}")
    if count := summary.overall.num_misformatted:
        hints.append(
            f"{count} of {summary.overall.num_trajectories} answers are correct (EM) but not in "
            "the format that the grader requires, and count as wrong: grade only the answers "
            f"(agentenv evaluate regrade {shlex.quote(folder)} grader.reward=answer), or request "
            "the format with a prompt.template such as no_tools or search"
        )
    return hints


Cell = Callable[[Figures], str]

SCORE_TITLES = {"em": "EM", "f1": "F1", "rule": "rules"}  # of those with another name
FEW_CALLS = 5  # of a tool; a share of errors over fewer means nothing
MAX_EMPTY_SHARE = 0.01  # of trajectories with an empty reply; above it the report warns
NOT_SHORT = ("reward", "contains", "rule")
LOW_KAPPA = 0.5  # of judge and rules, below which the report warns
MAX_UNREADABLE_SHARE = 0.05  # of a judge's replies; above it the report warns


def interval(estimate: Estimate | None) -> str:
    """A value with its 95 % interval."""
    if estimate is None or estimate.value is None:
        return "-"
    if estimate.low is None:
        return number(estimate.value)
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"


def tables_of(summary: Summary, *, short: bool = False) -> list[Table]:
    """All tables of the report with data; `short`: those that fit into a terminal."""
    overall, tables = summary.overall, [_scores(summary, short)]
    if summary.num_samples > 1 and short:
        tables.append(_overall_by_k(overall))
    elif summary.num_samples > 1:
        tables.append(_by_k(summary, "pass@k", lambda figures: figures.pass_at))
        tables.append(_by_k(summary, "maj@k", lambda figures: figures.majority_at))
    tables.append(_cost(summary, short))
    if overall.tools and not short:
        tables.append(_tools(overall))
    if overall.assist:
        tables.append(_helpers(overall))
    if short:
        return tables
    found = {f"reward/{name}": mean for name, mean in overall.parts.items()}
    found |= {f"env/{name}": count for name, count in summary.env.items()}
    if found:
        rows = [[name, f"{value:.4g}"] for name, value in found.items()]
        tables.append(Table(title="As in training", columns=["metric", "value"], rows=rows))
    if overall.truncations or overall.num_failed or overall.num_empty:
        tables.append(_ends(overall))
    if overall.agreement is not None:
        tables.append(_agreement(overall.agreement))
    return tables


def groups_of(summary: Summary) -> Iterator[tuple[str, str, Figures]]:
    """(field, label, figures) of each group, all questions last."""
    for field_name, values in summary.groups.items():
        if field_name == "dataset" and len(values) == 1:
            continue
        for value, figures in values.items():
            is_plain = field_name in ("dataset", "kind")
            yield field_name, value if is_plain else f"{field_name} {value}", figures
    yield "", "all", summary.overall


def _grouped(
    title: str, summary: Summary, cells: dict[str, Cell], note: str, fields: Collection[str] = ()
) -> Table:
    """A table with a row per group, only of `fields` if given, and a column per cell function."""
    rows, sections, before = [], [], None
    for name, label, figures in groups_of(summary):
        if fields and name not in fields:
            continue
        if before is not None and name != before:
            sections.append(len(rows))
        before = name
        rows.append([label, *(cell(figures) for cell in cells.values())])
    columns = ["questions", *cells]
    return Table(title=title, columns=columns, rows=rows, note=note, sections=sections)


def _scores(summary: Summary, short: bool) -> Table:
    """The scores of each set; `short` omits those of single graders."""
    estimates = summary.overall.estimates
    same = estimates.get("math") == estimates.get("rule")
    shown = estimates.keys() - (NOT_SHORT if short else ()) - ({"rule"} if same else set())
    known = [name for name in ("reward", *SCORES) if name in shown]
    cells: dict[str, Cell] = {} if short else {"asked": lambda one: str(one.num_questions)}
    cells["graded"] = lambda one: str(one.num_trajectories)
    cells["success [95 %]"] = lambda one: interval(one.estimates.get("success"))
    cells |= {SCORE_TITLES.get(name, name): _value_of(name) for name in known}
    cells |= {} if short else {"valid": lambda one: str(one.num_valid)}
    cells["failed"] = lambda one: str(one.num_failed)
    table = _grouped(f"Scores of {summary.name}", summary, cells, _scores_note(summary))
    if len(summary.groups.get("dataset", {})) > 1:
        before = [""] if short else ["", ""]
        blank = [""] * (len(cells) - len(before) - 1)
        table.rows.append(["mean of datasets", *before, number(summary.average), *blank])
    return table


def _scores_note(summary: Summary) -> str:
    overall = summary.overall
    note = "95 % intervals are over questions; the other scores have theirs in summary.json."
    if overall.num_failed:
        kinds = ", ".join(f"{kind} {count}" for kind, count in overall.failures.items())
        note += (
            f" {overall.num_failed} failed trajectories ({kinds}) are excluded from scores; if all "
            f"of them counted as wrong, success would be {number(overall.success_if_failed_wrong)}."
        )
    if overall.num_retries:
        note += f" {overall.num_retries} failed attempts were retried."
    if summary.compat:
        note += " em, F1, contains and math are those of the published code."
    return note


def _overall_by_k(figures: Figures) -> Table:
    rows = [
        [str(k), interval(one), interval(figures.majority_at.get(k)), str(one.num_questions)]
        for k, one in figures.pass_at.items()
    ]
    columns = ["k", "pass@k [95 %]", "maj@k [95 %]", "questions"]
    return Table(title="Pass@k, and majority vote over k samples", columns=columns, rows=rows)


def _by_k(summary: Summary, title: str, of: Callable[[Figures], dict[int, Estimate]]) -> Table:
    known = of(summary.overall)
    few = {k: one.num_questions for k, one in known.items()}
    short = [f"k = {k}: {n}" for k, n in few.items() if n < summary.overall.num_questions]
    note = f"Questions with k finished samples: {', '.join(short)}." if short else ""
    cells: dict[str, Cell] = {
        f"k = {k}": lambda figures, k=k: interval(of(figures).get(k))  # type: ignore[misc]
        for k in known
    }
    return _grouped(title, summary, cells, note)


def _value_of(name: str) -> Cell:
    return lambda figures: number(getattr(figures.estimates.get(name), "value", None))


def _spread_of(name: str, *figure: str) -> Cell:
    return lambda figures: " / ".join(number(getattr(figures.spreads[name], one)) for one in figure)


_COST: dict[str, Cell] = {
    "tool calls": _spread_of("tool_calls", "mean"),
    "right / call": _value_of("tool_productivity"),
    "used a tool": _value_of("tool_use"),
    "correct with tools": _value_of("tool_efficiency"),
    "ARPO productivity": lambda figures: number(figures.arpo_tool_productivity),
    "turns": _spread_of("turns", "mean"),
    "tokens": _spread_of("action_tokens", "mean"),
    "tokens median / p95": _spread_of("action_tokens", "median", "p95"),
    "tool tokens": _spread_of("tool_tokens", "mean"),
    "seconds median / p95": _spread_of("seconds", "median", "p95"),
}
_SHORT_COST = ("tool calls", "right / call", "tokens", "seconds median / p95")
_COST_NOTE = (
    "right / call: all correct answers over all tool calls. correct with tools: share of correct "
    "ones among the trajectories that used a tool. ARPO productivity: success * calls / (calls + "
    "0.1) * 100."
)


def _cost(summary: Summary, short: bool) -> Table:
    cells = {name: _COST[name] for name in (_SHORT_COST if short else _COST)}
    note, fields = ("", ("", "dataset")) if short else (_COST_NOTE, ())
    return _grouped("Cost of a trajectory", summary, cells, note, fields)


def _tools(figures: Figures) -> Table:
    rows = [
        [name, str(use.calls), str(use.errors), f"{use.errors / use.calls:.1%}"]
        for name, use in figures.tools.items()
    ]
    return Table(title="Tools", columns=["tool", "calls", "errors", "share"], rows=rows)


def _helpers(figures: Figures) -> Table:
    """Uses, successes and tokens of each helper that was used, over all trajectories."""
    total, counts, rows, notes = figures.num_trajectories, figures.assist, [], []
    for helper in HELPERS:
        uses, ok = counts.get(f"{helper}_uses", 0.0), counts.get(f"{helper}_ok", 0.0)
        if uses:
            tokens = counts.get(f"{helper}_tokens", 0.0)
            shares = [number(uses / total), f"{ok / uses:.1%}"]
            rows.append([helper, f"{uses:.0f}", *shares, f"{tokens:.0f}"])
    if "abandoned_calls" in counts:
        notes.append(
            f"Discarded by backtracking: {counts['abandoned_calls']:.0f} calls and "
            f"{counts['abandoned_tokens']:.0f} sampled tokens, which other tables do not count."
        )
    if "backtracer_refused" in counts:
        notes.append(
            f"{counts['backtracer_refused']:.0f} turns could not be retried: their environment "
            "could not be forked."
        )
    columns = ["helper", "uses", "a trajectory", "helped", "its tokens"]
    return Table(title="Helpers", columns=columns, rows=rows, note=" ".join(notes))


def _ends(figures: Figures) -> Table:
    total = figures.num_trajectories + figures.num_failed
    counts = [(f"limit {name}", count) for name, count in figures.truncations.items()]
    counts += [(f"failed {name}", count) for name, count in figures.failures.items()]
    counts += [("empty replies", figures.num_empty)] * (figures.num_empty > 0)
    return Table(
        title="Truncated and failed, and empty replies",
        columns=["end", "trajectories", "share"],
        rows=[[name, str(count), f"{count / total:.1%}"] for name, count in counts],
        note="Truncated by a limit: graded as they are. Failed: excluded from scores.",
    )


def _agreement(found: Agreement) -> Table:
    """Agreement of judge and rules."""
    kappa = "not defined" if found.kappa is None else f"{found.kappa:.3f}"
    total = found.both_right + found.only_judge + found.only_rules + found.both_wrong
    note = (
        f"They agree on {found.share:.1%} of the {total} that both graded; Cohen's kappa {kappa}."
    )
    if not total:
        note = "The judge returned no verdict."
    elif not found.both_right + found.only_rules:
        note = (
            "Of the answers that both graded, the rules accepted none, the judge "
            f'{found.only_judge} of {total}; only grader.judge.when = "always" also asks the judge '
            "about answers that the rules accept."
        )
    if found.num_unparsed:
        share = found.num_unparsed / (total + found.num_unparsed)
        note += (
            f" {found.num_unparsed} replies of the judge ({share:.1%}) contained no verdict; "
            "unless the rules accepted the answer, it counts as wrong."
        )
        if share > MAX_UNREADABLE_SHARE:
            note += (
                f" More than {MAX_UNREADABLE_SHARE:.0%} are unreadable: these scores are too low. "
                "Raise grader.judge.max_tokens for a reasoning model, or choose another judge."
            )
    return Table(
        title="Judge versus rules",
        columns=["", "rules: right", "rules: wrong"],
        rows=[
            ["judge: right", str(found.both_right), str(found.only_judge)],
            ["judge: wrong", str(found.only_rules), str(found.both_wrong)],
        ],
        note=note,
    )
