"""What befell the servers of a pool, in figures and in sentences for whoever reads a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

TOLD_PAUSE_S = 5.0  # a change of weights that took longer is told
SLOW = 0.5  # share of the other servers' speed below which one is told to be slow
MEASURED = 8  # answered requests from which on a server's speed is known


class Account:
    """Of one server, since it joined the pool.

    `lost` counts requests by what became of them, `last` has the last reason of each kind;
    `update_s` is its longest change of weights; `speed` tokens a second of one request.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lost: Counter[str] = Counter()
        self.last: dict[str, str] = {}
        self.num_refused = 0
        self.update_s = 0.0
        self._num_answered = self._num_tokens = 0
        self._busy_s = 0.0

    def lose(self, kind: str, reason: str) -> None:
        """A request was lost."""
        self.lost[kind] += 1
        self.last[kind] = reason

    def answer(self, num_tokens: int, seconds: float) -> None:
        """A request was answered, so long after it was sent."""
        self._num_answered += 1
        self._num_tokens += num_tokens
        self._busy_s += seconds

    @property
    def speed(self) -> float | None:
        """None as long as too few requests were answered."""
        if self._num_answered < MEASURED or not self._busy_s:
            return None
        return self._num_tokens / self._busy_s

    def figures(self) -> dict[str, Any]:
        """For a summary."""
        speed = self.speed
        return {
            "answered": self._num_answered,
            "lost": dict(self.lost),
            "refused": self.num_refused,
            "tokens_per_s_of_a_request": None if speed is None else round(speed, 1),
            "longest_update_s": round(self.update_s, 1),
        }


def told(accounts: Sequence[Account]) -> list[str]:
    """What a person should know of the servers, a sentence each; none if all went well."""
    lines = []
    for one in accounts:
        for kind, count in one.lost.most_common():
            lines.append(f"{one.name}: {count} requests {kind} ({one.last[kind]})")
        if one.num_refused:
            lines.append(f"{one.name} was full: it refused {one.num_refused} requests")
        if one.update_s > TOLD_PAUSE_S:
            lines.append(f"{one.name} took up to {one.update_s:.0f} s to change its weights")
        others = [each.speed for each in accounts if each is not one and each.speed is not None]
        if others and one.speed is not None and one.speed < SLOW * median(others):
            lines.append(
                f"{one.name} is slow: {one.speed:.0f} tokens a second of a request, the others "
                f"{median(others):.0f}"
            )
    return lines
