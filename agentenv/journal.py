"""The journal: the rollouts of a run, written to disk as they happen, from which a killed run
resumes.

frames.py defines the frames and rebuilds trees from them.

    folder/000001.frames ...   a new file at each start and at each checkpoint; a file goes when no
                               checkpoint that is kept can want a tree of it any more
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Awaitable, Callable
from copy import copy
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from agentenv.deadline import uncancelled, within
from agentenv.disk import make_folder, sync
from agentenv.errors import ConfigError, StallError
from agentenv.frames import (
    BEGAN,
    DECODER,
    FINISHED,
    HEADS,
    NUM_FIRST,
    OF_TREES,
    SUFFIX,
    Asked,
    Began,
    Counts,
    Finished,
    Frame,
    Grown,
    Head,
    JournalConfig,
    Mark,
    OpenBranch,
    Packed,
    Place,
    Recorded,
    Refused,
    Sink,
    Started,
    Turned,
    WorkerLost,
    assembled,
    framed,
    frames_of,
    read_payloads,
    trees_of,
)
from agentenv.offload import OwnThread
from agentenv.tree import Node, Order, TrajectoryTree
from agentenv.types import Task

logger = logging.getLogger(__name__)
# In which frames come together, and those that somebody waits for: handing a thread each turn alone
# costs 300 us.
GATHER_S, COMMIT_S = 0.2, 0.05
STALL_S = 300.0  # a disk that has not written for so long hangs
CLOSE_S = 10.0  # of one that has failed already


class Journal:
    """Writes frames, and finds the trees of those that an earlier process wrote.

    `settings` names what trees depend on: one that was begun under others is not taken up.
    """

    def __init__(
        self,
        folder: Path,
        config: JournalConfig,
        *,
        settings: str,
        incarnation: int,
        offload: Callable[..., Awaitable[Any]] | None = None,
    ) -> None:
        """`offload` runs what blocks; by default in a thread of the journal's own, for which no
        other work is ever waited. Raises ConfigError if the folder cannot be written."""
        self.folder = folder
        self.config = config
        self.settings = settings
        self.incarnation = incarnation
        self._places: dict[int, list[Place]] = {}
        self._started: dict[int, Started] = {}  # by an earlier process
        self._begun: dict[int, Place] = {}  # where a tree begins of which no more is read yet
        # By tree, the workers that earlier processes lost in a row while it came no further.
        self.losses: dict[int, int] = {}
        self._last: dict[Path, int] = {}  # the latest tree that a file knows of
        self._pending: list[Frame | Packed] = []
        self._num_appended = self._num_written = 0
        self._wake, self._written = asyncio.Event(), asyncio.Event()
        self._hurry = asyncio.Event()  # somebody waits for what is not written yet
        self._lock = asyncio.Lock()  # held while the file is written or replaced
        self._working: asyncio.Task[None] | None = None
        self._is_closed = False
        self._problem: OSError | None = None
        self._is_reported = False  # somebody was
        self._thread = OwnThread("journal")
        self._offload = offload or self._thread
        self._num_records = 0
        self._file: BinaryIO | None = None
        self._size = 0  # of the file, whole frames
        try:
            make_folder(folder)
            paths = sorted(folder.glob(f"*{SUFFIX}"))
            for path in paths:
                self._read(path)
            self._number = int(paths[-1].stem) if paths else 0
            self._begin_file()
        except OSError as error:
            raise self._error(error) from error

    # reading

    def _read(self, path: Path) -> None:
        self._last[path] = -1
        if path.stat().st_size == 0:
            return
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            self._index(path, data)

    def _index(self, path: Path, data: mmap) -> None:
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
                if isinstance(frame, Refused):
                    for tree in trees:
                        self._places.pop(tree, None)
                        self._begun.pop(tree, None)
                if isinstance(frame, WorkerLost):
                    self.losses[frame.tree] = frame.num if frame.settings == self.settings else 0
            self._last[path] = max([self._last[path], *trees])

    def _note(self, head: Head, place: Place) -> None:
        """A tree that goes on begins again, and then says all that is known of it: before it has
        said that, the earlier frames hold."""
        if head.tag == BEGAN:
            self._begun[head.number] = place
            self._places.setdefault(head.number, [])
        elif head.number in self._begun:
            self._places[head.number] = [self._begun.pop(head.number), place]
        else:
            self._places.setdefault(head.number, []).append(place)
        if len(self._places[head.number]) > NUM_FIRST and head.tag not in (BEGAN, FINISHED):
            self.losses.pop(head.number, None)  # it came further

    def knows(self, index: int) -> bool:
        """Whether an earlier process began this tree."""
        return index in self._places

    def started(self, index: int) -> bool:
        """Whether an earlier process started this tree, though it may not have begun it."""
        return index in self._started or index in self._places

    def drawn(self, index: int) -> str:
        """The id of the task that an earlier process drew for this tree; empty: none."""
        return self._started[index].task if index in self._started else ""

    def order_of(self, index: int) -> Order | None:
        """What an earlier process decided of this tree, if anything beside its task."""
        return self._started[index].order if index in self._started else None

    def read(self, index: int, task: Task) -> Recorded | None:
        """The tree of this place as an earlier process left it, if it can be gone on with: it is
        the task's, nothing of it is damaged, and the settings are those of today. Blocks."""
        try:
            frames = [
                DECODER.decode(payload) for payload in read_payloads(self._places.get(index, ()))
            ]
        except (OSError, msgspec.DecodeError):
            return None
        if not frames or not isinstance(began := frames[0], Began):
            return None
        if (began.task_id, began.settings) != (task.id, self.settings):
            return None
        return assembled(began, frames[1:], task)

    async def recall(self, index: int, task: Task) -> Recorded | None:
        """As `read`, in the journal's thread."""
        found: Recorded | None = await self._offload(self.read, index, task)
        return found

    # writing

    def record(self, index: int) -> TreeRecord:
        """Through which the rollout of a tree writes."""
        self._num_records += 1
        return TreeRecord(self, index, self._num_records)

    def append(self, frame: Frame | Packed) -> None:
        """Write a frame soon, behind all before it; returns at once. Of a journal that is closed
        nothing is written any more, as `commit` says."""
        if not self._pending:
            self._wake.set()
        self._pending.append(frame)
        self._num_appended += 1
        if self._working is None and not self._is_closed:
            self._working = asyncio.get_running_loop().create_task(self._work())

    @property
    def is_broken(self) -> bool:
        """Nothing is written any more."""
        return self._problem is not None

    async def commit(self) -> None:
        """Wait until all that was appended is written. Raises ConfigError when it cannot be, also
        for a disk that does not write for STALL_S, and RuntimeError for what was appended to a
        journal that is closed."""
        wanted = self._num_appended
        while self._num_written < wanted:
            if self._problem is not None:
                raise self._failure(self._problem)
            if self._working is not None and self._working.done():
                self._working.result()  # raises what no disk has done
            if self._is_closed and (self._working is None or self._working.done()):
                raise self._closed()
            self._written.clear()
            self._hurry.set()
            await self._written.wait()

    async def rotate(self, oldest: int) -> None:
        """Go on in a new file, and remove those in which no tree from place `oldest` on is. Raises
        ConfigError when that cannot be done, and then nothing is written any more, and RuntimeError
        if the journal is closed."""
        await self.commit()
        async with self._lock:
            if self._file is None:
                raise self._closed()
            try:
                await uncancelled(self._on_disk(STALL_S, self._rotate, oldest))
            except OSError as error:
                self._problem = self._problem or error
                raise self._failure(error) from error

    async def close(self) -> None:
        """Write what is left, and close the file; idempotent. Raises ConfigError when something
        could not be written, unless `commit` has."""
        self._is_closed = True
        self._wake.set()
        self._hurry.set()
        try:
            if self._working is not None:
                await uncancelled(self._working)
        finally:
            await uncancelled(self._close_file())
        if self._problem is not None and not self._is_reported:
            raise self._failure(self._problem)

    async def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                seconds = CLOSE_S if self.is_broken else STALL_S
                await uncancelled(self._on_disk(seconds, _close, file))
            except OSError as error:
                self._problem = self._problem or error
        self._thread.close()

    async def _on_disk(self, seconds: float, function: Callable[..., None], *given: Any) -> None:
        """Let a thread do it. Raises OSError, also where the disk takes longer."""
        try:
            await within(seconds, "it", self._offload(function, *given))
        except StallError as error:
            raise OSError(errno.ETIMEDOUT, str(error)) from error

    async def _work(self) -> None:
        """Write what comes, until the journal closes; its waiters learn of its end."""
        try:
            await self._write_batches()
        finally:
            asyncio.get_running_loop().call_soon(self._written.set)  # once this task is done

    async def _write_batches(self) -> None:
        """Batch after batch; what was written is synced after `sync_s` at the latest."""
        loop = asyncio.get_running_loop()
        to_sync_s: float | None = None  # when the oldest of what is not synced is due
        while self._pending or not self._is_closed:
            if not self._pending:
                try:
                    async with asyncio.timeout_at(to_sync_s):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            if self._pending and not self._is_closed:
                await self._gather()
            self._wake.clear()
            self._hurry.clear()
            batch, self._pending = self._pending, []
            is_due = to_sync_s is not None and loop.time() >= to_sync_s
            try:
                async with self._lock:
                    if self._problem is not None:  # a rotation's
                        return
                    await uncancelled(self._on_disk(STALL_S, self._put, batch, is_due))
            except OSError as error:
                self._problem = error
                return
            if is_due:
                to_sync_s = None
            elif batch and to_sync_s is None:
                to_sync_s = loop.time() + self.config.sync_s
            self._num_written += len(batch)
            self._written.set()

    async def _gather(self) -> None:
        """More frames come, for so long as nobody waits for those that are there."""
        try:
            async with asyncio.timeout(GATHER_S):
                await self._hurry.wait()
        except TimeoutError:
            return
        await asyncio.sleep(COMMIT_S)

    def _put(self, batch: list[Frame | Packed], is_due: bool) -> None:
        """Append whole frames or nothing."""
        file = self._file
        assert file is not None
        frames = [one.frame if isinstance(one, Packed) else framed(one) for one in batch]
        view = memoryview(b"".join(frames))
        size = len(view)
        try:
            while view:
                view = view[os.write(file.fileno(), view) :]
            if is_due:
                os.fdatasync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), self._size)
            raise
        self._size += size
        trees = [t for one in batch for t in trees_of(one)]
        path = Path(file.name)
        self._last[path] = max([self._last[path], *trees])

    def _rotate(self, oldest: int) -> None:
        assert self._file is not None
        before = self._file
        os.fdatasync(before.fileno())
        self._begin_file()
        before.close()  # now that there is another to write into
        for path, last in list(self._last.items()):
            if last < oldest and path != Path(self._file.name):
                path.unlink(missing_ok=True)
                del self._last[path]
        for index in [one for one in self._places if one < oldest]:
            del self._places[index]
        self._started = {one: frame for one, frame in self._started.items() if one >= oldest}

    def _begin_file(self) -> None:
        self._number += 1
        path = self.folder / f"{self._number:06d}{SUFFIX}"
        file = path.open("xb", buffering=0)
        try:
            sync(self.folder)
        except OSError:
            file.close()
            path.unlink(missing_ok=True)
            raise
        self._file, self._size, self._last[path] = file, 0, -1

    def _closed(self) -> RuntimeError:
        return RuntimeError(f"the journal in {self.folder} is closed and accepts no more frames")

    def _failure(self, error: OSError) -> ConfigError:
        self._is_reported = True
        return self._error(error)

    def _error(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self.folder} cannot be written: {error.strerror or error}; free some space there or "
            "choose another location with run.dir=DIR, then continue with --resume"
        )


def _close(file: BinaryIO) -> None:
    try:
        os.fdatasync(file.fileno())
    finally:
        file.close()


class TreeRecord:
    """Writes what happens to one tree.

    What happens in one go is one frame, so that a crash finds the tree as it was before or after:
    a leaf that ended, and the branches that the plan began for it.
    """

    def __init__(self, journal: Sink, index: int, number: int = 0) -> None:
        """`number`: see `Mark.record`."""
        self._journal = journal
        self._index = index
        self._number = number
        self._num_frames = 0
        self._tree: TrajectoryTree
        self._opened: list[OpenBranch] = []
        self._turns: list[Turned] = []
        self._asked: list[Asked] = []
        self._known: set[int] = set()
        self._flushing: asyncio.Handle | None = None

    def began(self, tree: TrajectoryTree) -> None:
        """The tree begins, without nodes that are complete."""
        journal = self._journal
        self._loop = asyncio.get_running_loop()
        self._tree = tree
        self._opened, self._turns, self._asked = [], [], []
        self._known = set()
        journal.append(
            Began(
                tree=self._index,
                task_id=tree.task.id,
                policy_version=tree.policy_version,
                incarnation=journal.incarnation,
                settings=journal.settings,
                mark=self._mark(),
            )
        )

    def _mark(self) -> Mark:
        """Of the next frame."""
        self._num_frames += 1
        return Mark(self._journal.incarnation, self._number, self._num_frames)

    def resumes(self, recorded: Recorded) -> None:
        """The tree goes on, its nodes under new numbers."""
        tree = recorded.tree
        self.began(tree)
        self._opened += recorded.branches
        seconds = {branch.cursor: branch.seconds for branch in recorded.branches}
        for node in tree.nodes:
            self.turned(node, seconds.get(node.index, 0.0), recorded.stops.get(node.index))
            if node.num_forks is not None:
                self.asked(node)

    def opened(self, name: str, cursor: Node, seconds: float) -> None:
        """A branch begins behind a node."""
        self._opened.append(OpenBranch(name, cursor.index, seconds))
        self._soon()

    def turned(self, node: Node, seconds: float, stop: str | None = None) -> None:
        """A node is complete, whose turn ended by `stop`; its branch was worked for so many
        seconds."""
        self._turns.append(Turned(copy(node), seconds, stop))
        self._known.add(node.index)
        self._soon()

    def asked(self, node: Node) -> None:
        """The plan decided on forks at a complete node."""
        assert node.num_forks is not None
        self._asked.append(Asked(node.index, node.num_forks))
        self._soon()

    async def finished(self) -> None:
        """Every branch is at its end; returns when that is written."""
        self._flush()
        tree = self._tree
        left = [Turned(copy(node)) for node in tree.nodes if node.index not in self._known]
        counts = self._counts()
        self._journal.append(Finished(self._index, len(tree.nodes), left, counts, self._mark()))
        await self._journal.commit()

    def _soon(self) -> None:
        if self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._flushing is None:
            return
        self._flushing.cancel()
        self._flushing = None
        self._journal.append(
            Grown(
                tree=self._index,
                opened=self._opened,
                turns=self._turns,
                asked=self._asked,
                counts=self._counts(),
                mark=self._mark(),
            )
        )
        self._opened, self._turns, self._asked = [], [], []

    def _counts(self) -> Counts:
        tree = self._tree
        return Counts(*(getattr(tree, name) for name in Counts.__struct_fields__))
