"""Reads archived trees: header and index of a step, a tree, the tokens of a trajectory.

step = read_step(path)          header and index, without reading a tree
for entry in step.entries: ...  rewards, sizes, the fate of the tree and the reason
kept = step.tree(entry)         reads one tree, at its offset in the file
columns_of(kept, leaf)          its tokens as arrays: ids, log-probs, credit, versions, mask
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from agentenv.base.errors import DataError
from agentenv.base.tree import Node, Scored, Trajectory
from agentenv.rollout.archive import FORMAT, Entry, KeptTree, StepHeader, steps_of
from agentenv.rollout.frames import read_frame, skip_frame


class Columns(NamedTuple):
    """The tokens of one trajectory, one entry each; unknown values, such as log-probs of observed
    tokens, are nan, and their `version` is -1.
    """

    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]  # sampled by the policy
    logprobs: NDArray[np.float32]  # the engine's
    proximal: NDArray[np.float32]  # the learner's before the update
    learner_logprobs: NDArray[np.float32]  # the learner's when it first trained the token
    entropies: NDArray[np.float32]  # the learner's where it computed them, nats
    adv_pos: NDArray[np.float64]
    adv_neg: NDArray[np.float64]
    weight: NDArray[np.float64]  # trajectories that share the token; 0: not trained
    version: NDArray[np.int32]


def columns_of(kept: KeptTree, leaf: Node) -> Columns:
    """The tokens of the trajectory that ends with `leaf`."""
    return Columns(*map(np.concatenate, zip(*_columns(kept, leaf), strict=True)))


def _columns(kept: KeptTree, leaf: Node) -> Iterator[tuple[NDArray[Any], ...]]:
    credit, scored = kept.credit, kept.tree.scored
    for node in Trajectory(kept.tree.path(leaf)).path:
        at, size = node.index, len(node.action_ids)
        rest = len(node.observation_ids)
        versions = np.full(size, kept.tree.policy_version, np.int32)
        for span in node.version_spans:
            versions[span.start : span.end] = span.version
        found = scored[at] if scored else Scored()
        shares = [0.0] * 3
        if credit is not None:
            shares = [credit.adv_pos[at], credit.adv_neg[at], credit.weight[at]]
        figures = (node.logprobs, found.proximal, found.logprobs)
        entropies = found.entropies or node.entropies
        yield (
            np.asarray(node.action_ids + node.observation_ids, np.int32),
            np.arange(size + rest) < size,
            *(_padded(one, size + rest) for one in (*figures, entropies)),
            *(np.repeat([share, 0.0], [size, rest]) for share in shares),
            np.append(versions, np.full(rest, -1, np.int32)),
        )


def _padded(values: Sequence[float], size: int) -> NDArray[np.float32]:
    known = np.asarray(values, np.float32)
    return np.pad(known, (0, size - len(known)), constant_values=np.nan)


_read_header = msgspec.msgpack.Decoder(StepHeader).decode
_read_entry = msgspec.msgpack.Decoder(Entry).decode
_read_tree = msgspec.msgpack.Decoder(KeptTree).decode


class Step(NamedTuple):
    """One file. `is_whole` is False if it is truncated or being written."""

    path: Path
    header: StepHeader
    entries: list[Entry]
    is_whole: bool

    def tree(self, entry: Entry) -> KeptTree:
        """Read one tree. Raises DataError if it is damaged."""
        with self.path.open("rb") as file:
            file.seek(entry.place)
            data = read_frame(file)
        with suppress(msgspec.DecodeError):
            if data is not None:
                return _read_tree(data)
        raise DataError(
            f"{self.path}: tree {entry.tree}, at byte {entry.place}, is damaged; the other trees "
            "of the file are readable"
        )

    def trees(self) -> Iterator[KeptTree]:
        """All trees, one at a time."""
        return map(self.tree, self.entries)


def read_step(path: Path) -> Step:
    """Header and index of a file of RUN/trees, complete or truncated. Raises DataError for other
    files.
    """
    try:
        with path.open("rb") as file:
            return _read_step(path, file)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _read_step(path: Path, file: BinaryIO) -> Step:
    first = read_frame(file)
    header: StepHeader | None = None
    with suppress(msgspec.DecodeError):
        header = None if first is None else _read_header(first)
    if header is None or header.format != FORMAT:
        raise DataError(f"{path}: not a tree file that this version can read")
    entries = []
    while (data := read_frame(file)) is not None:
        try:
            entry = _read_entry(data)
        except msgspec.DecodeError:
            break
        place = file.tell()
        if not skip_frame(file):
            break
        entries.append(msgspec.structs.replace(entry, place=place))
    return Step(path, header, entries, is_whole=len(entries) == header.num_trees)


def readable_steps(folder: Path, report: Callable[[str], None]) -> list[Step]:
    """The files of RUN/trees, oldest first. Unreadable ones are reported and skipped: the last one
    of a killed run may be empty.
    """
    found = []
    for path in steps_of(folder).values():
        try:
            found.append(read_step(path))
        except DataError as error:
            report(f"{error}; it is skipped")
    return found
