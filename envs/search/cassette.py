"""Cassettes: replies of the outside world, recorded once and replayed without a network.

A cassette is a JSONL file of {"key", "status", "body"}. Keys never hold a secret.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, Literal

import msgspec
from msgspec import Struct

from agentenv.errors import ConfigError, DataError, InfraError

CassetteMode = Literal["record", "replay"]


class Reply(Struct, frozen=True, omit_defaults=True):
    """What came back: HTTP status, body, and for pages their type and final address."""

    status: int
    body: bytes
    content_type: str = ""
    url: str = ""


class _Row(Struct, omit_defaults=True):
    key: str
    status: int
    body: str
    base64: bool = False
    content_type: str = ""
    url: str = ""


class Cassette:
    """`record` fetches what is not on the cassette yet and appends it; `replay` fetches nothing.

    In replay, what was not recorded is an InfraError: it can never look like "no results". The
    file is read by `start`, or by the first call, in a thread.
    """

    def __init__(self, path: Path, mode: CassetteMode) -> None:
        self.path = path
        self.mode = mode
        self._replies: dict[str, Reply] = {}
        self._file: IO[bytes] | None = None
        self._loading: asyncio.Task[None] | None = None
        if mode == "replay" and not path.is_file():
            raise DataError(f"cassette {path} cannot be read: there is no such file")

    async def start(self) -> None:
        """Read the file, once. Raises DataError."""
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(self._load))
        await asyncio.shield(self._loading)

    async def through(self, key: str, fetch: Callable[[], Awaitable[Reply]]) -> Reply:
        """The recorded reply, else (in record mode) the fetched one, which is recorded."""
        await self.start()
        reply = self._replies.get(key)
        if reply is not None:
            return reply
        if self.mode == "replay":
            raise InfraError(f"cassette {self.path} holds no reply for {key[:200]}")
        reply = await fetch()
        if key not in self._replies:
            self._append(key, reply)
        return reply

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _load(self) -> None:
        if self.mode == "record" and not self.path.exists():
            return
        decoder = msgspec.json.Decoder(_Row)
        try:
            lines = self.path.read_bytes().splitlines()
        except OSError as error:
            raise DataError(f"cassette {self.path} cannot be read: {error.strerror}") from error
        for number, line in enumerate(lines, start=1):
            try:
                row = decoder.decode(line)
                body = base64.b64decode(row.body) if row.base64 else row.body.encode()
            except (msgspec.DecodeError, ValueError) as error:
                raise DataError(
                    f"cassette {self.path}, row {number}: {error}; expected "
                    '{"key": text, "status": number, "body": text}'
                ) from error
            self._replies[row.key] = Reply(row.status, body, row.content_type, row.url)

    def _append(self, key: str, reply: Reply) -> None:
        self._replies[key] = reply
        try:
            text, encoded = reply.body.decode(), False
        except UnicodeDecodeError:
            text, encoded = base64.b64encode(reply.body).decode(), True
        row = _Row(key, reply.status, text, encoded, reply.content_type, reply.url)
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab")
            self._file.write(msgspec.json.encode(row) + b"\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"search.cassette: {self.path} cannot be written: {error.strerror}"
            ) from error
