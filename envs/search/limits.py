"""What protects a provider: a token bucket, and a circuit breaker."""

from __future__ import annotations

import asyncio

from agentenv.errors import InfraError


class TokenBucket:
    """At most `rate_per_s` requests a second in the long run, and `burst` at once.

    Callers are served in order of arrival. A rate of 0 means no limit.
    """

    def __init__(self, rate_per_s: float, burst: int) -> None:
        self._rate = rate_per_s
        self._burst = max(1, burst)
        self._free_at = 0.0  # loop time at which the bucket has refilled to the full
        self._paused_until = 0.0

    async def take(self) -> None:
        """Wait for a token, and for the end of a pause."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._paused_until:
            await asyncio.sleep(self._paused_until - loop.time())
        if self._rate <= 0:
            return
        now = loop.time()
        # a full bucket lies `burst` tokens of time in the past of the next free slot
        self._free_at = max(self._free_at, now) + 1 / self._rate
        delay = self._free_at - now - self._burst / self._rate
        if delay > 0:
            await asyncio.sleep(delay)

    def pause(self, seconds: float) -> None:
        """Give nobody a token for so long: the provider has asked for it."""
        until = asyncio.get_running_loop().time() + seconds
        self._paused_until = max(self._paused_until, until)


class CircuitBreaker:
    """After `max_failures` failures in a row calls fail at once for `cool_down_s`.

    Then one call is let through as a probe: its success closes the circuit, its failure opens it
    for another `cool_down_s`.
    """

    def __init__(self, name: str, max_failures: int, cool_down_s: float) -> None:
        self._name = name
        self._max_failures = max_failures
        self._cool_down_s = cool_down_s
        self._num_failures = 0
        self._open_until: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether calls are refused, but for probes."""
        return self._open_until is not None

    def check(self) -> None:
        """Raises InfraError while the circuit is open."""
        if self._open_until is None:
            return
        now = asyncio.get_running_loop().time()
        if now < self._open_until:
            raise InfraError(
                f"{self._name}: not called for {self._open_until - now:.1f} s more, after "
                f"{self._num_failures} failures in a row"
            )
        self._open_until = now + self._cool_down_s  # this caller is the probe

    def succeeded(self) -> None:
        """Close the circuit."""
        self._num_failures, self._open_until = 0, None

    def failed(self) -> None:
        """Count a failure, and open the circuit if there are too many."""
        self._num_failures += 1
        if self._num_failures >= self._max_failures:
            self._open_until = asyncio.get_running_loop().time() + self._cool_down_s
