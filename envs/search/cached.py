"""Cache and single flight in front of a backend that others run."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from envs.search.backend import Backend, Hit, Query
from envs.search.cache import ARPO_PREFIX, ResultCache
from envs.search.flight import SingleFlight

_PAGE = re.compile(r"^Page \d+: ", re.MULTILINE)
_ARPO_NOTHING = "No search results found."


class CachedBackend:
    """Equal queries cost one call of `backend`, in this process and in all that share the cache.

    `name` tells backends in one cache apart. Only answers are cached, "no results" included;
    failures never are. Entries of ARPO's cache answer any backend's query of the same text.
    """

    def __init__(
        self, name: str, backend: Backend, cache: ResultCache, arpo_cache: Path | None = None
    ) -> None:
        self.backend = backend
        self.cache = cache
        self._name = name
        self._arpo_cache = arpo_cache
        self._flight: SingleFlight[list[Hit]] = SingleFlight()

    async def start(self) -> None:
        """Import ARPO's cache, if there is one to import, and start the backend."""
        if self._arpo_cache is not None:
            path, self._arpo_cache = self._arpo_cache, None
            await self.cache.import_arpo(path)
        await self.backend.start()

    async def search(self, query: Query) -> list[Hit]:
        """From the cache, from an equal call in the air, or from the backend."""
        key = self._key(query)
        known = self.cache.get(key)
        if known is not None:
            return msgspec.json.decode(known, type=list[Hit])
        imported = self.cache.get(ARPO_PREFIX + query.text)
        if imported is not None:
            return hits_of_arpo(imported.decode())[: query.max_results]
        return await self._flight.run(key, lambda: self._fetch(key, query))

    def knows(self, query: Query) -> bool:
        """Whether the answer is in the cache."""
        return self.cache.holds(self._key(query)) or self.cache.holds(ARPO_PREFIX + query.text)

    async def document(self, url: str) -> Hit | None:
        """The backend's own document."""
        return await self.backend.document(url)

    async def close(self) -> None:
        """Stop what is in the air and close the backend; the cache is its owner's."""
        await self._flight.close()
        await self.backend.close()

    def _key(self, query: Query) -> str:
        return msgspec.json.encode([self._name, query]).decode()

    async def _fetch(self, key: str, query: Query) -> list[Hit]:
        hits = await self.backend.search(query)
        self.cache.put(key, msgspec.json.encode(hits))
        return hits


def hits_of_arpo(text: str) -> list[Hit]:
    """The results in a text of ARPO's cache: "Page 1: snippet", "Page 2: ..." on lines."""
    if text.strip() == _ARPO_NOTHING:
        return []
    return [Hit(part.strip()) for part in _PAGE.split(text) if part.strip()]
