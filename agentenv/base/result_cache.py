"""A cache of results that many processes share: SQLite in WAL mode behind an in-memory LRU.

Reads take about 0.1 ms and never wait for writers; a thread writes in batches. SQLite's clock
measures the age of an entry.

Damaged entries, and those of another version of this program, are misses, with one warning. They
never end a run.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from agentenv.base.deadline import waiting
from agentenv.base.errors import ConfigError, ForeignError
from agentenv.base.offload import in_thread

T = TypeVar("T")

VERSION = 1  # of the table and its values; files written before versions were recorded have 0
BUSY_TIMEOUT_S = 10.0
# UnicodeDecodeError: a message about a damaged file may quote undecodable bytes.
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
# An empty answer may be due to a temporary fault of the engine, so it expires after an hour.
EMPTY, EMPTY_MAX_AGE_S = b"[]", 3600.0
_TABLE = (
    "CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value BLOB, written_at REAL) "
    "WITHOUT ROWID"
)
_NOW_S = "86400.0 * julianday('now')"
_READ = f"SELECT value, {_NOW_S} - written_at FROM entries WHERE key = ?"
_PUT = f"INSERT OR REPLACE INTO entries VALUES (?, ?, {_NOW_S})"

logger = logging.getLogger(__name__)


class SharedFetches(Generic[T]):
    """Runs one fetch per key at a time; equal concurrent calls share it.

    A cancelled waiter does not cancel the fetch, since others may wait for it and its result is
    cached. `close` cancels running fetches.
    """

    def __init__(self) -> None:
        self._in_flight: dict[str, asyncio.Task[T]] = {}

    async def run(self, key: str, fetch: Callable[[], Awaitable[T]]) -> T:
        """The result of `fetch`, or of an equal call; all waiters get the same exception."""
        task = self._in_flight.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(_await(fetch))
            self._in_flight[key] = task
            task.add_done_callback(lambda done: self._landed(key, done))
            return await asyncio.shield(task)
        with waiting("the same request of another rollout"):
            return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel all fetches and wait for their ends."""
        tasks = list(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _landed(self, key: str, done: asyncio.Task[T]) -> None:
        del self._in_flight[key]
        if not done.cancelled():
            done.exception()  # retrieved, since no waiter may be left


async def _await(fetch: Callable[[], Awaitable[T]]) -> T:
    return await fetch()


class ResultCache:
    """A cache from text keys to bytes; in memory only if `path` is None.

    `max_memory_entries` limits the LRU; empty ones older than EMPTY_MAX_AGE_S count as missing.
    `key` is the configuration key of the file, for messages.
    """

    def __init__(
        self,
        path: Path | None = None,
        max_memory_entries: int = 50_000,
        *,
        key: str = "search.cache",
    ) -> None:
        self.path = path
        self.num_hits = 0
        self.num_misses = 0
        self._max_memory_entries = max_memory_entries
        self._key = key
        self._memory: OrderedDict[str, tuple[bytes, float]] = OrderedDict()  # value, loop time
        self._pending: dict[str, bytes] = {}
        self._flushing: asyncio.Task[None] | None = None
        self._fetches: SharedFetches[bytes] = SharedFetches()
        self._reader: sqlite3.Connection | None = None
        self._warned = False  # about unreadable entries
        if path is not None:
            self._reader = _open(path, key)

    def get(self, key: str, read: Callable[[bytes], T]) -> T | None:
        """The value of `key`, decoded by `read`, or None. A ForeignError of `read` marks a damaged
        entry."""
        found = self._find(key)
        value = None
        if found is not None:
            try:
                value = read(found)
            except ForeignError as error:
                del self._memory[key]
                self._damaged(str(error))
        self.num_hits += value is not None
        self.num_misses += value is None
        return value

    def holds(self, key: str) -> bool:
        """Whether `get` would find a value; not counted as a look-up."""
        return self._find(key) is not None

    def _find(self, key: str) -> bytes | None:
        value = self._recall(key)
        if value is None:
            value = self._pending.get(key)
            age_s = 0.0
            if value is None and self._reader is not None:
                value, age_s = self._read(key)
            if value is not None:
                self._remember(key, value, age_s)
        return value

    def stats(self) -> dict[str, float]:
        """Hits and misses of `get`."""
        return {"cache/num_hits": self.num_hits, "cache/num_misses": self.num_misses}

    def put(self, key: str, value: bytes, *, lasts: bool = True) -> None:
        """Store in memory at once, and in the file soon, if it `lasts`."""
        self._remember(key, value)
        if self._reader is None or not lasts:
            return
        self._pending[key] = value
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.get_running_loop().create_task(self._flush())

    async def through(
        self,
        key: str,
        fetch: Callable[[], Awaitable[bytes]],
        read: Callable[[bytes], T],
        *,
        lasts: bool = True,
    ) -> T:
        """The value of `key` as in `get`, else the stored result of `fetch`. Equal concurrent
        calls share one fetch; all of them get a failure, which is not stored."""

        async def fetched() -> bytes:
            value = await fetch()
            self.put(key, value, lasts=lasts)
            return value

        known = self.get(key, read)
        return read(await self._fetches.run(key, fetched)) if known is None else known

    async def close(self) -> None:
        """Cancel running fetches, write pending entries and close the file; idempotent."""
        await self._fetches.close()
        if self._flushing is not None:
            await self._flushing
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    async def put_all(self, values: Mapping[str, bytes]) -> None:
        """Store many values, and wait until the file has them."""
        for key, value in values.items():
            self._remember(key, value)
        if self.path is not None and self._reader is not None:
            await in_thread(_write, self.path, values)

    def _recall(self, key: str) -> bytes | None:
        known = self._memory.get(key)
        if known is None:
            return None
        value, written_at = known
        limit_s = self._limit_s(value)
        if limit_s < math.inf and _now() - written_at > limit_s:
            del self._memory[key]
            return None
        self._memory.move_to_end(key)
        return value

    def _remember(self, key: str, value: bytes, age_s: float = 0.0) -> None:
        written_at = _now() - age_s if self._limit_s(value) < math.inf else 0.0
        self._memory[key] = (value, written_at)
        self._memory.move_to_end(key)
        if len(self._memory) > self._max_memory_entries:
            self._memory.popitem(last=False)

    def _limit_s(self, value: bytes) -> float:
        """The maximum age of the value, seconds."""
        return EMPTY_MAX_AGE_S if value == EMPTY else math.inf

    def _read(self, key: str) -> tuple[bytes | None, float]:
        """The value and its age in seconds, which may be negative if another clock is ahead."""
        assert self._reader is not None
        try:
            row = self._reader.execute(_READ, (key,)).fetchone()
        except SQLITE_ERRORS as error:
            self._damaged(str(error))
            return None, 0.0
        if row is None:
            return None, 0.0
        value, age_s = row
        if not isinstance(value, bytes) or not isinstance(age_s, float):
            self._damaged(f"an entry contains {value!r:.40} and {age_s!r:.40}")
            return None, 0.0
        return (value, max(0.0, age_s)) if age_s <= self._limit_s(value) else (None, 0.0)

    def _damaged(self, problem: str) -> None:
        """Warn about damage, once."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s: %s is damaged (%s); unreadable entries count as missing. Remove or restore "
                "the file while no run uses it",
                self._key,
                self.path,
                problem,
            )

    async def _flush(self) -> None:
        while self._pending:
            assert self.path is not None
            rows = dict(self._pending)
            try:
                await in_thread(_write, self.path, rows)
            except SQLITE_ERRORS as error:  # a failed cache must not end the run
                logger.warning(
                    "%s %s: %d results not kept: %s", self._key, self.path, len(rows), error
                )
            for key, value in rows.items():
                if self._pending.get(key) is value:
                    del self._pending[key]


def _now() -> float:
    return asyncio.get_running_loop().time()


def _open(path: Path, key: str) -> sqlite3.Connection | None:
    """Open the file; returns None if it is damaged or has another version. Raises ConfigError if
    it cannot be opened or is not an SQLite file."""
    connection = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        connection.execute(_TABLE)
        connection.execute(_READ, ("",))  # of our columns?
        if version == 0:
            connection.execute(f"PRAGMA user_version = {VERSION}")
        known = version in (0, VERSION)
        problem = "" if known else f"it is of version {version}, not {VERSION}"
    except (OSError, *SQLITE_ERRORS) as error:
        if not _is_damage(error):
            if connection is not None:
                connection.close()
            raise ConfigError(
                f"{key}: {path}: {error}; expected a writable SQLite file or a new path"
            ) from error
        is_text = not isinstance(error, UnicodeDecodeError)
        problem = str(error) if is_text else "its schema is damaged"
    if problem:
        assert connection is not None
        connection.close()
        logger.warning(
            "%s: %s is unusable: %s; results are kept in memory only. Remove the file, or choose "
            "another",
            key,
            path,
            problem,
        )
        return None
    return connection


def _is_damage(error: Exception) -> bool:
    """Whether an error means that a SQLite file can be opened, but not used."""
    if isinstance(error, UnicodeDecodeError):
        return True
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR) if code else False


def _write(path: Path, rows: Mapping[str, bytes]) -> None:
    """Write in one transaction; runs in a thread, on its own connection."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(_PUT, rows.items())
        connection.execute("COMMIT")
    finally:
        connection.close()
