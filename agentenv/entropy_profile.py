"""Does uncertainty rise after tool results? The premise of ARPO and AEPO, measured on any trees.

A curve holds the mean entropy (nats) of the tokens at each position of a turn, and how many turns
were that long. The paper's figure is `after` each tool against `start`, the first turn of a
trajectory, over the first 10 to 50 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from msgspec import Struct

from agentenv.tree import Node, TrajectoryTree

NO_TOOL = "no tool"  # an observation that answers no call


class EntropyCurve(Struct, frozen=True):
    """`mean` in nats and `count` of turns, both by token position from the start of a turn."""

    mean: list[float]
    count: list[int]

    def window(self, size: int) -> float:
        """Mean over the tokens of the first `size` positions; nan without one."""
        pairs = list(zip(self.mean, self.count, strict=True))[:size]
        total = sum(count for _, count in pairs)
        return sum(mean * count for mean, count in pairs) / total if total else float("nan")


class EntropyProfile(Struct, frozen=True):
    """Curves of first turns, of all turns after a tool result, and of those by tool."""

    start: EntropyCurve
    after_result: EntropyCurve
    after: dict[str, EntropyCurve]

    def rows(self) -> list[dict[str, float | int | str]]:
        """A table: one row per curve and position."""
        curves = {"start": self.start, "after_result": self.after_result}
        curves |= {f"after/{tool}": curve for tool, curve in self.after.items()}
        return [
            {"curve": name, "position": place, "entropy": mean, "turns": count}
            for name, curve in curves.items()
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
    length = max(map(len, turns), default=0)
    columns = [[turn[i] for turn in turns if len(turn) > i] for i in range(length)]
    return EntropyCurve([fmean(column) for column in columns], [len(c) for c in columns])
