"""The servers of a pool and the weights they should have: updates, losses, returns.

Each server has a keeper (pool_keeper.py): it looks at health and load, takes a lost server out,
and lets it serve again once it holds the current weights. All servers may sleep for a while: what
runs then is broken off, waits, and goes on from its tokens when they serve again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from random import Random

from agentenv.engines.pool.broadcast import Broadcast
from agentenv.engines.pool.check import WeightCheck
from agentenv.engines.pool.member import Member, Target, backoff
from agentenv.engines.server import Server, ServerLostError
from agentenv.engines.server_config import PoolConfig
from agentenv.errors import ConfigError, EngineDeadError, EngineError

# The tasks that look after the servers of a pool, one each.

logger = logging.getLogger(__name__)


class Keepers:
    """Each asks its server for health and load, and lets a lost one back in.

    `try_to_serve` says whether a member serves again, `on_change` is called after each look at
    one that serves, `on_loss` when one is found gone, `on_end` if a keeper itself fails. While the
    pool `is_asleep` they leave the servers alone.
    """

    def __init__(
        self,
        config: PoolConfig,
        rng: Random,
        *,
        try_to_serve: Callable[[Member], Awaitable[bool]],
        is_asleep: Callable[[], bool],
        on_change: Callable[[], None],
        on_loss: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._config, self._rng = config, rng
        self._try_to_serve, self._is_asleep = try_to_serve, is_asleep
        self._on_change, self._on_loss, self._on_end = on_change, on_loss, on_end
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, member: Member) -> None:
        """From now on until the member leaves."""
        task = asyncio.create_task(self._tend(member))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def cancel(self) -> set[asyncio.Task[None]]:
        """The tasks, whose end is to be awaited."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        return tasks

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a keeper of the engine pool failed", exc_info=error)
            self._on_end(f"a keeper of the engine pool failed: {error!r}")

    async def _tend(self, member: Member) -> None:
        """Look after one server until it leaves, then let it finish what it has."""
        failures = 0
        while not member.leaving:
            if self._is_asleep():
                await member.rest(self._config.poll_interval_s)
                continue
            pause = self._config.poll_interval_s
            if member.serving:
                failures = 0
                await self._look(member)
            elif await self._try_to_serve(member):
                continue
            else:
                failures += 1
                pause = backoff(self._config, failures, self._rng)
            if member.serving or failures:
                await member.rest(pause)
        while member.attempts:
            await asyncio.wait(set(member.attempts))
        await member.server.close()

    async def _look(self, member: Member) -> None:
        try:
            await member.poll()
            self._on_change()  # its limit may have grown
        except EngineError as error:
            if not self._is_asleep():
                member.suspend(str(error))
                self._on_loss()


# How long an engine could not sample, and when that is too long.


class Outage:
    """A clock that runs while no server is there; `on_end` is called after `max_s` in one go,
    unless the outage is `wanted`."""

    def __init__(self, max_s: float = 0.0, on_end: Callable[[], None] = lambda: None) -> None:
        self._max_s, self._on_end = max_s, on_end
        self._running = False
        self._timer: asyncio.TimerHandle | None = None
        self._began = 0.0
        self._past_s = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all outages so far."""
        if not self._running:
            return self._past_s
        return self._past_s + asyncio.get_running_loop().time() - self._began

    def watch(self, *, running: bool, wanted: bool = False) -> None:
        """Start or stop the clock. `wanted`: the servers sleep, for as long as it takes."""
        if running != self._running:
            self._past_s, self._running = self.total_s, running
            if running:
                self._began = asyncio.get_running_loop().time()
        limited = running and not wanted
        if limited and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._max_s, self._on_end)
        elif not limited and self._timer is not None:
            self._timer.cancel()
            self._timer = None


# Servers that give their memory back for a while: falling asleep and waking up.


HOW_TO_SLEEP = (
    "vLLM needs --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 (0.32 or newer), SGLang needs "
    "--enable-memory-saver (0.5.23 or newer, on a GPU)"
)


def check_feature(members: Sequence[Member], feature: str, key: str, lack: str) -> None:
    """Raises ConfigError for a server without the feature that the setting `key` needs."""
    for member in members:
        if feature not in member.features:
            raise ConfigError(f"{key}: {member.name} {lack}")


async def fall_asleep(member: Member) -> None:
    """Break off what runs and let the server sleep. One that is gone holds no memory.

    Raises EngineError for one that is there and does not sleep.
    """
    async with member.returning:
        member.suspend("it sleeps")
        member.asleep = True
        attempts = set(member.attempts)
        for attempt in attempts:
            attempt.cancel()
        if attempts:
            await asyncio.wait(attempts)
        try:
            await member.server.sleep()
        except EngineError as error:
            if await member.server.healthy():
                raise EngineError(f"{member.name} does not sleep: {error}") from error
            member.asleep, member.in_doubt = False, True
            member.reason = str(error)


async def rouse(member: Member, target: Target) -> EngineError | None:
    """Wake it up and load the target's weights, in any case: another process may have taken the
    place of the one that fell asleep. A member that is lost is in doubt afterwards, otherwise it
    may serve. Returns why it refused the weights, if it did."""
    member.asleep, member.in_doubt = False, True
    try:
        await member.server.wake()
        await member.take(target)
    except ServerLostError as lost:
        member.drop(f"it did not wake up: {lost}")
        logger.warning("%s is out: it did not wake up: %s", member.name, lost)
    except EngineError as refused:
        return refused
    return None


# How one server of a pool gets the weights that it should have: in an update, or on its return.


NUM_ATTEMPTS = 2


def took(member: Member, target: Target) -> bool:
    """Whether it serves these weights."""
    return member.serving and member.server.policy_version == target.policy_version


async def update(member: Member, target: Target, rng: Random) -> EngineError | None:
    """Load the target's weights. None: it took them or is out. Otherwise why it refused, the old
    weights on. One that slept is awake now; it may serve unless it refused or is in doubt."""
    if took(member, target):
        return None
    if member.asleep:
        return await rouse(member, target)
    if not member.serving:
        await member.updated()  # a load of older weights ends before they are removed
        return None
    refusal: EngineError | None = None
    for attempt in range(NUM_ATTEMPTS):
        if attempt:
            await asyncio.sleep(backoff(member.config, attempt, rng))
        try:
            await member.take(target)
            return None
        except ServerLostError as lost:
            member.drop(f"its weights are in doubt: {lost}")
            logger.warning("%s is out: %s", member.name, lost)
            return None
        except EngineError as refused:
            refusal = refused
    return refusal


async def bring_back(member: Member, target: Target, initial: Target) -> None:
    """Find out what one that is out holds, and load what it lacks; `initial` is what the pool was
    started with. Raises EngineError or ConfigError, and it stays out."""
    await member.updated()
    if not await member.still_there():
        member.drop(member.reason)
        await member.come_back(target, initial)
    elif member.server.policy_version != target.policy_version:
        await member.take(target)  # it refused or missed an update


class Fleet:
    """All members, and who of them may be used.

    `on_change` is called when a server serves again or may hold more requests; `on_end` with the
    reason when none is left.
    """

    def __init__(
        self,
        servers: Iterable[Server],
        target: Target,
        config: PoolConfig,
        vocab_size: int,
        rng: Random,
        on_change: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.version = target.policy_version
        self.num_updates = 0
        self.asleep = False
        self.reason: str | None = None  # why it serves no more
        self._config, self._rng = config, rng
        self._check = WeightCheck(vocab_size)
        self._target = self._initial = target
        self._on_change, self._on_end = on_change, on_end
        self.members = [Member(server, config, self._check) for server in servers]
        self._broadcast = Broadcast(config.broadcast_timeout_s)
        self._keepers = Keepers(
            config,
            rng,
            try_to_serve=self._try_to_serve,
            is_asleep=lambda: self.asleep,
            on_change=on_change,
            on_loss=self._watch_outage,
            on_end=on_end,
        )
        self._updating = asyncio.Lock()
        self._outage = Outage(config.max_outage_s, self._give_up)
        self._returned = asyncio.Event()  # a server serves again, or none ever will

    def check_alive(self) -> None:
        """Raises EngineDeadError once no server is left."""
        if self.reason is not None:
            raise EngineDeadError(self.reason)

    @property
    def outage_s(self) -> float:
        """Seconds without any server so far, those asleep included."""
        return self._outage.total_s

    def usable(self) -> list[Member]:
        """Those that may get a request now."""
        return [member for member in self.members if self._is_current(member)]

    async def start(self, *, fresh: bool) -> None:
        """Connect to all. Raises ConfigError if one cannot be used."""
        outcomes = await asyncio.gather(
            *(member.connect(self._target, fresh=fresh) for member in self.members),
            return_exceptions=True,
        )
        for member, outcome in zip(self.members, outcomes, strict=True):
            if isinstance(outcome, EngineError):
                raise ConfigError(f"engine server {member.name}: {outcome}") from outcome
            if outcome is not None:
                raise outcome
        for member in self.members:
            self._serve(member)
            self._keepers.keep(member)

    def add(self, server: Server) -> None:
        self.check_alive()
        member = Member(server, self._config, self._check)
        self.members.append(member)
        self._keepers.keep(member)

    def remove(self, name: str) -> None:
        for member in self.members:
            if member.name == name and not member.leaving:
                member.leaving = True
                member.suspend("it was removed from the pool")
        self._watch_outage()

    def lose(self, member: Member, problem: str) -> None:
        """A request on it was lost."""
        member.counts["lost"] += 1
        if member.serving:
            member.suspend(problem)
            self._watch_outage()

    async def load_weights(self, target: Target) -> None:
        """Update every member; see EnginePool.load_weights. Those that sleep wake up."""
        async with self._updating:
            self.check_alive()
            before, self._target = self._target, target
            members = list(self.members)
            await self._broadcast.update(target, members)
            outcomes = await self._update_all(members)
            refused = {m: e for m, e in zip(members, outcomes, strict=True) if e is not None}
            if refused and not any(took(member, target) for member in members):
                self._target = before
                reasons = "; ".join(f"{m.name}: {e}" for m, e in refused.items())
                raise EngineError(
                    f"no server took policy version {target.policy_version}: {reasons}"
                )
            await self._until_taken()
            self.version = target.policy_version
            self.num_updates += 1
            for member, error in refused.items():
                logger.warning("%s is out: it refused the weights: %s", member.name, error)
                member.suspend(f"it refused policy version {target.policy_version}: {error}")
            self._watch_outage()
            self._on_change()

    async def close(self) -> None:
        """Stop keeping, abort what runs, drop the connections."""
        keepers = self._keepers.cancel()
        attempts = [attempt for member in self.members for attempt in member.attempts]
        if keepers or attempts:
            await asyncio.wait({*keepers, *attempts})
        await asyncio.gather(*(member.server.close() for member in self.members))

    def end(self, reason: str) -> None:
        """No request can succeed any more."""
        self.reason = self.reason or reason
        self._watch_outage()
        self._returned.set()
        for member in self.members:
            member.drop(self.reason)

    async def sleep(self) -> None:
        """Let all sleep. Raises EngineError for one that is there but does not; what runs is
        broken off then too, and goes on once `wake` or `load_weights` was called."""
        async with self._updating:
            self.check_alive()
            self.asleep = True
            outcomes = await asyncio.gather(
                *(fall_asleep(member) for member in self.members if not member.leaving),
                return_exceptions=True,
            )
            self._watch_outage()
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome

    async def wake(self) -> None:
        """Let all serve again, with the weights that they had."""
        async with self._updating:
            self.check_alive()
            if self.asleep:
                await self._update_all(self.members)
                await self._until_taken()

    # one member

    async def _update_all(self, members: Sequence[Member]) -> list[EngineError | None]:
        outcomes = await asyncio.gather(*(self._update(member) for member in members))
        self.asleep = False
        for member in members:
            member.wake.set()
        self._watch_outage()
        return outcomes

    def _is_current(self, member: Member) -> bool:
        version = member.server.policy_version
        return member.serving and version in (self.version, self._target.policy_version)

    def _serve(self, member: Member) -> None:
        member.serving, member.reason = True, ""
        self._returned.set()
        self._watch_outage()
        self._on_change()

    async def _update(self, member: Member) -> EngineError | None:
        """See pool_update.update."""
        was_asleep = member.asleep
        refused = await update(member, self._target, self._rng)
        if was_asleep and not (refused or member.in_doubt):
            self._serve(member)
        return refused

    async def _until_taken(self) -> None:
        """If all servers are gone: wait for one that has come back with the new weights."""
        while not any(took(member, self._target) for member in self.members):
            self._watch_outage()
            self._returned.clear()
            await self._returned.wait()
            self.check_alive()

    async def _try_to_serve(self, member: Member) -> bool:
        """Let a server back in, with the current weights."""
        async with member.returning:
            return not self.asleep and await self._return(member)

    async def _return(self, member: Member) -> bool:
        target, epoch = self._target, member.epoch
        try:
            await bring_back(member, target, self._initial)
        except (EngineError, ConfigError) as error:
            member.reason = str(error)
            return False
        if member.leaving or target != self._target or self.reason is not None:
            return False
        if member.epoch != epoch:
            logger.warning("%s serves policy version %d", member.name, target.policy_version)
        self._serve(member)
        return True

    # the end

    def _watch_outage(self) -> None:
        """The clock of an outage runs while nobody serves."""
        serving = any(member.serving for member in self.members)
        self._outage.watch(running=not serving and self.reason is None, wanted=self.asleep)

    def _give_up(self) -> None:
        reasons = [f"{m.name}: {m.reason}" for m in self.members if not m.leaving]
        self._on_end(
            f"no engine server was there for {self._config.max_outage_s:g} s "
            f"(engine.pool.max_outage_s): {'; '.join(reasons) or 'all were removed'}"
        )
