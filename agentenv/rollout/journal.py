"""The journal: a log of the rollouts of a run on disk, from which a killed run resumes.

frames.py defines the frames and rebuilds trees from them.

    folder/000001.frames ...   a new file at each start and at each checkpoint; a file is removed
                               when no remaining checkpoint can need its trees
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any, BinaryIO

from agentenv.base.deadline import WorkClock, uncancelled, within
from agentenv.base.disk import make_folder, sync
from agentenv.base.errors import ConfigError, StallError
from agentenv.base.offload import OwnThread
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Task
from agentenv.rollout import frames
from agentenv.rollout.earlier_trees import EarlierTrees

logger = logging.getLogger(__name__)
# Time to collect a batch of frames, and a shorter one while a caller waits: passing each turn to a
# thread separately would cost 300 us.
GATHER_S, COMMIT_S = 0.2, 0.05
SYNC_S = 1.0  # after this time frames also survive a power failure
STALL_S = 300.0  # a disk that does not complete a write within this time hangs
CLOSE_S = 10.0  # the same for a disk that has already failed


class Journal:
    """Writes frames; `earlier` are the trees of earlier processes.

    `settings` is a digest of the settings that trees depend on; trees with other settings are not
    resumed.
    """

    def __init__(self, folder: Path, *, settings: str, incarnation: int) -> None:
        """Raises ConfigError if the folder cannot be written."""
        self.folder = folder
        self.settings = settings
        self.incarnation = incarnation
        self.earlier = EarlierTrees(settings)
        self._last: dict[Path, int] = {}  # by file, the highest index of a tree in it
        self._pending: list[frames.Frame | frames.Packed] = []
        self._num_appended = self._num_written = 0
        self._wake, self._written = asyncio.Event(), asyncio.Event()
        self._hurry = asyncio.Event()  # a caller waits for unwritten frames
        self._lock = asyncio.Lock()  # held while the file is written or replaced
        self._working: asyncio.Task[None] | None = None
        self._is_closed = False
        self._problem: OSError | None = None
        self._is_reported = False  # a caller got the error
        self._thread = OwnThread("journal")
        self._num_records = 0
        self._file: BinaryIO | None = None
        self._size = 0  # of the file, complete frames
        try:
            make_folder(folder)
            paths = sorted(folder.glob(f"*{frames.SUFFIX}"))
            for path in paths:
                self._last[path] = self.earlier.add_file(path)
            self._number = int(paths[-1].stem) if paths else 0
            self._begin_file()
        except OSError as error:
            raise self._failure(error) from error

    async def recall(self, index: int, task: Task) -> frames.Recorded | None:
        """The state of a tree of an earlier process, if it can be resumed; see `EarlierTrees`."""
        return await self._thread(self.earlier.read, index, task)

    def record(self, index: int) -> TreeRecord:
        """The writer for the rollout of a tree."""
        self._num_records += 1
        return TreeRecord(self, index, self._num_records)

    def append(self, frame: frames.Frame | frames.Packed) -> None:
        """Queue a frame for writing; returns at once. A closed journal drops it, and `commit`
        raises."""
        if not self._pending:
            self._wake.set()
        self._pending.append(frame)
        self._num_appended += 1
        if self._working is None and not self._is_closed:
            self._working = asyncio.get_running_loop().create_task(self._work())

    @property
    def is_broken(self) -> bool:
        """Whether a write failed, after which nothing more is written."""
        return self._problem is not None

    async def commit(self) -> None:
        """Wait until all appended frames are written. Raises ConfigError if a write fails or takes
        over STALL_S seconds, and RuntimeError for frames that were appended to a closed
        journal."""
        wanted = self._num_appended
        while self._num_written < wanted:
            if self._problem is not None:
                raise self._failure(self._problem)
            if self._working is not None and self._working.done():
                self._working.result()  # raises errors other than the disk's
            if self._is_closed and (self._working is None or self._working.done()):
                raise self._closed()
            self._written.clear()
            self._hurry.set()
            await self._written.wait()

    async def rotate(self, oldest: int) -> None:
        """Continue in a new file, and remove the files without trees from index `oldest` on. Raises
        ConfigError if that fails, after which nothing more is written, and RuntimeError if the
        journal is closed."""
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
        """Write the remaining frames and close the file; idempotent. Raises ConfigError if a write
        failed, unless `commit` has raised it."""
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
        """Run a disk access in a thread. Raises OSError, also after `seconds`."""
        try:
            await within(seconds, "it", self._thread(function, *given))
        except StallError as error:
            raise OSError(errno.ETIMEDOUT, str(error)) from error

    async def _work(self) -> None:
        """Write frames until the journal closes, and then wake the waiters."""
        try:
            await self._write_batches()
        finally:
            asyncio.get_running_loop().call_soon(self._written.set)  # once this task is done

    async def _write_batches(self) -> None:
        """Write batch after batch, and sync each within SYNC_S seconds."""
        loop = asyncio.get_running_loop()
        to_sync_s: float | None = None  # when the oldest unsynced frame must be synced
        while self._pending or not self._is_closed:
            if not self._pending:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(to_sync_s):
                        await self._wake.wait()
            if self._pending and not self._is_closed:
                await self._gather()
            self._wake.clear()
            self._hurry.clear()
            batch, self._pending = self._pending, []
            is_due = to_sync_s is not None and loop.time() >= to_sync_s
            try:
                async with self._lock:
                    if self._problem is not None:  # a rotation failed
                        return
                    await uncancelled(self._on_disk(STALL_S, self._put, batch, is_due))
            except OSError as error:
                self._problem = error
                return
            if is_due:
                to_sync_s = None
            elif batch and to_sync_s is None:
                to_sync_s = loop.time() + SYNC_S
            self._num_written += len(batch)
            self._written.set()

    async def _gather(self) -> None:
        """Collect more frames while no caller waits for the present ones."""
        try:
            async with asyncio.timeout(GATHER_S):
                await self._hurry.wait()
        except TimeoutError:
            return
        await asyncio.sleep(COMMIT_S)

    def _put(self, batch: list[frames.Frame | frames.Packed], is_due: bool) -> None:
        """Append the frames completely or not at all."""
        file = self._file
        assert file is not None
        parts = [
            one.frame if isinstance(one, frames.Packed) else frames.framed(one) for one in batch
        ]
        view = memoryview(b"".join(parts))
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
        trees = [t for one in batch for t in frames.trees_of(one)]
        path = Path(file.name)
        self._last[path] = max([self._last[path], *trees])

    def _rotate(self, oldest: int) -> None:
        assert self._file is not None
        before = self._file
        os.fdatasync(before.fileno())
        self._begin_file()
        before.close()  # only after the new file is open
        for path, last in list(self._last.items()):
            if last < oldest and path != Path(self._file.name):
                path.unlink(missing_ok=True)
                del self._last[path]
        self.earlier.forget_before(oldest)

    def _begin_file(self) -> None:
        self._number += 1
        path = self.folder / f"{self._number:06d}{frames.SUFFIX}"
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

    Simultaneous events form one frame, so that a crash leaves the tree in the state before or
    after: for instance a leaf that ended, and the branches that the plan started for it.
    """

    def __init__(self, journal: frames.Sink, index: int, number: int = 0) -> None:
        """`number`: see `Mark.record`."""
        self._journal = journal
        self._index = index
        self._number = number
        self._num_frames = 0
        self._tree: TrajectoryTree
        self._flushing: asyncio.Handle | None = None

    def began(self, tree: TrajectoryTree) -> None:
        """The tree begins, without nodes that are complete."""
        journal = self._journal
        self._loop = asyncio.get_running_loop()
        self._tree = tree
        self.clock = WorkClock()  # of the tree
        self._opened: list[frames.OpenBranch] = []
        self._turns: list[frames.Turned] = []
        self._decided: list[frames.ForkDecision] = []
        self._known: set[int] = set()
        journal.append(
            frames.Began(
                tree=self._index,
                task_id=tree.task.id,
                policy_version=tree.policy_version,
                settings=journal.settings,
                mark=self._mark(),
            )
        )

    def _mark(self) -> frames.Mark:
        """The mark of the next frame."""
        self._num_frames += 1
        return frames.Mark(self._journal.incarnation, self._number, self._num_frames)

    def resumes(self, recorded: frames.Recorded) -> None:
        """The tree resumes, with new node numbers."""
        tree = recorded.tree
        self.began(tree)
        self.clock = WorkClock(recorded.seconds)
        self._opened += recorded.branches
        seconds = {branch.cursor: branch.seconds for branch in recorded.branches}
        stops = dict(recorded.stops)
        for node in tree.nodes:
            self.turned(node, seconds.get(node.index, 0.0), stops.get(node.index))
            if node.num_forks is not None:
                self.decided(node)

    def opened(self, name: str, cursor: Node, seconds: float, is_late: bool) -> None:
        """A branch begins after a node."""
        self._opened.append(frames.OpenBranch(name, cursor.index, seconds, is_late))
        self._soon()

    def turned(self, node: Node, seconds: float, stop: str | None = None) -> None:
        """A node is complete; `seconds` is the working time of its branch, `stop` the stop string
        that ended its turn."""
        self._turns.append(frames.Turned(copy(node), seconds, stop))
        self._known.add(node.index)
        self._soon()

    def decided(self, node: Node) -> None:
        """The plan decided on forks at a complete node."""
        assert node.num_forks is not None
        self._decided.append(frames.ForkDecision(node.index, node.num_forks))
        self._soon()

    async def finished(self) -> None:
        """Every branch has ended; returns once this is on disk."""
        self._flush()
        tree = self._tree
        left = [frames.Turned(copy(node)) for node in tree.nodes if node.index not in self._known]
        counts = self._counts()
        self._journal.append(
            frames.Finished(self._index, len(tree.nodes), left, counts, self._mark())
        )
        await self._journal.commit()

    def _soon(self) -> None:
        if self._flushing is None:
            self._flushing = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._flushing is None:
            return
        self._flushing.cancel()
        self._flushing = None
        opened, turns, decided = self._opened, self._turns, self._decided
        counts, mark = self._counts(), self._mark()
        self._journal.append(frames.Grown(self._index, opened, turns, decided, counts, mark))
        self._opened, self._turns, self._decided = [], [], []

    def _counts(self) -> frames.Counts:
        tree = self._tree
        of_tree = {name: getattr(tree, name) for name in frames.OF_TREE}
        return frames.Counts(**of_tree, seconds=self.clock())
