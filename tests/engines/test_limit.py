"""How many requests a server gets: from its own figures, and from trials once its cache is full."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from agentenv.engines.pool.limit import MAX_PAUSE, ROUNDS, SPARSE, ConcurrencyLimit
from agentenv.engines.remote import ServerLoad

HELD = 100  # requests that the cache of a server below holds
TURN_S = 2.0


class Looked:
    """What a server of HELD requests, which samples `rate(limit)` tokens a second, is given in so
    many looks, each a second after the other."""

    def __init__(self, rate: Callable[[int], float]) -> None:
        self.limit = ConcurrencyLimit(16, 512)
        self.values: list[int] = []
        self._rate = rate
        self._turns = self._tokens = self._now_s = 0.0

    def look(self, num_looks: int, *, asked: int = 10**6) -> None:
        for _ in range(num_looks):
            in_flight = min(self.limit.value, asked)
            running = min(in_flight, HELD)
            self.values.append(self.limit.value)
            self._now_s += 1.0
            self._turns += running / TURN_S
            self._tokens += self._rate(in_flight)
            self.limit.observe(
                ServerLoad(running, in_flight - running, running / HELD, 0),
                in_flight,
                num_turns=int(self._turns),
                num_tokens=int(self._tokens),
                now_s=self._now_s,
            )

    def pass_by(self, seconds: float) -> None:
        """Nothing is sampled meanwhile."""
        self._now_s += seconds


TRIAL = int(ROUNDS * TURN_S) + 2  # looks that one takes at most


def share_sparse(values: list[int]) -> float:
    return sum(value <= HELD * SPARSE + 1 for value in values) / len(values)


def test_a_cache_is_kept_half_free_where_that_gives_more_tokens() -> None:
    """Within ten trials, and from then on but for a trial of the full one now and then."""
    server = Looked(lambda requests: 3_500 if requests <= HELD * 0.7 else 3_000)
    server.look(10 * TRIAL)
    assert server.values[:4] == [16, 32, 64, 85], "until it is nearly full"
    server.look(50 * TRIAL)
    assert 0.85 < share_sparse(server.values[10 * TRIAL :]) < 1


def test_a_cache_is_filled_where_that_gives_more_tokens() -> None:
    server = Looked(lambda requests: 30.0 * min(requests, HELD))
    server.look(10 * TRIAL)
    server.look(50 * TRIAL)
    assert 0 < share_sparse(server.values[10 * TRIAL :]) < 0.15
    assert server.limit.has_been_full


class Growing:
    """A server with a cache of 626,768 tokens, whose requests have 512 tokens of prompt and sample
    as many as `length` says, 14,000 a second in all. It admits what fits now, and preempts the
    latest when what runs has grown too long."""

    CACHE = 626_768

    def __init__(self, length: Callable[[], int]) -> None:
        self.limit = ConcurrencyLimit(64, 2048)
        self.num_preempted = self.num_full_s = self.num_turns = 0
        self.num_tokens = 0.0
        self._length = length
        self._running: list[list[float]] = []  # tokens now, and at the end
        self._waiting: list[list[float]] = []

    def serve(self, num_asked: int, seconds: int) -> None:
        for now_s in range(seconds):
            for _ in range(10):
                while len(self._running) + len(self._waiting) < min(num_asked, self.limit.value):
                    self._waiting.append([512, 512 + self._length()])
                self._step(0.1)
            usage = self._used / self.CACHE
            self.num_full_s += usage > 0.97
            running, waiting = len(self._running), len(self._waiting)
            self.limit.observe(
                ServerLoad(running, waiting, usage, self.num_preempted),
                running + waiting,
                num_turns=self.num_turns,
                num_tokens=int(self.num_tokens),
                now_s=float(now_s),
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


@pytest.mark.slow
@pytest.mark.parametrize("is_ragged", [False, True])
def test_what_grows_longer_is_not_preempted(is_ragged: bool) -> None:
    """1,000 requests that begin together fit in as prompts, not when they have come to their ends;
    and the server samples as fast as it can."""
    rng = Random(0)
    server = Growing(lambda: max(5, int(rng.expovariate(1 / 512))) if is_ragged else 512)
    server.serve(1000, 120)
    assert (server.num_preempted, server.num_full_s) == (0, 0)
    assert server.num_tokens > 0.97 * 14_000 * 120


def test_what_is_better_may_change() -> None:
    """The longest that it takes to be seen is the longest pause between two trials."""
    is_early = True

    def rate(requests: int) -> float:
        return 3_500 if (requests <= HELD * 0.7) == is_early else 3_000

    server = Looked(rate)
    server.look(60 * TRIAL)
    assert share_sparse(server.values[-5 * TRIAL :]) > 0.7
    is_early = False
    server.look((MAX_PAUSE + 4) * TRIAL)
    server.look(20 * TRIAL)
    assert share_sparse(server.values[-20 * TRIAL :]) < 0.3


def test_a_half_free_cache_asks_for_no_longer_queue_than_a_full_one() -> None:
    """Turns have become so short that the batch is what is full."""
    server = Looked(lambda requests: 3_500 if requests <= HELD * 0.7 else 3_000)
    server.look(20 * TRIAL)
    while server.values[-1] > HELD * 0.7:
        server.look(1)
    for _ in range(TRIAL):
        in_flight = server.limit.value
        server.limit.observe(ServerLoad(50, in_flight - 50, 0.05, 0), in_flight)
    assert server.limit.value <= 100, "as many may wait as run"


def test_nothing_is_tried_before_the_cache_was_full_or_while_few_ask() -> None:
    server = Looked(float)
    server.look(10 * TRIAL, asked=60)
    assert (server.limit.value, server.limit.has_been_full) == (85, False)
    server.look(3)
    assert server.limit.has_been_full
    server.values.clear()
    server.look(10 * TRIAL, asked=40)
    assert len(set(server.values)) == 1, server.values


@pytest.mark.parametrize("sparse", [3_500, 2_500])
def test_what_passes_while_weights_are_replaced_counts_for_no_way(sparse: int) -> None:
    """Updates come more often than trials end, and take as long again."""
    server = Looked(lambda requests: sparse if requests <= HELD * 0.7 else 3_000)
    for _ in range(100):
        server.look(TRIAL // 2)
        server.pass_by(TRIAL / 2)
        server.limit.restart()
    best = share_sparse(server.values[-10 * TRIAL :])
    assert best > 0.85 if sparse > 3_000 else best < 0.15


def test_the_limit_follows_the_engines_own_figures() -> None:
    limit = ConcurrencyLimit(16, 64)
    idle, queued = ServerLoad(16, 0, 0.2, 3), ServerLoad(16, 19, 0.2, 3)
    limit.observe(ServerLoad(16, 16, 0.2, 3), in_flight=8)
    assert limit.value == 16  # as many may wait as run
    limit.observe(idle, in_flight=4)
    assert limit.value == 16  # not in use: no reason to grow
    limit.observe(idle, in_flight=16)
    assert limit.value == 32  # at first it doubles
    limit.observe(queued, in_flight=32)
    assert limit.value == 32  # one look may have met a burst
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
    assert limit.value == 96  # by the look that saw more of them run
