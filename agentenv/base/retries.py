"""Retries with back-off: of calls, of calls during an outage, of lost processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from random import Random
from typing import TypeVar

from agentenv.base.deadline import Work, waiting
from agentenv.base.errors import EngineError, InfraError, OutageError

T = TypeVar("T")

FIRST_DELAY_S, MAX_DELAY_S = 0.5, 60.0  # between requests to a server; doubles, jittered


def backoff_s(
    attempt: int, key: str, *, first_s: float, max_s: float, at_least_s: float = 0.0
) -> float:
    """Seconds to wait after attempt number `attempt` (from 0) failed.

    The wait is `first_s`, doubled with each attempt, or `at_least_s` (requested by a server) if
    that is longer; at most `max_s`. A jitter of up to half of it is added, so that clients which
    failed together do not return together. The jitter depends on `key` and `attempt` only: equal
    runs wait equally long.
    """
    delay = min(max_s, max(first_s * 2.0 ** min(attempt, 64), at_least_s))
    return delay * Random(f"{key}/{attempt}").uniform(1.0, 1.5)


async def pause_before_retry(
    who: str, attempt: int, key: str, *, first_s: float, max_s: float, at_least_s: float = 0.0
) -> None:
    """Wait `backoff_s` seconds before `who` is asked again. The wait does not count as work."""
    delay_s = backoff_s(attempt, key, first_s=first_s, max_s=max_s, at_least_s=at_least_s)
    with waiting(f"a pause before {who} is retried"):
        await asyncio.sleep(delay_s)


async def retried(call: Callable[[int], Awaitable[T]], who: str, key: str, num_retries: int) -> T:
    """The result of `call`, which gets the number of the attempt (from 0). Failures of
    infrastructure and engines that are not final are retried, not before the seconds that `who`
    requests (`retry_after_s`) within MAX_DELAY_S; then raises the last one."""
    for attempt in count():
        try:
            return await call(attempt)
        except (InfraError, EngineError) as error:
            if attempt >= num_retries or getattr(error, "is_final", False):
                raise
            least_s = getattr(error, "retry_after_s", 0.0)
        delays = {"first_s": FIRST_DELAY_S, "max_s": MAX_DELAY_S, "at_least_s": least_s}
        await pause_before_retry(who, attempt, key, **delays)
    raise AssertionError


async def through_outage(
    call: Callable[[], Awaitable[T]],
    who: str,
    key: str,
    *,
    outage_s: float,
    failed: Callable[[int, InfraError], None] = lambda attempt, error: None,
    first_s: float = 0.1,
    max_s: float = 10.0,
    num_retries: int = 0,
) -> T:
    """The result of `call`. Infrastructure failures, which `failed` gets with the number of their
    attempt (from 0), are retried after jittered delays (`backoff_s`), `num_retries` times and until
    `outage_s` seconds after the first one. Their working time does not count. Then raises
    OutageError, which names `who` failed."""
    began_s: float | None = None
    for attempt in count():
        work = Work()
        try:
            return await call()
        except InfraError as error:
            work.discard()
            now_s = asyncio.get_running_loop().time()
            began_s = now_s if began_s is None else began_s
            if attempt >= num_retries and now_s - began_s >= outage_s:
                raise OutageError(
                    f"{who} failed {attempt + 1} times, the last time: {error}"
                ) from error
            failed(attempt, error)
            wanted_s = error.retry_after_s
        most_s = max(max_s, min(wanted_s, outage_s))
        await pause_before_retry(
            who, attempt, key, first_s=first_s, max_s=most_s, at_least_s=wanted_s
        )
    raise AssertionError


class Restarts:
    """The restarts of one process: the back-off, and the limit of consecutive losses."""

    def __init__(self, limit: int, key: str, *, first_s: float, max_s: float) -> None:
        self.num = 0  # consecutive losses
        self._limit, self._key = limit, key
        self._first_s, self._max_s = first_s, max_s

    def progressed(self) -> None:
        """Reset the count: the process made progress before it was lost."""
        self.num = 0

    def lost(self) -> float | None:
        """Count a loss. Returns the seconds before the next start; None: do not restart."""
        self.num += 1
        if self.num > self._limit:
            return None
        return backoff_s(self.num - 1, self._key, first_s=self._first_s, max_s=self._max_s)
