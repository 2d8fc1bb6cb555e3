"""Files of JSON lines that may still be growing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

TAIL_BYTES = 64_000


class JsonLines:
    """Reads a file from where it stopped. A last line without its end is waited for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = 0  # bytes that were read
        self._file: tuple[int, int] | None = None  # which one it was

    def new(self) -> tuple[bool, Iterator[bytes]]:
        """Whether it is another file, or was cut, so that the lines read before are void; and the
        whole lines since then."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            is_void, self.place, self._file = self.place > 0, 0, None
            return is_void, iter(())
        file = found.st_dev, found.st_ino
        is_void = self.place > 0 and (file != self._file or found.st_size < self.place)
        if is_void:
            self.place = 0
        self._file = file
        return is_void, self._read()

    def _read(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(self.place)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.place += len(line)
                yield line


def size_of(path: Path) -> int:
    """Bytes; 0 without a file."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def tail(path: Path, num_bytes: int = TAIL_BYTES) -> str:
    """The end of a text file, from the beginning of a line."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            data = file.read(num_bytes)
    except OSError:
        return ""
    if size > num_bytes:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", "replace")
