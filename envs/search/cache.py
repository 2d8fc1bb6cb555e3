"""The cache in front of an external search backend, and ARPO's cache, which it imports."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from agentenv.base.errors import DataError, ForeignError
from agentenv.base.offload import in_thread
from agentenv.base.result_cache import ResultCache
from agentenv.base.untrusted import decode, decode_text
from agentenv.contract.env import summed_stats
from agentenv.envs.search.corpus import Backend, Hit, Query

ARPO_PREFIX = "arpo:"  # prefix of the keys of entries imported from ARPO's search_cache.json
_PAGE = re.compile(r"^Page \d+: ", re.MULTILINE)
_ARPO_NOTHING = "No search results found."


@dataclass(eq=False)
class CachedBackend:
    """Caches a backend: equal queries need one call of `backend`, over all processes that share the
    cache.

    `name` identifies the backend in the cache; `lasts`: the name means the same in other runs. Only
    answers are cached, including "no results"; failures are not. Entries of ARPO's cache answer
    equal queries of any backend.
    """

    name: str
    backend: Backend
    cache: ResultCache
    arpo_cache: Path | None = None
    lasts: bool = field(default=True, kw_only=True)

    async def start(self) -> None:
        """Import ARPO's cache, if there is one to import, and start the backend."""
        if self.arpo_cache is not None:
            path, self.arpo_cache = self.arpo_cache, None
            texts = await in_thread(read_arpo_cache, path)
            for query, text in texts.items():
                self.cache.put(ARPO_PREFIX + query, text.encode())
        await self.backend.start()

    async def search(self, query: Query) -> list[Hit]:
        """Search in the cache, by an equal running call, or by the backend."""
        key, imported = self._key(query), ARPO_PREFIX + query.text
        if not self.cache.holds(key) and self.cache.holds(imported):
            text = self.cache.get(imported, decode_text)
            if text is not None:
                return hits_of_arpo(text)[: query.max_results]

        async def fetch() -> bytes:
            return msgspec.json.encode(await self.backend.search(query))

        through, kind = self.cache.through, list[Hit]
        return await through(key, fetch, lambda data: decode(data, kind), lasts=self.lasts)

    async def document(self, url: str) -> Hit | None:
        """The backend's own document."""
        return await self.backend.document(url)

    def stats(self) -> dict[str, float]:
        """The counters of the backend; the owner of the cache reports those of the cache."""
        return summed_stats([self.backend])

    async def close(self) -> None:
        """Close the backend; the cache belongs to its owner."""
        await self.backend.close()

    def _key(self, query: Query) -> str:
        return msgspec.json.encode([self.name, query]).decode()


def read_arpo_cache(path: Path) -> dict[str, str]:
    """The entries of ARPO's search_cache.json, query -> text. Raises DataError, naming the file."""
    try:
        return decode(path.read_bytes(), dict[str, str])
    except OSError as error:
        raise DataError(f"search cache {path} cannot be read: {error.strerror}") from error
    except ForeignError as error:
        raise DataError(
            f"search cache {path}: {error}; expected one JSON object, query -> result text"
        ) from error


def hits_of_arpo(text: str) -> list[Hit]:
    """The results in a text of ARPO's cache, with lines "Page 1: snippet", "Page 2: ..."."""
    if text.strip() == _ARPO_NOTHING:
        return []
    return [Hit(part.strip()) for part in _PAGE.split(text) if part.strip()]
