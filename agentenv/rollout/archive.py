"""The archive: every tree of every training step, as it was trained, for inspection and analysis.

    RUN/trees/step-000001.frames    a header; then for each tree an index entry, and the tree

`archive_reader.py` reads them. The frames have the format of frames.py. A truncated file is
readable up to the cut. Filtered and failed trees are included. A thread writes a step once, after
the update; a run that resumes from a checkpoint removes later files, so that the files match the
weights. A sampled token takes 16 to 24 bytes, an observed one 4.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from msgspec import Struct

from agentenv.base.deadline import uncancelled
from agentenv.base.disk import make_folder, removing, sync
from agentenv.base.disk_errors import DIR_KEY, explain
from agentenv.base.errors import ConfigError
from agentenv.base.offload import in_thread
from agentenv.base.tree import TrajectoryTree
from agentenv.rollout.frames import SUFFIX, ArchiveConfig, framed

logger = logging.getLogger(__name__)

ARCHIVE = "trees"  # folder of a run
FORMAT = 1

Fate = Literal["trained", "filtered", "failed"]


class StepHeader(Struct, frozen=True):
    """Header of a step. `policy_version` is the learner's when it took the trees; `incarnation`
    counts starts of the run; `settings` is a digest of the settings that trees depend on;
    `vocab_size` is an input of the plans; `metrics` has those of the update.
    """

    step: int
    policy_version: int
    incarnation: int
    settings: str
    vocab_size: int
    num_trees: int
    metrics: dict[str, float] = {}
    format: int = FORMAT


class Entry(Struct, frozen=True):
    """A tree in the index. `why` is the reason if it was not trained; `rewards` has the returns of
    its trajectories, except failed ones; tokens that trajectories share count once.
    """

    tree: int
    task_id: str
    kind: str
    fate: Fate
    why: str
    rewards: list[float]
    num_leaves: int
    num_failed: int
    num_truncated: int
    num_roots: int
    num_forks: int
    num_tokens: int
    num_action_tokens: int
    policy_version: int  # the engine's at the start of the tree
    oldest_version: int  # the oldest version that sampled a token
    place: int = -1  # offset of the tree's frame in the file, bytes
    num_changed: int = 0  # forks with another outcome than their parent branch

    @classmethod
    def of(cls, kept: KeptTree) -> Entry:
        tree = kept.tree
        leaves, paths = tree.leaves(), list(tree.trajectories())
        return cls(
            tree=tree.index,
            task_id=tree.task.id,
            kind=tree.task.kind,
            fate=kept.fate,
            why=kept.why,
            rewards=[path.reward for path in paths],
            num_leaves=len(leaves),
            num_failed=len(leaves) - len(paths),
            num_truncated=sum(path.leaf.end == "truncated" for path in paths),
            num_roots=tree.num_roots,
            num_forks=tree.num_forks,
            num_tokens=tree.num_tokens,
            num_action_tokens=tree.num_action_tokens,
            policy_version=tree.policy_version,
            oldest_version=tree.oldest_version(),
            num_changed=changed_forks(tree),
        )


def changed_forks(tree: TrajectoryTree) -> int:
    """The number of forks whose outcome differs from that of their parent branch: its success or,
    where the env reports none, its return. Pairs with a failed branch do not count."""
    ends = {
        path.leaf.branch: path.success if "success" in path.leaf.info else path.reward
        for path in tree.trajectories()
    }
    left = {branch: branch.rpartition(".")[0] for branch in ends}
    return sum(parent in ends and ends[branch] != ends[parent] for branch, parent in left.items())


class Credit(Struct, array_like=True):
    """Credit of a tree, an entry per node: the sums of the positive and of the negative advantages
    of the leaves below it, their number, and the return and advantage of a leaf (elsewhere nan)."""

    adv_pos: list[float]
    adv_neg: list[float]
    weight: list[float]
    returns: list[float]
    advantages: list[float]


class KeptTree(Struct):
    """An archived tree. `credit` is None if too few leaves counted for a group."""

    tree: TrajectoryTree
    fate: Fate
    why: str = ""
    credit: Credit | None = None


def steps_of(folder: Path) -> dict[int, Path]:
    """The files of RUN/trees by step, oldest first."""
    found = {int(path.stem[5:]): path for path in folder.glob(f"step-*[0-9]{SUFFIX}")}
    return dict(sorted(found.items()))


# writing


class Archive:
    """Writes the files of a run, one at a time."""

    def __init__(self, folder: Path, config: ArchiveConfig) -> None:
        self.folder = folder
        self.config = config
        self._writing: asyncio.Task[None] | None = None

    def forget_after(self, step: int) -> None:
        """Remove the files of later steps, which do not belong to the resumed weights."""
        for number, path in steps_of(self.folder).items():
            if number > step:
                path.unlink()

    async def write_behind(self, header: StepHeader, trees: Iterable[KeptTree]) -> None:
        """Write a step in the background, after waiting for the previous step's write. The trees
        must not change anymore. Raises ConfigError if that write failed; this step is written
        anyway, and the next call reports its failure.
        """
        try:
            await self.written()
        finally:
            if self.config.max_gb:
                work = uncancelled(in_thread(self.write, header, trees))
                self._writing = asyncio.create_task(work)

    async def written(self) -> None:
        """Wait for the pending write. Raises ConfigError if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await uncancelled(writing)

    async def close(self) -> None:
        """Wait for pending writes, ignoring their errors."""
        try:
            await self.written()
        except ConfigError as error:
            logger.warning("%s", error)

    def write(self, header: StepHeader, trees: Iterable[KeptTree]) -> None:
        """Write the file of a step, replacing an existing one, and remove the oldest files beyond
        the limit. Raises ConfigError.
        """
        path = self.folder / f"step-{header.step:06d}{SUFFIX}"
        try:
            make_folder(self.folder)
            with removing(path), path.open("wb") as file:
                file.write(framed(header))
                for kept in trees:
                    file.write(framed(Entry.of(kept)))
                    file.write(framed(kept))
                file.flush()
                os.fdatasync(file.fileno())
            sync(self.folder)
            self._prune(path)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {explain(error, DIR_KEY)}; archive.max_gb limits the "
                "size of the archive, 0 turns it off"
            ) from error

    def _prune(self, newest: Path) -> None:
        paths = list(steps_of(self.folder).values())
        sizes = {path: path.stat().st_size for path in paths}
        total = sum(sizes.values())
        for path in paths:
            if total <= self.config.max_gb * 1e9 or path == newest:
                break
            path.unlink()
            total -= sizes[path]
