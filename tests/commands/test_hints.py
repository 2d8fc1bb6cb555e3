"""Hints: what the teacher reads, and that nobody else does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace as NS
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentenv.assembly.checks import start_checks
from agentenv.base.errors import ConfigError
from agentenv.base.model_files import load_tokenizer
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Task
from agentenv.launchers import train
from agentenv.learners.algorithms.credit import credit_of
from agentenv.learners.algorithms.distill import Distill
from agentenv.rollout.archive import ARCHIVE
from agentenv.rollout.archive_reader import readable_steps
from agentenv.training.supervised import hints, teaching
from agentenv.training.supervised.hints import PlacedHint, copied, gold, hinted, sibling
from tests.support.runs import rows_of


def turn(tree: TrajectoryTree, parent: Node, *ids: int, **fields: Any) -> Node:
    own = {"action_ids": ids, "logprobs": [-1.0] * len(ids), "entropies": [1.0] * len(ids)}
    return tree.add(parent, **own, **fields)


def forked() -> TrajectoryTree:
    """
    1 2 -+- 3 4 [5] -+- 6 7        right
         |           +- 8 [5] -+- 9
         |                     +- 9 9
         +- 8
    """
    tree = TrajectoryTree(Task("t", "me", "?", ("yes",)))
    root = tree.add(None, observation_ids=[1, 2])
    first = turn(tree, root, 3, 4, observation_ids=[5])
    turn(tree, first, 6, 7, end="terminated", reward=1.0, info={"success": True})
    second = turn(tree, first, 8, branch="0+1", observation_ids=[5])
    turn(tree, second, 9, branch="0+1", end="terminated")
    turn(tree, second, 9, 9, branch="0+1.1+1", end="terminated")
    turn(tree, root, 8, branch="1", end="terminated")
    return tree


def test_a_siblings_hint_begins_where_the_paths_part() -> None:
    tree = forked()
    found, _ = hinted(tree, sibling, 999)
    assert [one.ids for one in found] == [
        [1, 2, 3, 4, 5, 6, 7, 5, 8, 5, 9],
        [1, 2, 3, 4, 5, 6, 7, 5, 8, 5, 9, 9],
        [1, 2, 3, 4, 5, 6, 7, 1, 2, 8],
    ]
    scored = [[t for t, one in zip(path.ids, path.mask, strict=True) if one] for path in found]
    assert scored == [[8, 9], [9, 9], [8]], "a shared turn once, no token of a hint"
    assert [[node.index for node in path.nodes] for path in found] == [[3, 4], [5], [6]]
    assert not any(copied(found[0]))
    algorithm = Distill(group_size=4, hint="sibling")
    assert credit_of(algorithm, tree).has_signal
    tree.nodes[2].reward = 0.0
    assert hinted(tree, sibling, 999)[0] == []  # no return is better than another
    assert not credit_of(algorithm, tree).has_signal


def test_the_gold_follows_the_prompt() -> None:
    asked: list[str] = []

    def encode(text: str) -> Sequence[int]:
        asked.append(text)
        return [7, 8, 9]

    found, _ = hinted(forked(), hints.own(gold, encode), 999)
    assert found[0].ids == [1, 2, 7, 8, 9, 1, 2, 3, 4, 5, 8, 5, 9]
    assert "yes" in asked[0]
    assert sum(found[0].mask) == 2, "not the turn that a right trajectory shares"


def test_a_shared_turn_is_scored_in_the_first_path_that_fits() -> None:
    def build(tree: TrajectoryTree, path: Any) -> PlacedHint | None:
        ids = list(path.path[-1].action_ids)
        return PlacedHint(tree.root, [7] * (30 if ids == [9] else 1)) if ids[0] == 9 else None

    ((path,), num_long) = hinted(forked(), build, 20)
    assert num_long == 1
    assert [node.index for node in path.nodes] == [3, 5]


def test_a_hint_is_a_text() -> None:
    with pytest.raises(ConfigError, match="expected a text"):
        hinted(forked(), hints.own(lambda *_: 5, list), 999)


def test_copies_of_a_hint_are_counted() -> None:
    path = hints.HintedPath([1, 4, 5, 6, 0, 4, 5, 6, 6], [False] * 5 + [True] * 4, [], [4, 5, 6])
    assert copied(path) == [False, False, True, False]


KEYS = [
    "algorithm={name='grpo', group_size=4, teach=0.5, hint='HINT'}", "train.num_steps=2",
    "queue.groups_per_step=4",
]  # fmt: skip


def told(tree: TrajectoryTree, path: Any) -> str:
    """A hint of one's own."""
    return f"It is {tree.task.answers[0]}."


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("hint", ["sibling", "gold", "tests.commands.test_hints:told"])
def test_only_the_teacher_reads_hints(warehouse: Path, hint: str) -> None:
    name = f"hinted-{hint[:3]}"
    keys = [one.replace("HINT", hint) for one in KEYS]
    assert train.main([str(warehouse), *keys, f"run.name={name}"]) == 0
    run = warehouse.parent / "runs" / name
    row = next(one for one in rows_of(run) if "teacher/hinted" in one)
    assert row["teacher/hinted"] > 0 == row["teacher/hints_too_long"]
    model = AutoModelForCausalLM.from_pretrained(warehouse.parent / "model")
    gaps, build = [], hints.builder(hint, load_tokenizer(warehouse.parent / "model"))
    for kept in next(iter(readable_steps(run / ARCHIVE, print))).trees():
        whole = [one for node in kept.tree.nodes for one in node.observation_ids]
        for path in hinted(kept.tree, build, 999)[0]:
            with torch.no_grad():
                scores = model(torch.tensor([path.ids])).logits[0].double().log_softmax(-1)
            places = [n for n, one in enumerate(path.mask) if one]
            policy = [one for node in path.nodes for one in node.logprobs]
            gaps += [
                float(scores[n - 1, path.ids[n]]) - p for n, p in zip(places, policy, strict=True)
            ]
        if hint == "gold":
            text = " ".join(map(str, whole))
            for own in filter(None, (build(kept.tree, one) for one in kept.tree.trajectories())):
                assert " ".join(map(str, own.ids)) not in text
    assert row["teacher/gap"] == pytest.approx(np.mean(gaps), abs=1e-4)


BAD = {
    "weight": (["algorithm.hint=gold"], "algorithm.teach is 0"),
    "alone": (["algorithm={name='distill', group_size=1, hint='sibling'}"], "no siblings"),
    "name": (["algorithm={name='grpo', teach=1, hint='golden'}"], "expected sibling, gold"),
    "function": (["algorithm={name='grpo', teach=1, hint='nowhere:at_all'}"], "cannot be loaded"),
    "server": (
        ["algorithm={name='grpo', teach=1, hint='gold'}", "roles.teacher.url=http://127.0.0.1:9"],
        "the learner scores hints",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_hint_that_cannot_be_used_is_refused(
    warehouse: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    keys, says = BAD[name]
    assert train.main([str(warehouse), *keys, f"run.name=bad-hint-{name}"]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("turn", "says"), [({"turn": 1}, "runs a program"), ({}, "no answer")])
async def test_a_gold_needs_answers_and_one_context(turn: dict[str, int], says: str) -> None:
    async def tasks_of(name: str) -> list[Task]:
        return [Task("t", "me", "?")]

    async def episodes() -> dict[str, Any]:
        return {"data": ([], turn)}

    config = NS(algorithm=Distill(group_size=4, hint="gold"))
    sets = {"data": NS(env=NS(id="me"))}
    given: Any = NS(config=config, tasks_of=tasks_of, episodes=episodes, sets=sets)
    with pytest.raises(ConfigError, match=says):
        await start_checks.hints(given)


@pytest.mark.usefixtures("here")
def test_a_hint_beyond_the_context_is_left_out_and_counted(
    warehouse: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teaching, "num_positions", lambda config: 20)
    keys = [one.replace("HINT", "gold") for one in KEYS]
    assert train.main([str(warehouse), *keys, "run.name=hinted-long"]) == 0
    rows = rows_of(warehouse.parent / "runs" / "hinted-long")
    assert all(row["teacher/hinted"] == 0 for row in rows if "teacher/hinted" in row)
    assert sum(row.get("teacher/hints_too_long", 0) for row in rows) > 0
    assert "hints_too_long" in capsys.readouterr().err
