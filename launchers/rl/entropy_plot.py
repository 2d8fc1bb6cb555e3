"""Entropy after tool results, as table and picture of a run.

ARPO (arXiv 2507.19849) and AEPO (arXiv 2510.14545) rest on a rise of entropy in the
first tokens after a tool result; these files show whether the user's own policy has one.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from agentenv.entropy_profile import EntropyProfile

COLUMNS = ("curve", "position", "entropy", "turns")
WINDOW = 20  # tokens of the line that is said
SHOWN_SHARE = 0.05  # of a curve's turns; means over fewer are noise and are only in the table


def write_entropy(profile: EntropyProfile, folder: Path, name: str) -> None:
    """entropy.csv and entropy.png: mean entropy (nats) by token position from the start of a turn,
    of first turns and of turns after a tool result, by tool; beside it how many turns each point
    is the mean of."""
    with (folder / "entropy.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        table.writerows(profile.rows())
    _plot(profile, folder / "entropy.png", name)


def entropy_line(profile: EntropyProfile) -> str:
    """The means of the first tokens, for terminal and log."""
    means = {name: curve.window(WINDOW) for name, curve in profile.curves().items()}
    if math.isnan(means["start"]) or math.isnan(means["after_result"]):
        return ""
    tools = ", ".join(f"{tool} {means[f'after/{tool}']:.3f}" for tool in profile.after)
    return (
        f"entropy of a turn's first {WINDOW} tokens, nats: first turn {means['start']:.3f}, after "
        f"a tool result {means['after_result']:.3f} ({tools})"
    )


def _plot(profile: EntropyProfile, target: Path, name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # Wide and pale below its tools, of which there may be but one.
    styles: dict[str, dict[str, Any]] = {
        "start": {"color": "black", "linestyle": "--"},
        "after_result": {"color": "black", "linewidth": 4, "alpha": 0.3},
    }
    titles = {"start": "first turn", "after_result": "after any tool result"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for label, curve in profile.curves().items():
        if not curve.count:
            continue
        style = styles.get(label, {})
        length = sum(count >= SHOWN_SHARE * curve.count[0] for count in curve.count)
        for axes, values in ((left, curve.mean[:length]), (right, curve.count)):
            axes.plot(values, label=titles.get(label, label.replace("/", " ")), **style)
    left.set(
        title="mean entropy, nats, while 5 % of the turns are that long",
        xlabel="token of the turn",
        ylim=(0, None),
    )
    right.set(title="turns that were that long", xlabel="token of the turn", ylim=(0, None))
    if left.lines:
        left.legend(fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(f"{name}: entropy by position, rollouts of the whole run")
    figure.savefig(target, dpi=110)
    plt.close(figure)
