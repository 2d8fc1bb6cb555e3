"""Frames in files, of which journal and archive are written, and the keys of both.

A frame is MARK, length and CRC-32 of the payload (little-endian uint32), and the payload as
MessagePack. Whole frames are found again whatever lies between them, and cut ones are known as
such. The journal has one for each event of a tree or a step:

    Started    the feeder starts a tree that no process began before, at this moment of the run
    Began      a tree begins; with its next frame, what the journal says of it before holds no more
    Grown      what happened to it at once: branches that began, nodes that are complete
    Finished   all its branches are at their end: from here on the queue may deliver it
    Leased     the learner takes these trees for a step
    Trained    what became of them; weights that know them are live
    WorkerLost its worker was lost, and how many in a row while it came no further

Each is an array. It does not say who wrote it, so that a worker of another host may.
Tokens take 4 bytes an id, 4 a log-prob and 4 an entropy. Frames are written in the order of events,
many at once, by a thread of their own: what is lost of them in a crash is an end, and from any end
a tree can go on. A damaged frame costs its tree alone: each frame of a tree names its record and
its place there (`Mark`), and a tree that lacks a frame in between is rolled out again.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple, Protocol

import msgspec
from msgspec import Meta, Struct

from agentenv.tree import Node
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


class Turned(Struct, array_like=True, frozen=True):
    """A complete node: how long its branch was worked for, and the stop string that ended its
    turn."""

    node: Node
    seconds: float = 0.0
    stop: str | None = None


class OpenBranch(Struct, array_like=True, frozen=True):
    """A branch that began: its name, the node it goes on from, and the seconds it was worked for
    before."""

    name: str
    cursor: int
    seconds: float = 0.0


class Counts(Struct, array_like=True, frozen=True):
    """Those of the tree, after what happened."""

    num_started: int
    num_roots: int
    num_live: int
    num_retries: int
    num_retaken: int


class Mark(Struct, array_like=True, frozen=True):
    """Of which record a frame is, and its place there. `record` is a number of its own within the
    process, which is the start `incarnation` of the run."""

    incarnation: int
    record: int
    place: int

    def follows(self, before: Mark | None) -> bool:
        """Whether the frame directly follows that one."""
        return before is not None and self == Mark(
            before.incarnation, before.record, before.place + 1
        )


class Began(Struct, array_like=True, frozen=True, tag=1):
    """`settings` names the configuration that the tree is grown under. `mark` is None in frames of
    earlier versions, here and below."""

    tree: int
    task_id: str
    policy_version: int
    incarnation: int
    settings: str
    mark: Mark | None = None


class Asked(Struct, array_like=True, frozen=True):
    """A node at which the plan was asked, the forks it wanted there, and how many turns of the
    frame were complete before."""

    node: int
    num_forks: int
    num_before: int = 1 << 30


class Grown(Struct, array_like=True, frozen=True, tag=2):
    """What happened in one go; `lost` are nodes as those of a tree."""

    tree: int
    opened: list[OpenBranch]
    turns: list[Turned]
    asked: list[Asked]
    counts: Counts
    lost: list[int] = []
    mark: Mark | None = None


class Finished(Struct, array_like=True, frozen=True, tag=3):
    """`turns` are those that were never complete."""

    tree: int
    num_nodes: int
    turns: list[Turned]
    counts: Counts
    mark: Mark | None = None


class Leased(Struct, array_like=True, frozen=True, tag=4):
    """`step` is the update that takes these trees."""

    step: int
    trees: list[int]


class Trained(Struct, array_like=True, frozen=True, tag=5):
    """The weights of the step are live, as this policy version; `trees` are those that it trained
    of the ones it took, the others were filtered or had failed."""

    step: int
    policy_version: int
    trees: list[int]


class Started(Struct, array_like=True, frozen=True, tag=6):
    """The feeder starts a tree while the learner has taken `step` steps, after it held the tree
    back for `early_s` seconds, in which the learner did not need it yet. Of a run that goes on,
    such a tree starts at once."""

    tree: int
    step: int
    early_s: float


class WorkerLost(Struct, array_like=True, frozen=True, tag=16):
    """The rollout worker of a tree was lost, as so many in a row while the tree came no further;
    `settings` as of `Began`."""

    tree: int
    num: int
    settings: str


Frame = Began | Grown | Finished | Leased | Trained | Started | WorkerLost
DECODER = msgspec.msgpack.Decoder(Frame)
BEGAN, FINISHED = Began.__struct_config__.tag, Finished.__struct_config__.tag
OF_TREES = (1, 2, 3)
NUM_FIRST = 2  # frames of a tree that say where it begins, or goes on


def read_frames(data: bytes) -> Iterator[tuple[int, Frame]]:
    """The frames of a file that are whole, each with the offset of its end. Raises
    msgspec.DecodeError for one that no journal wrote."""
    for offset, size, is_whole in frames_of(data):
        if is_whole:
            yield offset + size, DECODER.decode(data[offset : offset + size])


class Head(Struct, array_like=True):
    """The beginning of any frame."""

    tag: int
    number: int


HEADS = msgspec.msgpack.Decoder(Head)


class Packed(NamedTuple):
    """A frame of a tree that a rollout worker has packed, with its head."""

    tree: int
    frame: bytes


class Sink(Protocol):
    """Where the record of a tree writes: a journal, or the link to one."""

    @property
    def settings(self) -> str: ...
    @property
    def incarnation(self) -> int: ...

    def append(self, frame: Frame) -> None:
        """See Journal.append."""
        ...

    async def commit(self) -> None:
        """See Journal.commit."""
        ...


class Place(NamedTuple):
    """Where a frame lies."""

    path: Path
    offset: int  # of its payload
    size: int


def trees_of(frame: Frame | Packed) -> list[int]:
    """The places of the trees that a frame is about."""
    return frame.trees if isinstance(frame, Leased | Trained) else [frame.tree]
