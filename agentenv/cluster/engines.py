"""The engine of a rollout worker: the controller's engine, over their link.

If the engine is a pool of servers, the controller grants slots, and the worker sends its requests
to the servers directly.

    worker   LeasedEngine.generate --Acquire--> Leases   controller: EnginePool
                |      ^                        |
                |      +--- Granted, ServerPause, SlotAbort
                +-- HTTP --> server
                +-- SlotRelease -----------------> the outcome

The controller manages the pool: the choice of servers, their load, the order of turns, and the
weights. So tokens never pass through the controller, and a lost worker only leaves slots, which
become free again.

Any other engine, and servers that only one process may use (PooledEngineConfig.is_shared), are
called by the controller:

    worker   LinkedEngine.generate --SampleTurn-->  Turns   controller: one coroutine per turn
                  ^                                   |
                  +--- Tokens, TurnPause, SampledTurn, Refused
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from agentenv.base.deadline import ReportingClock, cancel_all, waiting, work_clock, working
from agentenv.base.errors import EngineDeadError, EngineError
from agentenv.base.tree import Prefix, packed_ids
from agentenv.base.types import Chunk, Completion, SamplingParams
from agentenv.cluster.messages import (
    Acquire,
    Granted,
    OfPlace,
    Quit,
    Refused,
    SampledTurn,
    SampleTurn,
    ServerPause,
    SlotAbort,
    SlotRelease,
    Tokens,
    TurnPause,
    pack,
)
from agentenv.contract.engine import Engine
from agentenv.contract.request import ServerLostError
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.pool.server import Aborted, Lost, Outcome, PooledServer, Slot
from agentenv.engines.pool.turn import TurnEngine
from agentenv.engines.remote.weight_sync import Server
from agentenv.processes.link import Link
from agentenv.processes.worker_group import named, raised


class _Pending:
    """A requested turn."""

    def __init__(self, on_tokens: Callable[[Chunk], None] | None) -> None:
        self.done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.on_tokens = on_tokens
        self.wait = waiting()
        self.clock = work_clock()


class LinkedEngine(Engine):
    """The worker's end, an Engine. `handle` takes the controller's messages about turns; the
    receiver of messages sets `policy_version`."""

    policy_version = 0

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pending: dict[int, _Pending] = {}
        self._num_requests = 0

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
        number = self._num_requests = self._num_requests + 1
        ids = prompt_ids.joined() if isinstance(prompt_ids, Prefix) else packed_ids(prompt_ids)
        listens = on_tokens is not None
        pending = self._pending[number] = _Pending(on_tokens)
        turn = SampleTurn(number, ids.tobytes(), sampling, session, listens, stream_interval, order)
        self._link.send(pack(turn))
        try:
            return await pending.done
        except asyncio.CancelledError:
            self._link.send(pack(Quit(number)))
            raise
        finally:
            pending.wait.end()
            del self._pending[number]

    def handle(self, message: Tokens | TurnPause | SampledTurn | Refused) -> None:
        """Handle a message about a turn; ignored if the turn was cancelled."""
        pending = self._pending.get(message.number)
        if pending is None or pending.done.done():
            return
        match message:
            case Tokens():
                assert pending.on_tokens is not None
                pending.on_tokens(message.chunk)
            case TurnPause():
                (pending.wait.begin if message.is_paused else pending.wait.end)()
                if message.lost_s and pending.clock is not None:
                    pending.clock.discard_last(message.lost_s)
            case SampledTurn():
                pending.done.set_result(message.completion)
            case Refused():
                error = raised(message.kind, message.text)
                if isinstance(error, EngineError) and message.is_final:
                    error.is_final = True
                pending.done.set_exception(error)


class Turns:
    """The controller's end: the requested turns of one worker."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self._engine, self._link = engine, link
        self._running: dict[int, asyncio.Task[None]] = {}

    def sample(self, request: SampleTurn) -> None:
        """Begin a turn."""
        self._running[request.number] = asyncio.create_task(self._sample(request))

    def quit(self, number: int) -> None:
        """Abort a turn, if it is running."""
        if number in self._running:
            self._running[number].cancel()

    async def close(self) -> None:
        """Abort all turns."""
        await cancel_all(self._running.values())

    async def _sample(self, request: SampleTurn) -> None:
        message: SampledTurn | Refused
        number, send = request.number, self._link.send
        clock = ReportingClock(
            lambda is_paused, lost_s: send(pack(TurnPause(number, is_paused, lost_s)))
        )
        try:
            with working(clock):
                completion = await self._engine.generate(
                    memoryview(request.prompt).cast("i").tolist(),
                    request.sampling,
                    session=request.session,
                    on_tokens=(lambda chunk: send(pack(Tokens(number, chunk))))
                    if request.listens
                    else None,
                    stream_interval=request.stream_interval,
                    order=request.order,
                )
                clock.report = None
            message = SampledTurn(number, completion)
        except Exception as error:  # the rollout raises it
            is_final = getattr(error, "is_final", False)
            message = Refused(number, *named(error), is_final=is_final)
        finally:
            clock.report = None
            del self._running[number]
        send(pack(message))


# The worker's end.


class Lease(Slot):
    """A slot on server number `on` of the controller's pool."""

    def __init__(self, client: Server, message: Granted) -> None:
        super().__init__(client)
        self.number, self.on = message.number, message.server
        client.policy_version = message.policy_version
        self.end: SlotAbort | None = None  # set when the controller has aborted the slot

    @property
    def is_asleep(self) -> bool:
        return self.end is not None and self.end.is_asleep

    def closed(self) -> Outcome | None:
        if self.end is None or self.end.is_asleep:
            return super().closed()
        return Lost(ServerLostError.kind, f"{self.name}: {self.reason}")

    def abort(self, message: SlotAbort) -> None:
        self.reason, self.end = message.reason, message
        self.abort_all()


class LeasedEngine(TurnEngine[Lease]):
    """The worker's Engine on the servers of the controller's pool. `handle` takes the controller's
    messages about slots; the receiver of messages sets `policy_version`."""

    def __init__(
        self, link: Link, make: Callable[[str], Server], model_path: Path, **options: Any
    ) -> None:
        """`make` creates the client of a URL; `options`: see TurnEngine. `counts` are those since
        the last report to the controller."""
        super().__init__(model_path, **options)
        self._link, self._make = link, make
        self._clients: dict[int, tuple[bytes, Server]] = {}  # (connection data, client)
        self._waiting: dict[int, asyncio.Future[Lease]] = {}
        self._held: dict[int, Lease] = {}
        self._numbers = count()
        self._loop = asyncio.get_running_loop()
        self._death = ""  # the reason of the pool's end

    def handle(self, message: OfPlace) -> None:
        """Handle a message of the controller."""
        lease = self._held.get(message.number)
        match message:
            case Granted():
                self._take(message)
            case Refused():
                if (waiting := self._waiting.get(message.number)) and not waiting.done():
                    waiting.set_exception(raised(message.kind, message.text))
            case ServerPause() if lease:
                lease.client.policy_version = message.policy_version
                if message.is_paused is not lease.is_paused:
                    (lease.pause if message.is_paused else lease.resume)()
            case SlotAbort():
                if message.is_dead:
                    self._death = message.reason
                if lease:
                    lease.abort(message)

    def _take(self, message: Granted) -> None:
        handed, client = self._clients.get(message.server, (None, None))
        client = client or self._make(message.url)
        if handed != message.handed:  # the first time, and after each reconnection
            client.take_over(message.handed)
            self._clients[message.server] = message.handed, client
        waiting = self._waiting.get(message.number)
        if waiting is None or waiting.done():  # cancelled, as the controller will learn
            return
        self._held[message.number] = lease = Lease(client, message)
        waiting.set_result(lease)

    # turns

    def check_alive(self) -> None:
        """Raises EngineDeadError after the controller has reported the end of the pool."""
        if self._death:
            raise EngineDeadError(self._death)

    def acquire(
        self, session: str, order: tuple[int, int], avoid: Collection[Lease]
    ) -> asyncio.Future[Lease]:
        number = next(self._numbers)
        waiting: asyncio.Future[Lease] = self._loop.create_future()
        self._waiting[number] = waiting
        waiting.add_done_callback(partial(self._end_wait, number))
        self._link.send(pack(Acquire(number, session, order, sorted({one.on for one in avoid}))))
        return waiting

    def _end_wait(self, number: int, waiting: asyncio.Future[Lease]) -> None:
        del self._waiting[number]
        if waiting.cancelled():
            self._link.send(pack(Quit(number)))

    def release(self, slot: Lease, outcome: Outcome) -> Outcome:
        if self._death:
            outcome = Aborted()
        del self._held[slot.number]
        counts = dict(self.counts)
        self.counts.clear()
        left = SlotRelease(
            slot.number, slot.num_requests, slot.num_answered, slot.num_tokens, counts, outcome
        )
        self._link.send(pack(left))
        return outcome

    async def close(self) -> None:
        """Drop the connections; the servers continue."""
        await asyncio.gather(*(client.close() for _, client in self._clients.values()))


# The controller's end.


class _Held(asyncio.Future[None]):
    """A slot that a worker holds; done when it is free again. `cancel` requests that the worker
    aborts its requests; `begin` and `end` announce a pause of the server."""

    def __init__(self, pool: EnginePool, link: Link, number: int, server: PooledServer) -> None:
        super().__init__()
        self.number, self.server = number, server
        self.is_over = False  # a SlotAbort was sent
        self._link, self._pool = link, pool

    def cancel(self, msg: object = None) -> bool:
        if self.done():
            return False
        self.is_over = True
        reason = self.server.reason or "its weight version is uncertain"
        is_dead = self._pool.reason is not None
        self._link.send(pack(SlotAbort(self.number, reason, self.server.is_asleep, is_dead)))
        return True

    def begin(self) -> None:
        self._report(True)

    def end(self) -> None:
        self._report(False)

    def _report(self, is_paused: bool) -> None:
        self._link.send(pack(ServerPause(self.number, is_paused, self.server.policy_version)))
        self._link.flush()  # tokens of these weights arrive soon, on another connection


class Leases:
    """The slots of one worker on the servers of a pool."""

    def __init__(self, pool: EnginePool, link: Link) -> None:
        self._pool, self._link = pool, link
        self._waiting: dict[int, asyncio.Future[PooledServer]] = {}
        self._held: dict[int, _Held] = {}

    def handle(self, message: Acquire | SlotRelease) -> None:
        """Handle a message of the worker."""
        if isinstance(message, Acquire):
            return self._seek(message)
        for name, number in message.counts.items():  # twice as fast as Counter.update
            self._pool.counts[name] += number
        if held := self._held.get(message.number):
            self._settle(held, message)
            self._free(held)

    def quit(self, number: int) -> None:
        """The worker has cancelled its request for a slot."""
        if held := self._held.get(number):
            self._free(held)
        elif number in self._waiting:
            self._forget(number)

    def close(self) -> None:
        """Free all slots of a worker that is gone."""
        for number in list(self._waiting):
            self._forget(number)
        for held in list(self._held.values()):
            self._free(held)

    def _seek(self, request: Acquire) -> None:
        pool = self._pool
        try:
            pool.check_alive()
        except EngineDeadError as error:
            return self._refuse(request.number, error)
        avoid = [one for one in pool.servers if one.number in request.avoid]
        slot = pool.queue.seek(request.session, request.order, avoid)
        self._waiting[request.number] = slot
        slot.add_done_callback(partial(self._found, request))

    def _found(self, request: Acquire, slot: asyncio.Future[PooledServer]) -> None:
        """A slot has become available."""
        is_wanted = self._waiting.pop(request.number, None) is not None
        if slot.cancelled():
            return
        error = slot.exception()
        if error is not None:
            return self._refuse(request.number, error)
        server = slot.result()
        if is_wanted and server.serving:  # it may have left meanwhile
            return self._grant(request.number, server)
        self._pool.queue.free(server)
        if is_wanted:
            self._seek(request)

    def _forget(self, number: int) -> None:
        """Cancel a wait for a slot; if it was just granted, `_found` releases it."""
        self._waiting.pop(number).cancel()

    def _refuse(self, number: int, error: BaseException) -> None:
        self._link.send(pack(Refused(number, *named(error), is_final=False)))

    def _grant(self, number: int, server: PooledServer) -> None:
        held = self._held[number] = _Held(self._pool, self._link, number, server)
        client, version = server.client, server.policy_version
        granted = Granted(number, server.number, client.url, client.handed(), version)
        self._link.send(pack(granted))
        server.guests.add(held)
        server.run(held, held)

    def _free(self, held: _Held) -> None:
        """Make the slot available to others."""
        del self._held[held.number], held.server.running[held]
        held.server.guests.discard(held)
        held.set_result(None)
        self._pool.queue.free(held.server)

    def _settle(self, held: _Held, left: SlotRelease) -> None:
        """Update the state of the server from a worker's requests. Results after an abort are
        ignored for its state, since the server may have restarted meanwhile."""
        server, outcome = held.server, left.outcome
        server.num_requests += left.num_requests
        server.num_answered += left.num_answered
        server.num_tokens += left.num_tokens
        self._pool.settle(server, outcome, is_late=held.is_over)
