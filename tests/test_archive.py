"""The archive: every tree of a step with its fate, read one at a time, from whole and truncated
files."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from agentenv.base.errors import ConfigError, DataError
from agentenv.base.tree import Scored, TrajectoryTree, to_frame
from agentenv.base.types import VersionSpan
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.credit import TreeCredit
from agentenv.rollout.archive import Archive, Credit, KeptTree, StepHeader, changed_forks, steps_of
from agentenv.rollout.archive_reader import columns_of, read_step
from agentenv.rollout.frames import ArchiveConfig
from tests.support.virtual_clock import run_virtual
from tests.test_actor import AlwaysFork
from tests.test_journal import TASK, make_actor

ALGORITHM = ARPO(group_size=5)


def header(step: int, num_trees: int) -> StepHeader:
    return StepHeader(
        step=step,
        policy_version=step - 1,
        incarnation=1,
        settings="s",
        vocab_size=64,
        num_trees=num_trees,
        metrics={"learner/loss": 0.5},
    )


def grown(index: int) -> TrajectoryTree:
    return run_virtual(make_actor().rollout(TASK, AlwaysFork(group_size=5), index=index))


def kept(index: int) -> KeptTree:
    """A tree with all values that a learner may add."""
    tree, rng = grown(index), Random(index)
    for leaf in tree.leaves():
        leaf.reward = rng.random()
    for node in tree.nodes:
        size = len(node.action_ids)
        node.version_spans = [VersionSpan(2, 0, size // 2), VersionSpan(3, size // 2, size)]
        node.info = {
            "tool_calls": [{"name": "search", "ok": True}],
            "odd": "\ud800",
            "big": 1 << 70,
        }
        figures = (array("f", [rng.random() for _ in range(size)]) for _ in range(3))
        tree.scored.append(Scored(*figures))
    credit = ALGORITHM.credit(tree)
    assert isinstance(credit, TreeCredit)
    figures = [getattr(credit, name).tolist() for name in Credit.__struct_fields__]
    return KeptTree(tree, "trained", "", Credit(*figures))


def written(folder: Path, trees: list[KeptTree], step: int = 1, max_gb: float = 1.0) -> Path:
    Archive(folder, ArchiveConfig(max_gb=max_gb)).write(header(step, len(trees)), trees)
    return folder / f"step-{step:06d}.frames"


def content(tree: TrajectoryTree) -> bytes:
    """All content of a tree except unencodable values."""
    for node in tree.nodes:
        node.info = {}
    return to_frame(tree)


def test_a_tree_is_read_back_unchanged(tmp_path: Path) -> None:
    trees = [kept(index) for index in range(3)]
    short = KeptTree(grown(9), "failed", "EnvError")
    step = read_step(written(tmp_path, [*trees, short]))
    assert step.is_whole
    assert step.header == header(1, 4)
    assert [entry.tree for entry in step.entries] == [0, 1, 2, 9]
    entry = step.entries[1]
    tree = trees[1].tree
    assert (entry.fate, entry.num_leaves, entry.num_forks) == ("trained", 5, tree.num_forks)
    assert entry.rewards == [path.reward for path in tree.trajectories()]
    assert (entry.num_tokens, entry.oldest_version) == (tree.num_tokens, 2)
    assert (step.entries[3].fate, step.entries[3].why) == ("failed", "EnvError")
    assert step.tree(step.entries[3]).credit is None
    found = step.tree(entry)
    assert found.tree.nodes[1].info["odd"] == "\\ud800"
    assert content(found.tree) == content(tree)
    assert found.credit is not None
    assert trees[1].credit is not None
    for name in Credit.__struct_fields__:
        a, b = getattr(found.credit, name), getattr(trees[1].credit, name)
        np.testing.assert_array_equal(a, b)


def test_columns_have_all_values_of_each_token(tmp_path: Path) -> None:
    step = read_step(written(tmp_path, [kept(4)]))
    found = step.tree(step.entries[0])
    assert found.credit is not None
    for path in found.tree.trajectories():
        columns = columns_of(found, path.leaf)
        assert columns.token_ids.tolist() == path.token_ids
        assert columns.mask.tolist() == path.loss_mask
        sampled = np.flatnonzero(columns.mask)
        of_node = [node for node in path.path for _ in node.action_ids]
        whole = [value for node in path.path for value in node.logprobs]
        assert columns.logprobs[sampled].tolist() == whole
        whole = [value for node in path.path for value in found.tree.scored[node.index].entropies]
        assert columns.entropies[sampled].tolist() == whole
        scored = [value for node in path.path for value in found.tree.scored[node.index].logprobs]
        assert columns.learner_logprobs[sampled].tolist() == scored
        assert np.isnan(columns.proximal[~columns.mask]).all()
        for name in ("adv_pos", "adv_neg", "weight"):
            values = getattr(found.credit, name)
            told = [values[node.index] for node in of_node]
            assert getattr(columns, name)[sampled].tolist() == told
            assert not getattr(columns, name)[~columns.mask].any()
        assert set(columns.version[sampled].tolist()) <= {2, 3}
        assert (columns.version[~columns.mask] == -1).all()


def places(path: Path) -> Iterator[int]:
    """Around every beginning of a tree and in the midst of it."""
    whole = read_step(path)
    ends = [*(entry.place for entry in whole.entries[1:]), path.stat().st_size]
    for entry, end in zip(whole.entries, ends, strict=True):
        yield from (entry.place - 5, entry.place, entry.place + 5, (entry.place + end) // 2)


def test_a_truncated_file_is_read_up_to_its_last_whole_tree(tmp_path: Path) -> None:
    path = written(tmp_path, [kept(index) for index in range(3)])
    whole, data = read_step(path), path.read_bytes()
    for place in places(path):
        path.write_bytes(data[:place])
        cut = read_step(path)
        assert not cut.is_whole
        assert cut.entries == whole.entries[: len(cut.entries)]
        assert [one.tree.index for one in cut.trees()] == [entry.tree for entry in cut.entries]
        following = [*whole.entries[1:], None][len(cut.entries)]
        assert following is None or following.place > place
    path.write_bytes(data[:8])
    with pytest.raises(DataError, match="a tree file"):
        read_step(path)


def test_damage_loses_only_one_tree(tmp_path: Path) -> None:
    path = written(tmp_path, [kept(index) for index in range(3)])
    step, data = read_step(path), bytearray(path.read_bytes())
    data[step.entries[1].place + 400] ^= 1
    path.write_bytes(data)
    step = read_step(path)
    assert step.is_whole
    with pytest.raises(DataError, match="tree 1, at"):
        step.tree(step.entries[1])
    assert step.tree(step.entries[2]).tree.index == 2


def test_the_oldest_steps_are_removed_first(tmp_path: Path) -> None:
    one = [kept(1)]
    size = written(tmp_path, one).stat().st_size
    for step in range(2, 6):
        written(tmp_path, one, step, max_gb=3.5 * size / 1e9)
    assert list(steps_of(tmp_path)) == [3, 4, 5]
    written(tmp_path, one, 6, max_gb=0.1 * size / 1e9)
    assert list(steps_of(tmp_path)) == [6], "the newest is always there"


def test_steps_after_the_resumed_checkpoint_are_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        written(tmp_path, [kept(step)], step)
    Archive(tmp_path, ArchiveConfig()).forget_after(2)
    assert list(steps_of(tmp_path)) == [1, 2]


@pytest.mark.parametrize("is_full", [False, True], ids=["for a moment", "for good"])
def test_each_step_whose_trees_are_missing_is_named(
    is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trees of a step are written even if those of the previous step failed."""
    archive, trees = Archive(tmp_path, ArchiveConfig()), [kept(1)]
    for step in (1, 2) if is_full else (1,):
        (tmp_path / f"step-{step:06d}.frames").symlink_to("/dev/full")

    async def writing() -> None:
        await archive.write_behind(header(1, 1), trees)
        with pytest.raises(ConfigError, match=r"step-000001\.frames"):
            await archive.write_behind(header(2, 1), trees)
        await archive.close()

    asyncio.run(writing())
    assert ("step-000002.frames cannot be" in caplog.text) == is_full
    assert is_full or read_step(tmp_path / "step-000002.frames").is_whole


def test_a_disabled_archive_writes_no_tree(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "trees", ArchiveConfig(max_gb=0))
    asyncio.run(archive.write_behind(header(1, 1), [kept(1)]))
    assert not (tmp_path / "trees").exists()


def test_a_sampled_token_takes_at_most_20_bytes(tmp_path: Path) -> None:
    one: Any = kept(1)
    tree = one.tree
    for node in tree.nodes:
        size = 1000 if len(node.action_ids) else 0
        node.action_ids = array("i", [70_000] * size)
        for name in ("logprobs", "entropies"):
            setattr(node, name, array("f", [0.1]) * size)
        tree.scored[node.index] = Scored(array("f", [0.1]) * size, array("f", [0.1]) * size)
    size = written(tmp_path, [one]).stat().st_size
    num_sampled = tree.num_action_tokens
    observed = tree.num_tokens - num_sampled
    assert size <= 20 * num_sampled + 4 * observed + 600 * len(tree.nodes)


def test_forks_with_another_outcome_than_their_branch_are_counted() -> None:
    """By success, or by the return if the env reports no success; failed branches are not
    compared."""
    tree = TrajectoryTree(TASK)
    root = tree.add(None)
    asked = tree.add(root, branch="0")
    ends = {"0": 1.0, "0.1+1": 0.0, "0.1+2": 1.0, "0.1+1.2+1": 1.0}
    leaves = {name: tree.add(asked, branch=name) for name in ends}
    leaves["1"] = tree.add(root, branch="1")  # from scratch: it left no branch
    for name, leaf in leaves.items():
        leaf.end, leaf.reward = "terminated", ends.get(name, 0.0)
    assert changed_forks(tree) == 2
    for leaf in leaves.values():
        leaf.info["success"] = True
    assert changed_forks(tree) == 0
    leaves["0.1+2"].info["success"] = False
    assert changed_forks(tree) == 1
    leaves["0"].end = "failed"
    assert changed_forks(tree) == 0
