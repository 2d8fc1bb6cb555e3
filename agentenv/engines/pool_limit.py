"""How many requests a server gets at a time: additive increase, multiplicative decrease.

The engine's own figures decide (Chiu and Jain 1989, "Analysis of the increase and decrease
algorithms for congestion avoidance"): while it admits what it gets, it gets more; when requests
queue up in it, are preempted, or its cache is full, it gets fewer. A short queue is wanted, since
it keeps the engine's batch full, also when many turns end in the same step: as many may wait as
run. Until the first congestion the limit doubles, as in the slow start of TCP, so that a large
server is not left idle for minutes.
"""

from __future__ import annotations

from agentenv.engines.server import ServerLoad

STEP = 8  # requests that a look without congestion adds, once there has been any
FACTOR = 0.7  # what one with congestion leaves at least
IN_USE = 0.8  # share of the limit from which on more room is of use
FULL = 0.95  # share of the cache above which a waiting request will not be admitted soon
QUEUE = 1.0  # that may wait for each one that runs; a queue that is longer is cut back to this
PATIENCE = 2  # looks in a row that must see a long queue: one of them may just be a burst


class ConcurrencyLimit:
    """The limit of one server; `value` is the number of requests it may hold."""

    def __init__(self, initial: int, maximum: int) -> None:
        self._limit = float(min(initial, maximum))
        self._maximum = maximum
        self._num_preemptions: int | None = None
        self._num_queued = 0  # looks in a row that saw a long queue
        self._wanted = 0.0  # the largest share of the requests that they would have left
        self._congested = False  # at any time so far

    @property
    def value(self) -> int:
        """Requests in flight that are allowed, at least 1."""
        return int(self._limit)

    def observe(self, load: ServerLoad, in_flight: int) -> None:
        """Adapt to what the engine says; `in_flight` requests of ours are on it."""
        before, self._num_preemptions = self._num_preemptions, load.num_preemptions
        preempted = before is not None and load.num_preemptions > before
        full = load.kv_usage > FULL and load.num_waiting > 0
        queued = load.num_waiting > max(1, load.num_running * QUEUE)
        self._num_queued = self._num_queued + 1 if queued else 0
        if queued:
            wanted = load.num_running * (1 + QUEUE) / (load.num_running + load.num_waiting)
            self._wanted = max(wanted, self._wanted if self._num_queued > 1 else 0.0)
        if preempted or full or self._num_queued >= PATIENCE:
            self._congested = True
            if 0 < in_flight <= self._limit:  # otherwise the last decrease is still taking effect
                held = self._limit if in_flight >= self._limit * IN_USE else in_flight
                left = FACTOR if preempted or full else max(FACTOR, self._wanted)
                self._limit = max(1.0, held * left)
        elif not queued and in_flight >= self._limit * IN_USE:
            step = STEP if self._congested else self._limit
            self._limit = min(float(self._maximum), self._limit + step)

    def restart(self) -> None:
        """Its counters say nothing of its load: it is another process now, or has new weights."""
        self._num_preemptions = None
        self._num_queued = 0
