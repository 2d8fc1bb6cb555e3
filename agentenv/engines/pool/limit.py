"""How many requests a server gets at a time, from its reports of its load.

ConcurrencyLimit  the limit of one server
Trials            whether its cache is better filled, or kept half free for prefixes
"""

from __future__ import annotations

from agentenv.engines.remote import ServerLoad

STEP = 8  # requests that a look without congestion adds, once there has been any
FACTOR = 0.7  # what one with congestion leaves at least
IN_USE = 0.8  # share of the limit from which on more room is of use
FULL = 0.95  # share of the cache above which a waiting request will not be admitted soon
BRIM = 0.85  # up to which requests are added: what runs gets longer, and beyond 1 it is preempted
BAND = 0.05  # below it, where the cache counts as full
QUICK = 0.25  # up to which each look may add some; beyond it turns have to show how long they get
QUEUE = 1.0  # that may wait for each one that runs; a queue that is longer is cut back to this
PATIENCE = 2  # looks in a row that must see a long queue: one of them may just be a burst

SPARSE = 0.6  # share of the cache that runs where prefixes are to be kept in the rest
APPROACH = 0.1  # of the way there that the limit goes at each look
ROUNDS = 16  # turns that each slot takes in a trial
SETTLE = 5  # of them, which do not count: prefixes of the other way are still in the cache
GAIN = 0.5  # weight of the last trial of a way among those before
FIRST_PAUSE, MAX_PAUSE = 1, 32  # trials of the better way before the other is tried again


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

    What runs then fills the cache, and the prefix of each turn that comes back from a tool has to
    be computed again. Where that costs more than a large batch brings, which depends on the model,
    the lengths and the tools, a cache that is kept half free gives more tokens a second. Once the
    cache has been full, both are tried and the better one is used (`Trials`).
    """

    def __init__(self, initial: int, maximum: int) -> None:
        self._maximum = maximum
        self._set(initial)
        self._num_preemptions: int | None = None
        self._num_queued = 0  # looks in a row that saw a long queue
        self._wanted = 0.0  # the largest share of the requests that they would have left
        self._congested = False  # at any time so far
        self._trials = Trials()
        self._num_turns = 0  # when the limit rose last
        self._share = 0.0  # of the cache, by one that runs, on average: the most since then
        self._sparse: float | None = None  # limit of a cache half free, once it has been full
        self._dense = 0.0  # limit of a full cache, while it is kept half free

    @property
    def has_been_full(self) -> bool:
        """Whether the cache has been, so that how much of it is used is found by trials."""
        return self._sparse is not None

    def observe(
        self,
        load: ServerLoad,
        in_flight: int,
        *,
        num_turns: int = 0,
        num_tokens: int = 0,
        now_s: float = 0.0,
    ) -> None:
        """Adapt to the engine's load; `in_flight` requests of ours are on it, which has
        answered `num_turns` and sampled `num_tokens` so far."""
        before, self._num_preemptions = self._num_preemptions, load.num_preemptions
        preempted = before is not None and load.num_preemptions > before
        full = load.kv_usage > FULL and load.num_waiting > 0
        in_use = in_flight >= self._limit * IN_USE
        if self._trials.is_sparse:
            if in_use and load.kv_usage > 0:
                wanted = load.num_running * min(SPARSE / load.kv_usage, 1 + QUEUE)
                self._set(self._limit + (wanted - self._limit) * APPROACH)
        else:
            self._fill(load, in_flight, num_turns, is_full=preempted or full)
        if load.kv_usage > BRIM - BAND and in_use:
            self._sparse = load.num_running * SPARSE / load.kv_usage
        if self._sparse is None:
            return
        if not in_use:
            self._trials.pause()
        elif self._trials.goes_on(in_flight, num_turns, num_tokens, now_s):
            return
        elif self._trials.is_sparse:
            self._dense = self._limit
            self._set(self._sparse)
        else:
            self._num_queued = 0
            self._set(max(self._limit, self._dense))

    def _fill(self, load: ServerLoad, in_flight: int, num_turns: int, *, is_full: bool) -> None:
        """As much as its cache and its batch hold."""
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
        self._trials.pause()


class Trials:
    """Which of two ways to use a cache gives more tokens a second: filled by what runs, or
    `is_sparse`, with room for prefixes of turns to come. Each trial lasts until every slot has
    taken some turns; the worse way is tried again, ever more seldom while it stays the worse."""

    def __init__(self) -> None:
        self.is_sparse = False  # the way that is tried, or used, now
        self._rates: dict[bool, float] = {}  # tokens a second by way
        self._best = False
        self._pause = self._left = FIRST_PAUSE  # trials of the better way
        self._seen: tuple[int, int, float] | None = None  # turns, tokens and time of the last look
        self._rounds = 0.0  # turns that each slot has taken in this trial
        self._num_tokens, self._seconds = 0, 0.0  # in the rounds that count

    def pause(self) -> None:
        """What comes until the next look says nothing."""
        self._seen = None

    def goes_on(self, in_flight: int, num_turns: int, num_tokens: int, now_s: float) -> bool:
        """Whether the way stays the same, after so many turns and tokens."""
        seen, self._seen = self._seen, (num_turns, num_tokens, now_s)
        if seen is None:
            return True
        if self._rounds >= SETTLE:
            self._num_tokens += num_tokens - seen[1]
            self._seconds += now_s - seen[2]
        self._rounds += (num_turns - seen[0]) / max(1, in_flight)
        if self._rounds < ROUNDS or self._seconds <= 0:
            return True
        was_sparse, self.is_sparse = self.is_sparse, self._next(self._num_tokens / self._seconds)
        stays = self.is_sparse == was_sparse
        self._rounds = SETTLE if stays else 0.0
        self._num_tokens, self._seconds = 0, 0.0
        return stays

    def _next(self, rate: float) -> bool:
        """The way to go on with, where the last trial gave this rate."""
        way, rates = self.is_sparse, self._rates
        rates[way] = rates.get(way, rate) * (1 - GAIN) + rate * GAIN
        if len(rates) < 2:
            return not way
        best = rates[True] > rates[False]
        if best != self._best:
            self._best, self._pause = best, FIRST_PAUSE
        elif way != best:
            self._pause = min(2 * self._pause, MAX_PAUSE)
        if way != best:
            self._left = self._pause
            return best
        self._left -= 1
        return best if self._left > 0 else not best
