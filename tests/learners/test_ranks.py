"""Two real ranks at every ZeRO stage equal one process of plain torch.

In each case below DeepSpeed 0.19 is silently wrong, crashes or hangs when its calls are used
directly: ranks have different numbers of micro-batches, or none.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from statistics import fmean

import pytest
import torch
from msgspec.structs import replace

from agentenv.errors import ConfigError, LearnerError
from agentenv.learners.batch import EncodedTree, encode_sequence
from agentenv.learners.checkpoint import Checkpoint, restore, save
from agentenv.learners.deepspeed_learner import DeepSpeedLearner
from agentenv.learners.learner import LearnerConfig
from agentenv.learners.optimizer import OptimizerConfig
from agentenv.learners.partition import partition
from agentenv.learners.trainer import Trainer
from tests.learners.ranks import (
    ALGORITHM,
    OF_THE_RANKS,
    encoded,
    largest_difference,
    plain_torch,
    train,
    two_ranks,
    undivided_tree,
    uneven_trees,
    weights_in,
    weights_of,
)
from tests.learners.trees import credited


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zero-0", "zero-1", "zero-2", "zero-3", "torch"])
async def test_two_ranks_equal_one(backend: str, model_dir: Path, tmp_path: Path) -> None:
    keys = {"backend": "torch"} if backend == "torch" else {"zero_stage": int(backend[-1])}
    config = two_ranks(**keys)
    learner = await DeepSpeedLearner.start(config, ALGORITHM, model_dir, tmp_path / "learner.log")
    oracle = plain_torch(model_dir, config, torch.float32)
    try:
        # three mini-batches: uneven trees, the largest divided; then a tree that one rank has alone
        trees = uneven_trees(7)
        metrics = await learner.update(credited(trees, learner.algorithm))
        expected = train(oracle, trees, config.groups_per_minibatch)
        for name in expected.keys() - OF_THE_RANKS:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        lone = [undivided_tree()]
        shares, _ = partition(encoded(lone), 2, config.max_tokens_per_microbatch)
        assert [len(own) for own in shares] == [1, 0]
        assert (await learner.update(credited(lone, learner.algorithm)))["num_steps"] == 1
        train(oracle, lone, 1)

        sequences = [
            encode_sequence([1, 2, 3, i], [False, True, True, True]) for i in range(9, 4, -1)
        ]
        for rows in (sequences, sequences[:1]):  # then a rank has none
            metrics, expected = await learner.imitate(rows), oracle.imitate(rows, 1.0)
            assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        found = weights_in(await learner.publish(tmp_path / "published"))
        assert largest_difference(found, weights_of(oracle)) < 1e-5

        scores = await learner.score(sequences)
        for score, same in zip(scores, oracle.score(sequences), strict=True):
            assert score.logprobs == pytest.approx(same.logprobs, abs=1e-4)
        assert len(await learner.score(sequences[:1])) == 1

        await _non_finite_steps_are_skipped(learner, tmp_path)
        await _resume_is_bit_exact(learner, tmp_path)
        await _one_rank_of_torch_goes_on_from_it_and_back(learner, oracle, tmp_path)
        await _an_optimizer_set_aside_keeps_its_state(learner, sequences, tmp_path)
        await learner.reset_optimizer(OptimizerConfig(optimizer="adamw", learning_rate=1e-4))
        assert (await learner.imitate(sequences[:1]))["num_tokens"] == 3
        logprobs = [value for score in await learner.score(sequences) for value in score.logprobs]
        metrics = await learner.imitate(sequences)
        assert (metrics["num_steps"], metrics["num_tokens"]) == (1, 15)
        assert metrics["loss"] == pytest.approx(-fmean(logprobs), rel=1e-4)
    finally:
        await learner.close()


async def _non_finite_steps_are_skipped(learner: DeepSpeedLearner, tmp_path: Path) -> None:
    before = weights_in(await learner.export(tmp_path / "before"))
    trees = uneven_trees(2, version=1)
    trees[0].nodes[1].logprobs[0] = float("nan")
    assert (await learner.update(credited(trees, learner.algorithm)))["num_skipped"] == 1
    assert largest_difference(before, weights_in(await learner.export(tmp_path / "after"))) == 0


async def _resume_is_bit_exact(learner: DeepSpeedLearner, tmp_path: Path) -> None:
    await learner.save(tmp_path / "checkpoint")
    results = []
    for number in range(2):
        await learner.load(tmp_path / "checkpoint")
        assert learner.policy_version == 1
        await learner.update(credited(uneven_trees(4, version=1), learner.algorithm))
        results.append(weights_in(await learner.export(tmp_path / f"again-{number}")))
    assert largest_difference(*results) == 0


async def _an_optimizer_set_aside_keeps_its_state(
    learner: DeepSpeedLearner, sequences: list[EncodedTree], tmp_path: Path
) -> None:
    await learner.save(tmp_path / "kept")
    await learner.save_optimizer(OptimizerConfig(optimizer="adamw", learning_rate=1e-4))
    assert (await learner.imitate(sequences))["num_steps"] == 1
    await learner.save(tmp_path / "between")
    await learner.restore_optimizer(learner.config)
    await learner.save(tmp_path / "taken")
    kept, between, taken = (Checkpoint(tmp_path / n) for n in ("kept", "between", "taken"))
    for name, shape in kept.shapes.items():
        assert kept.step_of(name) == taken.step_of(name) != between.step_of(name) == 1
        for kind in kept.kinds(name):
            before, other, after = (
                saved.read(name, kind, 0, prod(shape)) for saved in (kept, between, taken)
            )
            assert torch.equal(before, after)
            assert not torch.equal(before, other)
    with pytest.raises(LearnerError, match="no optimizer state was saved"):
        await learner.restore_optimizer(learner.config)


async def _one_rank_of_torch_goes_on_from_it_and_back(
    learner: DeepSpeedLearner, oracle: Trainer, tmp_path: Path
) -> None:
    await learner.save(tmp_path / "many")
    there = Checkpoint(tmp_path / "many")
    restore(oracle.backend, there)
    trees = uneven_trees(4, version=1)
    await learner.update(credited(trees, learner.algorithm))
    train(oracle, trees, 3)
    found = weights_in(await learner.export(tmp_path / "onwards"))
    assert largest_difference(found, weights_of(oracle)) < 1e-5
    save(oracle.backend, replace(there.meta, num_ranks=1, zero_stage=0), tmp_path / "one")
    await learner.load(tmp_path / "one")
    await learner.update(credited(trees, learner.algorithm))
    train(oracle, trees, 3)
    found = weights_in(await learner.export(tmp_path / "back"))
    assert largest_difference(found, weights_of(oracle)) < 1e-5


@pytest.mark.slow
async def test_a_step_does_not_depend_on_the_token_budget(model_dir: Path) -> None:
    trees, found = uneven_trees(6), []
    for budget in (16, 48, 4096):
        config = two_ranks(num_ranks=1, max_tokens_per_microbatch=budget)
        oracle = plain_torch(model_dir, config, torch.float32)
        train(oracle, trees, 3)
        found.append(weights_of(oracle))
    assert largest_difference(found[0], found[1]) < 1e-5
    assert largest_difference(found[0], found[2]) < 1e-5
    assert len(encoded(trees)) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
async def test_bfloat16_keeps_float32_weights(stage: int, model_dir: Path, tmp_path: Path) -> None:
    config = two_ranks(
        zero_stage=stage, dtype="bfloat16", learning_rate=1e-4, activation_checkpointing=True
    )
    learner = await DeepSpeedLearner.start(config, ALGORITHM, model_dir, tmp_path / "learner.log")
    oracle = plain_torch(model_dir, config, torch.bfloat16)
    try:
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
    finally:
        await learner.close()


def test_bfloat16_without_zero_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"bfloat16 needs learner\.zero_stage >= 1"):
        LearnerConfig(dtype="bfloat16", zero_stage=0)


@pytest.mark.slow
async def test_a_refusing_rank_is_named(model_dir: Path, tmp_path: Path) -> None:
    config = two_ranks(zero_stage=1)
    learner = await DeepSpeedLearner.start(config, ALGORITHM, model_dir, tmp_path / "learner.log")
    try:
        with pytest.raises(LearnerError, match=r"rank [01]: .*not a complete learner checkpoint"):
            await learner.load(tmp_path / "nothing")
        assert len(learner.ranks.pids) == 2, "all refused, so all go on"
        bad = [encode_sequence([1, i], [False, True]) for i in (2, 10**6)]
        with pytest.raises(LearnerError, match=r"learner rank [01]: .*IndexError"):
            await learner.score(bad)
        assert learner.ranks.pids == [], "one went on without the other, so both are ended"
    finally:
        await learner.close()
