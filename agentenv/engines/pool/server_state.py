"""One server of a pool: its state, the requests it may hold, the weights it should have.

Target            the weights that it should hold
WeightProbe       whether it holds the same weights as the other servers
Member            the server's state, and its ways out of the pool and back into it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any

from msgspec import Struct

from agentenv.backoff import backoff_s
from agentenv.engines.pool.limit import ConcurrencyLimit
from agentenv.engines.pool.slot import LISTEN_S, Hearing, Seat, Voice
from agentenv.engines.pool.stats import Account
from agentenv.engines.remote.server import (
    BrokenOffError,
    BusyError,
    ForeignWeightsError,
    NoDescriptorError,
    Request,
    Server,
    ServerLoad,
    ServerLostError,
    sampled,
)
from agentenv.engines.remote.weights import Group, Manifest, Sender
from agentenv.errors import SHOWN, EngineError
from agentenv.server_config import PoolConfig
from agentenv.types import SamplingParams

# What the servers of a pool should hold.


class Target(Struct, frozen=True):
    """The weights that every server of the pool should have: in a directory, or with a sender
    that can also write one."""

    source: Path | None
    policy_version: int
    sender: Sender | None = None

    async def directory(self) -> Path:
        """Raises EngineError if the sender has gone on to other weights."""
        if self.source is not None:
            return self.source
        assert self.sender is not None
        return await self.sender.write()


logger = logging.getLogger(__name__)

FIRST_CLOSED_S, MAX_CLOSED_S = 0.25, 60.0  # after a refusal for congestion

# Whether a server holds the same weights as the others, by one token.

PROBE_IDS = tuple(range(1, 17))
MAX_PROBE_PAUSE_S = 5.0  # before a full server is asked again
MAX_PROBE_GAP = 0.05  # nats; kernels of one engine differ by less, other weights by more


class WeightProbe:
    """The log-prob of the likeliest token behind a fixed prompt.

    The first server that took a policy version says what the log-prob is; a server that differs
    from it holds other weights, whatever their label says.
    """

    def __init__(self, vocab_size: int) -> None:
        self._prompt_ids = [token % vocab_size for token in PROBE_IDS]
        self._num_asked = 0
        self._version: int | None = None
        self._first = ""  # name of the first server
        self._logprob = 0.0  # nats

    async def check(self, server: Server, within_s: float) -> None:
        """Raises ServerLostError if the server has not the weights of the first server that took
        its policy version, or gives no token in time. One that is full is asked again until then:
        it refuses a request, not the weights."""
        version = server.policy_version
        try:
            async with asyncio.timeout(within_s):
                logprob = await self._ask(server)
        except TimeoutError as error:
            raise ServerLostError(
                f"{server.name} gave no token within {within_s:g} s when asked for one"
            ) from error
        if self._version is not None and version < self._version:
            return  # an update has come meanwhile
        if version != self._version:
            self._version, self._first, self._logprob = version, server.name, logprob
        elif abs(logprob - self._logprob) > MAX_PROBE_GAP:
            raise ServerLostError(
                f"{server.name} does not hold the weights of policy version {version} that "
                f"{self._first} has: log-probs differ by {abs(logprob - self._logprob):.3f} nats"
            )

    async def _ask(self, server: Server) -> float:
        """The log-prob on this server, nats, as soon as it has room for the request."""
        for attempt in count():
            self._num_asked += 1
            request = Request(
                f"weights-{id(self):x}-{self._num_asked}",
                self._prompt_ids,
                SamplingParams(max_tokens=1, temperature=0.0),
            )
            try:
                return (await sampled(server, request)).logprobs[0]
            except BusyError as error:
                wanted_s = error.retry_after_s
            except NoDescriptorError:
                wanted_s = 0.0
            pause_s = backoff_s(
                attempt, server.name, first_s=FIRST_CLOSED_S, max_s=MAX_PROBE_PAUSE_S
            )
            await asyncio.sleep(max(pause_s, wanted_s))
        raise AssertionError


# One server in a pool: whether it serves, what is on it, and how it comes back.

UNKNOWN_VERSION = -1  # of a server that came back, until it has loaded the current weights
SETTLE_S = 0.2  # after a loss: by then the other connections to a dead process are down too
NUM_LOADS = 2  # times that an update is offered to a server that refuses it
IDLE = ServerLoad(0, 0, 0.0, 0)
FIRST_STAY_S, MAX_STAY_S = 1.0, 60.0  # out of the pool, for a server that fails again
AWAY_S = 5.0  # for other processes to end their requests
MAX_REFUSALS = 30  # times in a row that a server without requests may be closed


class State(Enum):
    """What a server of a pool may be asked for.

    OUT      nothing: it is not connected, lost a request, refused or has unknown weights; its
             keeper finds out which, and brings it back with the weights that it lacks
    SERVING  requests
    LOADING  no new requests: it served, and its weights are being replaced; what runs on it waits
    ASLEEP   nothing until it is roused: it has given its memory back

        OUT <--> SERVING <--> LOADING --> OUT
         ^        |     ^
         +-- ASLEEP ----+
    """

    OUT = "out"
    SERVING = "serving"
    LOADING = "loading"
    ASLEEP = "asleep"


class Member(Seat):
    """A server and what the pool knows of it; `reason` says why it does not serve, `number` is its
    place in the order in which servers were named.

    Whether a server still holds its weights is told by their label, which the server gives back
    (Server.keeps_label), and by a token of the `probe`.

    A server that loses requests again, with none answered in between, stays out for twice as long
    each time, however well it says it is, and then gets one request, until a token comes. One that
    refuses a request because it is full is closed for a moment and gets fewer.
    """

    def __init__(self, server: Server, number: int, config: PoolConfig, probe: WeightProbe) -> None:
        super().__init__(server, config)
        self.number = number
        self.probe = probe
        self.state = State.OUT
        self.reason = "it is being connected"
        self.is_missed = False  # people were told that it is out, and not yet that it is back
        self.limit = ConcurrencyLimit(config.initial_concurrency, config.max_concurrency)
        self.load = IDLE
        self.max_model_len = 0  # tokens, once connected
        self.features: frozenset[str] = frozenset()
        self.epoch = 0  # connections so far; after each it may be another process
        self.in_flight = 0
        self.out_until = 0.0  # time of the loop; not brought back before
        self.on_trial = False  # came back after several losses, and has given no token since
        self._num_losses = 0  # in a row, without an answered request
        self._closed_until = 0.0  # time of the loop
        self._num_refusals = 0  # times in a row that it was closed
        self.account = Account(server.name)
        self.returning = asyncio.Lock()  # held while the server may come back into the pool
        self._return: asyncio.Timeout | None = None  # while it is being brought back
        self._replacing = asyncio.Lock()  # held while its weights are being replaced
        self._looked_for = asyncio.Event()  # something happened that its keeper should look at
        self._listening: asyncio.TimerHandle | None = None
        self.guests: set[asyncio.Future[Any]] = set()  # attempts that other processes have here
        server.before_release = self.send_away
        server.on_named = self.tell_version

    @property
    def pressure(self) -> float:
        """Share of its limit that is in use."""
        return self.in_flight / self.limit.value

    @property
    def serving(self) -> bool:
        return self.state is State.SERVING

    @property
    def has_room(self) -> bool:
        """Whether one more request may be sent to it now, if it serves."""
        room = 1 if self.on_trial else self.limit.value
        return self.in_flight < room and asyncio.get_running_loop().time() >= self._closed_until

    @property
    def asleep(self) -> bool:
        return self.state is State.ASLEEP

    @property
    def is_there(self) -> bool:
        """Whether it serves, or will again as soon as it has loaded."""
        return self.state in (State.SERVING, State.LOADING)

    def has(self, target: Target) -> bool:
        """Whether it serves these weights."""
        return self.serving and self.server.policy_version == target.policy_version

    def figures(self) -> dict[str, float]:
        """For the metrics; running, waiting, kv_usage and preemptions are its own account."""
        return {
            "up": float(self.is_there),
            "policy_version": self.server.policy_version,
            "in_flight": self.in_flight,
            "limit": self.limit.value,
            "running": self.load.num_running,
            "waiting": self.load.num_waiting,
            "kv_usage": self.load.kv_usage,
            "preemptions": self.load.num_preemptions,
            "requests": self.counts["requests"],
            "sampled_tokens": self.counts["sampled_tokens"],
            "lost": self.counts["lost"],
            "refused": self.counts["refused"],
        }

    # what runs on it

    def hear(self, voice: Voice) -> Hearing:
        if self._listening is None:
            self._listening = asyncio.get_running_loop().call_later(LISTEN_S, self._listen)
        return super().hear(voice)

    def _listen(self) -> None:
        self._listening = None
        for hearing in self.attempts.values():
            hearing.may_wait = self.load.num_waiting > 0
        self.listen()
        if self.attempts:
            self._listening = asyncio.get_running_loop().call_later(LISTEN_S, self._listen)

    async def send_away(self) -> None:
        """End what other processes have on it, and wait until it has ended."""
        guests = set(self.guests)
        for guest in guests:
            guest.cancel()
        if guests:
            await asyncio.wait(guests, timeout=AWAY_S)

    def tell_version(self) -> None:
        """Its next tokens are of other weights, as who asks it from elsewhere must know by then."""
        if self.standing:
            for hearing in self.attempts.values():
                hearing.wait.begin()

    # what became of requests

    def count_loss(self, error: EngineError) -> None:
        """A request was lost."""
        assert isinstance(error, ServerLostError | ForeignWeightsError)
        self.counts["lost"] += 1
        self.account.lose(error.kind, str(error))

    def completed(self) -> None:
        """A request came to its end."""
        self.counts["turns"] += 1
        self._num_losses = self._num_refusals = 0

    def lost(self, problem: str) -> None:
        """A request was lost on a server that was there."""
        self._num_losses += 1
        stay_s = 0.0
        if self._num_losses > 1:
            tries = self._num_losses - 2
            stay_s = backoff_s(tries, self.name, first_s=FIRST_STAY_S, max_s=MAX_STAY_S)
        self.out_until = asyncio.get_running_loop().time() + stay_s
        (self.suspend if stay_s else self._leave)(problem)

    def serve(self) -> None:
        """It may be asked from now on."""
        self.state, self.reason = State.SERVING, ""
        self.on_trial = self._num_losses > 1
        if not self.on_trial:
            self._tell_return()

    def pass_trial(self) -> None:
        """It has given a token."""
        self.on_trial = False
        self._tell_return()

    def _tell_return(self) -> None:
        if self.is_missed:
            self.is_missed = False
            text = "engine server %s serves policy version %d"
            logger.warning(text, self.name, self.server.policy_version, extra=SHOWN)

    def refused(self, wanted_s: float) -> float:
        """A request was refused since the server is full; it asks for `wanted_s` of quiet. The
        seconds until it may be asked again. Raises ServerLostError if it refuses all for long."""
        self.counts["refused"] += 1
        self.account.num_refused += 1
        self.limit.refuse(self.in_flight)
        now = asyncio.get_running_loop().time()
        if now >= self._closed_until:
            closed_s = backoff_s(
                self._num_refusals,
                self.name,
                first_s=FIRST_CLOSED_S,
                max_s=MAX_CLOSED_S,
                at_least_s=wanted_s,
            )
            self._num_refusals += 1
            self._closed_until = now + closed_s
        if self._num_refusals > MAX_REFUSALS and self.in_flight <= 1:
            raise ServerLostError(f"{self.name} refuses every request as if it were full")
        return self._closed_until - now

    # out of the pool

    def suspend(self, reason: str) -> None:
        """No new requests; what runs goes on, and the keeper finds out what happened."""
        self._leave(reason)
        self.miss(reason)

    def _leave(self, reason: str) -> None:
        self.state, self.reason = State.OUT, reason
        self.look()

    def miss(self, reason: str) -> None:
        """Why it still does not serve; people are told once, until it does."""
        self.reason = reason
        if not self.is_missed:
            self.is_missed = True
            logger.warning("engine server %s is out: %s", self.name, reason, extra=SHOWN)

    def drop(self, reason: str) -> None:
        """The server is gone, or nobody knows what it serves: what is on it goes on elsewhere."""
        self.suspend(reason)
        self.break_off()

    def look(self) -> None:
        """Let the keeper look at the server now."""
        self._looked_for.set()

    async def rest(self, seconds: float) -> None:
        """Until `look` is called, or was since the last rest; at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._looked_for.wait()
        self._looked_for.clear()

    async def poll(self) -> None:
        """Ask a server that serves for the label of its weights and for its load, and adapt the
        limit. Raises ServerLostError if the server does not answer, or has other weights."""
        if self._replacing.locked():  # paused: what waits now says nothing
            return
        try:
            async with asyncio.timeout(self.config.poll_timeout_s):
                load = await self.server.load()
                keeps_label = await self.server.keeps_label()
        except TimeoutError as error:
            raise ServerLostError(
                f"{self.name} did not say its load within {self.config.poll_timeout_s:g} s"
            ) from error
        if not self.serving:
            return
        self.load = load
        self.limit.observe(
            load,
            self.in_flight,
            num_turns=self.counts["turns"],
            num_tokens=self.counts["sampled_tokens"],
            now_s=asyncio.get_running_loop().time(),
        )
        if not keeps_label:
            self.drop(FOREIGN)

    # into the pool

    async def connect(self, target: Target, *, fresh: bool) -> None:
        """At the start. `fresh`: it has just been started from the target's directory."""
        await self._connect(target.policy_version)
        if fresh:
            await self.probe.check(self.server, self.config.first_token_s)
        else:
            await self.take(target)

    async def bring_back(self, wanted: Callable[[], Target]) -> None:
        """Find out what a server that is out holds, and load what it lacks of the weights that are
        wanted by then: those of before may be removed. Raises EngineError or ConfigError, and the
        server stays out."""
        self._return = asyncio.timeout(None)  # expires if it is to sleep
        try:
            async with self._return:
                async with self._replacing:
                    pass
                if not await self._is_unchanged():
                    if self.epoch:
                        self.drop(self.reason)
                    await self._come_back(wanted)
                elif self.server.policy_version != wanted().policy_version:
                    await self._catch_up(wanted)  # it refused or missed an update
        except TimeoutError as error:
            if not self._return.expired():
                raise
            raise BrokenOffError(f"{self.name} is to sleep") from error
        finally:
            self._return = None

    async def _is_unchanged(self) -> bool:
        """Whether it is the process that it was, with the weights that it had."""
        if not self.epoch:
            return False
        await asyncio.sleep(SETTLE_S)
        try:
            if not await self.server.healthy() or not await self.server.keeps_label():
                return False
            await self.probe.check(self.server, self.config.first_token_s)
        except BusyError:
            raise
        except EngineError:
            return False
        return True

    async def _come_back(self, wanted: Callable[[], Target]) -> None:
        """Connect, and load the current weights before anything is served."""
        if not await self.server.healthy():
            raise ServerLostError(f"{self.name} does not answer")
        await self._connect(UNKNOWN_VERSION)
        self.limit.restart()
        await self._catch_up(wanted)

    async def _connect(self, policy_version: int) -> None:
        info = await self.server.connect(policy_version)
        self.epoch += 1
        self.max_model_len, self.features = info.max_model_len, info.features

    # weights

    async def update(self, target: Target) -> EngineError | None:
        """Load the target's weights. None: the server took them, or it is out. Otherwise the error
        with which it refused them: it has the old weights, and is out if it slept before."""
        if self.has(target):
            return None
        if self.asleep:
            return await self._rouse(target)
        if self.state is State.OUT:
            async with self._replacing:  # a load of older weights ends before they are removed
                return None
        refusal: EngineError | None = None
        for attempt in range(NUM_LOADS):
            if attempt:
                await asyncio.sleep(self.config.backoff_s(attempt, self.name))
            try:
                await self.take(target)
                return None
            except ServerLostError:
                return None
            except EngineError as refused:
                refusal = refused
        return refusal

    async def take(self, target: Target) -> None:
        """Load weights from a directory and probe them.

        ServerLostError: nobody knows what the server has now, and it is out. EngineError: it
        refused, and has what it had.
        """
        await self._catch_up(lambda: target)

    async def _catch_up(self, wanted: Callable[[], Target]) -> None:
        """Take the weights that are wanted when the load begins; see `take`. An update that begins
        meanwhile waits for its end before the weights of before may be removed."""

        target = wanted()
        source = await target.directory()

        async def load() -> None:
            nonlocal target, source
            if (now := wanted()) is not target:  # an update has begun meanwhile
                target, source = now, await now.directory()
            await self.server.load_weights(source, target.policy_version)

        await self._replace(load, target.policy_version)

    async def receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        """Take weights that are broadcast meanwhile, and probe them; errors as of `take`."""
        await self._replace(
            lambda: self.server.receive(group, manifest, policy_version), policy_version
        )

    async def _replace(self, load: Callable[[], Awaitable[None]], policy_version: int) -> None:
        """Load these weights and serve them. Raises ServerLostError where that fails."""
        async with self._replacing:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            if self.serving:
                self.state = State.LOADING
            self.stand()
            try:
                async with asyncio.timeout(self.config.load_timeout_s):
                    await load()
                    await self.probe.check(self.server, self.config.first_token_s)
            except TimeoutError as error:
                lost = ServerLostError(
                    f"{self.name} did not load policy version {policy_version} within "
                    f"{self.config.load_timeout_s:g} s"
                )
                self._doubt(lost)
                raise lost from error
            except (ServerLostError, asyncio.CancelledError) as lost:
                self._doubt(lost)
                raise
            finally:
                if self.state is State.LOADING:
                    self.state = State.SERVING
                self.account.update_s = max(self.account.update_s, loop.time() - began_s)
                self.go_on()
            self.limit.restart()  # an engine may preempt what runs to change its weights

    def _doubt(self, error: BaseException) -> None:
        self.drop(f"its weights are in doubt: {str(error) or 'their load was broken off'}")

    # sleep

    async def fall_asleep(self) -> None:
        """Break off what runs and let the server sleep, also while it is being brought back. A
        server that is gone holds no memory.

        Raises EngineError for a server that is there and does not sleep.
        """
        if self._return is not None:
            self._return.reschedule(asyncio.get_running_loop().time())
        async with self.returning:
            self._leave("it sleeps")
            self.state = State.ASLEEP
            attempts = list(self.attempts)
            self.break_off()
            if attempts:
                await asyncio.wait(attempts)
            try:
                await self.server.sleep()
            except EngineError as error:
                if await self.server.healthy():
                    raise EngineError(f"{self.name} does not sleep: {error}") from error
                self.suspend(str(error))

    async def _rouse(self, target: Target) -> EngineError | None:
        """Wake the server up and load the target's weights, in any case: another process may have
        taken the place of the one that fell asleep."""
        self._leave("it wakes up")
        try:
            await self.server.wake()
            await self.take(target)
        except ServerLostError as lost:
            self.drop(f"it did not wake up: {lost}")
        except EngineError as refused:
            return refused
        else:
            self.serve()
        return None


FOREIGN = "it does not have the weights that this run gave it"
