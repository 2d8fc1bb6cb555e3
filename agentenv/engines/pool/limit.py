"""Concurrency limit of a server, adapted to its reported load."""

from __future__ import annotations

from agentenv.contract.request import ServerLoad

STEP = 8  # requests that each poll without congestion adds, after the first congestion
FACTOR = 0.7  # lower bound of the decrease at a congestion
IN_USE = 0.8  # the limit rises only if more than this share of it is used
FULL = 0.95  # cache usage above which a waiting request will not be admitted soon
FILL_LIMIT = 0.85  # cache usage up to which requests are added: running ones still grow
QUICK = 0.25  # cache usage up to which each poll may add requests; beyond, finished turns must
QUEUE = 1.0  # waiting requests per running one; a longer queue is reduced to this
NUM_QUEUED = 2  # consecutive polls with a long queue, since a single one may be a burst


class ConcurrencyLimit:
    """The limit of one server; `value` is its maximum number of requests, at least 1.

    Additive increase, multiplicative decrease by the engine's own metrics (Chiu and Jain 1989,
    "Analysis of the increase and decrease algorithms for congestion avoidance"): the limit rises
    while the engine admits its requests, and falls when they queue, are preempted, or its cache is
    full. A short queue is useful, since it keeps the engine's batch full when many turns end in the
    same step: as many may wait as run. Until the first congestion the limit doubles, as in TCP's
    slow start, so that a large server is not idle for minutes.

    A running request needs more and more of the cache until its turn ends. So beyond a quarter of
    the cache, the limit rises only after half as many turns as are running have ended, and only
    until the cache, by their usage, is filled to FILL_LIMIT. Otherwise a first wave of requests,
    admitted by the size of their prompts, would fill the cache later and be preempted.
    """

    def __init__(self, initial: int, maximum: int) -> None:
        self._maximum = maximum
        self._set(initial)
        self._num_preemptions: int | None = None
        self._num_queued = 0  # consecutive polls with a long queue
        self._wanted = 0.0  # the largest share of the requests that these polls would keep
        self._congested = False  # whether there was any congestion so far
        self._num_turns = 0  # at the last increase
        self._share = 0.0  # maximum since then of the mean cache usage per running request

    def observe(self, load: ServerLoad, in_flight: int, *, num_turns: int = 0) -> None:
        """Adapt to the engine's load; it has `in_flight` of our requests, and has answered
        `num_turns` turns so far."""
        before, self._num_preemptions = self._num_preemptions, load.num_preemptions
        preempted = before is not None and load.num_preemptions > before
        is_full = preempted or (load.kv_usage > FULL and load.num_waiting > 0)
        self._share = max(self._share, load.kv_usage / max(1, load.num_running))
        queued = load.num_waiting > max(1, load.num_running * QUEUE)
        self._num_queued = self._num_queued + 1 if queued else 0
        if queued:
            wanted = load.num_running * (1 + QUEUE) / (load.num_running + load.num_waiting)
            self._wanted = max(wanted, self._wanted if self._num_queued > 1 else 0.0)
        if is_full or self._num_queued >= NUM_QUEUED:
            self._congested = True
            if 0 < in_flight <= self._limit:  # otherwise the last decrease has not taken effect yet
                held = self._limit if in_flight >= self._limit * IN_USE else in_flight
                self._set(held * (FACTOR if is_full else max(FACTOR, self._wanted)))
        elif load.kv_usage > FULL:
            self._set(min(self._limit, in_flight * FILL_LIMIT / load.kv_usage))
        elif not queued and in_flight >= self._limit * IN_USE:
            self._raise(load, in_flight, num_turns)

    def _raise(self, load: ServerLoad, in_flight: int, num_turns: int) -> None:
        wanted = self._limit + (STEP if self._congested else self._limit)
        if load.kv_usage > QUICK:
            if num_turns - self._num_turns < in_flight / 2:
                return
            wanted = min(wanted, FILL_LIMIT / self._share)
        self._num_turns, self._share = num_turns, 0.0
        self._set(max(self._limit, wanted))

    def _set(self, limit: float) -> None:
        self._limit = min(float(self._maximum), max(1.0, limit))
        self.value = int(self._limit)

    def refuse(self, in_flight: int) -> None:
        """Decrease: the server rejected one of `in_flight` requests, since it is full."""
        self._congested = True
        if in_flight <= self._limit:
            self._set(in_flight * FACTOR)

    def restart(self) -> None:
        """Reset the observations, after a restart of the server or an update of its weights."""
        self._num_preemptions = None
        self._num_queued = 0
