"""N ranks train like one: two processes, started once, against one rank in this process.

In many of these cases DeepSpeed 0.19 is silently wrong, crashes or hangs when its calls are used
directly: ranks have different numbers of micro-batches, or none.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace

from agentenv.base.errors import LearnerError
from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms.aepo import AEPO
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.baselines import GSPO
from agentenv.learners.algorithms.credit import CreditedTree
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.lora import LoRAConfig
from agentenv.learners.optimizer import OptimizerConfig
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks import offline_export
from agentenv.learners.ranks.checkpoint import REFERENCE
from agentenv.learners.ranks.dpo import with_reference
from agentenv.learners.ranks.learner import DeepSpeedLearner, encode_groups, in_order, start_ranks
from agentenv.learners.ranks.rank import Rank
from agentenv.learners.ranks.rank_group import RankGroup
from agentenv.learners.ranks.saved_checkpoint import Checkpoint
from agentenv.learners.trees.encoded_tree import encode_sequence
from agentenv.learners.trees.partition import minibatches, partition
from tests.learners.ranks import (
    ALGORITHM,
    OF_THE_RANKS,
    encoded,
    largest_difference,
    pairs,
    plain_torch,
    save_tiny_model,
    train,
    two_ranks,
    undivided_tree,
    uneven_trees,
    weights_in,
    weights_of,
)
from tests.learners.trees import credited, credits_of, level

pytestmark = [pytest.mark.heavy, pytest.mark.asyncio(loop_scope="module")]

SEQUENCES_CLIPPED = GSPO(group_size=4, clip_low=0.1, clip_high=0.1, kl_reward=0.1)
KL = ARPO(group_size=4, importance_cap=1e9, kl_loss=0.3, kl_reward=0.05, entropy_bonus=0.01)
# Matrices are cut and norms stay whole on every rank, as in a large model.
CUT = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100}}
SEQUENCES = [encode_sequence([1, 2, 3, i], [False, True, True, True]) for i in range(9, 4, -1)]
LONG = encode_sequence([i % 7 + 1 for i in range(64)], [i % 5 != 0 for i in range(64)])


class Team:
    """Two ranks, which are started again after a failure that ended them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: RankGroup | None = None

    async def ranks(self) -> RankGroup:
        if self._ranks is None or not self._ranks._links:
            self._ranks = await start_ranks(two_ranks(), self._folder / "learner.log")
        return self._ranks

    async def close(self) -> None:
        if self._ranks is not None:
            await self._ranks.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def team(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Team]:
    found = Team(tmp_path_factory.mktemp("ranks"))
    yield found
    await found.close()


class Side(NamedTuple):
    """A learner on both ranks, and one rank here with the same model."""

    learner: DeepSpeedLearner
    one: Rank
    folder: Path

    async def update(
        self, trees: list[TrajectoryTree], num_minibatches: int | None = None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """An update of each; returns the metrics."""
        groups = self.groups(trees)
        metrics = await self.learner.update(groups, num_minibatches=num_minibatches)
        return metrics, self.one.run(self.command(trees, num_minibatches)).metrics

    def groups(self, trees: list[TrajectoryTree]) -> list[CreditedTree]:
        credits = credits_of(self.learner.algorithm, trees)
        pairs = zip(trees, credits, strict=True)
        return [(tree, credit) for tree, credit in pairs if credit is not None]

    def command(
        self, trees: list[TrajectoryTree], num_minibatches: int | None = None
    ) -> wire.Update:
        """The update as a whole."""
        learner, groups = self.learner, self.groups(trees)
        count = num_minibatches or -(-len(groups) // learner.config.groups_per_minibatch)
        rest = learner.policy_version, learner.config, learner.algorithm
        parts = [encode_groups(in_order(one), *rest) for one in minibatches(groups, count)]
        return wire.Update(parts, 1.0)

    async def assert_equal_weights(self, name: str, *, publish: bool = False) -> None:
        """And let the one go on from the state of the others: in later steps AdamW would magnify
        what rounding makes of gradients of almost nothing."""
        await (self.learner.publish if publish else self.learner.export)(self.folder / name)
        self.one.run(wire.WriteModel(str(self.folder / f"{name}-one"), publish))
        ours, theirs = (weights_in(self.folder / one) for one in (name, f"{name}-one"))
        assert largest_difference(ours, theirs) < 1e-5
        await self.learner.save(self.folder / f"{name}-state")
        self.one.run(wire.Load(str(self.folder / f"{name}-state")))


async def start(
    ranks: RankGroup, config: LearnerConfig, algorithm: Algorithm, model: Path, folder: Path
) -> Side:
    log = folder / "learner.log"
    learner = await DeepSpeedLearner.start(config, algorithm, model, log, ranks=ranks)
    alone: dict[str, Any] = {"num_ranks": 1, "zero_stage": 0, "context_parallel": 1}
    plain = replace(config, **alone, deepspeed_config="", activation_checkpointing=False)
    return Side(learner, Rank(wire.Init.of(plain, algorithm, str(model), seed=0)), folder)


def assert_equal(found: dict[str, float], expected: dict[str, float]) -> None:
    for name in expected.keys() - OF_THE_RANKS:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


CASES: dict[str, tuple[dict[str, Any], Algorithm]] = {
    "zero-0": ({"zero_stage": 0}, ALGORITHM),
    "zero-1": ({"zero_stage": 1}, AEPO(group_size=4)),
    "zero-2, reference": ({"zero_stage": 2}, KL),
    "zero-3, reference, cut": ({"zero_stage": 3, "deepspeed_config": CUT}, KL),
    "zero-3, sequences": ({"zero_stage": 3}, SEQUENCES_CLIPPED),
    "zero-3, adapters": ({"zero_stage": 3, "lora": LoRAConfig(r=4, alpha=8)}, ALGORITHM),
    "zero-3, experts": ({"zero_stage": 3}, ALGORITHM),
    "zero-2, shared paths": (
        {"zero_stage": 2, "context_parallel": 2, "max_tokens_per_microbatch": 24},
        ALGORITHM,
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.promise if n == "zero-1" else ()) for n in CASES]
)
async def test_two_ranks_equal_one(name: str, team: Team, model_dir: Path, tmp_path: Path) -> None:
    """Updates, imitation, preferences and scores, with steps in which a rank has no tree; and the
    published weights."""
    keys, algorithm = CASES[name]
    if "deepspeed_config" in keys:
        (tmp_path / "ds.json").write_text(json.dumps(keys["deepspeed_config"]))
        keys = {**keys, "deepspeed_config": str(tmp_path / "ds.json")}
    if "experts" in name:
        model_dir = save_tiny_model(tmp_path / "model", "lfm2_moe")
    config = two_ranks(**keys)
    both = await start(await team.ranks(), config, algorithm, model_dir, tmp_path)
    if config.context_parallel == 1:
        shares, _ = partition(encoded([undivided_tree()]), 2, config.max_tokens_per_microbatch)
        assert [len(own) for own in shares] == [1, 0]
    for number, trees in enumerate((uneven_trees(7), [undivided_tree()], uneven_trees(5))):
        metrics, expected = await both.update(trees)
        assert_equal(metrics, expected)
        await both.assert_equal_weights(f"updated-{number}", publish=number == 2)
    assert not algorithm.kl_loss or abs(metrics["kl_to_reference"]) > 5e-3
    learner, one = both.learner, both.one
    for rows in ([LONG, *SEQUENCES], SEQUENCES[:1]):
        metrics, expected = await learner.imitate(rows), one.trainer.imitate(rows, 1.0)
        assert_equal(metrics, expected)
        scores = await learner.score(rows)
        assert len(scores) == len(rows)
        for score, same in zip(scores, one.trainer.score(rows), strict=True):
            assert score.logprobs == pytest.approx(same.logprobs, abs=1e-4)
            assert score.matches == same.matches
    await both.assert_equal_weights("imitated")
    unscored = pairs([60, 3, 5, 40, 8])  # a pair above a budget is cut
    scored = [with_reference(pair, [-3.0] * pair.num_action_tokens) for pair in unscored]
    for batch in (scored, scored[1:2], scored[1:3]):
        metrics = await learner.prefer(batch, 0.5)
        assert_equal(metrics, one.run(wire.Prefer(batch, 0.5, 1.0)).metrics)
    await both.assert_equal_weights("preferred")
    assert learner.policy_version == 1
    if not algorithm.needs_reference:
        await _groups_without_a_signal_take_steps(both)
    await _non_finite_steps_are_skipped(both)
    await _an_optimizer_set_aside_keeps_its_state(both)
    await _a_resume_is_bit_exact_and_fits_any_number_of_ranks(both)
    if config.lora is not None:
        await _sharded_adapters_are_exported_without_ranks(both)
    if "experts" in name:
        before, now = weights_in(model_dir), weights_in(tmp_path / "updated-2")
        kept = {name for name in before if torch.equal(now[name], before[name])}
        assert all("norm" in name or "bias" in name for name in kept)


async def _sharded_adapters_are_exported_without_ranks(both: Side) -> None:
    directory = await both.learner.export(both.folder / "export")
    await both.learner.save(directory / "trainer")
    offline_export.export(directory, both.folder / "offline", dtype="float32")
    ours, theirs = weights_in(directory), weights_in(both.folder / "offline")
    assert largest_difference(ours, theirs) < 1e-6


async def _groups_without_a_signal_take_steps(both: Side) -> None:
    trees = uneven_trees(6, version=1)
    for tree in trees[3:]:
        level(tree, 1.1)
    metrics, expected = await both.update(trees, num_minibatches=2)
    assert_equal(metrics, expected)
    assert (metrics["num_steps"], metrics["num_trained"]) == (2, 6)
    assert metrics["num_equal_groups"] >= 3
    assert all(tree.scored for tree in trees)
    last, _ = await both.update(trees[3:], num_minibatches=2)
    assert (last["num_steps"], last["grad_norm"], last["num_tokens"]) == (2, 0, 0)
    assert "computed_over_unique" not in last


async def _non_finite_steps_are_skipped(both: Side) -> None:
    learner, _, folder = both
    before = weights_in(await learner.export(folder / "before"))
    trees = uneven_trees(2, version=1)
    trees[0].nodes[1].logprobs[0] = float("nan")
    assert (await learner.update(credited(trees, learner.algorithm)))["num_skipped"] == 1
    assert largest_difference(before, weights_in(await learner.export(folder / "after"))) == 0


async def _an_optimizer_set_aside_keeps_its_state(both: Side) -> None:
    learner, _, folder = both
    await learner.save(folder / "kept")
    await learner.reset_optimizer(
        OptimizerConfig(optimizer="adamw", learning_rate=1e-4), "set_aside"
    )
    assert (await learner.imitate(SEQUENCES))["num_steps"] == 1
    await learner.save(folder / "between")
    await learner.reset_optimizer(learner.config, "take_back")
    await learner.save(folder / "taken")
    kept, between, taken = (Checkpoint(folder / n) for n in ("kept", "between", "taken"))
    for name, shape in kept.shapes.items():
        assert kept.steps[name] == taken.steps[name] != between.steps[name] == 1
        for kind in kept.kinds(name):
            before, other, after = (
                saved.read(name, kind, 0, prod(shape)) for saved in (kept, between, taken)
            )
            assert torch.equal(before, after)
            assert kind == REFERENCE or not torch.equal(before, other)
    with pytest.raises(LearnerError, match="optimizer state was"):
        await learner.reset_optimizer(learner.config, "take_back")


async def _a_resume_is_bit_exact_and_fits_any_number_of_ranks(both: Side) -> None:
    """One rank goes on from the checkpoint of both, and both from that of one."""
    learner, one, folder = both
    many = folder / "updated-2-state"
    one.run(wire.Load(str(many)))
    results = []
    for number in range(2):
        await learner.load(many)
        assert learner.policy_version == 1
        metrics = await learner.update(both.groups(uneven_trees(4, version=1)))
        results.append(weights_in(await learner.export(folder / f"again-{number}")))
    assert largest_difference(*results) == 0
    expected = one.run(both.command(uneven_trees(4, version=1))).metrics
    assert_equal(metrics, expected)
    await both.assert_equal_weights("onwards")
    one.run(wire.Save(str(folder / "one")))
    await learner.load(folder / "one")
    metrics, expected = await both.update(uneven_trees(4, version=1))
    assert_equal(metrics, expected)
    await both.assert_equal_weights("back")


@pytest.mark.parametrize("stage", [1, 3])
async def test_bfloat16_keeps_float32_weights(
    stage: int, team: Team, model_dir: Path, tmp_path: Path
) -> None:
    config = two_ranks(
        zero_stage=stage, dtype="bfloat16", learning_rate=1e-4, activation_checkpointing=True
    )
    ranks = await team.ranks()
    log = tmp_path / "learner.log"
    learner = await DeepSpeedLearner.start(config, ALGORITHM, model_dir, log, ranks=ranks)
    oracle = plain_torch(model_dir, config, torch.bfloat16)
    for _ in range(3):
        metrics = await learner.update(credited(uneven_trees(4), learner.algorithm))
        expected = train(oracle, uneven_trees(4), 3)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=0.1, abs=0.02)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
    await learner.save(tmp_path / "checkpoint")
    saved = Checkpoint(tmp_path / "checkpoint")
    masters = {
        name: saved.read(name, "master", 0, weight.numel()).view_as(weight)
        for name, weight in weights_of(oracle).items()
    }
    # six steps of 1e-4: far less than bfloat16 can tell apart at weights of 0.2 to 1
    assert largest_difference(masters, weights_of(oracle)) < 6e-4
    exported = weights_in(await learner.export(tmp_path / "export"))
    assert all(weight.dtype == torch.bfloat16 for weight in exported.values())
    rounded = {name: weight.bfloat16() for name, weight in masters.items()}
    assert largest_difference(exported, rounded) == 0


async def test_a_refusing_rank_is_named(team: Team, model_dir: Path, tmp_path: Path) -> None:
    config, ranks = two_ranks(zero_stage=1), await team.ranks()
    learner, *_ = await start(ranks, config, ALGORITHM, model_dir, tmp_path)
    with pytest.raises(LearnerError, match=r"rank [01]: .*learner.json"):
        await learner.load(tmp_path / "nothing")
    assert len(learner.ranks._links) == 2, "all refused, so all go on"
    bad = [encode_sequence([1, i], [False, True]) for i in (2, 10**6)]
    with pytest.raises(LearnerError, match=r"learner rank [01]: .*IndexError"):
        await learner.score(bad)
    assert learner.ranks._links == [], "one went on without the other, so both are ended"
