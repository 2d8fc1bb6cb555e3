"""Which server gets the next request, and who waits for one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from agentenv.engines.pool_member import Member
from agentenv.errors import EngineDeadError

MAX_SESSIONS = 65536  # whose home is remembered


class Places:
    """Hands out places on servers, first come first served.

    A session has a home, since that holds its prefixes; it goes elsewhere while its home is full
    and gets another home when it is gone. Otherwise the least loaded server is taken.
    """

    def __init__(self, usable: Callable[[], list[Member]]) -> None:
        self._usable = usable
        self._homes: OrderedDict[str, Member] = OrderedDict()
        self._waiting: deque[tuple[asyncio.Future[Member], str]] = deque()

    @property
    def num_waiting(self) -> int:
        return sum(not place.done() for place, _ in self._waiting)

    async def acquire(self, session: str) -> Member:
        """A server with room; to be given back with `release`."""
        self.dispatch()
        member = None if self._waiting else self._choose(session)
        if member is not None:
            member.in_flight += 1
            return member
        place: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        self._waiting.append((place, session))
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.release(place.result())
            raise

    def release(self, member: Member) -> None:
        member.in_flight -= 1
        self.dispatch()

    def dispatch(self) -> None:
        """Serve those who wait as far as there is room."""
        while self._waiting:
            place, session = self._waiting[0]
            if not place.done():
                member = self._choose(session)
                if member is None:
                    return
                member.in_flight += 1
                place.set_result(member)
            self._waiting.popleft()

    def end(self, reason: str) -> None:
        """All who wait raise EngineDeadError."""
        while self._waiting:
            place, _ = self._waiting.popleft()
            if not place.done():
                place.set_exception(EngineDeadError(reason))

    def _choose(self, session: str) -> Member | None:
        usable = self._usable()
        free = [member for member in usable if member.in_flight < member.limit.value]
        if not free:
            return None
        home = self._homes.get(session)
        if home in free:
            self._homes.move_to_end(session)
            return home
        chosen = min(free, key=lambda member: member.pressure)
        if home not in usable:
            self._homes[session] = chosen
            self._homes.move_to_end(session)
            if len(self._homes) > MAX_SESSIONS:
                self._homes.popitem(last=False)
        return chosen
