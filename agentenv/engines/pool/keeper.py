"""The keeper of one server of a pool: polls its load, restores it, replaces its weights.

Target        the weights that every server should have
Keeper        brings one server into the pool, and back into it
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from agentenv.base.errors import ConfigError, EngineError
from agentenv.base.retries import Backoff
from agentenv.base.types import SamplingParams
from agentenv.contract.request import (
    BusyError,
    ForeignWeightsError,
    NoDescriptorError,
    ServerLostError,
    ServerRequest,
)
from agentenv.contract.server_config import PoolConfig
from agentenv.contract.weights import Group, Manifest, Sender, SharedSender
from agentenv.engines.pool.server import CLOSED, PooledServer
from agentenv.engines.remote.base import sampled
from agentenv.engines.remote.weight_sync import Server


class Target(Struct, frozen=True):
    """The weights that every server of the pool should have: in a directory, at a sender, or in
    shared memory of the learner; the last two can also write a directory."""

    source: Path | None
    policy_version: int
    sender: Sender | None = None
    shared: SharedSender | None = None

    async def directory(self) -> Path:
        """The directory. Raises EngineError if the sender has newer weights."""
        if self.source is not None:
            return self.source
        sender = self.sender or self.shared
        assert sender is not None
        return await sender.write()


PROBE_IDS = (1,)
PROBES = Backoff(CLOSED.first_s, 5.0)  # of a full server


@asynccontextmanager
async def in_time(seconds: float, late: str) -> AsyncIterator[None]:
    """A block with a deadline, after which it raises ServerLostError: `late`, and the seconds."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise ServerLostError(f"{late} within {seconds:g} s") from error


async def try_out(server: Server, within_s: float) -> None:
    """Raises ServerLostError if the server returns no token in time. Retries while it is full,
    which does not depend on its weights."""
    try:
        async with in_time(within_s, f"{server.name} returned no token of a probe"):
            for attempt in count():
                request = ServerRequest(
                    f"weights-{secrets.token_hex(4)}",
                    PROBE_IDS,
                    SamplingParams(max_tokens=1, temperature=0.0),
                )
                try:
                    await sampled(server, request)
                    return
                except (BusyError, NoDescriptorError) as error:
                    wanted_s = getattr(error, "retry_after_s", 0.0)
                await asyncio.sleep(max(PROBES.seconds(attempt, server.name), wanted_s))
    except ForeignWeightsError as error:  # another process has replaced it
        raise ServerLostError(str(error)) from error


UNKNOWN_VERSION = -1  # of a returned server, until it has loaded the current weights
SETTLE_S = 0.2  # after a loss, until the other connections to a dead process have ended too
NUM_LOADS = 2  # attempts of an update on a server that refuses it
AWAY_S = 5.0  # for other processes to abort their requests
FOREIGN = "it does not have the weights that this run loaded"


class KeptPool(Protocol):
    """The pool, as its keepers know it."""

    config: PoolConfig
    servers: list[PooledServer]
    target: Target
    is_asleep: bool
    reason: str | None

    def kept(self, keeper: Keeper) -> None: ...
    def serve(self, server: PooledServer) -> None: ...
    def dispatch(self) -> None: ...
    def watch_outage(self) -> None: ...


class Keeper:
    """The keeper of one server of the pool. The label that a server returns shows whether it still
    has its weights (keeps_label); a sampled token shows that it works."""

    def __init__(self, pool: KeptPool, server: PooledServer) -> None:
        self.server, self.client = server, server.client
        self.task: asyncio.Task[None] | None = None
        self._pool, self._config = pool, pool.config
        self._returning = asyncio.Lock()  # held while the server may return to the pool
        self._return: asyncio.Timeout | None = None  # during its return
        self._replacing = asyncio.Lock()  # held during the replacement of its weights
        self.client.before_release = self._abort_guests
        self.client.on_named = self._report_version

    def start(self) -> None:
        """Start keeping the server."""
        self.task = asyncio.create_task(self._keep())
        self.task.add_done_callback(lambda _: self._pool.kept(self))

    async def _keep(self) -> None:
        """Keep the server until it leaves; then let its requests end. Do nothing while the pool
        sleeps."""
        server, pool = self.server, self._pool
        failures = 0
        loop = asyncio.get_running_loop()
        while server in pool.servers:
            pause_s = self._config.poll_interval_s
            if pool.is_asleep:
                failures = 0
            elif not server.is_there and server.out_until > loop.time():
                pause_s = server.out_until - loop.time()
            elif server.is_there:
                failures = 0
                await self._look()
            elif await self._bring_back():
                continue
            else:
                failures += 1
                pause_s = self._config.backoff.seconds(failures - 1, server.name)
            await server.rest(pause_s)
        while running := [one for one in server.running if not one.done()]:
            await asyncio.wait(running)
        await self.client.close()

    async def _look(self) -> None:
        try:
            await self._poll()
        except BusyError:
            pass
        except EngineError as error:
            if not self._pool.is_asleep and self.server.is_there:
                self.server.suspend(str(error))
        self._pool.watch_outage()
        self._pool.dispatch()  # its limit may have grown

    async def _poll(self) -> None:
        """Request the label of a serving server's weights and its load, and adapt the limit. Raises
        ServerLostError if the server does not answer, or has other weights."""
        if self._replacing.locked():  # paused: waiting requests are no congestion
            return
        server = self.server
        async with in_time(self._config.poll_timeout_s, f"{server.name} did not report its load"):
            load = await self.client.load()
            keeps_label = await self.client.keeps_label()
        if not server.serving:
            return
        server.load = load
        server.limit.observe(load, server.in_flight, num_turns=server.counts["turns"])
        if not keeps_label:
            server.drop(FOREIGN)

    async def _abort_guests(self) -> None:
        """Abort the requests of other processes, and wait for their end."""
        guests = set(self.server.guests)
        for guest in guests:
            guest.cancel()
        if guests:
            await asyncio.wait(guests, timeout=AWAY_S)

    def _report_version(self) -> None:
        """Announce the new version to workers that use it, before its next tokens."""
        if self.server.is_paused:
            for pausable in self.server.running.values():
                pausable.begin()

    # into the pool

    async def connect(self, target: Target, *, fresh: bool) -> None:
        """Connect at the start. `fresh`: it was just started from the target's directory."""
        await self._connect(target.policy_version)
        if fresh:
            await try_out(self.client, self._config.first_token_s)
        else:
            await self._load(lambda: target)

    async def _bring_back(self) -> bool:
        """Return the server to the pool with the current weights."""
        server, pool = self.server, self._pool
        async with self._returning:
            if pool.is_asleep:
                return False
            is_new = not server.epoch
            self._return = asyncio.timeout(None)  # expires when the pool sleeps
            try:
                async with self._return:
                    await self._restore()
            except TimeoutError:
                if not self._return.expired():
                    raise
                return False
            except (EngineError, ConfigError) as error:
                server.report_out(str(error))
                return False
            except OSError as error:  # a directory that this process cannot read
                server.report_out(f"loading its weights failed: {error}")
                return False
            finally:
                self._return = None
            is_late = server.policy_version != pool.target.policy_version
            if server not in pool.servers or is_late or pool.reason is not None:
                return False
            server.is_reported |= is_new
            pool.serve(server)
            return True

    async def _restore(self) -> None:
        """Determine the weights of a server that is out, and load the current ones if necessary;
        earlier ones may be removed. Raises EngineError or ConfigError."""
        server, pool = self.server, self._pool
        async with self._replacing:
            pass
        if not await self._is_unchanged():
            if server.epoch:  # not `drop`, which would skip the keeper's pause
                server.report_out(server.reason)
                server.abort_all()
            if not await self.client.healthy():
                raise ServerLostError(f"{server.name} does not answer")
            await self._connect(UNKNOWN_VERSION)
            server.limit.restart()
        if server.policy_version != pool.target.policy_version:
            await self._load(lambda: pool.target)

    async def _is_unchanged(self) -> bool:
        """Whether it is the same process with the same weights."""
        if not self.server.epoch:
            return False
        await asyncio.sleep(SETTLE_S)
        try:
            if not await self.client.healthy() or not await self.client.keeps_label():
                return False
            await try_out(self.client, self._config.first_token_s)
        except BusyError:
            raise
        except EngineError:
            return False
        return True

    async def _connect(self, policy_version: int) -> None:
        info = await self.client.connect(policy_version)
        self.server.epoch += 1
        self.server.max_model_len, self.server.features = info.max_model_len, info.features

    # weights

    async def update(self, target: Target) -> EngineError | None:
        """Load the target's weights. Returns None if the server accepted them or is out, else the
        error of its refusal: it has the old weights, and is out if it was asleep."""
        if self.server.serves(target.policy_version):
            return None
        if self.server.is_asleep:
            return await self._wake(target)
        if self.server.is_out:
            async with self._replacing:  # a load of older weights must end before their removal
                return None
        refusal: EngineError | None = None
        for attempt in range(NUM_LOADS):
            if attempt:
                await asyncio.sleep(self._config.backoff.seconds(attempt - 1, self.server.name))
            try:
                await self._load(lambda: target)
                return None
            except ServerLostError:
                return None
            except EngineError as refused:
                refusal = refused
        return refusal

    async def _load(self, wanted: Callable[[], Target]) -> None:
        """Load the weights that are current at the start of the load, from a directory. A
        concurrent update waits for the end of the load, before older weights may be removed.

        Raises ServerLostError if the weights of the server are now unknown, and it is out;
        EngineError if it refused, and has its old weights.
        """
        target = wanted()
        source = await target.directory()

        async def load() -> None:
            nonlocal target, source
            if (now := wanted()) is not target:  # a new update has begun
                target, source = now, await now.directory()
            await self.client.load_weights(source, target.policy_version)

        await self._replace(load, target.policy_version)

    async def receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        """Receive broadcast weights; errors as in `_load`."""
        await self._replace(
            lambda: self.client.receive(group, manifest, policy_version), policy_version
        )

    async def take(
        self, shared: SharedSender, policy_version: int, release: Callable[[], Awaitable[None]]
    ) -> None:
        """Read weights from the learner's memory, and probe them; a sleeping server wakes up with
        them. Errors as in `_load`; `release`: see WeightSync.take."""
        server = self.server
        sleeps = server.is_asleep
        if sleeps:
            server.leave("it wakes up")
        await self._replace(
            lambda: self.client.take(shared.weights, server.number, policy_version, release),
            policy_version,
        )
        if sleeps:
            server.serve()

    async def _replace(self, load: Callable[[], Awaitable[None]], policy_version: int) -> None:
        """Load these weights and serve them. Raises ServerLostError if that fails."""
        server = self.server
        late = f"{server.name} did not load policy version {policy_version}"
        async with self._replacing:
            with server.loading():
                try:
                    async with in_time(self._config.load_timeout_s, late):
                        await load()
                        await try_out(self.client, self._config.first_token_s)
                except (ServerLostError, asyncio.CancelledError) as error:
                    text = str(error) or "their load was aborted"
                    server.drop(f"its weight version is uncertain: {text}")
                    raise
            server.limit.restart()  # an update may preempt running requests

    # sleep

    async def sleep(self) -> None:
        """Abort running requests and let the server sleep, also during its return. A lost server
        needs no memory.

        Raises EngineError for a server that answers but does not sleep.
        """
        server = self.server
        if self._return is not None:
            self._return.reschedule(asyncio.get_running_loop().time())
        async with self._returning:
            await server.fall_asleep()
            try:
                await self.client.sleep()
            except EngineError as error:
                if await self.client.healthy():
                    raise EngineError(f"{server.name} failed to sleep: {error}") from error
                server.suspend(str(error))

    async def _wake(self, target: Target) -> EngineError | None:
        """Wake the server up and load the target's weights in any case, since another process may
        have replaced it during the sleep."""
        self.server.leave("it wakes up")
        try:
            await self.client.wake()
            await self._load(lambda: target)
        except ServerLostError as lost:
            self.server.drop(f"it did not wake up: {lost}")
        except EngineError as refused:
            return refused
        else:
            self.server.serve()
        return None


logger = logging.getLogger(__name__)
