"""Which trajectories are fit to learn from, and of the others, why not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from launchers.evaluation.rows import EvalRow
from launchers.evaluation.store import FAILED
from launchers.synthesis.chains import Part, call_keys, chain_text, check_chain, parts_of
from launchers.synthesis.config import FilterConfig, Way

# why a trajectory is not in the SFT set, in the order in which it is looked at
REASONS = {
    "failed": "infrastructure failed; the same command samples it again",
    "truncated": "a limit ended it",
    "wrong": "the environment's grader says so",
    "unpaired_tag": "a tag is not opened, not closed, or within another",
    "wrong_order": "a call without its result, a result that no tool gave, or text after the end",
    "no_thought": "no <think>",
    "no_answer": "no <answer>",
    "no_box": "no \\boxed{} in the answer",
    "no_tool_call": "with tools, but none was called",
    "too_many_calls": "over filter.max_tool_calls",
    "repeated_call": "one call twice",
    "failed_call": "a tool answered by an error",
    "duplicate": "another trajectory of the question has the same text",
    "answered_directly": "with tools, of a question that needs none",
    "surplus": "right and clean, but another one was drawn",
}


class Judged(Struct, frozen=True):
    """A trajectory, its text, and the reason against it; "" for one that is right and clean."""

    way: Way
    row: EvalRow
    text: str
    reason: str = ""
    detail: str = ""


def judge(row: EvalRow, way: Way, tools: Sequence[str], config: FilterConfig) -> Judged:
    """Everything that can be said of one trajectory alone. `tools` are the environment's."""
    parts = parts_of(row, tools)
    reason, detail = _problem(row, way, parts, tools, config)
    return Judged(way, row, chain_text(parts), reason, detail)


def without_duplicates(judged: Iterable[Judged]) -> list[Judged]:
    """Of the clean trajectories of one question that have the same text, the first stays clean."""
    seen: dict[str, EvalRow] = {}
    result = []
    for one in judged:
        if one.reason:
            result.append(one)
            continue
        first = seen.setdefault(one.text, one.row)
        if first is one.row:
            result.append(one)
        else:
            detail = f"as {first.dataset} {first.sample}"
            result.append(Judged(one.way, one.row, one.text, "duplicate", detail))
    return result


def _problem(
    row: EvalRow, way: Way, parts: Sequence[Part], tools: Sequence[str], config: FilterConfig
) -> tuple[str, str]:
    if row.end == FAILED:
        return "failed", row.error or ""
    if row.end != "terminated":
        return "truncated", row.limit or ""
    if not row.success:
        return "wrong", row.prediction[:200]
    problem = check_chain(parts, tools, require_box=config.require_box)
    if problem[0]:
        return problem
    calls = row.tool_calls
    if way != "direct" and not calls:
        return "no_tool_call", ""
    if len(calls) > config.max_tool_calls:
        return "too_many_calls", f"{len(calls)} calls"
    keys = call_keys(row)
    twice = [key for place, key in enumerate(keys) if key in keys[:place]]
    if twice and config.drop_repeated_calls:
        return "repeated_call", twice[0][:200]
    errors = [str(call.get("error")) for call in calls if not call.get("ok")]
    if errors and config.drop_failed_calls:
        return "failed_call", errors[0][:200]
    return "", ""
