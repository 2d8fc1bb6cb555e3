"""How long to wait before something is tried again."""

from __future__ import annotations

from random import Random


def backoff_s(
    attempt: int, key: str, *, first_s: float, max_s: float, at_least_s: float = 0.0
) -> float:
    """Seconds to wait after try number `attempt`, from 0, has failed.

    `first_s`, doubled with each try, or what the other side asks for by `at_least_s` if that is
    more; at most `max_s`; and then up to half as long again, so that those who failed together do
    not come back together. The spread is drawn from `key` and `attempt` alone: equal runs wait
    equally long.
    """
    delay = min(max_s, max(first_s * 2.0 ** min(attempt, 64), at_least_s))
    return delay * Random(f"{key}/{attempt}").uniform(1.0, 1.5)
