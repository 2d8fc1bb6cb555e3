"""Entropy by position in a turn: does uncertainty rise after tool results, the premise of ARPO and
AEPO?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np
from msgspec import Struct

from agentenv.tree import Node, TrajectoryTree

NO_TOOL = "no tool"  # an observation that answers no call
OTHER_TOOLS = "other tools"  # a policy can make up any number of names
MAX_TOOLS = 32  # that a merged profile keeps apart


class EntropyCurve(Struct, frozen=True):
    """The mean entropy (nats) of the tokens at each position of a turn, and the `count` of turns
    that were that long."""

    mean: list[float] = []
    count: list[int] = []

    def merged(self, other: EntropyCurve) -> EntropyCurve:
        """The curve of the turns of both."""
        count = [sum(pair) for pair in zip_longest(self.count, other.count, fillvalue=0)]
        sums = zip_longest(self._sums(), other._sums(), fillvalue=0.0)
        return EntropyCurve([sum(pair) / n for pair, n in zip(sums, count, strict=True)], count)

    def _sums(self) -> list[float]:
        return [mean * count for mean, count in zip(self.mean, self.count, strict=True)]

    def window(self, size: int) -> float:
        """Mean over the tokens of the first `size` positions; nan without one."""
        pairs = list(zip(self.mean, self.count, strict=True))[:size]
        total = sum(count for _, count in pairs)
        return sum(mean * count for mean, count in pairs) / total if total else float("nan")


class EntropyProfile(Struct, frozen=True):
    """Curves of first turns, of all turns after a tool result, and of those by tool.

    The figure of ARPO and AEPO is `after` each tool against `start`, the first turn of a
    trajectory, over the first 10 to 50 tokens.
    """

    start: EntropyCurve = EntropyCurve()
    after_result: EntropyCurve = EntropyCurve()
    after: dict[str, EntropyCurve] = {}

    def merged(self, other: EntropyProfile) -> EntropyProfile:
        """The profile of the trees of both; of more than MAX_TOOLS tools those that came last are
        counted together, so that a run can merge for ever."""
        after = dict(self.after)
        for tool, curve in other.after.items():
            known = tool in after or len(after.keys() - {OTHER_TOOLS}) < MAX_TOOLS
            name = tool if known else OTHER_TOOLS
            after[name] = after.get(name, EntropyCurve()).merged(curve)
        return EntropyProfile(
            start=self.start.merged(other.start),
            after_result=self.after_result.merged(other.after_result),
            after={tool: after[tool] for tool in sorted(after)},
        )

    def curves(self) -> dict[str, EntropyCurve]:
        """By name: start, after_result, after/TOOL."""
        curves = {"start": self.start, "after_result": self.after_result}
        return curves | {f"after/{tool}": curve for tool, curve in self.after.items()}

    def rows(self) -> list[dict[str, float | int | str]]:
        """A table: one row per curve and position."""
        return [
            {"curve": name, "position": place, "entropy": mean, "turns": count}
            for name, curve in self.curves().items()
            for place, (mean, count) in enumerate(zip(curve.mean, curve.count, strict=True))
        ]


def entropy_profile(trees: Iterable[TrajectoryTree], num_positions: int = 50) -> EntropyProfile:
    """Curves over all turns of the trees, each shared turn counted once.

    A result that answers calls of several tools counts for each of them once.
    """
    start: list[Sequence[float]] = []
    after: dict[str, list[Sequence[float]]] = {}
    followed: list[Sequence[float]] = []
    for tree in trees:
        for node in tree.nodes[1:]:
            if not node.entropies or node.parent is None:
                continue
            first = node.entropies[:num_positions]
            above = tree.nodes[node.parent]
            if above.parent is None:
                start.append(first)
            elif above.observation_ids:
                followed.append(first)
                for tool in _tools(above):
                    after.setdefault(tool, []).append(first)
    return EntropyProfile(
        start=_curve(start),
        after_result=_curve(followed),
        after={tool: _curve(after[tool]) for tool in sorted(after)},
    )


def _tools(node: Node) -> list[str]:
    names = {str(call["name"]) for call in node.info.get("tool_calls", ())}
    return sorted(names) or [NO_TOOL]


def _curve(turns: Sequence[Sequence[float]]) -> EntropyCurve:
    """Of the positions up to the first at which no turn has an entropy that is known."""
    length = max(map(len, turns), default=0)
    if not length:
        return EntropyCurve()
    figures = np.full((len(turns), length), np.nan)
    for row, turn in zip(figures, turns, strict=True):
        row[: len(turn)] = turn
    is_known = ~np.isnan(figures)
    count = is_known.sum(0)
    size = length if count.all() else int(np.argmin(count > 0))
    sums = np.where(is_known, figures, 0.0).sum(0)
    return EntropyCurve((sums[:size] / count[:size]).tolist(), count[:size].tolist())
