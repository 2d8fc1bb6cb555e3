"""Frames in files, of which journal and archive are written, and the keys of both.

A frame is MARK, length and CRC-32 of what follows (little-endian uint32), and MessagePack. Frames
that are whole are found again whatever lies between them, and what was cut off is known as such.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from mmap import mmap
from typing import Annotated, BinaryIO

from msgspec import Meta, Struct

from agentenv.untrusted import packed

SUFFIX = ".frames"
MARK = b"\xaeJF1"
HEADER = struct.Struct("<4sII")


class JournalConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run writes down of its rollouts to go on from."""

    enabled: Annotated[
        bool,
        Meta(
            description="write every turn to RUN/journal, so that a run that is killed goes on "
            "with the trees it had finished and begun"
        ),
    ] = True
    sync_s: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds after which what is written survives a power failure too; a "
            "killed process loses nothing that is written",
        ),
    ] = 1.0


class ArchiveConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run keeps of the trees that it took."""

    max_gb: Annotated[
        float,
        Meta(
            ge=0,
            description="size of RUN/trees, all trees of the latest steps with every token; the "
            "oldest steps go first; 0: none is kept",
        ),
    ] = 10.0


def framed(value: Struct) -> bytes:
    """The bytes of a frame."""
    payload = packed(value)
    return HEADER.pack(MARK, len(payload), zlib.crc32(payload)) + payload


def frames_of(data: bytes | mmap) -> Iterator[tuple[int, int, bool]]:
    """(offset of the payload, its size, True) of each frame that is whole, and (offset, number of
    bytes, False) of each stretch between them that is none."""
    at = lost = 0
    while at < len(data):
        found = data.find(MARK, at)
        if found < 0 or found + HEADER.size > len(data):
            break
        _, size, checksum = HEADER.unpack_from(data, found)
        begin = found + HEADER.size
        payload = data[begin : begin + size]
        if len(payload) < size or zlib.crc32(payload) != checksum:
            at = found + 1
            continue
        if found > lost:
            yield lost, found - lost, False
        yield begin, size, True
        at = lost = begin + size
    if lost < len(data):
        yield lost, len(data) - lost, False


def read_frame(file: BinaryIO) -> bytes | None:
    """What the next frame holds; None where there is none that is whole."""
    size, checksum = _read_head(file)
    data = file.read(size)
    return data if len(data) == size and zlib.crc32(data) == checksum else None


def skip_frame(file: BinaryIO) -> bool:
    """Go on behind the next frame, without reading it; whether it is there in its length."""
    size, checksum = _read_head(file)
    end = file.seek(size, os.SEEK_CUR)
    return checksum is not None and end <= os.fstat(file.fileno()).st_size


def _read_head(file: BinaryIO) -> tuple[int, int | None]:
    """Size and checksum; none where no frame begins."""
    head = file.read(HEADER.size)
    if len(head) == HEADER.size:
        mark, size, checksum = HEADER.unpack(head)
        if mark == MARK:
            return size, checksum
    return 0, None
