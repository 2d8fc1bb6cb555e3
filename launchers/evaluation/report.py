"""Writes the report of a stored evaluation: `launchers/evaluate.py report DIR`.

DIR/summary.json  report.md  report.html (one file, plots inside)  plots/*.png
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib.util
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import cast, get_args

import jinja2
import msgspec

from agentenv.errors import DataError
from agentenv.shared import close_shared
from envs.grading.equivalence import shared_math
from launchers.evaluation.figure_types import Summary
from launchers.evaluation.figures import Question
from launchers.evaluation.filled import keep_filled, num_filled
from launchers.evaluation.report_plots import plots_of
from launchers.evaluation.report_samples import samples_of
from launchers.evaluation.report_tables import tables_of, terminal_tables_of
from launchers.evaluation.rows import EvalRow
from launchers.evaluation.scores import Compat, Scorer
from launchers.evaluation.store import load_saved, read_rows
from launchers.evaluation.summary import summarise
from launchers.evaluation.tables import Table, as_rich, interval, lines_of, markdown, number
from launchers.exits import to_its_end
from launchers.view import View

SUMMARY_FILE, MARKDOWN_FILE, HTML_FILE, PLOTS = (
    "summary.json", "report.md", "report.html", "plots",
)  # fmt: skip
TEMPLATE = "report.html.jinja"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="launchers/evaluate.py report",
        description="Report a stored evaluation: terminal, summary.json, report.md, report.html.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--k", default="", help="of pass@k and maj@k, e.g. 1,3,5; default 1,2,4,..")
    parser.add_argument(
        "--compat",
        choices=[one for one in get_args(Compat) if one],
        default="",
        help="reference: em, F1, contains and math as the published code has them",
    )
    arguments = parser.parse_args(argv)
    try:
        ks = [int(k) for k in arguments.k.split(",") if k]
    except ValueError:
        parser.error(f"--k {arguments.k}: expected numbers, e.g. 1,3,5")
    if any(k < 1 for k in ks):
        parser.error(f"--k {arguments.k}: expected numbers from 1")
    view = View()
    compat = cast(Compat, arguments.compat)

    def work() -> None:
        write_report(arguments.folder, view, ks=ks, compat=compat)

    return to_its_end(work, view, writing="writing the report")


def write_report(
    folder: Path, view: View, *, ks: Sequence[int] = (), compat: Compat = ""
) -> Summary:
    """Compute the figures of the rows in `folder`, show the tables and write the files. Raises
    DataError where there are none. Not to be called where an event loop runs."""
    return asyncio.run(report(folder, view, ks=ks, compat=compat))


async def report(
    folder: Path, view: View, *, ks: Sequence[int] = (), compat: Compat = ""
) -> Summary:
    """`write_report` within an event loop; it closes what the process shares."""
    try:
        load_saved(folder)  # which says what is wrong with the folder
        rows = await asyncio.to_thread(read_rows, folder)
        scorer, before = make_scorer(view, compat), num_filled(rows)
        summary = await report_rows(folder, rows, scorer, view, ks=ks)
        if scorer.is_usual and num_filled(rows) > before:
            await asyncio.to_thread(keep_filled, folder, rows)
        return summary
    finally:
        await close_shared()


def make_scorer(view: View, compat: Compat = "") -> Scorer:
    """With math-verify, if it is there."""
    math = importlib.util.find_spec("math_verify") is not None
    if not math:
        view.say('no math-verify (pip install "agentenv[math]"): expressions are compared as text')
    else:
        shared_math().take_turns()
    return Scorer(compat=compat, math=math)


async def report_rows(
    folder: Path,
    rows: Sequence[EvalRow],
    scorer: Scorer,
    view: View,
    *,
    ks: Sequence[int] = (),
) -> Summary:
    """Report these rows in `folder`."""
    if not rows:
        raise DataError(f"{folder} holds no rows of an evaluation")
    name = f"{folder.name}: {load_saved(folder).subject.get('name', '')}".rstrip(": ")
    again = bool(scorer.compat)  # stored scores are those without it
    summary, questions = await summarise(name, rows, scorer, ks=ks, again=again)
    tables = tables_of(summary)
    for table in terminal_tables_of(summary):
        view.show(as_rich(table))
    await asyncio.to_thread(_write, folder, summary, questions, tables)
    view.say(f"written to {folder}: {SUMMARY_FILE}, {MARKDOWN_FILE}, {HTML_FILE}, {PLOTS}/")
    return summary


def _write(
    folder: Path, summary: Summary, questions: Sequence[Question], tables: Sequence[Table]
) -> None:
    plots = plots_of(summary, questions)
    (folder / PLOTS).mkdir(exist_ok=True)
    for name, data in plots.items():
        write_whole(folder / PLOTS / f"{name}.png", data)
    text = f"# {markdown(summary.name)}\n\n{markdown(_subtitle(summary))}\n\n{lines_of(tables)}\n"
    text += "## Plots\n\n" + "".join(f"![{name}]({PLOTS}/{name}.png)\n\n" for name in plots)
    write_whole(folder / MARKDOWN_FILE, text.encode("utf-8", "replace"))
    page = _page(summary, questions, tables, plots)
    write_whole(folder / HTML_FILE, page.encode("utf-8", "replace"))
    encoded = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    write_whole(folder / SUMMARY_FILE, encoded + b"\n")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that no reader ever sees half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(data)
    partial.replace(path)


def _page(
    summary: Summary,
    questions: Sequence[Question],
    tables: Sequence[Table],
    plots: dict[str, bytes],
) -> str:
    """The HTML page. All that stands in trajectories is untrusted, so everything is escaped."""
    source = resources.files("launchers.evaluation").joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(source).render(
        title=f"Evaluation {summary.name}",
        subtitle=_subtitle(summary),
        tiles=_tiles(summary),
        tables=tables,
        plots=[
            {"name": name, "data": base64.b64encode(data).decode()} for name, data in plots.items()
        ],
        samples=samples_of(questions),
    )


def _subtitle(summary: Summary) -> str:
    overall = summary.overall
    versions = ""
    if summary.policy_versions:
        low, high = summary.policy_versions
        versions = f", policy version {low}" + (f" to {high}" if high != low else "")
    return (
        f"{overall.num_questions} questions, {overall.num_trajectories} graded trajectories, "
        f"{overall.num_failed} failed{versions}"
    )


def _tiles(summary: Summary) -> list[dict[str, str]]:
    overall, estimates = summary.overall, summary.overall.estimates
    tiles = [("success [95 %]", interval(estimates.get("success")))]
    if summary.num_samples > 1 and overall.pass_at:
        most = max(overall.pass_at)
        tiles.append((f"pass@{most}", number(overall.pass_at[most].value)))
        if most in overall.majority_at:
            tiles.append((f"maj@{most}", number(overall.majority_at[most].value)))
    tiles.append(("tool calls each", number(overall.spreads["tool_calls"].mean)))
    tiles.append(("sampled tokens each", number(overall.spreads["action_tokens"].mean)))
    tiles.append(("seconds, median", number(overall.spreads["seconds"].median)))
    tiles.append(("failed", str(overall.num_failed)))
    return [{"name": name, "value": value} for name, value in tiles]
