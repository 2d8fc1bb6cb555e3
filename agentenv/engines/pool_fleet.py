"""The servers of a pool and the weights they should have: updates, losses, returns.

Each server has a keeper (pool_keeper.py): it looks at health and load, takes a lost server out,
and lets it serve again once it holds the current weights. All servers may sleep for a while: what
runs then is broken off, waits, and goes on from its tokens when they serve again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from random import Random

from agentenv.engines.pool_broadcast import Broadcast
from agentenv.engines.pool_check import WeightCheck
from agentenv.engines.pool_config import PoolConfig
from agentenv.engines.pool_keeper import Keepers
from agentenv.engines.pool_member import Member
from agentenv.engines.pool_outage import Outage
from agentenv.engines.pool_sleep import fall_asleep
from agentenv.engines.pool_target import Target
from agentenv.engines.pool_update import bring_back, took, update
from agentenv.engines.server import Server
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
