"""Concurrency limit of a server, adapted to its reported load."""

from __future__ import annotations

from agentenv.engines.remote import ServerLoad

STEP = 8  # requests that a look without congestion adds, once there has been any
FACTOR = 0.7  # what one with congestion leaves at least
IN_USE = 0.8  # share of the limit from which on more room is of use
FULL = 0.95  # share of the cache above which a waiting request will not be admitted soon
BRIM = 0.85  # up to which requests are added: what runs gets longer, and beyond 1 it is preempted
QUICK = 0.25  # up to which each look may add some; beyond it turns have to show how long they get
QUEUE = 1.0  # that may wait for each one that runs; a queue that is longer is cut back to this
PATIENCE = 2  # looks in a row that must see a long queue: one of them may just be a burst


class ConcurrencyLimit:
    """The limit of one server; `value` is the number of requests it may hold, at least 1.

    Additive increase, multiplicative decrease by the engine's own figures (Chiu and Jain 1989,
    "Analysis of the increase and decrease algorithms for congestion avoidance"): while the engine
    admits what it gets, it gets more; when requests queue up in it, are preempted, or its cache is
    full, it gets fewer. A short queue is wanted, since it keeps the engine's batch full, also when
    many turns end in the same step: as many may wait as run. Until the first congestion the limit
    doubles, as in the slow start of TCP, so that a large server is not left idle for minutes.

    What runs needs ever more of the cache until its turn ends. So beyond a quarter of the cache the
    limit rises only after half as many turns as run have ended, and only as far as the cache, by
    what they used, is filled to BRIM. Without that a first wave of requests that is admitted by
    what its prompts need fills the cache later, and is preempted.
    """

    def __init__(self, initial: int, maximum: int) -> None:
        self._maximum = maximum
        self._set(initial)
        self._num_preemptions: int | None = None
        self._num_queued = 0  # looks in a row that saw a long queue
        self._wanted = 0.0  # the largest share of the requests that they would have left
        self._congested = False  # at any time so far
        self._num_turns = 0  # when the limit rose last
        self._share = 0.0  # of the cache, by one that runs, on average: the most since then

    def observe(self, load: ServerLoad, in_flight: int, *, num_turns: int = 0) -> None:
        """Adapt to the engine's load; `in_flight` requests of ours are on it, which has answered
        `num_turns` so far."""
        before, self._num_preemptions = self._num_preemptions, load.num_preemptions
        preempted = before is not None and load.num_preemptions > before
        is_full = preempted or (load.kv_usage > FULL and load.num_waiting > 0)
        self._share = max(self._share, load.kv_usage / max(1, load.num_running))
        queued = load.num_waiting > max(1, load.num_running * QUEUE)
        self._num_queued = self._num_queued + 1 if queued else 0
        if queued:
            wanted = load.num_running * (1 + QUEUE) / (load.num_running + load.num_waiting)
            self._wanted = max(wanted, self._wanted if self._num_queued > 1 else 0.0)
        if is_full or self._num_queued >= PATIENCE:
            self._congested = True
            if 0 < in_flight <= self._limit:  # otherwise the last decrease is still taking effect
                held = self._limit if in_flight >= self._limit * IN_USE else in_flight
                self._set(held * (FACTOR if is_full else max(FACTOR, self._wanted)))
        elif load.kv_usage > FULL:
            self._set(min(self._limit, in_flight * BRIM / load.kv_usage))
        elif not queued and in_flight >= self._limit * IN_USE:
            self._raise(load, in_flight, num_turns)

    def _raise(self, load: ServerLoad, in_flight: int, num_turns: int) -> None:
        wanted = self._limit + (STEP if self._congested else self._limit)
        if load.kv_usage > QUICK:
            if num_turns - self._num_turns < in_flight / 2:
                return
            wanted = min(wanted, BRIM / self._share)
        self._num_turns, self._share = num_turns, 0.0
        self._set(max(self._limit, wanted))

    def _set(self, limit: float) -> None:
        self._limit = min(float(self._maximum), max(1.0, limit))
        self.value = int(self._limit)

    def refuse(self, in_flight: int) -> None:
        """The server refused one of so many requests, since it holds no more."""
        self._congested = True
        if in_flight <= self._limit:
            self._set(in_flight * FACTOR)

    def restart(self) -> None:
        """Its counters say nothing of its load: it is another process now, or has new weights."""
        self._num_preemptions = None
        self._num_queued = 0
