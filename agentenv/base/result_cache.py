"""A cache of results that many processes share: SQLite in WAL mode behind an in-memory LRU.

Reads take about 0.1 ms and never wait for writers; a thread writes in batches.

Damaged entries, and those of another version of this program, are misses, with one warning. They
never end a run.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from agentenv.base.deadline import cancel_all, retrieve_exception, waiting
from agentenv.base.errors import ConfigError, ForeignError
from agentenv.base.offload import in_thread
from agentenv.base.secrets import SECRETS

T = TypeVar("T")

VERSION = 2  # of the table and its values; a new file has 0
BUSY_TIMEOUT_S = 10.0
# UnicodeDecodeError: a message about a damaged file may quote undecodable bytes.
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
EMPTY = b"[]"  # may be due to a temporary fault of the engine, so it stays in memory
_TABLE = "CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID"
_READ = "SELECT value FROM entries WHERE key = ?"
_PUT = "INSERT OR REPLACE INTO entries VALUES (?, ?)"

logger = logging.getLogger(__name__)


class ResultCache:
    """A cache from text keys to bytes; in memory only if `path` is None.

    `max_memory_entries` limits the LRU. `key` is the configuration key of the file, for messages.
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
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._pending: dict[str, bytes] = {}
        self._flushing: asyncio.Task[None] | None = None
        self._fetches: dict[str, asyncio.Task[bytes]] = {}
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
        value = self._memory.get(key)
        if value is None:
            value = self._pending.get(key)
            if value is None and self._reader is not None:
                value = self._read(key)
        if value is not None:
            self._remember(key, value)
        return value

    def stats(self) -> dict[str, float]:
        """Hits and misses of `get`."""
        return {"cache/num_hits": self.num_hits, "cache/num_misses": self.num_misses}

    def put(self, key: str, value: bytes, *, lasts: bool = True) -> None:
        """Store in memory at once, and in the file soon, without secrets, if it `lasts` and is not
        empty."""
        self._remember(key, value)
        if self._reader is None or not lasts or value == EMPTY:
            return
        self._pending[key] = SECRETS.encoded(value)
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
        calls share one fetch; all of them get a failure, which is not stored. A cancelled waiter
        does not cancel the fetch."""

        async def fetched() -> bytes:
            value = await fetch()
            self.put(key, value, lasts=lasts)
            return value

        known = self.get(key, read)
        if known is not None:
            return known
        running = self._fetches.get(key)
        if running is not None:
            with waiting("the same request of another rollout"):
                return read(await asyncio.shield(running))
        task = self._fetches[key] = asyncio.get_running_loop().create_task(fetched())
        task.add_done_callback(lambda done: self._fetches.pop(key))
        task.add_done_callback(retrieve_exception)
        return read(await asyncio.shield(task))

    async def close(self) -> None:
        """Cancel running fetches, write pending entries and close the file; idempotent."""
        await cancel_all(self._fetches.values())
        if self._flushing is not None:
            await self._flushing
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _remember(self, key: str, value: bytes) -> None:
        self._memory[key] = value
        self._memory.move_to_end(key)
        if len(self._memory) > self._max_memory_entries:
            self._memory.popitem(last=False)

    def _read(self, key: str) -> bytes | None:
        assert self._reader is not None
        try:
            row = self._reader.execute(_READ, (key,)).fetchone()
        except SQLITE_ERRORS as error:
            self._damaged(str(error))
            return None
        if row is None or isinstance(row[0], bytes):
            return None if row is None else row[0]
        self._damaged(f"an entry contains {row[0]!r:.40}")
        return None

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
    with closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)) as connection, connection:
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executemany(_PUT, rows.items())
