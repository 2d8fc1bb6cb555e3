"""The trees of earlier processes of a run, in the files of its journal."""

from __future__ import annotations

import logging
from mmap import ACCESS_READ, mmap
from pathlib import Path

import msgspec

from agentenv.base.types import Task
from agentenv.rollout.frames import (
    BEGAN,
    DECODER,
    FINISHED,
    HEADS,
    NUM_FIRST,
    OF_TREES,
    Began,
    Head,
    Place,
    Recorded,
    Started,
    StepRefused,
    WorkerLost,
    assembled,
    frames_of,
    trees_of,
)

logger = logging.getLogger(__name__)


class EarlierTrees:
    """The places of their frames. Trees of other `settings` are not resumed. `losses`: by tree, the
    consecutive losses of its worker without progress."""

    def __init__(self, settings: str) -> None:
        self.losses: dict[int, int] = {}
        self._settings = settings
        self._places: dict[int, list[Place]] = {}
        self._started: dict[int, Started] = {}
        self._begun: dict[int, Place] = {}  # the first frame of trees without further frames yet

    def add_file(self, path: Path) -> int:
        """Read a file of the journal. Returns the highest index of a tree in it; -1: none."""
        if path.stat().st_size == 0:
            return -1
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            return self._index(path, data)

    def _index(self, path: Path, data: mmap) -> int:
        last = -1
        for offset, size, is_whole in frames_of(data):
            if not is_whole:
                logger.warning(
                    "%s: %d bytes at %d are unreadable; their trees are rolled out again",
                    *(path, size, offset),
                )
                continue
            payload = data[offset : offset + size]
            head = HEADS.decode(payload)
            if head.tag in OF_TREES:
                trees = [head.number]
                self._note(head, Place(path, offset, size))
            else:
                frame = DECODER.decode(payload)
                trees = trees_of(frame)
                if isinstance(frame, Started):
                    self._started[frame.tree] = frame
                if isinstance(frame, StepRefused):
                    for tree in trees:
                        self._places.pop(tree, None)
                        self._begun.pop(tree, None)
                if isinstance(frame, WorkerLost):
                    self.losses[frame.tree] = frame.num if frame.settings == self._settings else 0
            last = max([last, *trees])
        return last

    def _note(self, head: Head, place: Place) -> None:
        """A resumed tree begins again and then records its whole state in one frame; until that
        frame is complete, the earlier frames remain valid."""
        if head.tag == BEGAN:
            self._begun[head.number] = place
            self._places.setdefault(head.number, [])
        elif head.number in self._begun:
            self._places[head.number] = [self._begun.pop(head.number), place]
        else:
            self._places.setdefault(head.number, []).append(place)
        if len(self._places[head.number]) > NUM_FIRST and head.tag not in (BEGAN, FINISHED):
            self.losses.pop(head.number, None)  # it made progress

    def knows(self, index: int) -> bool:
        """Whether an earlier process began this tree."""
        return index in self._places

    def started(self, index: int) -> bool:
        """Whether an earlier process started this tree, even if it did not begin to grow."""
        return index in self._started

    def drawn(self, index: int) -> str:
        """The id of the task that an earlier process drew for this tree; empty if none."""
        return self._started[index].task if index in self._started else ""

    def read(self, index: int, task: Task) -> Recorded | None:
        """The state of a tree from an earlier process; None unless it can be resumed: it must have
        this task and equal settings, and be undamaged. Blocks."""
        try:
            frames = [DECODER.decode(place.read()) for place in self._places.get(index, ())]
        except (OSError, msgspec.DecodeError):
            return None
        began = frames[0] if frames else None
        if not isinstance(began, Began) or began.settings != self._settings:
            return None
        return assembled(frames, task) if began.task_id == task.id else None

    def forget_before(self, oldest: int) -> None:
        """Forget the trees before this index."""
        for index in [one for one in self._places if one < oldest]:
            del self._places[index]
        self._started = {one: frame for one, frame in self._started.items() if one >= oldest}
