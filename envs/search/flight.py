"""Single flight: equal calls that are in the air at once share one fetch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Runs one fetch a key at a time; whoever asks meanwhile waits for the same one.

    A waiter that is cancelled leaves the fetch alone: others wait for it, and its result is
    cached. `close` cancels what is still in the air.
    """

    def __init__(self) -> None:
        self._flying: dict[str, asyncio.Task[T]] = {}

    async def run(self, key: str, fetch: Callable[[], Awaitable[T]]) -> T:
        """The result of `fetch`, or of an equal call's; all waiters see the same exception."""
        flight = self._flying.get(key)
        if flight is None:
            flight = asyncio.get_running_loop().create_task(_await(fetch))
            self._flying[key] = flight
            flight.add_done_callback(lambda done: self._landed(key, done))
        return await asyncio.shield(flight)

    async def close(self) -> None:
        """Cancel every fetch and wait until each is gone."""
        flights = list(self._flying.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    def _landed(self, key: str, done: asyncio.Task[T]) -> None:
        del self._flying[key]
        if not done.cancelled():
            done.exception()  # looked at: all waiters may be gone


async def _await(fetch: Callable[[], Awaitable[T]]) -> T:
    return await fetch()
