"""The frozen web: the results and pages that a run met, in one file that other runs meet again.

A snapshot is a file of JSON lines: a head that names it, then a row for each search and each page.
Its hash is what `sha256sum` says of the file. Summaries are no part of it: a summarizer is a model
of the run, as the engine and the judge are.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
from msgspec import Struct

from agentenv.envs.search.corpus import Hit, Query
from agentenv.envs.search.keys import OnMiss, SnapshotMode
from agentenv.errors import ConfigError, DataError, ForeignError, InfraError, ToolError
from agentenv.offload import in_thread
from agentenv.untrusted import decode, printable

FORMAT = 1
LOCK_S, LOOK_S = 30.0, 0.01  # how long the file's lock is waited for, and between two tries
MAX_SHOWN = 200  # misses that are listed at the end of a run
MOST = 1 << 31
MISSED = " is a frozen web without "  # in the error of a miss, before its name


logger = logging.getLogger(__name__)


class _Row(Struct, frozen=True, omit_defaults=True, tag_field="row"):
    """Base of the rows. `problem` is what the policy reads where nothing could be had."""


class Head(_Row, frozen=True, kw_only=True, tag="snapshot"):
    """The first row: the name, and who was asked for results and for pages."""

    name: str
    format: int = FORMAT
    backend: str = ""
    reader: str = ""


class _Search(_Row, frozen=True, tag="search"):
    text: str
    market: str
    max_results: int
    hits: list[Hit] = []
    problem: str = ""


class _Page(_Row, frozen=True, tag="page"):
    url: str
    text: str = ""
    problem: str = ""


class _Place(NamedTuple):
    """Where a row is in the file, in bytes; of a search, how many results it answers for."""

    offset: int
    length: int
    max_results: int = 0


_AnyRow = Head | _Search | _Page


class Snapshot:
    """Results and pages by what was asked. The texts stay in the file until they are asked for.

    `record` asks as ever and keeps what is not there yet, also that a page cannot be had, but no
    failure of machinery. `replay` asks nobody: what is not there is a miss, which is counted,
    listed at the end, and can never look like "no results". With `on_miss` "fail" it is an
    InfraError, with "tell" a ToolError, which the policy reads. Processes may record into one file.
    """

    def __init__(
        self,
        path: Path,
        mode: SnapshotMode = "replay",
        *,
        backend: str = "",
        reader: str = "",
        sha256: str = "",
        on_miss: OnMiss = "fail",
    ) -> None:
        self.path = path
        self.mode = mode
        self.head = Head(name=path.stem, backend=backend, reader=reader)
        self.sha256 = ""  # of the file as it was when it was read
        self.misses: dict[str, None] = {}  # in order
        self.num_found = 0
        self.num_recorded = 0
        self._expected = sha256.strip().lower()
        self._on_miss = on_miss
        self._searches: dict[str, dict[str, _Place]] = {}  # text -> market -> place
        self._pages: dict[str, _Place] = {}
        self._file: BinaryIO | None = None
        self._loading: asyncio.Task[None] | None = None
        if mode == "replay" and not path.is_file():
            raise DataError(
                f"search.snapshot: {path} cannot be read: there is no such file; expected one "
                'that was recorded with search.snapshot_mode = "record"'
            )

    async def start(self) -> None:
        """Read the file, once, in a thread. Raises DataError, and ConfigError for a file that was
        recorded of something else or has another hash."""
        if self._loading is None:
            self._loading = asyncio.ensure_future(self._begin())
        await asyncio.shield(self._loading)

    async def hits(self, query: Query, fetch: Callable[[], Awaitable[list[Hit]]]) -> list[Hit]:
        """The results of a search: those kept, else in record mode the fetched ones."""
        await self.start()
        text = printable(query.text)
        place = self._search_place(query)
        if place is None:
            self._miss(_search_name(text, query.market))
            try:
                row = _Search(text, query.market, query.max_results, await fetch())
            except ToolError as error:
                row = _Search(text, query.market, query.max_results, problem=printable(str(error)))
            async with self._locked():
                if self._search_place(query) is None:
                    self._searches.setdefault(text, {})[query.market] = self._append(row)
        else:
            self.num_found += 1
            found = self._read(place)
            assert isinstance(found, _Search)
            row = found
        if row.problem:
            raise ToolError(row.problem)
        return row.hits[: query.max_results]

    async def page(self, url: str, fetch: Callable[[], Awaitable[str]]) -> str:
        """The text of a page: the one kept, else in record mode the fetched one."""
        await self.start()
        url = printable(url)
        if url in self._pages:
            self.num_found += 1
            row = self._read(self._pages[url])
            assert isinstance(row, _Page)
        else:
            self._miss(_page_name(url))
            try:
                row = _Page(url, printable(await fetch()))
            except ToolError as error:
                row = _Page(url, problem=printable(str(error)))
            async with self._locked():
                if url not in self._pages:
                    self._pages[url] = self._append(row)
        if row.problem:
            raise ToolError(row.problem)
        return row.text

    def knows(self, query: Query) -> bool:
        """Whether the file answers a search; it must have been read."""
        return self._search_place(query) is not None

    def covers(self, text: str) -> list[str] | None:
        """The addresses of what a search of this text found, in whatever market; None if there is
        no such search."""
        found = self._searches.get(printable(text), {}).values()
        rows = [row for row in map(self._read, found) if isinstance(row, _Search)]
        return [hit.url for row in rows for hit in row.hits if hit.url] if rows else None

    def has_page(self, url: str) -> bool:
        """Whether the file says what a page holds, or that it cannot be had."""
        return printable(url) in self._pages

    def names(self) -> set[str]:
        """What it holds, by the names that the errors of misses give."""
        searches = ((text, market) for text, of in self._searches.items() for market in of)
        return {_search_name(*one) for one in searches} | set(map(_page_name, self._pages))

    @property
    def num_searches(self) -> int:
        return sum(map(len, self._searches.values()))

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    def stats(self) -> dict[str, float]:
        """Searches and pages answered from the file, kept in it, and missed (each once)."""
        return {
            "snapshot/num_found": self.num_found,
            "snapshot/num_recorded": self.num_recorded,
            "snapshot/num_missed": len(self.misses),
        }

    def close(self) -> None:
        """Say what was missed, and close the file; idempotent."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        if self.misses:
            listed = "\n  ".join(list(self.misses)[:MAX_SHOWN])
            rest = len(self.misses) - MAX_SHOWN
            more = f"\n  and {rest} more" if rest > 0 else ""
            logger.warning(
                "search.snapshot %s missed %d searches and pages:\n  %s%s",
                self.path,
                len(self.misses),
                listed,
                more,
            )

    async def _begin(self) -> None:
        await in_thread(self.load)
        if self.mode == "replay" and not self._expected:
            logger.warning(
                "search.snapshot %s: %r with %d searches and %d pages; with "
                'search.snapshot_sha256 = "%s" no other file is taken for it',
                self.path,
                self.head.name,
                self.num_searches,
                self.num_pages,
                self.sha256,
            )

    def load(self) -> None:
        """Read the file; see `start`."""
        try:
            if self.mode == "record":
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a+b", buffering=0)
                fcntl.flock(self._file, fcntl.LOCK_EX)
                try:
                    _drop_cut_row(self._file)
                    self._index(self._file)
                    if not self.sha256:
                        self._write(self.head)
                finally:
                    fcntl.flock(self._file, fcntl.LOCK_UN)
                return
            self._file = self.path.open("rb")
            self._index(self._file)
        except OSError as error:
            raise DataError(
                f"search.snapshot: {self.path} cannot be used: {error.strerror}"
            ) from error
        if self._expected and self._expected != self.sha256:
            raise DataError(
                f"search.snapshot: {self.path} has the sha256 {self.sha256}, expected "
                f"{self._expected} (search.snapshot_sha256): it is another file, or a damaged one"
            )

    def _index(self, file: BinaryIO) -> None:
        """Note where each row is; of equal searches the one with most results, else the first."""
        digest, offset, number = hashlib.sha256(), 0, 0
        file.seek(0)
        with open(file.fileno(), "rb", closefd=False) as lines:
            for number, line in enumerate(lines, start=1):
                digest.update(line)
                if not line.endswith(b"\n"):  # what a killed recording left
                    logger.warning("search.snapshot %s: row %d is cut off", self.path, number)
                    break
                row = self._decoded(line, number)
                place = _Place(offset, len(line))
                offset += len(line)
                if isinstance(row, Head):
                    self._check_head(row)
                elif isinstance(row, _Page):
                    self._pages.setdefault(row.url, place)
                else:
                    markets = self._searches.setdefault(row.text, {})
                    known = markets.get(row.market)
                    if known is None or known.max_results < _answered(row):
                        markets[row.market] = place._replace(max_results=_answered(row))
        if self.mode == "replay" and not offset:
            raise self._headless(1)
        self.sha256 = digest.hexdigest() if offset else ""

    def _decoded(self, line: bytes, number: int) -> _AnyRow:
        try:
            row: _AnyRow = decode(line, _AnyRow)
        except ForeignError as error:
            raise DataError(
                f"search.snapshot: {self.path}, row {number}: {error}; expected a row of a "
                'snapshot, {"row": "search" or "page", ...}'
            ) from error
        if (number == 1) != isinstance(row, Head):
            raise self._headless(number)
        return row

    def _headless(self, number: int) -> DataError:
        return DataError(
            f"search.snapshot: {self.path}, row {number}: expected the head, "
            '{"row": "snapshot", "name": ...}, as the first row and nowhere else'
        )

    def _check_head(self, head: Head) -> None:
        if head.format != FORMAT:
            raise DataError(
                f"search.snapshot: {self.path} is of format {head.format}; expected {FORMAT}"
            )
        of, now = (head.backend, head.reader), (self.head.backend, self.head.reader)
        if self.mode == "record" and of != now:
            raise ConfigError(
                f"search.snapshot: {self.path} was recorded of {' and '.join(of)}, but this run "
                f"asks {' and '.join(now)}; expected another file"
            )
        self.head = head

    def _search_place(self, query: Query) -> _Place | None:
        place = self._searches.get(printable(query.text), {}).get(query.market)
        return place if place is not None and query.max_results <= place.max_results else None

    def _miss(self, what: str) -> None:
        """Raises what a miss is in a replay."""
        if self.mode == "record":
            return
        self.misses[what] = None
        if self._on_miss == "tell":
            raise ToolError("This is not part of the web that can be reached.", {"missed": what})
        raise InfraError(f"{self.path}{MISSED}{what}")

    def _read(self, place: _Place) -> _AnyRow:
        """The row at a place; an InfraError if the file has been changed since it was read."""
        assert self._file is not None
        try:
            line = os.pread(self._file.fileno(), place.length, place.offset)
            return self._decoded(line, 0 if place.offset else 1)
        except (OSError, DataError) as error:
            raise InfraError(f"snapshot {self.path} was changed meanwhile: {error}") from error

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Other processes may record into the file too. To be held without an await inside, since
        the lock is one of this process."""
        assert self._file is not None
        try:
            async with asyncio.timeout(LOCK_S):
                while True:
                    try:
                        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            raise InfraError(
                f"snapshot {self.path}: another process has held its lock for {LOCK_S:g} s"
            ) from error
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _append(self, row: _Search | _Page) -> _Place:
        self.num_recorded += 1
        try:
            place = self._write(row)
            return place._replace(max_results=_answered(row)) if isinstance(row, _Search) else place
        except OSError as error:
            raise ConfigError(
                f"search.snapshot: {self.path} cannot be written: {error.strerror}"
            ) from error

    def _write(self, row: _AnyRow) -> _Place:
        assert self._file is not None
        _drop_cut_row(self._file)
        offset, line = self._file.seek(0, os.SEEK_END), msgspec.json.encode(row) + b"\n"
        rest = line
        while rest:
            rest = rest[os.write(self._file.fileno(), rest) :]
        return _Place(offset, len(line))


def _search_name(text: str, market: str) -> str:
    return f"search {text!r} ({market})"


def _page_name(url: str) -> str:
    return f"page {url}"


def _answered(row: _Search) -> int:
    """For how many results the row answers: for any number where there were no more."""
    return row.max_results if len(row.hits) >= row.max_results else MOST


def _drop_cut_row(file: BinaryIO) -> None:
    """Cut the file after its last whole row; the process that wrote the rest was killed."""
    end = size = os.fstat(file.fileno()).st_size
    while end:
        start = max(0, end - 65_536)
        newline = os.pread(file.fileno(), end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(file.fileno(), end)
