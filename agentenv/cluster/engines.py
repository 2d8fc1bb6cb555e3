"""The engine of a rollout worker: the controller's engine, over their link.

The engine is a pool of servers: the controller grants slots on them, and the worker asks the
servers itself.

    worker   LeasedEngine.generate --Acquire--> Leases   controller: EnginePool
                |      ^                        |
                |      +--- Granted, Standing, BreakOff
                +-- HTTP --> server
                +-- Release ---------------------> the outcome

The pool stays the controller's: which server serves, how many requests it gets, which turn is next,
which weights it has. So tokens never pass through the controller, and a worker that is lost leaves
nothing but slots that are free again.

Any other engine, and servers that only one process may ask (PooledEngineConfig.is_shared), sample
in the controller:

    worker   LinkedEngine.generate --Sample-->  Turns   controller: one coroutine a turn
                  ^                                |
                  +--- Tokens, Stand, Turn, Refused
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from agentenv.cluster.messages import (
    Acquire,
    BreakOff,
    FirstToken,
    Granted,
    OfPlace,
    Quit,
    Refused,
    Release,
    Sample,
    Stand,
    Standing,
    Tokens,
    Turn,
    pack,
)
from agentenv.deadline import ReportingClock, Wait, work_clock, working
from agentenv.engine import Engine
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.pool.server import Aborted, Busy, Lost, Outcome, PooledServer, Reset, Slot
from agentenv.engines.pool.turn import TurnEngine
from agentenv.engines.remote import ServerLostError
from agentenv.engines.remote.weight_sync import Server
from agentenv.errors import EngineDeadError, EngineError
from agentenv.link import Link
from agentenv.tree import Prefix, packed_ids
from agentenv.types import Chunk, Completion, SamplingParams
from agentenv.worker_group import named, raised


class _Pending:
    """A requested turn."""

    def __init__(self, on_tokens: Callable[[Chunk], None] | None) -> None:
        self.done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.on_tokens = on_tokens
        self.wait = Wait()
        self.clock = work_clock()


class LinkedEngine:
    """The worker's end, an Engine. `hear` takes the controller's messages about turns; their
    receiver sets `policy_version`."""

    def __init__(self, link: Link) -> None:
        self.policy_version = 0
        self._link = link
        self._pending: dict[int, _Pending] = {}
        self._num_asked = 0

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
        number = self._num_asked = self._num_asked + 1
        ids = prompt_ids.joined() if isinstance(prompt_ids, Prefix) else packed_ids(prompt_ids)
        listens = on_tokens is not None
        pending = self._pending[number] = _Pending(on_tokens)
        self._link.send(
            pack(Sample(number, ids.tobytes(), sampling, session, listens, stream_interval, order))
        )
        try:
            return await pending.done
        except asyncio.CancelledError:
            self._link.send(pack(Quit(number)))
            raise
        finally:
            pending.wait.end()
            del self._pending[number]

    def hear(self, said: Tokens | Stand | Turn | Refused) -> None:
        """Handle a message about a turn; ignored if the turn is not wanted any more."""
        pending = self._pending.get(said.number)
        if pending is None or pending.done.done():
            return
        match said:
            case Tokens():
                assert pending.on_tokens is not None
                pending.on_tokens(said.chunk)
            case Stand():
                (pending.wait.begin if said.stands else pending.wait.end)()
                if said.lost_s and pending.clock is not None:
                    pending.clock.lose(said.lost_s)
            case Turn():
                pending.done.set_result(said.completion)
            case Refused():
                error = raised(said.kind, said.text)
                if isinstance(error, EngineError) and said.is_final:
                    error.is_final = True
                pending.done.set_exception(error)

    async def load_weights(self, source: Path, policy_version: int) -> None:
        raise NotImplementedError("the controller loads weights")

    def stats(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """The engine itself goes on."""


class Turns:
    """The controller's end: the turns that one worker has asked for."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self._engine, self._link = engine, link
        self._running: dict[int, asyncio.Task[None]] = {}

    def sample(self, asked: Sample) -> None:
        """Begin a turn."""
        self._running[asked.number] = asyncio.create_task(self._sample(asked))

    def quit(self, number: int) -> None:
        """Abort a turn, if it runs."""
        if number in self._running:
            self._running[number].cancel()

    async def close(self) -> None:
        """Abort all turns."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self, asked: Sample) -> None:
        said: Turn | Refused
        clock = ReportingClock(partial(self._stand, asked.number))
        try:
            with working(clock):
                completion = await self._engine.generate(
                    memoryview(asked.prompt).cast("i").tolist(),
                    asked.sampling,
                    session=asked.session,
                    on_tokens=partial(self._tokens, asked.number) if asked.listens else None,
                    stream_interval=asked.stream_interval,
                    order=asked.order,
                )
                clock.report = None
            said = Turn(asked.number, completion)
        except Exception as error:  # the rollout raises it
            said = Refused(asked.number, *named(error), is_final=getattr(error, "is_final", False))
        finally:
            clock.report = None
            del self._running[asked.number]
        self._link.send(pack(said))

    def _tokens(self, number: int, chunk: Chunk) -> None:
        self._link.send(pack(Tokens(number, chunk)))

    def _stand(self, number: int, stands: bool, lost_s: float) -> None:
        self._link.send(pack(Stand(number, stands, lost_s)))


# The worker's end.


class Lease(Slot):
    """A slot on a server of the controller's pool, on which it has the number `on`."""

    def __init__(self, link: Link, client: Server, said: Granted) -> None:
        super().__init__(client)
        self.number, self.on, self.on_trial = said.number, said.server, said.on_trial
        self.version = said.policy_version
        self.answers: list[tuple[int, float]] = []
        self.end: BreakOff | None = None  # the controller wants nothing of this to run any more
        self._link = link

    @property
    def policy_version(self) -> int:
        return self.version

    @property
    def is_asleep(self) -> bool:
        return self.end is not None and self.end.asleep

    def closed(self) -> Outcome | None:
        if self.end is None or self.end.asleep:
            return super().closed()
        return Lost(ServerLostError.kind, f"{self.name}: {self.reason}")

    def break_off(self, said: BreakOff) -> None:
        self.reason, self.end = said.reason, said
        self.abort_all()

    def pass_trial(self) -> None:
        super().pass_trial()
        self._link.send(pack(FirstToken(self.number)))

    def answer(self, num_tokens: int, seconds: float) -> None:
        self.answers.append((num_tokens, seconds))


class LeasedEngine(TurnEngine[Lease]):
    """The worker's Engine over the servers of the controller's pool. `hear` takes the controller's
    messages on slots, and their receiver sets `policy_version`."""

    def __init__(
        self, link: Link, make: Callable[[str], Server], model_path: Path, **options: Any
    ) -> None:
        """`make` makes the client of a URL; `options`: see TurnEngine. `counts` are those since the
        controller has them."""
        super().__init__(model_path, **options)
        self.policy_version = 0
        self._link, self._make = link, make
        self._clients: dict[int, tuple[bytes, Server]] = {}  # with what each has taken over
        self._sought: dict[int, asyncio.Future[Lease]] = {}
        self._held: dict[int, Lease] = {}
        self._numbers = count()
        self._loop = asyncio.get_running_loop()
        self._death = ""  # of the pool: its reason

    def hear(self, said: OfPlace) -> None:
        """A message of the controller."""
        lease = self._held.get(said.number)
        match said:
            case Granted():
                self._take(said)
            case Refused():
                if (sought := self._sought.get(said.number)) and not sought.done():
                    sought.set_exception(raised(said.kind, said.text))
            case Standing() if lease:
                lease.version = said.policy_version
                if said.stands is not lease.is_paused:
                    (lease.pause if said.stands else lease.resume)()
            case BreakOff():
                if said.is_dead:
                    self._death = said.reason
                if lease:
                    lease.break_off(said)

    def _take(self, said: Granted) -> None:
        handed, client = self._clients.get(said.server, (None, None))
        client = client or self._make(said.url)
        if handed != said.handed:  # the first time, and after each connection
            client.take_over(said.handed)
            self._clients[said.server] = said.handed, client
        sought = self._sought.get(said.number)
        if sought is None or sought.done():  # nobody wants it, as the controller will know
            return
        self._held[said.number] = lease = Lease(self._link, client, said)
        sought.set_result(lease)

    # turns

    def check_alive(self) -> None:
        """The controller reports it where a slot is sought, and of slots that are held."""
        if self._death:
            raise EngineDeadError(self._death)

    async def acquire(
        self, session: str, order: tuple[int, int], avoid: Collection[Lease]
    ) -> Lease:
        number = next(self._numbers)
        sought: asyncio.Future[Lease] = self._loop.create_future()
        self._sought[number] = sought
        self._link.send(pack(Acquire(number, session, order, sorted({one.on for one in avoid}))))
        try:
            return await sought
        except asyncio.CancelledError:
            if sought.done() and not sought.cancelled() and sought.exception() is None:
                self.release(sought.result(), Aborted())
            else:
                self._link.send(pack(Quit(number)))
            raise
        finally:
            del self._sought[number]

    def release(self, slot: Lease, outcome: Outcome) -> Outcome:
        if self._death:
            outcome = Aborted()
        del self._held[slot.number]
        counts = dict(self.counts)
        self.counts.clear()
        left = Release(
            slot.number, slot.num_requests, slot.num_tokens, slot.answers, counts, outcome
        )
        self._link.send(pack(left))
        return outcome

    async def load_weights(self, source: Path, policy_version: int) -> None:
        raise NotImplementedError("the controller loads weights")

    def stats(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """Drop the connections; the servers go on."""
        await asyncio.gather(*(client.close() for _, client in self._clients.values()))


# The controller's end.


class _Held(asyncio.Future[None]):
    """A slot that a worker has; done when it is free again. To cancel it is to ask the worker to
    end its requests, to begin and to end it tells the worker of a pause of the server."""

    def __init__(self, pool: EnginePool, link: Link, number: int, server: PooledServer) -> None:
        super().__init__()
        self.number, self.server = number, server
        self.is_over = False  # the worker was asked to end
        self._link, self._pool = link, pool

    def cancel(self, msg: object = None) -> bool:
        if self.done():
            return False
        self.is_over = True
        reason = self.server.reason or "its weight version is uncertain"
        is_dead = self._pool.reason is not None
        self._link.send(pack(BreakOff(self.number, reason, self.server.is_asleep, is_dead)))
        return True

    def begin(self) -> None:
        self._report(True)

    def end(self) -> None:
        self._report(False)

    def _report(self, stands: bool) -> None:
        self._link.send(pack(Standing(self.number, stands, self.server.policy_version)))
        self._link.flush()  # tokens of these weights come by another way, and soon


class Leases:
    """The slots of one worker on the servers of a pool."""

    def __init__(self, pool: EnginePool, link: Link) -> None:
        self._pool, self._link = pool, link
        self._sought: dict[int, asyncio.Future[PooledServer]] = {}
        self._held: dict[int, _Held] = {}

    def hear(self, said: Acquire | FirstToken | Release) -> None:
        """A message of the worker."""
        if isinstance(said, Acquire):
            return self._seek(said)
        held = self._held.get(said.number)
        if isinstance(said, Release):
            for name, number in said.counts.items():  # half the time of Counter.update
                self._pool.counts[name] += number
            if held:
                self._settle(held, said)
                self._free(held)
        elif held:
            held.server.receive(0)

    def quit(self, number: int) -> None:
        """The worker does not want that slot any more, if it has asked for one."""
        if held := self._held.get(number):
            self._free(held)
        elif number in self._sought:
            self._forget(number)

    def close(self) -> None:
        """The worker is gone, and with it its requests."""
        for number in list(self._sought):
            self._forget(number)
        for held in list(self._held.values()):
            self._free(held)

    def _seek(self, asked: Acquire) -> None:
        pool = self._pool
        try:
            pool.check_alive()
        except EngineDeadError as error:
            return self._refuse(asked.number, error)
        avoid = [one for one in pool.servers if one.number in asked.avoid] if asked.avoid else ()
        slot = pool.queue.seek(asked.session, asked.order, avoid)
        if isinstance(slot, PooledServer):
            self._grant(asked.number, slot)
        else:
            self._sought[asked.number] = slot
            slot.add_done_callback(partial(self._found, asked))

    def _found(self, asked: Acquire, slot: asyncio.Future[PooledServer]) -> None:
        """A slot that was waited for."""
        is_wanted = self._sought.pop(asked.number, None) is not None
        if slot.cancelled():
            return
        error = slot.exception()
        if error is not None:
            return self._refuse(asked.number, error)
        server = slot.result()
        if is_wanted and not server.is_asleep:  # since the slot was given
            return self._grant(asked.number, server)
        self._pool.queue.free(server)
        if is_wanted:
            self._seek(asked)

    def _forget(self, number: int) -> None:
        """If a slot was just granted, `_found` releases it."""
        self._sought.pop(number).cancel()

    def _refuse(self, number: int, error: BaseException) -> None:
        self._link.send(pack(Refused(number, *named(error), is_final=False)))

    def _grant(self, number: int, server: PooledServer) -> None:
        held = self._held[number] = _Held(self._pool, self._link, number, server)
        client, version = server.client, server.policy_version
        granted = Granted(
            number, server.number, client.url, client.handed(), version, server.on_trial
        )
        self._link.send(pack(granted))
        server.guests.add(held)
        server.run(held, held)

    def _free(self, held: _Held) -> None:
        """The slot may be given to others."""
        del self._held[held.number], held.server.running[held]
        held.server.guests.discard(held)
        held.set_result(None)
        self._pool.queue.free(held.server)

    def _settle(self, held: _Held, left: Release) -> None:
        """Judge the server by the requests of a worker. Of what ended since it was aborted
        nothing is new; the server may be back by the time the worker reports it."""
        server, outcome = held.server, left.outcome
        server.num_requests += left.num_requests
        server.num_tokens += left.num_tokens
        if left.num_tokens and not isinstance(outcome, Busy | Reset | Lost) and not held.is_over:
            server.receive(0)
        for num_tokens, seconds in left.answers:
            server.answer(num_tokens, seconds)
        self._pool.settle(server, outcome, is_late=held.is_over)
