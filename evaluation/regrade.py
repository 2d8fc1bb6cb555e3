"""Regrades the trajectories of a stored evaluation, without generating.

This replaces DIR/rows.jsonl atomically, keeps the former rows in rows.before.jsonl, writes the new
grader to DIR/config.json and the changes to regrade.md, and updates the report.
"""

from __future__ import annotations

import asyncio
import copy
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
from msgspec.structs import replace

from agentenv.assembly.keys.evaluation import EvaluateConfig
from agentenv.assembly.parts.environments import EnvMaker, EnvSettings, grader_alone
from agentenv.assembly.reports.records import FAILED, EvalRow, calls_that_ran, prediction, written
from agentenv.assembly.run.tables import Table, as_markdown, short
from agentenv.assembly.run.terminal import View
from agentenv.base.config import Resolve, Tree, build_config, resolver, to_plain
from agentenv.base.config import changes as key_changes
from agentenv.base.crashes import guarded
from agentenv.base.disk import write_whole
from agentenv.base.errors import ConfigError, CrashError, GraderError
from agentenv.base.offload import in_thread
from agentenv.base.overrides import apply_overrides, blaming
from agentenv.base.types import Task
from agentenv.contract.env import Grader, close_shared, graded, start_grader
from agentenv.envs.grading.keys import GraderConfig, fit
from agentenv.evaluation import store
from agentenv.evaluation.report import figures, show_report
from agentenv.evaluation.run import verdict
from agentenv.evaluation.scores import for_each, make_scorer

MAX_FAILED_AT_FIRST = 20  # rows; if none of them could be graded, the grader is unavailable
GRADER_FAILED = "GraderError:"
RULE = ("reward", "compat", "combined", "own", "path", "name", "success_at", "solution_str")  # keys


Change = tuple[EvalRow, EvalRow]  # a row before and after regrading


class UngradedError(ConfigError):
    """No grader can grade a stored trajectory of this environment."""


class Graders:
    """The graders of environments, from instances that are never reset."""

    def __init__(self, makers: Mapping[str, EnvMaker]) -> None:
        self._makers = makers
        self._graders: dict[tuple[str, str], Grader] = {}  # by set and environment
        self._starting = asyncio.Lock()

    @classmethod
    def of_config(cls, config: EvaluateConfig, resolve: Resolve) -> Graders:
        """The graders of the sets of an evaluation, without their tools."""
        makers = {}
        for name, one in config.sets.items():
            assert one.env is not None, "filled when the sets were resolved"
            variants = {
                key: replace(variant, tools=[], python=None, search=None)
                for key, variant in one.env.variants.items()
            }
            own = replace(one.env, tools=[], variants=variants)
            settings = EnvSettings(env=own, limits=one.limits, prompt=one.prompt, grader=one.grader)
            makers[name] = EnvMaker(settings, resolve)
        return cls(makers)

    def check(self, rows: Sequence[EvalRow]) -> None:
        """Raises ConfigError for rows of an unknown set, and for unused grader keys."""
        for name in dict.fromkeys(row.dataset for row in rows):
            if name not in self._makers:
                raise ConfigError(
                    f"config.json: the rows belong to the set {name!r}, it has "
                    f"{sorted(self._makers)}"
                )
            self._makers[name].check_read([self.task(one) for one in rows if one.dataset == name])

    async def of(self, name: str, task: Task) -> Grader:
        """The started grader of a task in the set `name`. Raises UngradedError without one."""
        key = name, task.env_id
        async with self._starting:
            if key not in self._graders:
                grader = grader_alone(self._makers[name](task))
                if grader is None:
                    raise UngradedError(
                        f"{task.env_id} grades its episodes itself (by their state, or without an "
                        "attribute grader), so stored trajectories cannot be regraded"
                    )
                await guarded(start_grader(grader), "the start of the grader")
                self._graders[key] = grader
        return self._graders[key]

    def task(self, row: EvalRow) -> Task:
        """The task of a row."""
        env_id = row.env_id or self._makers[row.dataset].config.id
        answers = tuple(row.answers)
        return Task(row.task, env_id, row.question, answers, row.kind, dict(row.metadata))


async def regrade_rows(
    rows: Sequence[EvalRow], graders: Graders, on_row: Callable[[int], None]
) -> list[Change]:
    """Regrade all rows, except those that failed before their grader. A row whose grader fails now
    becomes a failed row, with the reason. Figures of a row other than its grade stay. `on_row`
    takes the number of processed rows.

    Raises ConfigError for a missing grader or unused keys, and GraderError if the grader fails for
    the first MAX_FAILED_AT_FIRST rows.
    """
    graders.check(rows)
    counts = {"graded": 0, "failed": 0}

    async def one(row: EvalRow) -> Change:
        if row.end == FAILED and not (row.error or "").startswith(GRADER_FAILED):
            return row, row
        after = await regraded(row, graders)
        counts["failed" if after.end == FAILED else "graded"] += 1
        if not counts["graded"] and counts["failed"] >= MAX_FAILED_AT_FIRST:
            raise GraderError(f"nothing was changed; no row could be graded: {after.error}")
        on_row(counts["graded"] + counts["failed"])
        return row, after

    return await for_each(one, rows)


async def regraded(row: EvalRow, graders: Graders) -> EvalRow:
    """The row with the grade of its task's grader, or failed if that fails. Raises UngradedError if
    its environment has no grader."""
    graded_row = replace(row, scores={})
    try:
        task = graders.task(row)
        grader = await graders.of(row.dataset, task)
        grade = await graded(grader, task, written(row), calls_that_ran(row))
    except (GraderError, CrashError) as error:
        ungraded = {"end": FAILED, "success": False, "reward": 0.0, "reason": "", "parts": {}}
        return replace(graded_row, error=f"{GRADER_FAILED} {error}", **ungraded)
    ended = "truncated" if row.limit else "terminated"
    return replace(
        graded_row,
        prediction=prediction(row),
        end=ended if row.end == FAILED else row.end,
        error=None,
        reward=grade.reward,
        success=grade.success,
        reason=grade.reason,
        parts=dict(grade.parts),
    )


def changed_keys(before: Tree, after: Tree) -> list[str]:
    """Lines about the changed keys of graders; first, those of the rule that turns a comparison of
    answers into the reward."""
    found = [line for line in key_changes(before["sets"], after["sets"]) if "grader." in line]
    texts = dict.fromkeys(line[line.index("grader.") :] for line in found)  # without their sets
    rules = [text for text in texts if re.split("[.:]", text)[1] in RULE]
    about = f"the rule of the reward changes, not only the comparison: {'; '.join(rules)}"
    keys = ", ".join(text.partition(":")[0] for text in texts)
    return [about] * bool(rules) + [f"changed keys: {keys}"] * bool(texts)


BEFORE_FILE, CHANGES_FILE = "rows.before.jsonl", "regrade.md"
MAX_LISTED = 40
MAX_CELL = 60


async def regrade(folder: Path, overrides: Sequence[str], view: View) -> None:
    """Regrade all rows with the graders of the stored configuration, changed by `overrides`, and
    replace rows and report. Raises ConfigError, DataError and GraderError, without any change."""
    saved = store.load_saved(folder)
    tree = regraded_config(saved.config, overrides)
    source = str(folder / store.CONFIG_FILE)
    with blaming(source, overrides):
        config = build_config(EvaluateConfig, tree, source)
    try:
        with closing(store.lock(folder)):
            rows = await in_thread(store.load_rows, folder)
            for line in changed_keys(saved.config, to_plain(config)):
                view.log(line)
            scorer = make_scorer(view.log)
            view.begin("regrading", len(rows))
            changes = await regrade_rows(
                rows, Graders.of_config(config, resolver(saved.run)), on_row=view.advance
            )
            view.end()
            after = [two for _, two in changes]
            _show(changes, folder, view)
            found = await figures(folder, after, scorer)
            store.replace_rows(folder, after, BEFORE_FILE)
            new = store.Saved(subject=saved.subject, run=saved.run, config=to_plain(config))
            store.save(folder, new)
            await show_report(folder, found, view)
    finally:
        await close_shared()
    view.log(f"{folder / store.ROWS_FILE} is regraded; the former rows are in {BEFORE_FILE}")


def regraded_config(config: Tree, overrides: Sequence[str]) -> Tree:
    """The configuration with changed graders. `grader.` keys apply to every set and to all
    environment variants, `sets.NAME.grader.` keys to that set."""
    tree, by_set = copy.deepcopy(config), defaultdict[str, list[str]](list)
    for override in overrides:
        start, is_grader, _ = override.partition("=")[0].strip().rpartition("grader.")
        name = start.removeprefix("sets.").removesuffix(".")  # which may have dots
        if "=" not in override or not is_grader or (start and start == name):
            raise ConfigError(
                f"{override!r}: regrading accepts grader.key=value and sets.NAME.grader.key=value"
            )
        if start and name not in tree["sets"]:
            raise ConfigError(f"{override!r}: the sets are {sorted(tree['sets'])}")
        by_set[name].append(override.strip().removeprefix(f"{start}grader."))
    for name in sorted(by_set):  # "" first: of every set
        for place in [tree["sets"][name]] if name else tree["sets"].values():
            _override(place, by_set[name])
    return tree


def _override(place: Tree, overrides: Sequence[str]) -> None:
    """Change the grader of a table and of the variants of its environment."""
    named = {text.partition("=")[0].strip() for text in overrides}
    variants = (place.get("env") or {}).get("variants") or {}
    for table in [place, *(one for one in variants.values() if one.get("grader") is not None)]:
        grader = table["grader"] = dict(table.get("grader") or {})
        apply_overrides(grader, overrides, GraderConfig)
        fit(grader, named)


def changes_table(changes: Sequence[Change]) -> Table:
    """The table of changed verdicts."""
    flipped = [(one, two) for one, two in changes if verdict(one) != verdict(two)]
    moves = Counter((verdict(one), verdict(two)) for one, two in flipped)
    moved = ", ".join(f"{count} {one} -> {two}" for (one, two), count in sorted(moves.items()))
    flipped.sort(key=lambda change: (verdict(change[1]), change[1].key))
    rows = []
    for before, after in flipped:
        texts = [" | ".join(after.answers), after.prediction, after.error or after.reason]
        expected, answered, why = (short(text, MAX_CELL) for text in texts)
        name = "/".join(map(str, after.key))
        rows.append([name, expected, answered, verdict(before), verdict(after), why])
    return Table(
        title=f"{len(flipped)} of {len(changes)} verdicts changed{moved and f': {moved}'}",
        columns=["trajectory", "expected", "answered", "before", "after", "why"],
        rows=rows,
        note=f"{sum(one.reward != two.reward for one, two in changes)} rewards changed.",
        left=list(range(6)),
    )


def _show(changes: Sequence[Change], folder: Path, view: View) -> None:
    table = changes_table(changes)
    write_whole(folder / CHANGES_FILE, as_markdown(table).encode("utf-8", "replace"))
    if not table.rows:
        view.log(f"{table.title}; {table.note}")
        return
    listed = msgspec.structs.replace(table, rows=table.rows[:MAX_LISTED])
    view.show(listed)
    if table.rows[MAX_LISTED:]:
        left = len(table.rows) - MAX_LISTED
        view.log(f"and {left} more, in {folder / CHANGES_FILE}")
