"""Retries with back-off: of calls, of calls during an outage, of lost processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from random import Random
from typing import NamedTuple, TypeVar

from agentenv.base.deadline import Work, waiting
from agentenv.base.errors import EngineError, InfraError, OutageError

T = TypeVar("T")


class Backoff(NamedTuple):
    """Seconds between attempts: `first_s`, doubled with each attempt, at most `max_s`."""

    first_s: float
    max_s: float

    def seconds(self, attempt: int, key: str, at_least_s: float = 0.0) -> float:
        """Seconds to wait after attempt number `attempt` (from 0) failed; `at_least_s` (requested
        by a server) if that is longer, within `max_s`.

        A jitter of up to half of it is added, so that clients which failed together do not return
        together. The jitter depends on `key` and `attempt` only: equal runs wait equally long.
        """
        delay = min(self.max_s, max(self.first_s * 2.0 ** min(attempt, 64), at_least_s))
        return delay * Random(f"{key}/{attempt}").uniform(1.0, 1.5)


REQUESTS = Backoff(0.5, 60.0)  # to a server
OUTAGE = Backoff(0.1, 10.0)  # while a service is down


async def pause_before_retry(who: str, seconds: float) -> None:
    """Wait before `who` is asked again. The wait does not count as work."""
    with waiting(f"a pause before {who} is retried"):
        await asyncio.sleep(seconds)


async def retried(call: Callable[[int], Awaitable[T]], who: str, key: str, num_retries: int) -> T:
    """The result of `call`, which gets the number of the attempt (from 0). Failures of
    infrastructure and engines that are not final are retried, not before the seconds that `who`
    requests (`retry_after_s`) within those of REQUESTS; then raises the last one."""
    for attempt in count():
        try:
            return await call(attempt)
        except (InfraError, EngineError) as error:
            if attempt >= num_retries or getattr(error, "is_final", False):
                raise
            least_s = getattr(error, "retry_after_s", 0.0)
        await pause_before_retry(who, REQUESTS.seconds(attempt, key, least_s))
    raise AssertionError


async def through_outage(
    call: Callable[[], Awaitable[T]],
    who: str,
    key: str,
    *,
    outage_s: float,
    failed: Callable[[int, InfraError], None] = lambda attempt, error: None,
    backoff: Backoff = OUTAGE,
    num_retries: int = 0,
) -> T:
    """The result of `call`. Infrastructure failures, which `failed` gets with the number of their
    attempt (from 0), are retried after jittered delays (`Backoff`), `num_retries` times and until
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
        longest = backoff._replace(max_s=max(backoff.max_s, min(wanted_s, outage_s)))
        await pause_before_retry(who, longest.seconds(attempt, key, wanted_s))
    raise AssertionError


class Restarts:
    """The restarts of one process: the back-off, and the limit of consecutive losses."""

    def __init__(self, limit: int, key: str, backoff: Backoff) -> None:
        self.num = 0  # consecutive losses
        self._limit, self._key, self._backoff = limit, key, backoff

    def progressed(self) -> None:
        """Reset the count: the process made progress before it was lost."""
        self.num = 0

    def lost(self) -> float | None:
        """Count a loss. Returns the seconds before the next start; None: do not restart."""
        self.num += 1
        is_over = self.num > self._limit
        return None if is_over else self._backoff.seconds(self.num - 1, self._key)
