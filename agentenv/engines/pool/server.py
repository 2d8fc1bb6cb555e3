"""A server of a pool: its requests, its concurrency limit, and the outcomes of requests.

Outcome         how the requests of a turn on one server ended, one of six
Slot            one server as a turn sees it
PooledServer    the server's state, and what outcomes say of it
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from math import inf
from statistics import median
from typing import Any, Protocol

from msgspec import Struct

from agentenv.deadline import Wait, Work, WorkClock, backoff_s
from agentenv.engines.pool.limit import ConcurrencyLimit
from agentenv.engines.remote import ForeignWeightsError, ServerLoad
from agentenv.engines.remote.weight_sync import Server
from agentenv.errors import SHOWN
from agentenv.server_config import PoolConfig

logger = logging.getLogger(__name__)


class Done(Struct, frozen=True, array_like=True, tag="done"):
    """The turn is whole."""


class Aborted(Struct, frozen=True, array_like=True, tag="aborted"):
    """The request was ended for a change of the server, or by its caller; or, with a `problem`, by
    the server itself."""

    problem: str = ""


class Busy(Struct, frozen=True, array_like=True, tag="busy"):
    """The server is full, and asks for `retry_after_s` seconds without requests."""

    problem: str
    retry_after_s: float = 0.0


class Starved(Struct, frozen=True, array_like=True, tag="starved"):
    """This process had no file descriptor for the request."""


class Reset(Struct, frozen=True, array_like=True, tag="reset"):
    """A connection broke; the server may be well."""

    problem: str


class Lost(Struct, frozen=True, array_like=True, tag="lost"):
    """The server failed; `kind` is that of ServerLostError or ForeignWeightsError."""

    kind: str
    problem: str


Outcome = Done | Aborted | Busy | Starved | Reset | Lost
SILENT, BROKE = "received no tokens", "were interrupted"  # kinds of losses

# Whether a server and a request on it still give tokens.

WATCH_S = 1.0  # between two checks for silent requests
# Tokens of an event that no fork rule waits for: those that a server samples of a request
# meanwhile, within these bounds. As many may be lost with a server, and a request whose events
# take longer than PoolConfig.silence_s is lost; each event costs both sides some 50 microseconds.
EVENT_S = 2.0
MIN_EVENT, MAX_EVENT = 16, 64
ALIVE_S = EVENT_S + WATCH_S  # a server that gave a token within so long is not silent
PACE_GAIN = 0.1  # weight of a request in the pace of its server


class Heartbeat:
    """Tokens of one server, of any request."""

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._last_s = -inf  # time of the loop
        self._pace = 0.0  # tokens a second of one request

    @property
    def interval(self) -> int:
        """Tokens of an event that no fork rule waits for."""
        return min(MAX_EVENT, max(MIN_EVENT, round(self._pace * EVENT_S)))

    @property
    def is_alive(self) -> bool:
        """Whether a token came just now."""
        return self._time() - self._last_s < ALIVE_S

    def beat(self) -> None:
        """A token has come."""
        self._last_s = self._time()

    def observe(self, pace: float) -> None:
        """A request had so many tokens a second after its first ones. The pace is capped, since
        events come together where the loop was held up."""
        pace = min(pace, MAX_EVENT / EVENT_S)
        self._pace += (pace - self._pace) * (PACE_GAIN if self._pace else 1.0)


class RequestMonitor:
    """Tokens of one request. `wait` pauses the clock of its rollout while its server is paused,
    `work` is the work since the last token, `problem` the silence after which it was ended."""

    def __init__(self, slot: Slot, heartbeat: Heartbeat) -> None:
        self.wait, self.work, self.problem = Wait(), Work(), ""
        self._slot, self._heartbeat = slot, heartbeat
        self._since_s = slot.clock()
        self._has_tokens = False
        self._num_later, self._first_s = 0, 0.0  # tokens after the first event, and its time
        self._is_due = False  # its rollout has no time left, unless the server is silent

    def beat(self, num_tokens: int) -> None:
        """An event with so many tokens has come."""
        self._since_s = self._slot.clock()
        if self._has_tokens:
            self._num_later += num_tokens
        else:
            self._has_tokens, self._first_s = True, self._since_s
        self._heartbeat.beat()
        self.work.begin()

    def deferral_s(self) -> float:
        """Seconds until a rollout that has no time left should check again: where the server is
        silent, that may be its fault, which is known after `silence_s`."""
        if self._heartbeat.is_alive:
            return 0.0
        self._is_due = True
        return WATCH_S

    def is_lost(self, config: PoolConfig) -> bool:
        """Whether it is silent for too long."""
        silence_s = self._slot.clock() - self._since_s
        is_preempted = self._slot.has_queue and self._heartbeat.is_alive
        began = self._has_tokens and not is_preempted
        max_silence_s = config.silence_s if began else config.first_token_s
        if self._is_due:
            max_silence_s = min(max_silence_s, config.silence_s)
        if silence_s <= max_silence_s:
            return False
        missing = "no more tokens" if self._has_tokens else "no first token"
        self.problem = f"{missing} of a request within {silence_s:.0f} s"
        return True

    def end(self) -> None:
        """The request is over."""
        self.wait.end()
        took_s = self._since_s - self._first_s
        if self._num_later and took_s > 0:
            self._heartbeat.observe(self._num_later / took_s)


class Pausable(Protocol):
    """A clock that stands still while a server is paused, here or in a rollout worker."""

    def begin(self) -> None: ...
    def end(self) -> None: ...


class Slot:
    """A server that a turn may send requests to. `reason` says why it does not serve, `running` are
    its requests and what to pause with it, `on_trial`: one request until its first token."""

    def __init__(self, client: Server) -> None:
        self.client = client
        self.name = client.name
        self.label = f"the server {client.name}"  # of what a rollout awaits
        self.reason = ""
        self.running: dict[asyncio.Future[Any], Pausable] = {}
        self.num_requests = self.num_tokens = 0
        self.is_paused = self.on_trial = False
        self.clock = WorkClock()  # stands still while it is paused
        self.clock.go()

    @property
    def policy_version(self) -> int:
        """Version of the weights that choose its next token, as far as is known."""
        return self.client.policy_version

    @property
    def is_asleep(self) -> bool:
        """Whether it sleeps, so that its requests were aborted."""
        return False

    @property
    def has_queue(self) -> bool:
        """Whether requests wait in the server, as one may again, preempted."""
        return False

    def closed(self) -> Outcome | None:
        """The outcome of a request that cannot be sent any more; None: it can."""
        return Aborted() if self.is_asleep else None

    def run(self, request: asyncio.Future[Any], pausable: Pausable) -> None:
        """The server has one more request."""
        self.running[request] = pausable
        if self.is_paused:
            pausable.begin()

    def receive(self, num_tokens: int) -> None:
        """A request gave more tokens."""
        self.num_tokens += num_tokens
        if self.on_trial:
            self.pass_trial()

    def pass_trial(self) -> None:
        """It has given a token."""
        self.on_trial = False

    def answer(self, num_tokens: int, seconds: float) -> None:
        """A request was answered, so long after it was sent."""
        raise NotImplementedError

    def pause(self) -> None:
        """Its weights are being replaced from now on."""
        self.is_paused = True
        self.clock.stop()
        for pausable in self.running.values():
            pausable.begin()

    def resume(self) -> None:
        """They have been."""
        self.is_paused = False
        self.clock.go()
        for pausable in self.running.values():
            pausable.end()

    def abort_all(self) -> None:
        """End its requests."""
        for request in self.running:
            request.cancel()


# A server in the controller's process.

FIRST_CLOSED_S, MAX_CLOSED_S = 0.25, 60.0  # after a refusal
FIRST_STAY_S, MAX_STAY_S = 1.0, 60.0  # out of the pool, for a server that fails again
MAX_REFUSALS = 30  # times in a row that a server without requests may be closed
MIN_ANSWERS = 8  # after which the speed of a server is known
LONG_UPDATE_S = 5.0  # a longer change of weights is reported
SLOW = 0.5  # share of the other servers' speed below which one is reported as slow


class State(Enum):
    """State of a server of a pool.

    OUT      nothing: it is not connected, lost a request, refused or has unknown weights; its
             keeper finds out which, and brings it back with the weights that it lacks
    SERVING  requests
    LOADING  no new requests: it served, and its weights are being replaced; running requests wait
    ASLEEP   nothing until it is woken: it has given its memory back

        OUT <--> SERVING <--> LOADING --> OUT
         ^        |     ^
         +-- ASLEEP ----+
    """

    OUT = "out"
    SERVING = "serving"
    LOADING = "loading"
    ASLEEP = "asleep"


class PooledServer(Slot):
    """One server of a pool; `number` is its place in the order in which servers were named, and
    `on_room` is called when it may take more requests.

    A server that loses requests again, with none answered in between, stays out for twice as long
    each time, however well it says it is, and then gets one request, until a token comes. One that
    refuses a request because it is full is closed for a moment and gets fewer.
    """

    def __init__(
        self, client: Server, number: int, config: PoolConfig, on_room: Callable[[], None]
    ) -> None:
        super().__init__(client)
        self.number = number
        self.state, self.reason = State.OUT, "it is being connected"
        self.limit = ConcurrencyLimit(config.initial_concurrency, config.max_concurrency)
        self.load = ServerLoad(0, 0, 0.0, 0)
        self.max_model_len = 0  # tokens, once connected
        self.features: frozenset[str] = frozenset()
        self.epoch = 0  # connections so far; after each it may be another process
        self.in_flight = 0
        self.is_reported = False  # that it is out, and not yet that it is back
        self.out_until = 0.0  # time of the loop; not brought back before
        self.counts: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()  # by kind
        self.last_loss: dict[str, str] = {}  # the reason, by kind
        self.longest_update_s = self._busy_s = 0.0
        self.guests: set[asyncio.Future[Any]] = set()  # requests of other processes
        self.looked_for = asyncio.Event()  # its keeper should look at it
        self._num_losses = 0  # in a row, without an answered request
        self._num_refusals = 0  # times in a row that it was closed
        self._closed_until = 0.0  # time of the loop
        self._on_room = on_room

    @property
    def serving(self) -> bool:
        return self.state is State.SERVING

    @property
    def is_there(self) -> bool:
        """Whether it serves, or will again as soon as it has loaded."""
        return self.state in (State.SERVING, State.LOADING)

    @property
    def is_asleep(self) -> bool:
        return self.state is State.ASLEEP

    @property
    def has_queue(self) -> bool:
        return self.load.num_waiting > 0

    @property
    def has_room(self) -> bool:
        """Whether one more request may be sent to it now, if it serves."""
        room = 1 if self.on_trial else self.limit.value
        return self.in_flight < room and asyncio.get_running_loop().time() >= self._closed_until

    def serves(self, policy_version: int) -> bool:
        """Whether it serves these weights."""
        return self.serving and self.policy_version == policy_version

    # requests

    def answer(self, num_tokens: int, seconds: float) -> None:
        self.counts["answered"] += 1
        self.counts["answered_tokens"] += num_tokens
        self._busy_s += seconds

    def pass_trial(self) -> None:
        super().pass_trial()
        self._report_return()
        self._on_room()

    def settle(self, outcome: Outcome, *, is_late: bool = False) -> Outcome:
        """Judge the server by the outcome of a request; Lost for a server that refuses all of them.
        `is_late`: its requests were aborted before, and it may be another process by now."""
        match outcome:
            case Done():
                self.counts["turns"] += 1
                self._num_losses = self._num_refusals = 0
            case Busy(problem, wanted_s):
                return self._close(problem, wanted_s)
            case Reset(problem):
                self._count_loss(BROKE, problem)
                self.looked_for.set()  # it may be dead, or another process by now
            case Lost(kind, problem):
                self.counts["lost"] += 1
                self._count_loss(kind, problem)
                if not is_late and kind == ForeignWeightsError.kind:
                    self.drop(problem)
                elif not is_late and self.is_there:
                    self._fail(f"a request was lost: {problem}")
        return outcome

    def _count_loss(self, kind: str, problem: str) -> None:
        self.losses[kind] += 1
        self.last_loss[kind] = problem

    def _fail(self, problem: str) -> None:
        """A request was lost on a server that was there."""
        tries, self._num_losses = self._num_losses - 1, self._num_losses + 1
        self.out_until = asyncio.get_running_loop().time()
        if tries < 0:
            return self.leave(problem)
        self.out_until += backoff_s(tries, self.name, first_s=FIRST_STAY_S, max_s=MAX_STAY_S)
        self.suspend(problem)

    def _close(self, problem: str, wanted_s: float) -> Outcome:
        """It is full."""
        self.counts["refused"] += 1
        self.limit.refuse(self.in_flight)
        loop = asyncio.get_running_loop()
        if loop.time() >= self._closed_until:
            tries, self._num_refusals = self._num_refusals, self._num_refusals + 1
            self._closed_until = loop.time() + backoff_s(
                tries, self.name, first_s=FIRST_CLOSED_S, max_s=MAX_CLOSED_S, at_least_s=wanted_s
            )
        if self._num_refusals > MAX_REFUSALS and self.in_flight <= 1:
            text = f"{self.name} rejects every request as if it were full"
            return self.settle(Lost("were lost", text))
        loop.call_at(self._closed_until, self._on_room)
        return Busy(problem, wanted_s)

    # in and out of the pool

    def serve(self) -> None:
        """It may be asked from now on."""
        self.state, self.reason = State.SERVING, ""
        self.on_trial = self._num_losses > 1
        if not self.on_trial:
            self._report_return()
        self._on_room()

    def leave(self, reason: str) -> None:
        """No new requests; the keeper finds out what happened."""
        self.state, self.reason = State.OUT, reason
        self.looked_for.set()

    def suspend(self, reason: str) -> None:
        """The same, and people are warned."""
        self.leave(reason)
        self.report_out(reason)

    def drop(self, reason: str) -> None:
        """The server is lost, or its weights are unknown: its requests resume on others."""
        self.suspend(reason)
        self.abort_all()

    def report_out(self, reason: str) -> None:
        """Why it still does not serve; people are warned once, until it does."""
        self.reason = reason
        if not self.is_reported:
            self.is_reported = True
            logger.warning("engine server %s is out: %s", self.name, reason, extra=SHOWN)

    def _report_return(self) -> None:
        if self.is_reported:
            self.is_reported = False
            text = "engine server %s serves policy version %d"
            logger.warning(text, self.name, self.policy_version, extra=SHOWN)

    async def rest(self, seconds: float) -> None:
        """At most so long; until the keeper is asked to look, or was since its last rest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.looked_for.wait()
        self.looked_for.clear()

    def figures(self) -> dict[str, float]:
        """For the metrics; running, waiting, kv_usage and preemptions as the server says."""
        return {
            "up": float(self.is_there),
            "policy_version": self.policy_version,
            "in_flight": self.in_flight,
            "limit": self.limit.value,
            "running": self.load.num_running,
            "waiting": self.load.num_waiting,
            "kv_usage": self.load.kv_usage,
            "preemptions": self.load.num_preemptions,
            "requests": self.num_requests,
            "sampled_tokens": self.num_tokens,
            "lost": self.counts["lost"],
            "refused": self.counts["refused"],
            "pause_wait_s": self.client.pause_wait_s,
        }

    @property
    def speed(self) -> float | None:
        """Tokens a second of one request; None as long as too few were answered."""
        if self.counts["answered"] < MIN_ANSWERS or not self._busy_s:
            return None
        return self.counts["answered_tokens"] / self._busy_s

    def summary(self) -> dict[str, Any]:
        """For the summary of a run."""
        return {
            "answered": self.counts["answered"],
            "lost": dict(self.losses),
            "refused": self.counts["refused"],
            "tokens_per_s_of_a_request": None if self.speed is None else round(self.speed, 1),
            "longest_update_s": round(self.longest_update_s, 1),
        }


def problems(servers: Sequence[PooledServer]) -> list[str]:
    """Faults of the servers, a sentence each."""
    lines = []
    for one in servers:
        for kind, count in one.losses.most_common():
            lines.append(f"{one.name}: {count} requests {kind} ({one.last_loss[kind]})")
        if refused := one.counts["refused"]:
            lines.append(f"{one.name} was full: it rejected {refused} requests")
        if one.longest_update_s > LONG_UPDATE_S:
            lines.append(f"{one.name} took up to {one.longest_update_s:.0f} s to load new weights")
        others = [each.speed for each in servers if each is not one and each.speed is not None]
        if others and one.speed is not None and one.speed < SLOW * median(others):
            lines.append(
                f"{one.name} is slow: {one.speed:.0f} tokens a second of a request, the others "
                f"{median(others):.0f}"
            )
    return lines
