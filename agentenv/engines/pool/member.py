"""How many requests a server gets at a time: additive increase, multiplicative decrease.

The engine's own figures decide (Chiu and Jain 1989, "Analysis of the increase and decrease
algorithms for congestion avoidance"): while it admits what it gets, it gets more; when requests
queue up in it, are preempted, or its cache is full, it gets fewer. A short queue is wanted, since
it keeps the engine's batch full, also when many turns end in the same step: as many may wait as
run. Until the first congestion the limit doubles, as in the slow start of TCP, so that a large
server is not left idle for minutes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

from msgspec import Struct

from agentenv.engines.pool.check import WeightCheck
from agentenv.engines.server import Server, ServerInfo, ServerLoad, ServerLostError
from agentenv.engines.server_config import PoolConfig
from agentenv.engines.weights import Group, Manifest, Receiver, Sender
from agentenv.errors import ConfigError, EngineError
from agentenv.types import Completion

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


# Versions of served engines that the contract tests ran with; docs/engines.md has the table.

TRIED = {"vllm": "0.32.", "sglang": "0.5.23"}  # what a tried version begins with

logger = logging.getLogger(__name__)


def is_tried(info: ServerInfo) -> bool:
    """Whether the contract tests ran with this engine's version."""
    return info.version.startswith(TRIED.get(info.engine, info.version))


def warn_untried(name: str, info: ServerInfo) -> None:
    """Tell of a version that nobody tried: its routes are there, what they mean may differ."""
    if not is_tried(info):
        logger.warning(
            "%s runs %s %s, which was not tried (%s was, see docs/engines.md); watch "
            "parity/logprob_gap_max",
            name,
            info.engine,
            info.version,
            TRIED[info.engine].rstrip("."),
        )


# One server in a pool: whether it serves, what is on it, and how it comes back.


UNKNOWN_VERSION = -1  # of a server that came back, until it has loaded the current weights
SETTLE_S = 0.2  # after a loss: by then the other connections to a dead process are down too
IDLE = ServerLoad(0, 0, 0.0, 0)


class Member:
    """A server and what the pool knows of it.

    Requests are given only to a member that is `serving`; one that is not says why in `reason`.
    `lock` is held while its weights are being replaced.
    """

    def __init__(self, server: Server, config: PoolConfig, check: WeightCheck) -> None:
        self.server = server
        self.config = config
        self.check = check
        self.limit = ConcurrencyLimit(config.initial_concurrency, config.max_concurrency)
        self.load = IDLE
        self.serving = False
        self.in_doubt = True  # not connected, another process perhaps, or with mixed weights
        self.leaving = False  # removed: it serves no more requests
        self.asleep = False
        self.max_model_len = 0  # tokens, once connected
        self.features: frozenset[str] = frozenset()
        self.epoch = 0  # connections so far; after each it may be another process
        self.reason = "it is being connected"
        self.in_flight = 0
        self.attempts: set[asyncio.Task[Completion]] = set()
        self.lock = asyncio.Lock()
        self.returning = asyncio.Lock()  # held while it may come back into the pool
        self.wake = asyncio.Event()  # something happened that its keeper should look at
        self.counts: Counter[str] = Counter()

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def pressure(self) -> float:
        """Share of its limit that is in use."""
        return self.in_flight / self.limit.value

    def figures(self) -> dict[str, float]:
        """For the metrics; running, waiting, kv_usage and preemptions are its own account."""
        return {
            "up": float(self.serving),
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
        }

    def suspend(self, reason: str) -> None:
        """No new requests; its keeper finds out what it is about."""
        self.serving, self.reason = False, reason
        self.wake.set()

    def drop(self, reason: str) -> None:
        """It is gone, or nobody knows what it serves: what is on it goes on elsewhere."""
        self.suspend(reason)
        self.in_doubt = True
        for attempt in self.attempts:
            attempt.cancel()

    async def rest(self, seconds: float) -> None:
        """Until something happens to it, at most so long."""
        self.wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self.wake.wait()
        except TimeoutError:
            return

    async def poll(self) -> None:
        """Ask for its load and adapt. Raises ServerLostError."""
        if self.lock.locked():  # paused: what waits now says nothing
            return
        try:
            async with asyncio.timeout(self.config.poll_timeout_s):
                self.load = await self.server.load()
        except TimeoutError as error:
            raise ServerLostError(
                f"{self.name} did not say its load within {self.config.poll_timeout_s:g} s"
            ) from error
        self.limit.observe(self.load, self.in_flight)

    async def still_there(self) -> bool:
        """After a request was lost: whether it is the same process with the same weights."""
        if self.in_doubt:
            return False
        await asyncio.sleep(SETTLE_S)
        if not await self.server.healthy() or self.in_doubt:
            return False
        # Connections do not outlive a process, so one that goes on proves it is the same.
        if self.attempts:
            return True
        try:
            return await self.check.unchanged(self.server)
        except EngineError:
            return False

    async def connect(self, target: Target, *, fresh: bool) -> None:
        """At the start. `fresh`: it has just been started from the target's directory."""
        info = await self._connect(target.policy_version)
        self.max_model_len = info.max_model_len
        if not fresh and "load_weights" in info.features:
            await self.take(target)
        elif not fresh:
            logger.warning(
                "%s cannot load weights; it is taken to serve %s", self.name, target.source
            )
        if fresh and self.config.check_weights:
            await self.check.check(self.server, target.policy_version, target.source)
        self.in_doubt = False

    async def come_back(self, target: Target, initial: Target) -> None:
        """Connect, and load the current weights before anything is served.

        Raises EngineError or ConfigError, and the member stays out.
        """
        if not await self.server.healthy():
            raise ServerLostError(f"{self.name} does not answer")
        info = await self._connect(UNKNOWN_VERSION)
        self.limit.restart()
        if "load_weights" in info.features:
            await self.take(target)
        elif target == initial:
            await self.server.connect(target.policy_version)
            self.in_doubt = False
        else:
            raise ConfigError(cannot_load(self.name, info))

    def receiver(self) -> Receiver:
        """Raises EngineError if it takes no broadcasts."""
        receiver = self.server.receiver if "broadcast" in self.features else None
        if receiver is None:
            raise EngineError(f"{self.name} takes no weights by broadcast")
        return receiver

    async def take(self, target: Target) -> None:
        """Load weights from a directory and check them.

        ServerLostError: nobody knows what it serves now. EngineError: refused, it still serves
        what it had.
        """
        source = await target.directory()
        version = target.policy_version
        await self._change(lambda: self.server.load_weights(source, version), version, source)

    async def receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        """Take weights that are broadcast meanwhile, and check them; errors as of `take`."""
        receiver = self.receiver()
        await self._change(
            lambda: receiver.receive(group, manifest, policy_version), policy_version, None
        )

    async def _connect(self, policy_version: int) -> ServerInfo:
        info = await self.server.connect(policy_version)
        if not self.epoch:
            warn_untried(self.name, info)
        self.epoch += 1
        self.features = info.features
        return info

    async def _change(
        self, load: Callable[[], Awaitable[None]], policy_version: int, source: Path | None
    ) -> None:
        async with self.lock:
            doubted, self.in_doubt = self.in_doubt, True
            try:
                async with asyncio.timeout(self.config.load_timeout_s):
                    await load()
            except ServerLostError:
                raise
            except EngineError:
                self.in_doubt = doubted
                raise
            except TimeoutError as error:
                raise ServerLostError(
                    f"{self.name} did not load policy version {policy_version} within "
                    f"{self.config.load_timeout_s:g} s"
                ) from error
            if self.config.check_weights:
                await self.check.check(self.server, policy_version, source)
            self.in_doubt = False
            self.limit.restart()  # an engine may preempt what runs to change its weights

    async def updated(self) -> None:
        """Wait while its weights are being replaced."""
        async with self.lock:
            return


def backoff(config: PoolConfig, attempt: int, rng: Random) -> float:
    """Seconds before the n-th retry: exponential, with jitter so that many do not come at once."""
    longest = min(config.max_backoff_s, config.first_backoff_s * 2 ** (attempt - 1))
    return rng.uniform(longest / 2, longest)


def cannot_load(name: str, info: ServerInfo) -> str:
    return (
        f"{name} ({info.engine} {info.version}) came back without the weights of this run and "
        "cannot load them: it lacks the feature load_weights"
    )
