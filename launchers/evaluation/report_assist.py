"""The table of helpers: debugger, backtracer, refiner, browser agent."""

from __future__ import annotations

from agentenv.assist.counts import HELPERS
from launchers.evaluation.figure_types import Figures
from launchers.evaluation.tables import Table, number


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
