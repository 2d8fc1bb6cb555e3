"""How many requests a server gets, from its own figures."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from agentenv.contract.request import ServerLoad
from agentenv.engines.pool.limit import ConcurrencyLimit


class Growing:
    """A server with a cache of 626,768 tokens, whose requests have 512 tokens of prompt and sample
    as many as `length` says, 14,000 a second in all. It admits requests that fit now, and preempts
    the latest when the running ones have grown too long."""

    CACHE = 626_768

    def __init__(self, length: Callable[[], int]) -> None:
        self.limit = ConcurrencyLimit(64, 2048)
        self.num_preempted = self.num_full_s = self.num_turns = 0
        self.num_tokens = 0.0
        self._length = length
        self._running: list[list[float]] = []  # tokens now, and at the end
        self._waiting: list[list[float]] = []

    def serve(self, num_requests: int, seconds: int) -> None:
        for _ in range(seconds):
            for _step in range(10):
                while len(self._running) + len(self._waiting) < min(num_requests, self.limit.value):
                    self._waiting.append([512, 512 + self._length()])
                self._step(0.1)
            usage = self._used / self.CACHE
            self.num_full_s += usage > 0.97
            running, waiting = len(self._running), len(self._waiting)
            self.limit.observe(
                ServerLoad(running, waiting, usage, self.num_preempted),
                running + waiting,
                num_turns=self.num_turns,
            )

    @property
    def _used(self) -> float:
        return sum(one[0] for one in self._running)

    def _step(self, seconds: float) -> None:
        while self._waiting and self._used + self._waiting[0][0] <= self.CACHE:
            self._running.append(self._waiting.pop(0))
        each = seconds * min(60.0, 14_000 / max(1, len(self._running)))
        for one in self._running:
            one[0] += each
        self.num_tokens += each * len(self._running)
        self.num_turns += sum(one[0] >= one[1] for one in self._running)
        self._running = [one for one in self._running if one[0] < one[1]]
        while self._used > self.CACHE:
            self._waiting.insert(0, self._running.pop())
            self.num_preempted += 1


@pytest.mark.parametrize("is_ragged", [False, True])
def test_growing_requests_are_not_preempted(is_ragged: bool) -> None:
    """1,000 requests that begin together fit as prompts, but not at their full length; the server
    still samples at full speed."""
    rng = Random(0)
    server = Growing(lambda: max(5, int(rng.expovariate(1 / 512))) if is_ragged else 512)
    server.serve(1000, 120)
    assert (server.num_preempted, server.num_full_s) == (0, 0)
    assert server.num_tokens > 0.97 * 14_000 * 120


def test_the_limit_follows_the_metrics_of_the_engine() -> None:
    limit = ConcurrencyLimit(16, 64)
    idle, queued = ServerLoad(16, 0, 0.2, 3), ServerLoad(16, 19, 0.2, 3)
    limit.observe(ServerLoad(16, 16, 0.2, 3), in_flight=8)
    assert limit.value == 16  # as many may wait as run
    limit.observe(idle, in_flight=4)
    assert limit.value == 16  # not in use: no reason to grow
    limit.observe(idle, in_flight=16)
    assert limit.value == 32  # at first it doubles
    limit.observe(queued, in_flight=32)
    assert limit.value == 32  # one check may have met a burst
    limit.observe(queued, in_flight=32)
    assert limit.value == 29  # by 32 of 35 requests
    for grown in (37, 45):
        limit.observe(idle, in_flight=limit.value)
        assert limit.value == grown  # from then on it is careful
    limit.observe(idle, in_flight=limit.value)
    for _ in range(2):
        limit.observe(queued, in_flight=40)
    assert limit.value == 36
    limit.observe(queued, in_flight=40)
    assert limit.value == 36  # still draining
    limit.observe(ServerLoad(16, 0, 0.2, 4), in_flight=36)
    assert limit.value == 25  # a preemption counts at once
    limit.observe(ServerLoad(16, 1, 0.99, 4), in_flight=25)
    assert limit.value == 17  # so does a full cache with someone waiting
    for _ in range(9):
        limit.observe(queued, in_flight=0)
    assert limit.value == 17  # the queue is someone else's
    for _ in range(99):
        limit.observe(queued, in_flight=1)
    assert limit.value == 1
    limit = ConcurrencyLimit(16, 64)
    for _ in range(2):
        limit.observe(ServerLoad(2, 99, 0.2, 3), in_flight=16)
    assert limit.value == 11  # not to a tenth at once
    limit = ConcurrencyLimit(100, 100)
    limit.observe(ServerLoad(48, 52, 0.2, 3), in_flight=100)
    limit.observe(ServerLoad(10, 90, 0.2, 3), in_flight=100)
    assert limit.value == 96  # by the check that saw more of them run
