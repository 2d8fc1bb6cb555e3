"""Frames in files: the format of journal and archive, and the keys of both.

A frame is MARK, length and CRC-32 of the payload (little-endian uint32), and the payload as
MessagePack. Complete frames can be found even after damaged data, and truncated ones are
recognized. The journal has one for each event of a tree or a step:

    Started    the feeder starts a new tree, at this point of the run
    Began      a tree begins; its next frame invalidates its earlier frames
    Grown      simultaneous events: branches that began, nodes that are complete
    Finished   all its branches have ended: the queue may deliver it
    Leased     the learner takes these trees for a step
    Trained    their outcome; weights trained on them are live
    StepRefused  no step trains them: they are rolled out again
    WorkerLost its worker was lost; the number of consecutive losses without progress

Each is an array. It does not name its writer, so that a worker on another host can write it. A
token takes 4 bytes for each of id, log-prob and entropy. A dedicated thread writes the frames in
batches, in the order of events: a crash loses a tail, and a tree can resume from any prefix. A
damaged frame affects only its tree: each frame of a tree names its record and its position there
(`Mark`), and a tree with a missing frame is rolled out again. `assembled` rebuilds a tree from its
frames.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from mmap import mmap
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agentenv.base.config import about
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Task
from agentenv.base.untrusted import packed

SUFFIX = ".frames"
MARK = b"\xaeJF1"
HEADER = struct.Struct("<4sII")


class JournalConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log of rollouts from which a run resumes."""

    enabled: Annotated[
        bool,
        about(
            "write every turn to RUN/journal, so that a killed run resumes with its "
            "finished and in-flight trees"
        ),
    ] = True


class ArchiveConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The archive of the trees of a run."""

    max_gb: Annotated[
        float,
        about(
            "size of RUN/trees, all trees of the latest steps with every token; the "
            "oldest steps are deleted first; 0: no archive",
            ge=0,
        ),
    ] = 10.0


def framed(value: Struct) -> bytes:
    """The bytes of a frame."""
    payload = packed(value)
    return HEADER.pack(MARK, len(payload), zlib.crc32(payload)) + payload


def frames_of(data: bytes | mmap) -> Iterator[tuple[int, int, bool]]:
    """(offset of the payload, its size, True) for each complete frame, and (offset, number of
    bytes, False) for each damaged stretch between them."""
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
    """The payload of the next frame; None if there is no complete one."""
    size, checksum = _read_head(file)
    data = file.read(size)
    return data if len(data) == size and zlib.crc32(data) == checksum else None


def skip_frame(file: BinaryIO) -> bool:
    """Seek past the next frame without reading it; returns whether it has its full length."""
    size, checksum = _read_head(file)
    end = file.seek(size, os.SEEK_CUR)
    return checksum is not None and end <= os.fstat(file.fileno()).st_size


def _read_head(file: BinaryIO) -> tuple[int, int | None]:
    """Size and checksum; the checksum is None where no frame begins."""
    head = file.read(HEADER.size)
    if len(head) == HEADER.size:
        mark, size, checksum = HEADER.unpack(head)
        if mark == MARK:
            return size, checksum
    return 0, None


class Turned(Struct, array_like=True, frozen=True):
    """A complete node: the working seconds of its branch, and the stop string that ended its
    turn."""

    node: Node
    seconds: float = 0.0
    stop: str | None = None


class OpenBranch(Struct, array_like=True, frozen=True):
    """A branch that began: its name, the node it continues, its working seconds so far, and whether
    it began at an earlier tool result and has no turn yet."""

    name: str
    cursor: int
    seconds: float = 0.0
    is_late: bool = False


class Counts(Struct, array_like=True, frozen=True):
    """The counts of the tree after the event, and its working seconds."""

    num_started: int
    num_roots: int
    num_live: int
    num_retries: int
    num_retaken: int
    seconds: float = 0.0


OF_TREE = Counts.__struct_fields__[:-1]  # fields of the tree


class Mark(Struct, array_like=True, frozen=True):
    """The record of a frame, and its position there. `record` is unique within the process, which
    is start number `incarnation` of the run."""

    incarnation: int
    record: int
    place: int

    def follows(self, before: Mark) -> bool:
        """Whether the frame directly follows that one."""
        return self == Mark(before.incarnation, before.record, before.place + 1)


class Began(Struct, array_like=True, frozen=True, tag=1):
    """`settings` is a digest of the tree's configuration."""

    tree: int
    task_id: str
    policy_version: int
    settings: str
    mark: Mark


class ForkDecision(Struct, array_like=True, frozen=True):
    """A node at which the plan decided on forks, and their number."""

    node: int
    num_forks: int


class Grown(Struct, array_like=True, frozen=True, tag=2):
    """A batch of events."""

    tree: int
    opened: list[OpenBranch]
    turns: list[Turned]
    decided: list[ForkDecision]
    counts: Counts
    mark: Mark


class Finished(Struct, array_like=True, frozen=True, tag=3):
    """`turns` lists the nodes that were never complete."""

    tree: int
    num_nodes: int
    turns: list[Turned]
    counts: Counts
    mark: Mark


class Leased(Struct, array_like=True, frozen=True, tag=4):
    """The update `step` takes these trees."""

    step: int
    trees: list[int]


class Trained(Struct, array_like=True, frozen=True, tag=5):
    """The weights of the step are live, as this policy version. It trained `trees`; the others that
    it took were filtered or had failed."""

    step: int
    policy_version: int
    trees: list[int]


class Started(Struct, array_like=True, frozen=True, tag=6):
    """The feeder starts a tree after `step` steps of the learner and a delay of `early_s` seconds,
    in which the learner did not need it yet. A resumed run starts such a tree at once. `task` is
    the id of its task if a curriculum drew it."""

    tree: int
    step: int
    early_s: float
    task: str = ""


class WorkerLost(Struct, array_like=True, frozen=True, tag=16):
    """The rollout worker of a tree was lost, with the number of consecutive losses without progress
    of the tree; `settings` as in `Began`."""

    tree: int
    num: int
    settings: str


class StepRefused(Struct, array_like=True, frozen=True, tag=17):
    """The run ended before this step, which was for these trees; they are rolled out again."""

    step: int
    trees: list[int]


Frame = Began | Grown | Finished | Leased | Trained | Started | WorkerLost | StepRefused
DECODER = msgspec.msgpack.Decoder(Frame)
BEGAN, FINISHED = Began.__struct_config__.tag, Finished.__struct_config__.tag
OF_TREES = (1, 2, 3)
NUM_FIRST = 2  # frames of a tree that record its start or its resumption


class Head(Struct, array_like=True):
    """The beginning of any frame."""

    tag: int
    number: int


HEADS = msgspec.msgpack.Decoder(Head)


class Packed(NamedTuple):
    """A frame of a tree that a rollout worker packed, with its head."""

    tree: int
    frame: bytes


class Sink(Protocol):
    """The destination of a tree's record: a journal, or the link to one."""

    @property
    def settings(self) -> str: ...
    @property
    def incarnation(self) -> int: ...

    def append(self, frame: Frame) -> None:
        """See Journal.append."""

    async def commit(self) -> None:
        """See Journal.commit."""


class Place(NamedTuple):
    """Position of a frame."""

    path: Path
    offset: int  # of its payload
    size: int

    def read(self) -> bytes:
        """Its payload."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


def trees_of(frame: Frame | Packed) -> list[int]:
    """The indices of the trees that a frame refers to."""
    return frame.trees if isinstance(frame, Leased | Trained | StepRefused) else [frame.tree]


class Recorded(Struct, array_like=True):
    """A tree from the journal, its unfinished branches, the stop strings that ended turns (pairs of
    node index and string), and its working seconds."""

    tree: TrajectoryTree
    is_finished: bool
    branches: list[OpenBranch]
    stops: list[tuple[int, str]]
    seconds: float = 0.0


RECORDED = msgspec.msgpack.Decoder(Recorded)  # from another process, which has `packed` it


class TreeFrames:
    """The frames of one tree in another process since its start there. They give its current state
    without the journal."""

    def __init__(self) -> None:
        self.is_finished = False
        self._frames: list[bytes] = []

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, tag: int, frame: bytes) -> None:
        """Add the next frame, with its head, and the tag of its content."""
        if tag == BEGAN:  # also when the tree could not resume and restarts
            self._frames.clear()
        self._frames.append(frame)
        self.is_finished = tag == FINISHED

    def recorded(self, task: Task) -> Recorded | None:
        """The tree that they record; None if it cannot be resumed."""
        frames = [DECODER.decode(memoryview(frame)[HEADER.size :]) for frame in self._frames]
        return assembled(frames, task)


def assembled(recorded: Sequence[Frame], task: Task) -> Recorded | None:
    """The tree of these frames; None if one is missing."""
    began = recorded[0] if recorded else None
    frames = [frame for frame in recorded if isinstance(frame, Grown | Finished)]
    if not isinstance(began, Began) or not frames or len(frames) + 1 < len(recorded):
        return None
    if not all(two.mark.follows(one.mark) for one, two in pairwise([began, *frames])):
        return None
    turns: dict[int, Turned] = {}
    live: dict[str, OpenBranch] = {}
    for frame in frames:
        if isinstance(frame, Grown):
            live |= {branch.name: branch for branch in frame.opened}
        for turn in frame.turns:
            node = turn.node
            turns[node.index] = turn
            if node.end is not None:
                live.pop(node.branch, None)
            elif node.branch in live:
                live[node.branch] = OpenBranch(node.branch, node.index, turn.seconds)
        for decided in frame.decided if isinstance(frame, Grown) else ():
            if decided.node not in turns:
                return None
            turns[decided.node].node.num_forks = decided.num_forks
    last = frames[-1]
    if isinstance(last, Finished):
        is_whole = len(turns) == last.num_nodes
    else:
        is_whole = len(live) == last.counts.num_live
    if 0 not in turns or not is_whole:
        return None
    new = {old: number for number, old in enumerate(sorted(turns))}  # without incomplete nodes
    links = {turn.node.parent for turn in turns.values()} | {b.cursor for b in live.values()}
    links |= {turn.node.continues for turn in turns.values()}
    if not links <= {None, *new}:
        return None
    tree = TrajectoryTree(task, index=began.tree, policy_version=began.policy_version)
    for old in new:
        node = turns[old].node
        node.index = new[old]
        node.parent = None if node.parent is None else new[node.parent]
        node.continues = None if node.continues is None else new[node.continues]
        tree.nodes.append(node)
    for name in OF_TREE:
        setattr(tree, name, getattr(last.counts, name))
    branches = [replace(one, cursor=new[one.cursor]) for one in live.values()]
    stops = [(new[old], turn.stop) for old, turn in turns.items() if turn.stop is not None]
    return Recorded(tree, isinstance(last, Finished), branches, stops, last.counts.seconds)
