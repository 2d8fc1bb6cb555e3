"""The learner with its real worker process, on a tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from agentenv.assembly.run.terminal import is_shown
from agentenv.base.errors import ConfigError, LearnerError
from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.optimizer import OptimizerConfig
from agentenv.learners.ranks.learner import DeepSpeedLearner
from agentenv.learners.trees.encoded_tree import EncodedTree, encode, encode_sequence
from tests.learners import ranks
from tests.learners.trees import credited, random_tree

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALGORITHM = ARPO(group_size=6, importance_cap=1e9)
CONFIG = LearnerConfig(
    optimizer="muon_adamw",
    learning_rate=1e-3,
    groups_per_minibatch=2,
    max_tokens_per_microbatch=64,
    command_timeout_s=600,
)


@pytest.fixture(scope="module")
def own_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("started")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(model_dir: Path, own_dir: Path) -> AsyncIterator[DeepSpeedLearner]:
    learner = await DeepSpeedLearner.start(CONFIG, ALGORITHM, model_dir, own_dir / "learner.log")
    await learner.save(own_dir / "start")
    yield learner
    await learner.close()
    await learner.close()


@pytest_asyncio.fixture(loop_scope="module")
async def learner(started: DeepSpeedLearner, own_dir: Path) -> DeepSpeedLearner:
    """The one process of this file, as it was at its start."""
    await started.reset_optimizer(CONFIG)
    await started.load(own_dir / "start")
    return started


def some_trees(count: int, version: int = 0) -> list[TrajectoryTree]:
    return [random_tree(Random(i), index=i, version=version) for i in range(count)]


def encode_trees(trees: list[TrajectoryTree], algorithm: Algorithm) -> list[EncodedTree]:
    encoded = [encode(tree, algorithm.credit(tree), 0) for tree in trees]
    return [tree for tree in encoded if tree.floats("adv_pos").any()]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return ranks.largest_difference(a, b) == 0


async def test_update_equals_plain_torch(
    learner: DeepSpeedLearner, model_dir: Path, tmp_path: Path
) -> None:
    trees = some_trees(4)
    metrics = await learner.update(credited(trees, learner.algorithm), lr_scale=0.5)
    assert metrics["num_steps"] == 2
    assert "behaviour_ratio/staleness_0" not in metrics, "no fresh token was measured"

    plain = ranks.plain_torch(model_dir, CONFIG, torch.float32, ALGORITHM)
    encoded = encode_trees(trees, ALGORITHM)
    cut = len(encoded) // 2
    expected = plain.update([encoded[:cut], encoded[cut:]], 0.5)
    for name in expected.keys() - ranks.OF_THE_RANKS:
        assert metrics[name] == expected[name], name
    published = await learner.publish(tmp_path / "published")
    assert learner.policy_version == 1
    assert (published / "tokenizer_config.json").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    found = {name: param.detach() for name, param in loaded.named_parameters()}
    assert same(found, ranks.weights_of(plain))


async def test_resume_is_bit_exact(learner: DeepSpeedLearner, tmp_path: Path) -> None:
    await learner.update(credited(some_trees(4), learner.algorithm))
    await learner.publish(tmp_path / "one")
    await learner.save(tmp_path / "checkpoint")
    await learner.save(tmp_path / "checkpoint")
    results = []
    for _ in range(2):
        await learner.load(tmp_path / "checkpoint")
        assert learner.policy_version == 1
        await learner.update(credited(some_trees(4, version=1), learner.algorithm))
        results.append(ranks.weights_in(await learner.export(tmp_path / "export")))
    assert learner.policy_version == 1
    assert same(*results)
    assert not same(results[0], ranks.weights_in(tmp_path / "one"))
    with pytest.raises(LearnerError, match="readable learner checkpoint"):
        await learner.load(tmp_path / "one")


async def test_imitation_lowers_the_loss_that_score_reports(learner: DeepSpeedLearner) -> None:
    sequences = [encode_sequence([1, 2, 3, i], [False, True, True, True]) for i in range(4, 8)]
    losses = []
    for _ in range(5):
        scores = await learner.score(sequences)
        nll = [-value for score in scores for value in score.logprobs]
        losses.append(sum(nll) / len(nll))
        metrics = await learner.imitate(sequences)
        assert metrics["loss"] == pytest.approx(losses[-1], rel=1e-5)
    assert losses[-1] < losses[0]
    assert [len(score.matches) for score in scores] == [3] * 4
    assert all(value > 0 for score in scores for value in score.entropies)
    config = OptimizerConfig(optimizer="adamw", learning_rate=1e-4)
    await learner.reset_optimizer(config)
    assert (await learner.imitate(sequences))["num_steps"] == 1
    assert (await learner.imitate([]))["num_steps"] == 0


async def test_stale_tokens_are_corrected(learner: DeepSpeedLearner, tmp_path: Path) -> None:
    trees = some_trees(2)
    fresh = await learner.update(credited(trees, learner.algorithm))
    assert fresh["num_proximal_tokens"] == 0
    await learner.publish(tmp_path / "one")
    metrics = await learner.update(credited(trees, learner.algorithm))
    assert metrics["num_proximal_tokens"] == metrics["num_tokens"]
    ratio = metrics["behaviour_ratio/staleness_1"]
    assert ratio != 1.0
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)


async def test_an_update_without_a_signal_takes_no_step(
    learner: DeepSpeedLearner, tmp_path: Path
) -> None:
    before = ranks.weights_in(await learner.export(tmp_path / "before"))
    trees = some_trees(3)
    for tree in trees:
        for node in tree.nodes:
            node.reward = 0.0
    for leaf in trees[0].leaves():
        leaf.end = "failed"
    metrics = await learner.update(credited(trees, learner.algorithm))
    assert metrics == {"num_trained": 0, "num_equal_groups": 0, "num_steps": 0}
    assert same(before, ranks.weights_in(await learner.export(tmp_path / "after")))


async def test_non_finite_steps_are_skipped(
    learner: DeepSpeedLearner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = ranks.weights_in(await learner.export(tmp_path / "before"))
    trees = some_trees(2)
    trees[0].nodes[1].logprobs[0] = float("nan")
    metrics = await learner.update(credited(trees, learner.algorithm))
    assert metrics["num_skipped"] == 1
    assert same(before, ranks.weights_in(await learner.export(tmp_path / "after")))
    assert caplog.text.count("was skipped") == caplog.text.count("tree 0 (t0)") == 1
    assert [is_shown(one) for one in caplog.records if "was skipped" in one.message] == [True]


async def test_errors_are_returned_and_the_rank_continues(
    learner: DeepSpeedLearner, tmp_path: Path
) -> None:
    with pytest.raises(LearnerError, match="IndexError"):
        await learner.score([encode_sequence([1, 10**6], [False, True])])
    (tmp_path / "file").touch()
    with pytest.raises(LearnerError, match="Not a directory"):
        await learner.save(tmp_path / "file" / "checkpoint")
    assert len(await learner.score([encode_sequence([1, 2], [False, True])])) == 1


async def test_invalid_starts_are_refused(model_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "learner.log"
    with pytest.raises(ConfigError, match="Hugging Face model"):
        await DeepSpeedLearner.start(CONFIG, ALGORITHM, tmp_path, log)
    with pytest.raises(ConfigError, match="zero_stage"):
        LearnerConfig(optimizer="muon_adamw", zero_stage=1)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(LearnerError, match="broken"):
        await DeepSpeedLearner.start(CONFIG, ALGORITHM, broken, log)
