"""A server of a pool: its requests, its concurrency limit, and the outcomes of requests.

Outcome         the result of a turn's requests on one server, one of six kinds
Slot            one server from the view of a turn
PooledServer    the server's state, which follows from the outcomes
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from math import inf
from typing import Any, Protocol

from msgspec import Struct

from agentenv.base.deadline import Work, WorkClock, at_most, waiting
from agentenv.base.errors import SHOWN
from agentenv.base.retries import Backoff
from agentenv.contract.request import ForeignWeightsError, ServerLoad
from agentenv.contract.server_config import PoolConfig
from agentenv.engines.pool.limit import ConcurrencyLimit
from agentenv.engines.remote.weight_sync import Server

logger = logging.getLogger(__name__)


class TurnDone(Struct, frozen=True, array_like=True, tag="done"):
    """The turn is complete."""


class Aborted(Struct, frozen=True, array_like=True, tag="aborted"):
    """The request was aborted for a change of the server, or by its caller; or, with a `problem`,
    by the server."""

    problem: str = ""


class Busy(Struct, frozen=True, array_like=True, tag="busy"):
    """The server is full, and requests a pause of `retry_after_s` seconds."""

    problem: str
    retry_after_s: float = 0.0


class Starved(Struct, frozen=True, array_like=True, tag="starved"):
    """This process had no file descriptor for the request."""


class Reset(Struct, frozen=True, array_like=True, tag="reset"):
    """A connection broke; the server may be healthy."""

    problem: str


class Lost(Struct, frozen=True, array_like=True, tag="lost"):
    """The server failed; `kind` is that of ServerLostError or ForeignWeightsError."""

    kind: str
    problem: str


Outcome = TurnDone | Aborted | Busy | Starved | Reset | Lost
SILENT, BROKE = "received no tokens", "were interrupted"  # kinds of losses

# Whether a server and a request on it still return tokens.

WATCH_S = 1.0  # between two checks for silent requests
# Bounds of the tokens per event, if no fork rule waits for them. As many may be lost with a server,
# and a request whose events take longer than PoolConfig.silence_s is lost; each event costs both
# sides about 50 microseconds.
EVENT_S = 2.0
MIN_EVENT, MAX_EVENT = 16, 64
ALIVE_S = EVENT_S + WATCH_S  # a server that gave a token within so long is not silent
PACE_GAIN = 0.1  # weight of a request in the pace of its server


class Heartbeat:
    """Tokens of one server, of any request."""

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._last_s = -inf  # time of the loop
        self._pace = 0.0  # tokens per second of one request

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
        self.wait, self.work, self.problem = waiting(), Work(), ""
        self._slot, self._heartbeat = slot, heartbeat
        self._since_s = slot.clock()
        self._has_tokens = False
        self._num_later, self._first_s = 0, 0.0  # tokens after the first event, and its time
        self._is_due = False  # its rollout is out of time, unless the server is silent

    def beat(self, num_tokens: int) -> None:
        """Record an event with so many tokens."""
        self._since_s = self._slot.clock()
        if self._has_tokens:
            self._num_later += num_tokens
        else:
            self._has_tokens, self._first_s = True, self._since_s
        self._heartbeat.beat()
        self.work.begin()

    def deferral_s(self) -> float:
        """Seconds by which the deadline of a rollout that is out of time is deferred: a silent
        server may be at fault, which is known after `silence_s`."""
        if self._heartbeat.is_alive:
            return 0.0
        self._is_due = True
        return WATCH_S

    def is_lost(self, config: PoolConfig) -> bool:
        """Whether it has been silent for too long."""
        silence_s = self._slot.clock() - self._since_s
        # A preempted request waits again, while the server answers others.
        is_preempted = self._slot.load.num_waiting > 0 and self._heartbeat.is_alive
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
        """End the monitoring of the request."""
        self.wait.end()
        took_s = self._since_s - self._first_s
        if self._num_later and took_s > 0:
            self._heartbeat.observe(self._num_later / took_s)


class Pausable(Protocol):
    """A clock that stops while a server is paused, here or in a rollout worker."""

    def begin(self) -> None: ...
    def end(self) -> None: ...


class Slot:
    """A server to which a turn may send requests. `reason` explains why it does not serve,
    `running` maps its requests to the clocks to pause with it."""

    def __init__(self, client: Server) -> None:
        self.client = client
        self.name = client.name
        self.label = f"the server {client.name}"  # for the waits of rollouts
        self.reason = ""
        self.running: dict[asyncio.Future[Any], Pausable] = {}
        self.load = ServerLoad(0, 0, 0.0, 0)  # as reported to this process
        self.num_requests = self.num_answered = self.num_tokens = 0
        self.is_paused = False
        self.clock = WorkClock()  # stops while the server is paused
        self.clock.go()

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample its next token, as far as known."""
        return self.client.policy_version

    @property
    def is_asleep(self) -> bool:
        """Whether it sleeps; then its requests were aborted."""
        return False

    def closed(self) -> Outcome | None:
        """The outcome of a request that can no longer be sent; None if it can."""
        return Aborted() if self.is_asleep else None

    def run(self, request: asyncio.Future[Any], pausable: Pausable) -> None:
        """Add a running request."""
        self.running[request] = pausable
        if self.is_paused:
            pausable.begin()

    def pause(self) -> None:
        """Pause the clocks, while its weights are replaced."""
        self.is_paused = True
        self.clock.stop()
        for pausable in self.running.values():
            pausable.begin()

    def resume(self) -> None:
        """Resume the clocks."""
        self.is_paused = False
        self.clock.go()
        for pausable in self.running.values():
            pausable.end()

    def abort_all(self) -> None:
        """Abort its requests."""
        for request in self.running:
            request.cancel()


# A server in the controller's process.

CLOSED = Backoff(0.25, 60.0)  # after a refusal
STAY = Backoff(1.0, 60.0)  # outside of the pool, for a server that fails repeatedly
MAX_REFUSALS = 30  # consecutive rejections of a server without requests
LONG_UPDATE_S = 5.0  # a longer update of weights is reported


class ServerState(Enum):
    """State of a server of a pool.

    OUT      unused: it is not connected, lost a request, refused an update or has unknown weights;
             its keeper determines the cause, and returns it with the current weights
    SERVING  receives requests
    LOADING  no new requests while its weights are replaced; running requests wait
    ASLEEP   unused until it is woken: it has freed its memory

        OUT <--> SERVING <--> LOADING --> OUT
         ^        |     ^
         +-- ASLEEP ----+
    """

    OUT = "out"
    SERVING = "serving"
    LOADING = "loading"
    ASLEEP = "asleep"


class PooledServer(Slot):
    """One server of a pool; `number` counts servers in the order of their addition, and `on_room`
    is called when it may take more requests.

    A server that loses requests repeatedly, without an answered one in between, stays out for twice
    as long each time, even if it reports to be healthy. One that rejects a request because it is
    full is closed for a moment and gets fewer.
    """

    def __init__(
        self, client: Server, number: int, config: PoolConfig, on_room: Callable[[], None]
    ) -> None:
        super().__init__(client)
        self.number = number
        self.state, self.reason = ServerState.OUT, "it is being connected"
        self.limit = ConcurrencyLimit(config.initial_concurrency, config.max_concurrency)
        self.max_model_len = 0  # tokens, once connected
        self.features: frozenset[str] = frozenset()
        self.epoch = 0  # number of connections; after each it may be another process
        self.in_flight = 0
        self.is_reported = False  # reported as out, and not yet as returned
        self.out_until = 0.0  # loop time of its earliest return
        self.counts: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()  # by kind
        self.last_loss: dict[str, str] = {}  # the reason, by kind
        self.longest_update_s = 0.0
        self.guests: set[asyncio.Future[Any]] = set()  # requests of other processes
        self.check_due = asyncio.Event()  # its keeper should check it
        self._num_losses = 0  # consecutive, without an answered request
        self._num_refusals = 0  # consecutive rejections
        self._closed_until = 0.0  # loop time
        self._on_room = on_room

    @property
    def serving(self) -> bool:
        return self.state is ServerState.SERVING

    @property
    def is_out(self) -> bool:
        return self.state is ServerState.OUT

    @property
    def is_there(self) -> bool:
        """Whether it serves, or will after loading weights."""
        return self.state in (ServerState.SERVING, ServerState.LOADING)

    @property
    def is_asleep(self) -> bool:
        return self.state is ServerState.ASLEEP

    @property
    def has_room(self) -> bool:
        """Whether it may take another request now, if it serves."""
        now_s = asyncio.get_running_loop().time()
        return self.in_flight < self.limit.value and now_s >= self._closed_until

    def serves(self, policy_version: int) -> bool:
        """Whether it serves these weights."""
        return self.serving and self.policy_version == policy_version

    # requests

    def settle(self, outcome: Outcome, *, is_late: bool = False) -> Outcome:
        """Update the server's state by the outcome of a request; returns Lost for a server that
        rejects all requests. `is_late`: its requests were aborted before, and it may be another
        process now."""
        match outcome:
            case TurnDone():
                self.counts["turns"] += 1
                self._num_losses = self._num_refusals = 0
                self._report_return()
            case Busy(problem, wanted_s):
                return self._close(problem, wanted_s)
            case Reset(problem):
                self._count_loss(BROKE, problem)
                self.check_due.set()  # it may be dead, or another process by now
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
        """Handle the loss of a request on an available server."""
        tries, self._num_losses = self._num_losses - 1, self._num_losses + 1
        self.out_until = asyncio.get_running_loop().time()
        if tries < 0:
            return self.leave(problem)
        self.out_until += STAY.seconds(tries, self.name)
        self.suspend(problem)

    def _close(self, problem: str, wanted_s: float) -> Outcome:
        """Close the server for a moment, since it is full."""
        self.counts["refused"] += 1
        self.limit.refuse(self.in_flight)
        loop = asyncio.get_running_loop()
        if loop.time() >= self._closed_until:
            tries, self._num_refusals = self._num_refusals, self._num_refusals + 1
            self._closed_until = loop.time() + CLOSED.seconds(tries, self.name, wanted_s)
        if self._num_refusals > MAX_REFUSALS and self.in_flight <= 1:
            text = f"{self.name} rejects every request as if it were full"
            return self.settle(Lost("were lost", text))
        loop.call_at(self._closed_until, self._on_room)
        return Busy(problem, wanted_s)

    # in and out of the pool

    def _transition(self, state: ServerState, reason: str = "") -> None:
        """Change the state; all changes are here. See State for the possible ones."""
        self.state, self.reason = state, reason
        if state is ServerState.OUT:
            self.check_due.set()

    def serve(self) -> None:
        """Start serving."""
        self._transition(ServerState.SERVING)
        if self._num_losses <= 1:  # else it has returned once a turn ends well
            self._report_return()
        self._on_room()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Replace its weights inside: no new requests if it serves, and clocks stop."""
        began_s = asyncio.get_running_loop().time()
        if self.serving:
            self._transition(ServerState.LOADING)
        self.pause()
        try:
            yield
        finally:
            if self.state is ServerState.LOADING:
                self._transition(ServerState.SERVING)
            took_s = asyncio.get_running_loop().time() - began_s
            self.longest_update_s = max(self.longest_update_s, took_s)
            self.resume()

    async def fall_asleep(self) -> None:
        """Abort its requests, so that it may free its memory."""
        self._transition(ServerState.ASLEEP, "it sleeps")
        requests = list(self.running)
        self.abort_all()
        if requests:
            await asyncio.wait(requests)

    def leave(self, reason: str) -> None:
        """Stop new requests; the keeper determines the cause."""
        self._transition(ServerState.OUT, reason)

    def suspend(self, reason: str) -> None:
        """As `leave`, with a warning."""
        self.leave(reason)
        self.report_out(reason)

    def drop(self, reason: str) -> None:
        """Remove a server that is lost, or whose weights are unknown; its requests resume on
        others."""
        self.suspend(reason)
        self.abort_all()

    def report_out(self, reason: str) -> None:
        """Set the reason why it does not serve; warns once per outage."""
        self.reason = reason
        if not self.is_reported:
            self.is_reported = True
            logger.warning("engine server %s is out: %s", self.name, reason, extra=SHOWN)

    def _report_return(self) -> None:
        if self.is_reported and self.serving:
            self.is_reported = False
            text = "engine server %s serves policy version %d"
            logger.warning(text, self.name, self.policy_version, extra=SHOWN)

    async def rest(self, seconds: float) -> None:
        """Wait until a check is requested, or was since the last wait; `seconds` at most."""
        await at_most(seconds, self.check_due.wait())
        self.check_due.clear()

    def figures(self) -> dict[str, float]:
        """The metrics; running, waiting, kv_usage and preemptions as the server reports."""
        return {
            "up": float(self.is_there), "policy_version": self.policy_version,
            "in_flight": self.in_flight, "limit": self.limit.value,
            "running": self.load.num_running, "waiting": self.load.num_waiting,
            "kv_usage": self.load.kv_usage, "preemptions": self.load.num_preemptions,
            "requests": self.num_requests, "sampled_tokens": self.num_tokens,
            "lost": self.counts["lost"], "refused": self.counts["refused"],
            "pause_wait_s": self.client.pause_wait_s,
        }  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """The part of a run's summary."""
        return {
            "answered": self.num_answered,
            "lost": dict(self.losses),
            "refused": self.counts["refused"],
            "longest_update_s": round(self.longest_update_s, 1),
        }


def problems(servers: Sequence[PooledServer]) -> list[str]:
    """Faults of the servers, one sentence each."""
    lines = []
    for one in servers:
        for kind, count in one.losses.most_common():
            lines.append(f"{one.name}: {count} requests {kind} ({one.last_loss[kind]})")
        if refused := one.counts["refused"]:
            lines.append(f"{one.name} was full: it rejected {refused} requests")
        if one.longest_update_s > LONG_UPDATE_S:
            lines.append(f"{one.name} took up to {one.longest_update_s:.0f} s to load new weights")
    return lines
