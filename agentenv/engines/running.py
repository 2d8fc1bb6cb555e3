"""The requests that a client has on a server, each of which it can break off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Running:
    """By request id; those without a token so far are `unstarted`."""

    def __init__(self) -> None:
        self.unstarted: set[str] = set()
        self._timeouts: dict[str, asyncio.Timeout] = {}
        self._on_purpose: set[str] = set()

    @property
    def ids(self) -> list[str]:
        return list(self._timeouts)

    @contextmanager
    def watch(self, request_id: str) -> Iterator[asyncio.Timeout]:
        """To be entered as `async with`; it expires when the request is broken off."""
        timeout = asyncio.timeout(None)
        self._timeouts[request_id] = timeout
        self.unstarted.add(request_id)
        try:
            yield timeout
        finally:
            self.unstarted.discard(request_id)
            self._on_purpose.discard(request_id)
            del self._timeouts[request_id]

    def break_off(self, request_ids: Iterable[str], *, on_purpose: bool = False) -> None:
        """End these. `on_purpose`: nothing is wrong, they may be sent again at once."""
        now = asyncio.get_running_loop().time()
        for each in request_ids:
            if self._timeouts[each].when() is None:
                self._timeouts[each].reschedule(now)
                if on_purpose:
                    self._on_purpose.add(each)

    def was_on_purpose(self, request_id: str) -> bool:
        return request_id in self._on_purpose
