"""The servers of a pool and the weights they should have: updates, losses, returns.

Each server has a keeper: it looks at health and load, takes a lost server out, and lets it serve
again once it holds the current weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from random import Random

from agentenv.engines.pool_broadcast import Broadcast
from agentenv.engines.pool_check import WeightCheck
from agentenv.engines.pool_config import PoolConfig
from agentenv.engines.pool_member import Member, backoff
from agentenv.engines.pool_outage import Outage
from agentenv.engines.pool_target import Target
from agentenv.engines.server import Server, ServerLostError
from agentenv.errors import ConfigError, EngineDeadError, EngineError

logger = logging.getLogger(__name__)


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
        self.reason: str | None = None  # why it serves no more
        self._config, self._rng = config, rng
        self._check = WeightCheck(vocab_size)
        self._target = self._initial = target
        self._on_change, self._on_end = on_change, on_end
        self.members = [Member(server, config, self._check) for server in servers]
        self._broadcast = Broadcast(config.broadcast_timeout_s)
        self._keepers: set[asyncio.Task[None]] = set()
        self._updating = asyncio.Lock()
        self._outage = Outage(config.max_outage_s, self._give_up)
        self._returned = asyncio.Event()  # a server serves again, or none ever will

    def check_alive(self) -> None:
        """Raises EngineDeadError once no server is left."""
        if self.reason is not None:
            raise EngineDeadError(self.reason)

    @property
    def outage_s(self) -> float:
        """Seconds without any server so far."""
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
            self._keep(member)

    def add(self, server: Server) -> None:
        self.check_alive()
        member = Member(server, self._config, self._check)
        self.members.append(member)
        self._keep(member)

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
        """Update every member; see EnginePool.load_weights."""
        async with self._updating:
            self.check_alive()
            before, self._target = self._target, target
            members = list(self.members)
            await self._broadcast.update(target, members)
            outcomes = await asyncio.gather(*(self._update(member) for member in members))
            refused = {m: e for m, e in zip(members, outcomes, strict=True) if e is not None}
            if refused and not any(self._took(member) for member in members):
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
        keepers, self._keepers = self._keepers, set()
        for keeper in keepers:
            keeper.cancel()
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

    # one member

    def _is_current(self, member: Member) -> bool:
        version = member.server.policy_version
        return member.serving and version in (self.version, self._target.policy_version)

    def _took(self, member: Member) -> bool:
        return member.serving and member.server.policy_version == self._target.policy_version

    def _serve(self, member: Member) -> None:
        member.serving, member.reason = True, ""
        self._returned.set()
        self._watch_outage()
        self._on_change()

    async def _update(self, member: Member) -> EngineError | None:
        """None: it took the update or is out. Otherwise why it refused, the old weights on."""
        if self._took(member):
            return None
        if not member.serving:
            await member.updated()  # a load of older weights ends before they are removed
            return None
        error = await member.take_or_refuse(self._target, self._rng)
        if isinstance(error, ServerLostError):
            logger.warning("%s is out: %s", member.name, error)
            return None
        return error

    async def _until_taken(self) -> None:
        """If all servers are gone: wait for one that has come back with the new weights."""
        while not any(self._took(member) for member in self.members):
            self._watch_outage()
            self._returned.clear()
            await self._returned.wait()
            self.check_alive()

    def _keep(self, member: Member) -> None:
        keeper = asyncio.create_task(self._tend(member))
        self._keepers.add(keeper)
        keeper.add_done_callback(self._keeper_ended)

    def _keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        self._keepers.discard(keeper)
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            logger.error("a keeper of the engine pool failed", exc_info=error)
            self._on_end(f"a keeper of the engine pool failed: {error!r}")

    async def _tend(self, member: Member) -> None:
        """Look after one server until it leaves, then let it finish what it has."""
        failures = 0
        while not member.leaving:
            pause = self._config.poll_interval_s
            if member.serving:
                failures = 0
                try:
                    await member.poll()
                    self._on_change()  # its limit may have grown
                except EngineError as error:
                    member.suspend(str(error))
                    self._watch_outage()
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

    async def _try_to_serve(self, member: Member) -> bool:
        """Let a server back in, with the current weights."""
        target = self._target
        came_back = False
        try:
            await member.updated()
            if not await member.still_there():
                member.drop(member.reason)
                await member.come_back(target, self._initial)
                came_back = True
            elif member.server.policy_version != target.policy_version:
                await member.take(target)  # it refused or missed an update
        except (EngineError, ConfigError) as error:
            member.reason = str(error)
            return False
        if member.leaving or target != self._target or self.reason is not None:
            return False
        if came_back:
            logger.warning("%s serves policy version %d", member.name, target.policy_version)
        self._serve(member)
        return True

    # the end

    def _watch_outage(self) -> None:
        """The clock of an outage runs while nobody serves."""
        serving = any(member.serving for member in self.members)
        self._outage.watch(running=not serving and self.reason is None)

    def _give_up(self) -> None:
        reasons = [f"{m.name}: {m.reason}" for m in self.members if not m.leaving]
        self._on_end(
            f"no engine server was there for {self._config.max_outage_s:g} s "
            f"(engine.pool.max_outage_s): {'; '.join(reasons) or 'all were removed'}"
        )
