"""Distillation: what a teacher adds to the credit of trees, in runs and from servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentenv.base.errors import EngineError
from agentenv.base.tree import TrajectoryTree
from agentenv.envs.quickstart.setup import build_model
from agentenv.launchers import train
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.credit import Taught
from agentenv.rollout.archive import ARCHIVE
from agentenv.rollout.archive_reader import readable_steps
from agentenv.training.supervised import teaching
from agentenv.training.supervised.teaching import OnServer, Teaching
from tests.learners.trees import credited, random_tree, tiny_model
from tests.support.runs import rows_of

SMALL = [
    "engine.name=embedded", "limits.max_turn_tokens=12", "limits.max_response_tokens=40",
    "train.num_steps=2", "train.max_logprob_gap=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def teacher(warehouse: Path) -> Path:
    folder = warehouse.parent / "teacher"
    build_model(folder, seed=5)
    return folder


def sums_of(model: Any, tree: TrajectoryTree) -> dict[int, np.ndarray]:
    """Log-probs of the sampled tokens of each node by transformers, path by path."""
    found = {}
    for leaf in tree.leaves():
        path = tree.path(leaf)
        ids = [one for node in path for one in (*node.action_ids, *node.observation_ids)]
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        place = 0
        for node in path:
            size = len(node.action_ids)
            rows = scores[place - 1 : place - 1 + size] if size else scores[:0]
            chosen = rows[torch.arange(size), list(node.action_ids)]
            found[node.index] = chosen.numpy()
            place += size + len(node.observation_ids)
    return found


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("algorithm", "top_k"), [("distill", 0), ("distill", 3), ("grpo", 0)])
def test_the_gap_of_a_run_is_that_of_both_models(
    warehouse: Path, teacher: Path, algorithm: str, top_k: int
) -> None:
    """Of equal returns too, which a teacher makes worth training."""
    name = f"taught-{algorithm}-{top_k}"
    keys = [f"algorithm={{name='{algorithm}', group_size=2, teach=0.5, teach_top_k={top_k}}}"]
    keys += [f"roles.teacher.model={teacher}", "roles.teacher.engine=learner", f"run.name={name}"]
    assert train.main([str(warehouse), *SMALL, *keys]) == 0
    run, model = warehouse.parent / "runs" / name, AutoModelForCausalLM.from_pretrained(teacher)
    (step, *_) = readable_steps(run / ARCHIVE, print)
    gaps = [
        gap
        for kept in step.trees()
        for index, scores in sums_of(model, kept.tree).items()
        for gap in scores - np.array(kept.tree.nodes[index].logprobs)
    ]
    for kept in step.trees():
        for index, scores in sums_of(model, kept.tree).items():
            assert kept.tree.scored[index].teacher.tolist() == pytest.approx(scores, abs=1e-4)
    row = next(one for one in rows_of(run) if "teacher/gap" in one)
    assert row["teacher/gap"] == pytest.approx(np.mean(gaps), abs=1e-4)
    assert row["learner/num_equal_groups"] == 0
    assert row["learner/grad_norm"] > 0


class Server:
    """Scores as an engine's server does; every other request fails."""

    name = "nowhere"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.asked: list[int] = []

    async def scored(
        self, ids: Sequence[int], start: int, top_k: int = 0
    ) -> list[dict[int, float]]:
        self.asked.append(len(ids) - start)
        if len(self.asked) % 2:
            raise EngineError("busy")
        with torch.no_grad():
            scores = self.model(torch.tensor([list(ids)])).logits[0].double().log_softmax(-1)
        rows = scores[start - 1 : -1]
        best = [{*row.topk(top_k).indices.tolist()} if top_k else set() for row in rows]
        return [
            {one: float(row[one]) for one in known | {token}}
            for row, known, token in zip(rows, best, ids[start:], strict=True)
        ]


async def test_a_server_scores_each_shared_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(*_: Any, **__: Any) -> None:
        pass

    monkeypatch.setattr("agentenv.base.retries.pause_before_retry", at_once)
    groups = credited([random_tree(Random(n), index=n, num_leaves=7) for n in range(3)], ARPO())
    server: Any = Server(tiny_model(dtype=torch.float64))
    found = await OnServer(server, top_k=3).score(groups)
    for (tree, _), (own, likeliest) in zip(groups, found, strict=True):
        expected = sums_of(server.model, tree)
        assert all(
            (one.logprobs[:, :-1] >= one.logprobs[:, 1:]).all() for one in likeliest.values()
        )
        assert own.keys() == likeliest.keys()
        assert own.keys() == {node.index for node in tree.nodes if node.action_ids}
        for index, values in own.items():
            np.testing.assert_allclose(values, expected[index], rtol=1e-6)
    assert len(server.asked) / 2 == sum(len(tree.leaves()) for tree, _ in groups)


async def test_advantages_are_bounded_and_add_up(warehouse: Path) -> None:
    from agentenv.assembly.keys.rl import TrainConfig
    from agentenv.base.config import load_config

    keys = ["algorithm={name='grpo', group_size=2, teach=0.5}"]
    keys += ["roles.teacher.url=http://127.0.0.1:9"]
    config: Any = load_config(TrainConfig, warehouse, keys)
    scorer: Any = None
    found = Teaching(config, scorer, 9).advantages(np.array([-9.0, 1.0, np.nan, 9.0]))
    assert found.tolist() == [-2.5, 0.5, 0.0, 2.5]


BAD = {
    "no teacher": (["algorithm.teach=1"], "no teacher"),
    "unused": (["roles.teacher.url=http://127.0.0.1:9"], "algorithm.teach is 0"),
    "weight 0": (["algorithm={name='distill', teach=0}"], "learns from the teacher alone"),
    "no server": (["algorithm.teach=1", "roles.teacher.url=http://127.0.0.1:9"], "roles.teacher: "),
    "another role": (
        ["roles.judge={model='{teacher}', engine='learner'}"], "serves roles.teacher alone",
    ),
    "both": (
        ["algorithm.teach=1", "roles.teacher={url='http://127.0.0.1:9', engine='learner'}"],
        "expected no url",
    ),
    "itself": (
        ["algorithm.teach=1", "roles.teacher={model='{folder}/model', engine='learner'}"],
        "is the policy itself",
    ),
    "other tokens": (
        ["algorithm.teach=1", "roles.teacher={model='{folder}/other', engine='learner'}"],
        "another tokenizer",
    ),
    "top k": (
        ["algorithm={name='distill', teach_top_k=5}", "sampling.train.top_k=20",
         "roles.teacher={model='{teacher}', engine='learner'}"],
        "need the whole vocabulary",
    ),
    "gate": (
        ["algorithm={name='distill', teach_top_k=5, teach_gate=1}",
         "roles.teacher={model='{teacher}', engine='learner'}"],
        "algorithm.teach_gate",
    ),
    "unused gate": (["algorithm.teach_gate=1"], "algorithm.teach_gate = 1.0 is unused"),
    "context": (
        ["algorithm.teach=1",
         "roles.teacher={model='{teacher}', engine='learner', max_model_len=150}"],
        "exceed roles.teacher's context",
    ),
    "temperature": (
        ["algorithm.teach=1", "roles.teacher.model={teacher}", "sampling.train.temperature=0.9"],
        "temperature 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_teacher_that_does_not_fit_is_refused(
    warehouse: Path, teacher: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    keys, says = BAD[name]
    other = warehouse.parent / "other"
    if name == "other tokens" and not other.exists():
        build_model(other, seed=5)
        file = other / "tokenizer.json"
        found = json.loads(file.read_text())
        found["model"]["vocab"] = dict(
            zip(found["model"]["vocab"], reversed(found["model"]["vocab"].values()), strict=True)
        )
        file.write_text(json.dumps(found))
    given = [one.replace("{teacher}", str(teacher)) for one in keys]
    given = [one.replace("{folder}", str(warehouse.parent)) for one in given]
    embedded = ["engine.name=embedded"]
    code = train.main([str(warehouse), *embedded, *given, f"run.name=bad-{name.replace(' ', '-')}"])
    assert code == (1 if name == "no server" else 2)  # which may come back
    assert says in " ".join(capsys.readouterr().err.split())


def test_ids_of_a_larger_vocabulary_are_unknown() -> None:
    found = Taught(np.array([[1, 2], [3, 9]]), np.zeros((2, 2))).within(9)
    assert found.ids.max() < 9
    assert np.isnan(found.logprobs).tolist() == [[False, False], [True, True]]


def test_retries_of_a_server_last_minutes() -> None:
    assert teaching.NUM_RETRIES >= 10
