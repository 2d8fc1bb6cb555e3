"""Counts of a synthesis: summary.json, and tables in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from rich.table import Table

from launchers.synthesis.config import Plan
from launchers.synthesis.filters import REASONS
from launchers.synthesis.questions import Dropped
from launchers.synthesis.sorting import Class, Sorted

CLASSES: tuple[Class, ...] = get_args(Class)
GOES_TO = {
    "direct": "sft.jsonl",
    "tools": "sft.jsonl",
    "hard": "rl.jsonl",
    "unfinished": "asked again by the same command",
}
NUM_RIGHT = ("neither", "tools_only", "direct_only", "both")

Summary = dict[str, Any]


def summarise(plan: Plan, found: Sequence[Sorted], dropped: Sequence[Dropped]) -> Summary:
    """All counts. Questions add up over classes and reasons, trajectories over SFT and reasons."""
    classes = Counter(one.kind for one in found)
    kinds = sorted({one.question.task.kind for one in found})
    by_kind = {
        kind: _counted(Counter(o.kind for o in found if o.question.task.kind == kind), CLASSES)
        for kind in kinds
    }
    right = Counter(NUM_RIGHT[2 * one.right[0] + one.right[1]] for one in found)
    learned = Counter(judged.way for one in found for judged in one.chosen)
    trajectories = {}
    for way in plan.ways:
        reasons = Counter(j.reason for one in found for j in one.rejected if j.way == way)
        trajectories[way] = {
            "sft": learned[way],
            "rejected": {reason: reasons[reason] for reason in REASONS if reasons[reason]},
        }
    return {
        "num_questions": len(found) + len(dropped),
        "not_asked": dict(sorted(Counter(one.reason for one in dropped).items())),
        "classes": _counted(classes, CLASSES),
        "by_kind": by_kind,
        "right": _counted(right, NUM_RIGHT),
        "trajectories": trajectories,
        "num_sft": sum(learned.values()),
        "num_rl": classes["hard"],
    }


def class_table(summary: Summary) -> Table:
    """Questions by class and kind."""
    kinds = list(summary["by_kind"])
    table = Table(title="questions")
    table.add_column("class")
    table.add_column("all", justify="right")
    for kind in kinds if len(kinds) > 1 else ():
        table.add_column(kind, justify="right")
    table.add_column("goes to")
    for name in CLASSES:
        own = [str(summary["by_kind"][kind][name]) for kind in kinds] if len(kinds) > 1 else []
        table.add_row(name, str(summary["classes"][name]), *own, GOES_TO[name])
    for reason, count in summary["not_asked"].items():
        table.add_row(reason, str(count), *("" for _ in kinds if len(kinds) > 1), "not asked")
    return table


def reason_table(summary: Summary) -> Table:
    """Trajectories by way and reason."""
    ways = summary["trajectories"]
    table = Table(title="trajectories")
    table.add_column("")
    for way in ways:
        table.add_column(way, justify="right")
    table.add_column("because")
    table.add_row("sft", *(str(one["sft"]) for one in ways.values()), "right, clean, drawn")
    for reason, why in REASONS.items():
        counts = [one["rejected"].get(reason, 0) for one in ways.values()]
        if any(counts):
            table.add_row(reason, *map(str, counts), why)
    return table


def _counted(counts: Counter[Any], names: Sequence[str]) -> dict[str, int]:
    return {name: counts[name] for name in names}
