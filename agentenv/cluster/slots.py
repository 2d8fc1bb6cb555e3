"""Places on the servers of a pool that a controller gives to its rollout workers, which then ask
the servers themselves.

    worker   LeasedEngine.generate --Seek--> Leases   controller: EnginePool, its Fleet
                |      ^                        |
                |      +--- Serves, Seated, Standing, BreakOff
                +-- HTTP --> server
                +-- Leave ---------------------> what became of it

The fleet stays the controller's: who serves, how many requests a server gets, whose turn is next,
which weights it has. So tokens never pass through the controller, and a worker that is lost leaves
nothing but places that are free again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

from agentenv.cluster.messages import (
    BreakOff,
    Heard,
    Leave,
    OfPlace,
    Quit,
    Refused,
    Seated,
    Seek,
    Serves,
    Settled,
    Standing,
    Trouble,
    pack,
)
from agentenv.engines.pool.client import PoolClient
from agentenv.engines.pool.fleet import Fleet
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.pool.server_state import Member
from agentenv.engines.pool.slot import LISTEN_S, Hearing, Seat
from agentenv.engines.remote.server import (
    BrokenConnectionError,
    BusyError,
    ForeignWeightsError,
    Server,
    ServerLostError,
    SilentError,
)
from agentenv.errors import EngineDeadError, EngineError
from agentenv.link import Link
from agentenv.server_config import PoolConfig
from agentenv.types import Chunk, Completion, SamplingParams
from agentenv.worker_group import named, raised

TROUBLES: dict[Trouble, type[EngineError]] = {
    "foreign": ForeignWeightsError,
    "silent": SilentError,
    "broken": BrokenConnectionError,
    "lost": ServerLostError,
}


def _trouble(error: EngineError) -> Trouble:
    return next(name for name, kind in TROUBLES.items() if isinstance(error, kind))


# The worker's end.


class Lease(Seat):
    """A place on a server of the controller's pool, on which it has the number `on`."""

    def __init__(self, server: Server, config: PoolConfig, said: Seated) -> None:
        super().__init__(server, config)
        self.number, self.on = said.number, said.server
        self.on_trial = said.on_trial
        self.version = said.policy_version
        self.left = False
        self.answers: list[tuple[int, float]] = []
        self.trouble: Trouble | None = None
        self.text = ""
        self.retry_after_s = 0.0
        self.is_complete = False
        self._asleep = self._broken = False

    @property
    def policy_version(self) -> int:
        return self.version

    @property
    def asleep(self) -> bool:
        return self._asleep

    def check(self) -> None:
        super().check()
        if self._broken:
            raise ServerLostError(f"{self.name}: {self.reason}")

    def end(self, said: BreakOff) -> None:
        """The controller wants nothing of this to run any more."""
        self.reason, self._asleep, self._broken = said.reason, said.asleep, True
        self.break_off()


class Leased:
    """Seats that the controller gives. `make` makes the client of a URL."""

    def __init__(self, link: Link, config: PoolConfig, make: Callable[[str], Server]) -> None:
        self.counts: Counter[str] = Counter()  # of the client, since the controller was told
        self._link, self._config, self._make = link, config, make
        self._servers: dict[int, tuple[str, Server]] = {}
        self._sought: dict[int, asyncio.Future[Lease]] = {}
        self._held: dict[int, Lease] = {}
        self._settling: dict[int, asyncio.Future[str]] = {}
        self._numbers = count()
        self._loop = asyncio.get_running_loop()
        self._death = ""  # of the pool: its reason
        self._listening: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def hear(self, said: OfPlace) -> None:
        """What the controller says of places."""
        match said:
            case Serves():
                self._serve(said)
            case Seated():
                self._seat(said)
            case Refused():
                if (sought := self._sought.get(said.number)) and not sought.done():
                    sought.set_exception(raised(said.kind, said.text))
            case Standing():
                if lease := self._held.get(said.number):
                    lease.version = said.policy_version
                    if said.stands is not lease.standing:
                        (lease.stand if said.stands else lease.go_on)()
            case BreakOff():
                if said.is_dead:
                    self._death = said.reason
                if lease := self._held.get(said.number):
                    lease.end(said)
            case Settled():
                if (settling := self._settling.get(said.number)) and not settling.done():
                    settling.set_result(said.problem)

    def _serve(self, said: Serves) -> None:
        url, server = self._servers.get(said.server, ("", None))
        if server is None or url != said.url:
            if server is not None:
                self._close(server)
            server = self._make(said.url)
            self._servers[said.server] = said.url, server
        server.take_over(said.handed)

    def _seat(self, said: Seated) -> None:
        _, server = self._servers[said.server]
        lease = Lease(server, self._config, said)
        sought = self._sought.get(said.number)
        if sought is None or sought.done():  # nobody wants it, and the controller has been told
            return
        self._held[said.number] = lease
        sought.set_result(lease)
        if self._listening is None:
            self._listening = self._loop.call_later(LISTEN_S, self._listen)

    def _listen(self) -> None:
        self._listening = None
        for lease in self._held.values():
            lease.listen()
        if self._held:
            self._listening = self._loop.call_later(LISTEN_S, self._listen)

    def _close(self, server: Server) -> None:
        closing = asyncio.create_task(server.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Drop the connections to all servers."""
        if self._listening is not None:
            self._listening.cancel()
        await asyncio.gather(*(server.close() for _, server in self._servers.values()))
        if self._closing:
            await asyncio.wait(self._closing)

    # Seats

    def check_alive(self) -> None:
        """The controller says it where a place is sought, and of places that are held."""
        if self._death:
            raise EngineDeadError(self._death)

    async def acquire(
        self, session: str, order: tuple[int, int], avoid: Collection[Lease]
    ) -> Lease:
        number = next(self._numbers)
        sought: asyncio.Future[Lease] = self._loop.create_future()
        self._sought[number] = sought
        self._link.send(pack(Seek(number, session, order, sorted({one.on for one in avoid}))))
        try:
            return await sought
        except asyncio.CancelledError:
            if sought.done() and not sought.cancelled() and sought.exception() is None:
                self.release(sought.result())
            else:
                self._link.send(pack(Quit(number)))
            raise
        finally:
            del self._sought[number]

    def release(self, seat: Lease) -> None:
        if seat.left:
            return
        seat.left = True
        del self._held[seat.number]
        counts = dict(self.counts)
        self.counts.clear()
        self._link.send(
            pack(
                Leave(
                    seat.number,
                    seat.counts["requests"],
                    seat.counts["sampled_tokens"],
                    seat.answers,
                    counts,
                    seat.is_complete,
                    seat.trouble,
                    seat.text,
                    seat.retry_after_s,
                )
            )
        )

    def heard(self, seat: Lease, num_tokens: int) -> None:
        seat.counts["sampled_tokens"] += num_tokens
        if seat.on_trial:
            seat.on_trial = False
            self._link.send(pack(Heard(seat.number)))

    def answered(self, seat: Lease, num_tokens: int, seconds: float) -> None:
        seat.answers.append((num_tokens, seconds))

    def completed(self, seat: Lease) -> None:
        seat.is_complete = True

    def reset(self, seat: Lease, error: ServerLostError) -> None:
        seat.trouble, seat.text = "reset", str(error)

    def lose(self, seat: Lease, error: EngineError) -> None:
        seat.trouble, seat.text = _trouble(error), str(error)

    async def refuse(self, seat: Lease, error: BusyError) -> str:
        seat.trouble, seat.text, seat.retry_after_s = "full", str(error), error.retry_after_s
        settling: asyncio.Future[str] = self._loop.create_future()
        self._settling[seat.number] = settling
        self.release(seat)
        try:
            return await settling
        finally:
            del self._settling[seat.number]


class LeasedEngine:
    """The worker's Engine over the servers of the controller's pool. `hear` takes what the
    controller says of places, and whoever receives it sets `policy_version`."""

    def __init__(
        self,
        link: Link,
        make: Callable[[str], Server],
        model_path: Path,
        *,
        vocab_size: int,
        eos_ids: Collection[int],
        config: PoolConfig,
        name: str,
        seed: int | str = 0,
        entropies: Literal["all", "window"] = "all",
    ) -> None:
        """`make` makes the client of a URL; for the others see EnginePool."""
        self.policy_version = 0
        self._leased = Leased(link, config, make)
        self._client: PoolClient[Lease] = PoolClient(
            self._leased,
            model_path,
            vocab_size=vocab_size,
            eos_ids=eos_ids,
            config=config,
            name=name,
            seed=seed,
            entropies=entropies,
        )
        self._leased.counts = self._client.counts

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 1,
        order: tuple[int, int] = (0, 0),
    ) -> Completion:
        """See Engine.generate."""
        return await self._client.generate(
            prompt_ids,
            sampling,
            session=session,
            on_tokens=on_tokens,
            stream_interval=stream_interval,
            order=order,
        )

    def hear(self, said: OfPlace) -> None:
        """What the controller says of places."""
        self._leased.hear(said)

    async def load_weights(self, source: Path, policy_version: int) -> None:
        raise NotImplementedError("the controller loads weights")

    def stats(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """Drop the connections; the servers go on."""
        await self._leased.close()


# The controller's end.


class _Wait:
    """Time in which a server changes its weights, told to the worker."""

    def __init__(self, link: Link, number: int, member: Member) -> None:
        self._link, self._number, self._member = link, number, member

    def _tell(self, stands: bool) -> None:
        version = self._member.policy_version
        self._link.send(pack(Standing(self._number, stands, version)))
        self._link.flush()  # tokens of these weights come by another way, and soon

    def begin(self) -> None:
        self._tell(True)

    def end(self) -> None:
        self._tell(False)


class _Listens(Hearing):
    """Of a request of a worker, which listens itself."""

    def __init__(self, wait: _Wait) -> None:
        self.wait = wait  # type: ignore[assignment]

    def is_lost(self, config: PoolConfig) -> bool:
        return False


class _Held(asyncio.Future[None]):
    """A place that a worker has; done when it is free again. To cancel it is to ask the worker to
    end what runs there."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        link: Link,
        number: int,
        member: Member,
        fleet: Fleet,
    ) -> None:
        super().__init__(loop=loop)
        self.number, self.member = number, member
        self.is_over = False  # the worker was asked to
        self._link, self._fleet = link, fleet

    def cancel(self, msg: object = None) -> bool:
        if self.done():
            return False
        self.is_over = True
        reason = self.member.reason or "its weights are in doubt"
        is_dead = self._fleet.reason is not None
        self._link.send(pack(BreakOff(self.number, reason, self.member.asleep, is_dead)))
        return True


class Leases:
    """The places of one worker on the servers of a pool."""

    def __init__(self, pool: EnginePool, link: Link) -> None:
        self._pool, self._link = pool, link
        self._loop = asyncio.get_running_loop()
        self._known: dict[int, int] = {}  # connections of a server that the worker knows of
        self._sought: dict[int, asyncio.Future[Member]] = {}
        self._held: dict[int, _Held] = {}

    @property
    def num_held(self) -> int:
        """Places that the worker has."""
        return len(self._held)

    def hear(self, told: Seek | Heard | Leave) -> None:
        """What the worker says of places."""
        match told:
            case Seek():
                self._seek(told)
            case Heard():
                if held := self._held.get(told.number):
                    self._pool.fleet.heard(held.member, 0)
            case Leave():
                counts = self._pool.client.counts
                for name, number in told.counts.items():  # half the time of Counter.update
                    counts[name] += number
                if held := self._held.get(told.number):
                    self._settle(held, told)
                    self._free(held)

    def quit(self, number: int) -> None:
        """The worker does not want that place any more, if it has asked for one."""
        if held := self._held.get(number):
            self._free(held)
        elif number in self._sought:
            self._forget(number)

    def close(self) -> None:
        """The worker is gone, and with it what it had on servers."""
        for number in list(self._sought):
            self._forget(number)
        for held in list(self._held.values()):
            self._free(held)

    def _seek(self, asked: Seek) -> None:
        fleet = self._pool.fleet
        try:
            fleet.check_alive()
        except EngineDeadError as error:
            return self._refuse(asked.number, error)
        avoid = [one for one in fleet.members if one.number in asked.avoid] if asked.avoid else ()
        place = fleet.places.seek(asked.session, asked.order, avoid)
        if isinstance(place, Member):
            self._seat(asked.number, place)
        else:
            self._sought[asked.number] = place
            place.add_done_callback(partial(self._found, asked))

    def _found(self, asked: Seek, place: asyncio.Future[Member]) -> None:
        """A place that was waited for."""
        is_wanted = self._sought.pop(asked.number, None) is not None
        if place.cancelled():
            return
        error = place.exception()
        if error is not None:
            return self._refuse(asked.number, error)
        member = place.result()
        if is_wanted and not member.asleep:  # since the place was given
            return self._seat(asked.number, member)
        self._pool.fleet.release(member)
        if is_wanted:
            self._seek(asked)

    def _forget(self, number: int) -> None:
        """If a place has just been given, `_found` gives it back."""
        self._sought.pop(number).cancel()

    def _refuse(self, number: int, error: BaseException) -> None:
        self._link.send(pack(Refused(number, *named(error), is_final=False)))

    def _seat(self, number: int, member: Member) -> None:
        held = _Held(self._loop, self._link, number, member, self._pool.fleet)
        self._held[number] = held
        wait = _Wait(self._link, number, member)
        member.attempts[held] = _Listens(wait)
        member.guests.add(held)
        if self._known.get(member.number) != member.epoch:
            self._known[member.number] = member.epoch
            url, handed = member.server.url, member.server.handed()
            self._link.send(pack(Serves(member.number, url, handed)))
        self._link.send(pack(Seated(number, member.number, member.policy_version, member.on_trial)))
        if member.standing:
            wait.begin()

    def _free(self, held: _Held) -> None:
        """The place may be given to others."""
        del self._held[held.number], held.member.attempts[held]
        held.member.guests.discard(held)
        held.set_result(None)
        self._pool.fleet.release(held.member)

    def _settle(self, held: _Held, left: Leave) -> None:
        """What the requests of a worker say of the server. Of what ended since it was broken off
        nothing is new; the server may be back by the time the worker says it."""
        fleet, member = self._pool.fleet, held.member
        member.counts["requests"] += left.num_requests
        member.counts["sampled_tokens"] += left.num_tokens
        if left.num_tokens and left.trouble is None and not held.is_over:
            fleet.heard(member, 0)
        for num_tokens, seconds in left.answers:
            fleet.answered(member, num_tokens, seconds)
        if left.trouble == "full":
            error = BusyError(left.text, left.retry_after_s)
            problem = fleet.close_for_a_while(member, error)
            self._link.send(pack(Settled(left.number, problem)))
        elif left.trouble == "reset":
            fleet.reset(member, BrokenConnectionError(left.text))
        elif left.trouble is not None:
            lost = TROUBLES[left.trouble](left.text)
            if held.is_over:
                member.count_loss(lost)
            else:
                fleet.lose(member, lost)
        elif left.is_complete:
            fleet.completed(member)
