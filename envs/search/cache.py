"""The shared cache of tool results: SQLite in WAL mode behind an in-memory LRU.

Many processes may share one file. Reads take some 0.1 ms and never wait for writers; writes are
collected and done by a thread.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import msgspec

from agentenv.errors import ConfigError, DataError

ARPO_PREFIX = "arpo:"  # keys of entries that came from ARPO's search_cache.json
BUSY_TIMEOUT_S = 10.0
_TABLE = "CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID"

logger = logging.getLogger(__name__)


class ResultCache:
    """Text keys to bytes; in memory only when `path` is None.

    `max_memory_entries` bounds the LRU. `num_hits` and `num_misses` count for the metrics.
    """

    def __init__(self, path: Path | None = None, max_memory_entries: int = 50_000) -> None:
        self.path = path
        self.num_hits = 0
        self.num_misses = 0
        self._max_memory_entries = max_memory_entries
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._pending: dict[str, bytes] = {}
        self._flushing: asyncio.Task[None] | None = None
        self._reader: sqlite3.Connection | None = None
        if path is not None:
            self._reader = _open(path)

    def get(self, key: str) -> bytes | None:
        """The value of `key`, or None."""
        value = self._memory.get(key)
        if value is not None:
            self._memory.move_to_end(key)
        else:
            value = self._pending.get(key)
            if value is None and self._reader is not None:
                value = self._read(key)
            if value is not None:
                self._remember(key, value)
        self.num_hits += value is not None
        self.num_misses += value is None
        return value

    def put(self, key: str, value: bytes) -> None:
        """Remember at once, and write to the file soon."""
        self._remember(key, value)
        if self._reader is None:
            return
        self._pending[key] = value
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.get_running_loop().create_task(self._flush())

    async def close(self) -> None:
        """Write what is pending and close the file; idempotent."""
        if self._flushing is not None:
            await self._flushing
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    async def import_arpo(self, path: Path) -> int:
        """Take in ARPO's search_cache.json (query -> text); the number of entries taken."""
        entries = await asyncio.to_thread(read_arpo_cache, path)
        rows = {ARPO_PREFIX + query: text.encode() for query, text in entries.items()}
        for key, value in rows.items():
            self._remember(key, value)
        if self.path is not None:
            await asyncio.to_thread(_write, self.path, rows)
        return len(rows)

    def _remember(self, key: str, value: bytes) -> None:
        self._memory[key] = value
        self._memory.move_to_end(key)
        if len(self._memory) > self._max_memory_entries:
            self._memory.popitem(last=False)

    def _read(self, key: str) -> bytes | None:
        assert self._reader is not None
        row = self._reader.execute("SELECT value FROM results WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    async def _flush(self) -> None:
        while self._pending:
            assert self.path is not None
            rows = dict(self._pending)
            try:
                await asyncio.to_thread(_write, self.path, rows)
            except sqlite3.Error as error:  # a cache that cannot be kept must not end the run
                logger.warning(
                    "search cache %s: %d results not kept: %s", self.path, len(rows), error
                )
            for key, value in rows.items():
                if self._pending.get(key) is value:
                    del self._pending[key]


def read_arpo_cache(path: Path) -> dict[str, str]:
    """The entries of ARPO's search_cache.json; a DataError names the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except OSError as error:
        raise DataError(f"search cache {path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"search cache {path}: {error}; expected one JSON object, query -> result text"
        ) from error


def _open(path: Path) -> sqlite3.Connection:
    connection = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(_TABLE)
    except (OSError, sqlite3.Error) as error:
        if connection is not None:
            connection.close()
        raise ConfigError(
            f"search.cache: {path}: {error}; expected a writable SQLite file or a new path"
        ) from error
    return connection


def _write(path: Path, rows: Mapping[str, bytes]) -> None:
    """One transaction; runs in a thread, on a connection of its own."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT OR REPLACE INTO results VALUES (?, ?)", rows.items())
        connection.execute("COMMIT")
    finally:
        connection.close()
