"""Which trajectories a report shows, and in what form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from launchers.evaluation.figures import Question
from launchers.evaluation.rows import EvalRow
from launchers.evaluation.tables import plain

MAX_SAMPLES = 40
MAX_TEXT_CHARS = 6000  # of one segment; the middle of a longer one is left out
Outcome = Literal["right", "wrong", "cut off", "failed"]
PER_DATASET: dict[Outcome, int] = {"wrong": 4, "right": 2, "cut off": 1, "failed": 1}


class Segment(Struct):
    """One piece of a trajectory: who wrote it (prompt, policy, env), and what."""

    author: str
    text: str


class Sample(Struct, kw_only=True):
    """A trajectory as the report shows it. Texts are as they came: whoever shows them escapes."""

    title: str
    question: str
    answers: str
    prediction: str
    outcome: str
    reason: str
    figures: str
    segments: list[Segment]
    calls: list[dict[str, str]]


def samples_of(questions: Sequence[Question]) -> list[Sample]:
    """A few of each outcome from each dataset, in the order of the questions."""
    left: dict[str, dict[Outcome, int]] = {}
    found: dict[str, list[EvalRow]] = {}
    for question in questions:
        taken: set[Outcome] = set()  # of each question one of a kind
        for row in question.rows:
            quota = left.setdefault(row.dataset, dict(PER_DATASET))
            outcome = outcome_of(row)
            if quota[outcome] and outcome not in taken:
                quota[outcome] -= 1
                taken.add(outcome)
                found.setdefault(row.dataset, []).append(row)
    each = max(1, MAX_SAMPLES // max(1, len(found)))
    return [_sample(row) for rows in found.values() for row in rows[:each]]


def outcome_of(row: EvalRow) -> Outcome:
    """A trajectory that a limit cut off is only told apart when it is wrong."""
    if row.end == "failed":
        return "failed"
    if row.success:
        return "right"
    return "cut off" if row.end == "truncated" else "wrong"


def _sample(row: EvalRow) -> Sample:
    figures = [f"reward {row.reward:g}", f"{row.num_turns} turns", f"{row.action_tokens} tokens"]
    figures.append(f"{row.seconds:.1f} s")
    figures += [f"{name} {value:.3g}" for name, value in row.scores.items()]
    end = f"{row.end} by {row.limit}" if row.limit else row.end
    return Sample(
        title=plain(f"{row.dataset} / {row.task} / sample {row.sample}"),
        question=_cut(row.question),
        answers=_cut(" | ".join(row.answers)),
        prediction=_cut(row.prediction),
        outcome=outcome_of(row),
        reason=_cut(row.error or row.reason),
        figures=", ".join([end, *figures]),
        segments=[_segment(part, place == 0) for place, part in enumerate(row.segments)],
        calls=[_call(call) for call in row.tool_calls],
    )


def _segment(part: dict[str, str], first: bool) -> Segment:
    if "policy" in part:
        return Segment("policy", _cut(part["policy"]))
    return Segment("prompt" if first else "env", _cut(part.get("env", "")))


def _call(call: dict[str, Any]) -> dict[str, str]:
    arguments = call.get("arguments", {})
    seconds = call.get("duration_s")
    return {
        "name": _cut(str(call.get("name", ""))),
        "arguments": _cut(json.dumps(arguments, ensure_ascii=False, default=str)),
        "outcome": "ok" if call.get("ok", True) else "error",
        "error": _cut(str(call.get("error") or "")),
        "seconds": f"{seconds:.2f}" if isinstance(seconds, int | float) else "",
    }


def _cut(text: str) -> str:
    text = plain(text)
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
