"""How often the helpers of a trajectory were used, with what success, for how many tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

HELPERS = ("debugger", "backtracer", "refiner", "browser")
Counts = dict[str, float]


def add(counts: Counts, **more: float) -> None:
    """Add to some of the counts."""
    for name, value in more.items():
        counts[name] = counts.get(name, 0.0) + value


def count_calls(counts: Counts, records: Iterable[Mapping[str, Any]]) -> None:
    """Add what the records of tool calls say about debugger and browser agent.

    HELPER_uses, HELPER_ok and HELPER_tokens; the latter are of requests and replies.
    """
    for record in records:
        info = record.get("info") or {}
        if "debugger" in info:
            told = info["debugger"]
            add(
                counts,
                debugger_uses=1,
                debugger_ok=bool(told["fixed"]),
                debugger_tokens=told["num_tokens"],
            )
        if "browser" in info:
            told = info["browser"]
            add(
                counts,
                browser_uses=1,
                browser_ok=bool(told["found"]),
                browser_tokens=told["num_tokens"],
            )
