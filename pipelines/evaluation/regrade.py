"""Grades a stored evaluation again: `agentenv evaluate regrade DIR [grader.key=value ...]`.

DIR/rows.jsonl is replaced at once, what it held is kept in rows.before.jsonl; DIR/config.json gets
the new grader, regrade.md lists what changed, and the report is written anew.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from agentenv.config import Tree, apply_overrides, blaming, build_config, resolver, to_plain
from agentenv.disk import write_whole
from agentenv.env import close_shared
from agentenv.errors import ConfigError, CrashError, GraderError
from agentenv.offload import in_thread
from agentenv.pipelines.config.evaluation import EvaluateConfig
from agentenv.pipelines.config.rl import EnvConfig
from agentenv.pipelines.evaluation.report import report_rows
from agentenv.pipelines.evaluation.scores import CONCURRENCY, make_scorer
from agentenv.pipelines.evaluation.store import (
    CONFIG_FILE,
    ROWS_FILE,
    Saved,
    load_rows,
    load_saved,
    lock,
    replace_rows,
    save,
)
from agentenv.pipelines.records.row import EvalRow, calls_that_ran, prediction, written
from agentenv.pipelines.run.arguments import Parser
from agentenv.pipelines.run.tables import Table, as_markdown, short
from agentenv.pipelines.run.terminal import View, to_its_end
from agentenv.pipelines.setup.data import EnvMaker, Resolve
from agentenv.tool_env import Grader, graded, start_grader
from agentenv.types import Task

# Grades stored trajectories again, by the graders that a configuration gives; asks no engine.

MAX_FAILED_AT_FIRST = 20  # rows; when none before could be graded, the grader is not there
GRADER_FAILED = "GraderError:"


class Change(NamedTuple):
    """A row before and after."""

    before: EvalRow
    after: EvalRow

    @property
    def flipped(self) -> bool:
        """Whether the verdict is another; a failed row has none."""
        return verdict(self.before) != verdict(self.after)


class Graders:
    """The grader of each row's environment, which is made without its tools and never reset."""

    def __init__(self, config: EvaluateConfig, resolve: Resolve) -> None:
        self._makers: dict[str, EnvMaker] = {}
        self._env_ids: dict[str, str] = {}
        self._started: set[int] = set()
        for name, one in config.sets.items():
            assert one.env is not None, "filled when the sets were resolved"
            tables = {"grader": one.grader}
            own = _without_tools(one.env)
            self._makers[name] = EnvMaker(own, tables, resolve, one.limits, one.prompt)
            self._env_ids[name] = one.env.id

    def check(self, rows: Sequence[EvalRow]) -> None:
        """Refuse sets that the configuration lacks, and grader keys that no environment reads.
        Raises ConfigError."""
        tasks: dict[str, list[Task]] = {}
        for row in rows:
            if row.dataset not in self._makers:
                raise ConfigError(
                    f"config.json: the rows are of the set {row.dataset!r}, it has "
                    f"{sorted(self._makers)}"
                )
            tasks.setdefault(row.dataset, []).append(self._task(row))
        for name, own in tasks.items():
            self._makers[name].check_read(own)

    async def of(self, row: EvalRow) -> tuple[Task, Grader]:
        """The task of a row and its grader, started. Raises ConfigError where there is none."""
        task = self._task(row)
        grader: Grader | None = getattr(self._makers[row.dataset](task), "grader", None)
        if grader is None:
            raise ConfigError(
                f"{task.env_id} has no grader, so its trajectories cannot be graded again"
            )
        if id(grader) not in self._started:
            await start_grader(grader)
            self._started.add(id(grader))
        return task, grader

    def _task(self, row: EvalRow) -> Task:
        env_id, answers = row.env_id or self._env_ids[row.dataset], tuple(row.answers)
        return Task(row.task, env_id, row.question, answers, row.kind, dict(row.metadata))


def _without_tools(env: EnvConfig) -> EnvConfig:
    variants = {
        name: replace(one, tools=[], python=None, search=None) for name, one in env.variants.items()
    }
    return replace(env, tools=[], variants=variants)


async def regrade_rows(
    rows: Sequence[EvalRow], graders: Graders, on_row: Callable[[int], None] = lambda number: None
) -> list[Change]:
    """Grade all rows that ended, and those whose grader failed. A row whose grader fails now is
    failed, with the reason; the other figures of a row stay. `on_row` hears how many are graded.

    Raises ConfigError for graders that cannot be made or keys that none reads, GraderError when
    the grader gives no verdict at all.
    """
    graders.check(rows)
    slots = asyncio.Semaphore(CONCURRENCY)
    counts = {"graded": 0, "failed": 0}

    async def one(row: EvalRow) -> Change:
        if not may_be_graded(row):
            return Change(row, row)
        async with slots:
            after = await _regrade(row, graders)
        counts["failed" if after.end == "failed" else "graded"] += 1
        if not counts["graded"] and counts["failed"] >= MAX_FAILED_AT_FIRST:
            raise GraderError(f"nothing is changed; no row could be graded: {after.error}")
        on_row(counts["graded"] + counts["failed"])
        return Change(row, after)

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(row)) for row in rows]
    return [task.result() for task in running]


def may_be_graded(row: EvalRow) -> bool:
    """Whether a row ended with something to grade: an infrastructure failure did not, a grader's
    did."""
    return row.end != "failed" or (row.error or "").startswith(GRADER_FAILED)


async def _regrade(row: EvalRow, graders: Graders) -> EvalRow:
    task, grader = await graders.of(row)
    messages = written(row)
    try:
        grade = await graded(grader, task, messages, calls_that_ran(row))
    except (GraderError, CrashError) as error:
        return replace(
            row, end="failed", error=f"GraderError: {error}", success=False, reward=0.0,
            reason="", parts={}, scores={}, same_as=None,
        )  # fmt: skip
    return replace(
        row,
        prediction=prediction(messages),
        end=row.end if row.end != "failed" else "truncated" if row.limit else "terminated",
        error=None,
        reward=grade.reward,
        success=grade.success,
        reason=grade.reason,
        parts=dict(grade.parts),
        scores={},
        same_as=None,
    )


BEFORE_FILE, CHANGES_FILE = "rows.before.jsonl", "regrade.md"
MAX_LISTED = 40
MAX_CELL = 60


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    parser = Parser(
        prog="agentenv evaluate regrade",
        description="Grade the stored trajectories of an evaluation again, without generating.",
        epilog="grader.kind=KIND starts from that kind's defaults; other grader.key=value change "
        "the grader that the evaluation had; sets.NAME.grader.key=value that of one set. Without "
        "any, the same grader grades again.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("overrides", nargs="*", default=[], metavar="grader.key=value")
    arguments = parser.parse_args(argv)
    view = View()
    return to_its_end(
        lambda: asyncio.run(_run(arguments, view)), view, writing="writing the grades"
    )


async def _run(arguments: argparse.Namespace, view: View) -> None:
    folder: Path = arguments.folder
    saved = load_saved(folder)
    tree = regraded_config(saved.config, arguments.overrides)
    source = str(folder / CONFIG_FILE)
    with blaming(source, arguments.overrides):
        config = build_config(EvaluateConfig, tree, source)
    try:
        with lock(folder):
            rows = await in_thread(load_rows, folder)
            scorer = make_scorer(view.say)
            view.begin("regrading", len(rows))
            changes = await regrade_rows(
                rows, Graders(config, resolver(saved.run)), on_row=view.advance
            )
            view.end()
            after = [change.after for change in changes]
            _show(changes, folder, view)
            await report_rows(folder, after, scorer, view)  # fills in the scores, too
            replace_rows(folder, after, BEFORE_FILE)
            new = Saved(subject=saved.subject, run=saved.run, config=to_plain(config))
            save(folder, new)
    finally:
        await close_shared()
    view.say(f"{folder / ROWS_FILE} is graded anew; what it held is in {BEFORE_FILE}")


def regraded_config(config: Tree, overrides: Sequence[str]) -> Tree:
    """The configuration with other graders. `grader.` keys hold for every set, and for what
    environments the rows of a set choose; `sets.NAME.grader.` ones for that set."""
    tree = copy.deepcopy(config)
    for override in overrides:
        start, is_grader, _ = override.partition("=")[0].strip().rpartition("grader.")
        name = start.removeprefix("sets.").removesuffix(".")  # which may have dots
        if "=" not in override or not is_grader or (start and start == name):
            raise ConfigError(
                f"{override!r}: regrading takes grader.key=value and sets.NAME.grader.key=value"
            )
        if start and name not in tree["sets"]:
            raise ConfigError(f"{override!r}: the sets are {sorted(tree['sets'])}")
    places = {"grader.": [tree, *tree["sets"].values()]}
    places |= {f"sets.{name}.grader.": [one] for name, one in tree["sets"].items()}
    for start, found in places.items():
        asked = [text.removeprefix(start) for text in overrides if text.startswith(start)]
        for place in found:
            _override(place, asked)
    return tree


def _override(place: Tree, asked: Sequence[str]) -> None:
    """Change the grader of a table and of the variants of its environment."""
    if not asked:
        return
    variants = (place.get("env") or {}).get("variants") or {}
    chosen = any(text.partition("=")[0].strip() == "kind" for text in asked)
    for table in [place, *(one for one in variants.values() if one.get("grader") is not None)]:
        grader = {} if chosen else dict(table.get("grader") or {})
        apply_overrides(grader, asked)
        table["grader"] = grader


def changes_table(changes: Sequence[Change]) -> Table:
    """What changed, right to wrong first."""
    flipped = [change for change in changes if change.flipped]
    moves = Counter((verdict(one), verdict(two)) for one, two in flipped)
    rewards = sum(one.reward != two.reward for one, two in changes)
    told = ", ".join(f"{count} {one} -> {two}" for (one, two), count in sorted(moves.items()))
    flipped.sort(key=lambda change: (verdict(change.after), change.after.key))
    return Table(
        title=f"{len(flipped)} of {len(changes)} verdicts changed" + (f": {told}" if told else ""),
        columns=["trajectory", "expected", "answered", "before", "after", "why"],
        rows=[
            [
                "/".join(map(str, after.key)),
                short(" | ".join(after.answers), MAX_CELL),
                short(after.prediction, MAX_CELL),
                verdict(before),
                verdict(after),
                short(after.error or after.reason, MAX_CELL),
            ]
            for before, after in flipped
        ],
        note=f"{rewards} rewards changed.",
        left=list(range(6)),
    )


def _show(changes: Sequence[Change], folder: Path, view: View) -> None:
    table = changes_table(changes)
    write_whole(folder / CHANGES_FILE, as_markdown(table).encode("utf-8", "replace"))
    if not table.rows:
        view.say(f"{table.title}; {table.note}")
        return
    listed = msgspec.structs.replace(table, rows=table.rows[:MAX_LISTED])
    view.show(listed)
    if table.rows[MAX_LISTED:]:
        left = len(table.rows) - MAX_LISTED
        view.say(f"and {left} more, in {folder / CHANGES_FILE}")


def verdict(row: EvalRow) -> str:
    """failed, right, or wrong."""
    return "failed" if row.end == "failed" else "right" if row.success else "wrong"
