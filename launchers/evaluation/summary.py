"""From the rows of an evaluation to its summary: scores, votes, figures by group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from statistics import fmean

from launchers.evaluation.benchmarks import groups as benchmark_groups
from launchers.evaluation.figure_types import Figures, Summary
from launchers.evaluation.figures import Question, default_ks, figures_of, questions_of
from launchers.evaluation.rows import EvalRow
from launchers.evaluation.scores import CONCURRENCY, Scorer, score_rows
from launchers.evaluation.votes import count_votes

FALLBACK_FIELDS = ("level", "type", "category")  # of metadata, without a known benchmark
MAX_GROUPS = 40  # values of a fallback field; with more it is no group but a number or a name


async def summarise(
    name: str,
    rows: Sequence[EvalRow],
    scorer: Scorer,
    *,
    ks: Sequence[int] = (),
    again: bool = False,
    seed: int = 0,
) -> tuple[Summary, list[Question]]:
    """The summary of an evaluation, and its questions. `ks` are those of pass@k and maj@k, by
    default powers of two; `again` computes scores that the rows have already."""
    num_unscored = await score_rows(rows, scorer, again=again)
    questions = questions_of(rows)
    await _vote(questions, scorer)
    for question in questions:
        question.groups = list(_groups_of(question.rows[0]))
    ks = tuple(sorted(set(ks))) or default_ks(questions)
    by_group = _by_group(questions)
    groups = {
        field: {value: figures_of(own, ks, seed=seed) for value, own in values.items()}
        for field, values in by_group.items()
    }
    versions = [version for row in rows for version in row.policy_versions]
    return Summary(
        name=name,
        compat=scorer.compat,
        num_samples=max((len(question.rows) for question in questions), default=0),
        policy_versions=[min(versions), max(versions)] if versions else [],
        num_unscored=num_unscored,
        average=_average(groups),
        overall=figures_of(questions, ks, seed=seed),
        groups=groups,
    ), questions


async def _vote(questions: Sequence[Question], scorer: Scorer) -> None:
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(question: Question) -> None:
        async with slots:
            question.votes = await count_votes(question.done, scorer)

    async with asyncio.TaskGroup() as group:
        for question in questions:
            if len(question.done) > 1:
                group.create_task(one(question))


def _groups_of(row: EvalRow) -> Iterator[tuple[str, str]]:
    """(field, value) of a question; fields of a dataset bear its name."""
    yield "dataset", row.dataset
    yield "kind", row.kind
    own = benchmark_groups(row)
    if not own:
        metadata = {key.lower(): value for key, value in row.metadata.items()}
        own = [
            (field, str(metadata[field]))
            for field in FALLBACK_FIELDS
            if isinstance(metadata.get(field), str | int)
        ]
    for field, value in own:
        yield f"{row.dataset} {field}", value


def _by_group(questions: Sequence[Question]) -> dict[str, dict[str, list[Question]]]:
    """Questions by field and value; of kinds, only if they are not the datasets over again."""
    found: dict[str, dict[str, list[Question]]] = {}
    for question in questions:
        for field, value in question.groups:
            found.setdefault(field, {}).setdefault(value, []).append(question)
    pairs = {(question.rows[0].dataset, question.rows[0].kind) for question in questions}
    if len(pairs) == len(found.get("dataset", {})) == len(found.get("kind", {})):
        found.pop("kind", None)
    return {
        field: dict(sorted(values.items()))
        for field, values in found.items()
        if field == "dataset" or 1 < len(values) <= MAX_GROUPS
    }


def _average(groups: dict[str, dict[str, Figures]]) -> float | None:
    estimates = [one.estimates.get("success") for one in groups.get("dataset", {}).values()]
    values = [one.value for one in estimates if one is not None and one.value is not None]
    return fmean(values) if values else None
