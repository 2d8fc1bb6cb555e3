"""The trees of earlier processes of a run, in the files of its journal."""

from __future__ import annotations

import logging
from mmap import ACCESS_READ, mmap
from pathlib import Path

import msgspec

from agentenv.base.types import Task
from agentenv.rollout import frames

logger = logging.getLogger(__name__)


class EarlierTrees:
    """The places of their frames. Trees of other `settings` are not resumed. `losses`: by tree, the
    consecutive losses of its worker without progress."""

    def __init__(self, settings: str) -> None:
        self.losses: dict[int, int] = {}
        self._settings = settings
        self._places: dict[int, list[frames.Place]] = {}
        self._started: dict[int, frames.Started] = {}
        # The first frame of trees without further frames yet.
        self._begun: dict[int, frames.Place] = {}

    def add_file(self, path: Path) -> int:
        """Read a file of the journal. Returns the highest index of a tree in it; -1: none."""
        if path.stat().st_size == 0:
            return -1
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            return self._index(path, data)

    def _index(self, path: Path, data: mmap) -> int:
        last = -1
        for offset, size, is_whole in frames.frames_of(data):
            if not is_whole:
                text = "%s: %d bytes at %d are unreadable; their trees are rolled out again"
                logger.warning(text, path, size, offset)
                continue
            payload = data[offset : offset + size]
            head = frames.HEADS.decode(payload)
            if head.tag in frames.OF_TREES:
                trees = [head.number]
                self._note(head, frames.Place(path, offset, size))
            else:
                frame = frames.DECODER.decode(payload)
                trees = frames.trees_of(frame)
                if isinstance(frame, frames.Started):
                    self._started[frame.tree] = frame
                if isinstance(frame, frames.StepRefused):
                    for tree in trees:
                        self._places.pop(tree, None)
                        self._begun.pop(tree, None)
                if isinstance(frame, frames.WorkerLost):
                    self.losses[frame.tree] = frame.num if frame.settings == self._settings else 0
            last = max([last, *trees])
        return last

    def _note(self, head: frames.Head, place: frames.Place) -> None:
        """A resumed tree begins again and then records its whole state in one frame; until that
        frame is complete, the earlier frames remain valid."""
        if head.tag == frames.BEGAN:
            self._begun[head.number] = place
            self._places.setdefault(head.number, [])
        elif head.number in self._begun:
            self._places[head.number] = [self._begun.pop(head.number), place]
        else:
            self._places.setdefault(head.number, []).append(place)
        if len(self._places[head.number]) > frames.NUM_FIRST and head.tag not in (
            frames.BEGAN,
            frames.FINISHED,
        ):
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

    def read(self, index: int, task: Task) -> frames.Recorded | None:
        """The state of a tree from an earlier process; None unless it can be resumed: it must have
        this task and equal settings, and be undamaged. Blocks."""
        try:
            found = [frames.DECODER.decode(place.read()) for place in self._places.get(index, ())]
        except (OSError, msgspec.DecodeError):
            return None
        began = found[0] if found else None
        if not isinstance(began, frames.Began) or began.settings != self._settings:
            return None
        return frames.assembled(found, task) if began.task_id == task.id else None

    def forget_before(self, oldest: int) -> None:
        """Forget the trees before this index."""
        for index in [one for one in self._places if one < oldest]:
            del self._places[index]
        self._started = {one: frame for one, frame in self._started.items() if one >= oldest}
