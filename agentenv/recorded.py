"""Recorded trees: from the frames that the journal or another process has of a tree to the tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from agentenv.errors import DataError
from agentenv.frames import (
    BEGAN,
    DECODER,
    FINISHED,
    HEADER,
    HEADS,
    OF_TREES,
    SUFFIX,
    Began,
    Counts,
    Finished,
    Frame,
    Grown,
    OpenBranch,
    Place,
    Turned,
    frames_of,
)
from agentenv.tree import TrajectoryTree
from agentenv.types import Task
from agentenv.untrusted import packed


class Recorded(NamedTuple):
    """A tree as the journal has it, its branches that are not at their end, and by the index of a
    node the stop string that ended its turn."""

    tree: TrajectoryTree
    is_finished: bool
    branches: list[OpenBranch]
    stops: dict[int, str]


class TreeFrames:
    """The frames of one tree that another process grows, since it began there: its state at any
    moment, without the journal."""

    def __init__(self) -> None:
        self.is_finished = False
        self._frames: list[bytes] = []

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, tag: int, frame: bytes) -> None:
        """The next frame, with its head, and the tag of what is in it."""
        if tag == BEGAN:  # also where the tree could not go on, and begins anew
            self._frames.clear()
        self._frames.append(frame)
        self.is_finished = tag == FINISHED

    def recorded(self, task: Task) -> Recorded | None:
        """What they leave of the tree; None: nothing that can be gone on with."""
        frames = [DECODER.decode(memoryview(frame)[HEADER.size :]) for frame in self._frames]
        if not frames or not isinstance(began := frames[0], Began):
            return None
        return assembled(began, frames[1:], task)


class _Recorded(Struct, array_like=True):
    """A Recorded for another process."""

    tree: TrajectoryTree
    branches: list[OpenBranch]
    stops: list[tuple[int, str]]


_RECORDED = msgspec.msgpack.Decoder(_Recorded)


def pack_recorded(recorded: Recorded) -> bytes:
    """For another process that goes on with the tree, MessagePack."""
    return packed(_Recorded(recorded.tree, recorded.branches, [*recorded.stops.items()]))


def unpack_recorded(data: bytes) -> Recorded:
    """What `pack_recorded` packed."""
    found = _RECORDED.decode(data)
    return Recorded(found.tree, False, found.branches, dict(found.stops))


def assembled(began: Began, rest: Sequence[Frame], task: Task) -> Recorded | None:
    """What these frames leave of a tree, if nothing is missing between them."""
    frames = [frame for frame in rest if isinstance(frame, Grown | Finished)]
    if not frames or len(frames) < len(rest) or not _is_chain([began, *frames]):
        return None
    turns: dict[int, Turned] = {}
    live: dict[str, OpenBranch] = {}
    lost: list[int] = []
    events: list[int] = []
    for frame in frames:
        if isinstance(frame, Grown):
            events += _order(frame)
            live |= {branch.name: branch for branch in frame.opened}
            lost += frame.lost
        for turn in frame.turns:
            node = turn.node
            turns[node.index] = turn
            if node.end is not None:
                live.pop(node.branch, None)
            elif node.branch in live:
                live[node.branch] = OpenBranch(node.branch, node.index, turn.seconds)
        for asked in frame.asked if isinstance(frame, Grown) else ():
            if asked.node not in turns:
                return None
            turns[asked.node].node.num_forks = asked.num_forks
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
    tree.events = [new[one] if one >= 0 else ~new[~one] for one in events]
    tree.lost = [new[one] for one in lost]
    if _has_doubles(tree):
        return None
    for name in Counts.__struct_fields__:
        setattr(tree, name, getattr(last.counts, name))
    branches = [OpenBranch(one.name, new[one.cursor], one.seconds) for one in live.values()]
    stops = {new[old]: turn.stop for old, turn in turns.items() if turn.stop is not None}
    return Recorded(tree, isinstance(last, Finished), branches, stops)


def _is_chain(frames: Sequence[Began | Grown | Finished]) -> bool:
    """Whether each frame follows the one before; of earlier versions nothing is known."""
    if all(frame.mark is None for frame in frames):
        return True
    return all(two.mark and two.mark.follows(one.mark) for one, two in pairwise(frames))


def _has_doubles(tree: TrajectoryTree) -> bool:
    """Whether a place (branch, turns before it, begins a context or not) is there twice."""
    depths: list[int] = []
    places = set()
    for node in tree.nodes:
        before = node.continues if node.parent is None else node.parent
        depths.append(0 if before is None else depths[before] + 1)
        places.add((node.branch, depths[-1], node.parent is None))
    return len(places) < len(depths)


def _order(frame: Grown) -> list[int]:
    """The events of a frame, as a tree has them."""
    turned = [(place, 1, turn.node.index) for place, turn in enumerate(frame.turns)]
    asked = [(asked.num_before, 0, ~asked.node) for asked in frame.asked]
    return [event for *_, event in sorted(turned + asked, key=lambda one: one[:2])]


def finished_trees(folder: Path, settings: str) -> Iterator[TrajectoryTree]:
    """Of a journal that is only read, the finished trees that were begun under these settings, in
    start order; of a task its id alone is known. Raises DataError."""
    places: dict[int, list[Place]] = {}
    try:
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            data = path.read_bytes()
            for offset, size, is_whole in frames_of(data):
                head = HEADS.decode(data[offset : offset + size]) if is_whole else None
                if head is not None and head.tag in OF_TREES:
                    known = [] if head.tag == BEGAN else places.get(head.number, [])
                    places[head.number] = [*known, Place(path, offset, size)]
        for _, parts in sorted(places.items()):
            began, *rest = (DECODER.decode(payload) for payload in read_payloads(parts))
            if isinstance(began, Began) and began.settings == settings:
                recorded = assembled(began, rest, Task(began.task_id, "", "", ()))
                if recorded is not None and recorded.is_finished:
                    yield recorded.tree
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{folder}: cannot be read: {error}") from error


def read_payloads(places: Sequence[Place]) -> Iterator[bytes]:
    for place in places:
        with place.path.open("rb") as file:
            file.seek(place.offset)
            yield file.read(place.size)
