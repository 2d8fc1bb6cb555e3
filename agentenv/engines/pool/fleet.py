"""The servers of a pool and the weights that they should have: who serves, who waits for a place.

requests --acquire--> Places --> a server that serves and has room
                        ^
                        | dispatch, whenever a server serves again or may hold more
updates, sleep, keepers (one task a server: look at its load, bring it back) --> Member.state
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable
from heapq import heappop, heappush

from agentenv.deadline import uncancelled
from agentenv.engines.pool.broadcast import Broadcast
from agentenv.engines.pool.limit import FULL
from agentenv.engines.pool.server_state import Member, State, Target, WeightProbe
from agentenv.engines.remote.server import (
    BrokenOffError,
    BusyError,
    ForeignWeightsError,
    Server,
    ServerLostError,
)
from agentenv.errors import ConfigError, EngineDeadError, EngineError
from agentenv.server_config import PoolConfig

logger = logging.getLogger(__name__)

MAX_SESSIONS = 65536  # whose home is remembered
HARDLY = 0.1  # turns that may wait for a place before no tree begins, by places
MEASURED = 8  # running requests from which on their use of the cache says something


# order, number, place, session, whom to avoid
_Waiter = tuple[tuple[int, int], int, asyncio.Future[Member], str, Collection[Member]]


class Places:
    """Hands out places on servers: to the smallest `order` first (Engine.generate), and to equal
    ones in the order in which they came.

    A session has a home, since that holds its prefixes; the session goes elsewhere while its home
    is full or loads weights, and gets another home when the home is gone. Otherwise the least
    loaded server is taken. A server that failed a turn gets it again only if no other serves.
    """

    def __init__(self, members: list[Member]) -> None:
        self._members = members
        self._homes: OrderedDict[str, Member] = OrderedDict()
        self._waiting: list[_Waiter] = []  # a heap
        self._num_came = 0

    @property
    def num_waiting(self) -> int:
        return sum(not place.done() for _, _, place, *_ in self._waiting)

    async def acquire(
        self, session: str, order: tuple[int, int] = (0, 0), avoid: Collection[Member] = ()
    ) -> Member:
        """A server with room; to be given back with `release`."""
        place = self.seek(session, order, avoid)
        if isinstance(place, Member):
            return place
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.release(place.result())
            raise

    def seek(
        self, session: str, order: tuple[int, int] = (0, 0), avoid: Collection[Member] = ()
    ) -> Member | asyncio.Future[Member]:
        """A server with room, or what will be one; cancelled, it is not waited for any more."""
        self.dispatch()
        member = None if self._waiting else self._choose(session, avoid)
        if member is not None:
            member.in_flight += 1
            return member
        place: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        self._num_came += 1
        heappush(self._waiting, (order, self._num_came, place, session, avoid))
        self.dispatch()  # there may be room for this one and not for those before it
        return place

    def release(self, member: Member) -> None:
        member.in_flight -= 1
        self.dispatch()

    def dispatch(self) -> None:
        """Serve those who wait as far as there is room. Who avoids the free servers is passed."""
        passed: list[_Waiter] = []
        while self._waiting:
            _, _, place, session, avoid = self._waiting[0]
            if not place.done():
                member = self._choose(session, avoid)
                if member is not None:
                    member.in_flight += 1
                    place.set_result(member)
                elif avoid:
                    passed.append(self._waiting[0])
                else:
                    break
            heappop(self._waiting)
        for waiter in passed:
            heappush(self._waiting, waiter)

    def end(self, reason: str) -> None:
        """All who wait raise EngineDeadError."""
        while self._waiting:
            _, _, place, *_ = self._waiting.pop()
            if not place.done():
                place.set_exception(EngineDeadError(reason))

    def _choose(self, session: str, avoid: Collection[Member]) -> Member | None:
        serving = [member for member in self._members if member.serving]
        if avoid:
            serving = [member for member in serving if member not in avoid] or serving
        free = [member for member in serving if member.has_room]
        if not free:
            return None
        home = self._homes.get(session)
        if home in free:
            self._homes.move_to_end(session)
            return home
        chosen = min(free, key=lambda member: member.pressure)
        if home is None or home.state is State.OUT:
            self._homes[session] = chosen
            self._homes.move_to_end(session)
            if len(self._homes) > MAX_SESSIONS:
                self._homes.popitem(last=False)
        return chosen


class Fleet:
    """All members, the weights that they should have, and the tasks that keep them.

    `members` are the servers that take part, whether they serve now or not. `version` is that of
    the last update that a server took. `reason` says why the fleet serves no more, once it is so.
    """

    def __init__(
        self,
        servers: Iterable[Server],
        target: Target,
        config: PoolConfig,
        vocab_size: int,
    ) -> None:
        self.members: list[Member] = []
        self.places = Places(self.members)
        self.version = target.policy_version
        self.num_updates = 0
        self.asleep = False
        self.reason: str | None = None
        self._config = config
        self._probe = WeightProbe(vocab_size)
        self._broadcast = Broadcast(config.broadcast_timeout_s)
        self._target = target
        self._keepers: dict[Member, asyncio.Task[None]] = {}
        self._num_servers = 0  # so far, those that have left included
        self._updating = asyncio.Lock()
        self._returned = asyncio.Event()  # a server serves again, or none ever will
        self._outage_began: float | None = None  # time of the loop; None: a server is there
        self._past_outages_s = 0.0
        self._patience: asyncio.TimerHandle | None = None  # ends the fleet after a long outage
        for server in servers:
            self._enlist(server)

    def has_room(self, num_live: int) -> bool:
        """Whether more trajectories should begin beside so many that are under way: turns hardly
        wait for places, and the caches would hold all trajectories if each were as large as those
        that are on a server now. Once each cache has been full, the limits of the servers find by
        trials how much of it is best used, and waiting alone decides."""
        serving = [member for member in self.members if member.serving]
        room = sum(member.limit.value for member in serving)
        if not serving or self.places.num_waiting > HARDLY * room:
            return False
        if all(member.limit.has_been_full for member in serving):
            return True
        running = sum(member.load.num_running for member in serving)
        usage = sum(member.load.kv_usage for member in serving)
        return running < MEASURED or usage / running * num_live <= FULL * len(serving)

    def check_alive(self) -> None:
        """Raises EngineDeadError once no server is left."""
        if self.reason is not None:
            raise EngineDeadError(self.reason)

    # who takes part

    async def start(self, *, fresh: bool) -> None:
        """Connect to all. Raises ConfigError if one cannot be used, or none is there; one that is
        gone while others are there, or full, takes part as soon as it can."""
        outcomes = await asyncio.gather(
            *(member.connect(self._target, fresh=fresh) for member in self.members),
            return_exceptions=True,
        )
        found = list(zip(self.members, outcomes, strict=True))
        gone = {m for m, one in found if isinstance(one, ServerLostError | BusyError)}
        is_there = any(not isinstance(one, ServerLostError) for one in outcomes)
        for member, outcome in found:
            if member in gone and is_there:
                member.suspend(str(outcome))
            elif isinstance(outcome, EngineError):
                raise ConfigError(f"engine server {member.name}: {outcome}") from outcome
            elif outcome is not None:
                raise outcome
        for member in self.members:
            if member not in gone:
                self._serve(member)
            self._keep(member)
        self._watch_outage()

    def add(self, server: Server) -> None:
        """One more takes part; it serves once it holds the current weights."""
        self.check_alive()
        self._keep(self._enlist(server))

    def remove(self, name: str) -> None:
        """A server leaves for good, after what runs on it has ended."""
        for member in list(self.members):
            if member.name == name:
                self.members.remove(member)
                member.suspend("it was removed from the pool")
        self._watch_outage()

    # places, and what became of them; see Seats

    async def acquire(
        self, session: str, order: tuple[int, int], avoid: Collection[Member]
    ) -> Member:
        return await self.places.acquire(session, order, avoid)

    def release(self, member: Member) -> None:
        self.places.release(member)

    def heard(self, member: Member, num_tokens: int) -> None:
        member.counts["sampled_tokens"] += num_tokens
        if member.on_trial:
            member.pass_trial()
            self.places.dispatch()

    def answered(self, member: Member, num_tokens: int, seconds: float) -> None:
        member.account.answer(num_tokens, seconds)

    def completed(self, member: Member) -> None:
        member.completed()

    def reset(self, member: Member, error: ServerLostError) -> None:
        member.account.lose(error.kind, str(error))
        member.look()  # it may be dead, or another process by now

    def lose(self, member: Member, error: EngineError) -> None:
        member.count_loss(error)
        if isinstance(error, ForeignWeightsError):
            member.drop(str(error))
        elif member.is_there:
            member.lost(f"a request was lost: {error}")
        self._watch_outage()

    async def refuse(self, member: Member, error: BusyError) -> str:
        return self.close_for_a_while(member, error)

    def close_for_a_while(self, member: Member, error: BusyError) -> str:
        """See Seats.refuse."""
        try:
            closed_s = member.refused(error.retry_after_s)
        except ServerLostError as lost:
            self.lose(member, lost)
            return str(lost)
        asyncio.get_running_loop().call_later(closed_s, self.places.dispatch)
        return ""

    # the end

    async def close(self) -> None:
        """Stop keeping, abort what runs, drop the connections, however often it is cancelled."""
        await uncancelled(self._close())

    async def _close(self) -> None:
        members = {*self.members, *self._keepers}
        tasks: set[asyncio.Task[None]] = set(self._keepers.values())
        for task in tasks:
            task.cancel()
        attempts = [attempt for member in members for attempt in member.attempts]
        if tasks or attempts:
            await asyncio.wait({*tasks, *attempts})
        await asyncio.gather(*(member.server.close() for member in members))

    def end(self, reason: str) -> None:
        """No request can succeed any more: who waits, and who comes, raises EngineDeadError."""
        self.reason = self.reason or reason
        self._watch_outage()
        self._returned.set()
        for member in self.members:
            member.is_missed = True  # whoever ends the fleet says why
            member.drop(self.reason)
        self.places.end(self.reason)

    def _enlist(self, server: Server) -> Member:
        member = Member(server, self._num_servers, self._config, self._probe)
        self._num_servers += 1
        self.members.append(member)
        return member

    def _serve(self, member: Member) -> None:
        member.serve()
        self._returned.set()
        self._watch_outage()
        self.places.dispatch()

    # weights

    async def load_weights(self, target: Target) -> None:
        """Update every member; see EnginePool.load_weights. Those that sleep wake up."""
        async with self._updating:
            self.check_alive()
            before, self._target = self._target, target
            members = list(self.members)
            await self._broadcast.update(target, members)
            outcomes = await self._update_all(members)
            refused = {m: e for m, e in zip(members, outcomes, strict=True) if e is not None}
            if refused and not any(member.has(target) for member in members):
                self._target = before
                self.places.dispatch()
                reasons = "; ".join(f"{m.name}: {e}" for m, e in refused.items())
                raise EngineError(
                    f"no server took policy version {target.policy_version}: {reasons}"
                )
            await self._until_taken()
            self.version = target.policy_version
            self.num_updates += 1
            for member, error in refused.items():
                member.suspend(f"it refused policy version {target.policy_version}: {error}")
            self._watch_outage()

    async def sleep(self) -> None:
        """Let all sleep. Raises EngineError for one that is there but does not; what runs is
        broken off then too, and goes on once `wake` or `load_weights` was called."""
        async with self._updating:
            self.check_alive()
            self.asleep = True
            outcomes = await asyncio.gather(
                *(member.fall_asleep() for member in self.members), return_exceptions=True
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
                await self._update_all(list(self.members))
                await self._until_taken()

    async def _update_all(self, members: list[Member]) -> list[EngineError | None]:
        """Why each refused the target's weights; None for those that did not."""
        outcomes = await asyncio.gather(*(self._update(member) for member in members))
        self.asleep = False
        for member in members:
            member.look()
        self._watch_outage()
        return outcomes

    async def _update(self, member: Member) -> EngineError | None:
        refused = await member.update(self._target)
        if member.serving and refused is None:  # else it may be about to be left
            self._serve(member)
        return refused

    async def _until_taken(self) -> None:
        """If all servers are gone: wait for one that has come back with the new weights."""
        while not any(member.has(self._target) for member in self.members):
            self._watch_outage()
            self._returned.clear()
            await self._returned.wait()
            self.check_alive()

    # keepers

    def _keep(self, member: Member) -> None:
        task = asyncio.create_task(self._tend(member))
        self._keepers[member] = task
        task.add_done_callback(lambda task: self._tended(member, task))

    def _tended(self, member: Member, task: asyncio.Task[None]) -> None:
        del self._keepers[member]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a keeper of the engine pool failed", exc_info=error)
            self.end(f"a keeper of the engine pool failed: {error!r}")

    async def _tend(self, member: Member) -> None:
        """Look after one server until it leaves, then let it finish what it has. While the fleet
        sleeps its servers are left alone."""
        failures = 0
        loop = asyncio.get_running_loop()
        while member in self.members:
            pause = self._config.poll_interval_s
            if self.asleep:
                failures = 0
            elif not member.is_there and member.out_until > loop.time():
                pause = member.out_until - loop.time()
            elif member.is_there:
                failures = 0
                await self._look(member)
            elif await self._bring_back(member):
                continue
            else:
                failures += 1
                pause = self._config.backoff_s(failures, member.name)
            await member.rest(pause)
        while running := [one for one in member.attempts if not one.done()]:
            await asyncio.wait(running)
        await member.server.close()

    async def _look(self, member: Member) -> None:
        try:
            await member.poll()
        except BusyError:
            pass
        except EngineError as error:
            if not self.asleep and member.is_there:
                member.suspend(str(error))
        self._watch_outage()
        self.places.dispatch()  # its limit may have grown

    async def _bring_back(self, member: Member) -> bool:
        """Let a server back in, with the current weights."""
        async with member.returning:
            if self.asleep:
                return False
            epoch = member.epoch
            try:
                await member.bring_back(lambda: self._target)
            except BrokenOffError:
                return False
            except (EngineError, ConfigError) as error:
                member.miss(str(error))
                return False
            except OSError as error:  # ours: a directory that cannot be read now
                member.miss(f"it cannot be given its weights: {error}")
                return False
            is_late = member.server.policy_version != self._target.policy_version
            if member not in self.members or is_late or self.reason is not None:
                return False
            if not epoch:
                member.is_missed = True  # it is new
            self._serve(member)
            return True

    # outages

    @property
    def outage_s(self) -> float:
        """Seconds so far in which no server was there, or all slept."""
        if self._outage_began is None:
            return self._past_outages_s
        return self._past_outages_s + asyncio.get_running_loop().time() - self._outage_began

    def _watch_outage(self) -> None:
        """The clock of an outage runs while no server is there. The fleet ends when the clock has
        run for max_outage_s in one go, unless the servers sleep."""
        out = self.reason is None and not any(member.is_there for member in self.members)
        if out and self._outage_began is None:
            self._outage_began = asyncio.get_running_loop().time()
        elif not out and self._outage_began is not None:
            self._past_outages_s, self._outage_began = self.outage_s, None
        if out and not self.asleep and self._patience is None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(self._config.max_outage_s, self._give_up)
        elif (not out or self.asleep) and self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        reasons = [f"{member.name}: {member.reason}" for member in self.members]
        self.end(
            f"no engine server was there for {self._config.max_outage_s:g} s "
            f"(engine.pool.max_outage_s): {'; '.join(reasons) or 'all were removed'}"
        )
