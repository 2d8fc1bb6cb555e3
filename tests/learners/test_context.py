"""Teams of ranks that compute a micro-batch together equal one rank.

Threads of this process with real process groups of gloo, in float64; DeepSpeed's ranks are below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Lfm2Config

from agentenv.base.errors import ConfigError
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Task, VersionSpan
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.keys import LearnerConfig, Metrics, check_heads
from agentenv.learners.lora import LoRAConfig, add_adapters
from agentenv.learners.ranks.dpo import prefer, with_reference
from agentenv.learners.ranks.learner import DeepSpeedLearner
from agentenv.learners.ranks.model_check import check_model
from agentenv.learners.ranks.saved_checkpoint import Checkpoint, restore
from agentenv.learners.ranks.trainer import Trainer
from agentenv.learners.trees.context import ContextShare
from agentenv.learners.trees.encoded_tree import EncodedTree, encode, encode_sequence
from agentenv.learners.trees.partition import assign, pack, partition
from tests.learners.flat import grown
from tests.learners.ranks import ALGORITHM as RANKS_ALGORITHM
from tests.learners.ranks import (
    OF_THE_RANKS,
    largest_difference,
    pairs,
    plain_torch,
    train,
    two_ranks,
    uneven_trees,
    weights_in,
    weights_of,
)
from tests.learners.test_oracle import exact
from tests.learners.test_partition import WHOLE_UPDATES, encode_all
from tests.learners.threads import Meeting, trainers
from tests.learners.trees import VOCABULARY, credited, credits_of, tiny_model

BUDGET = 16  # tokens of a rank
TEAMS = [(2, 2), (4, 4), (4, 2)]  # ranks, ranks of a team
MODEL = exact(tiny_model(dtype=torch.float64))  # four heads, two of keys
CONFIG = LearnerConfig(
    zero_stage=0, learning_rate=1e-3, grad_clip=0.0, max_tokens_per_microbatch=BUDGET
)
Work = Callable[[Trainer, int], Metrics]  # of a trainer and the number of its team


def path_of_four_budgets() -> EncodedTree:
    random = Random(0)
    ids = [random.randrange(VOCABULARY) for _ in range(4 * BUDGET)]
    return encode_sequence(ids, [i % 5 != 0 for i in range(len(ids))])


def tree_of_three_forks() -> TrajectoryTree:
    """The prompt has two children, and each of these has two; longer than any budget."""
    random = Random(1)
    tree = TrajectoryTree(task=Task("t", "env", "?", ("a",)), index=0)

    def ids(count: int) -> list[int]:
        return [random.randrange(VOCABULARY) for _ in range(count)]

    tree.add(None, observation_ids=ids(5))
    for parent in (0, 0, 1, 1, 2, 2):
        size = random.randint(9, 14)
        node = tree.add(
            tree.nodes[parent],
            action_ids=ids(size),
            logprobs=[random.uniform(-6.0, -2.0) for _ in range(size)],
            entropies=[random.uniform(0.1, 4.0) for _ in range(size)],
            version_spans=[VersionSpan(0, 0, size)],
            observation_ids=ids(4),
        )
        if parent:
            node.end, node.reward = "terminated", random.random()
    return tree


def run(
    num_ranks: int,
    size: int,
    algorithm: Algorithm,
    work: Work,
    budget: int = BUDGET,
    model: Any = MODEL,
) -> tuple[list[list[Tensor]], Metrics]:
    """The gradients of every step, summed over ranks, and the metrics."""
    meeting = Meeting(num_ranks)
    config = replace(
        CONFIG, num_ranks=num_ranks, context_parallel=size, max_tokens_per_microbatch=budget
    )
    ranks = trainers(model, algorithm, config, meeting)
    optimizer = ranks[0].backend.base_optimizer
    steps: list[list[Tensor]] = []
    step = optimizer.step

    def recorded() -> None:
        params = ranks[0].backend.policy.parameters()
        steps.append([param.grad.clone() for param in params if param.grad is not None])
        step()

    optimizer.step = recorded
    metrics = meeting.run(lambda rank: work(ranks[rank], rank // size))
    for other in metrics[1:]:
        same = metrics[0].keys() - OF_THE_RANKS
        assert [other[name] for name in same] == [metrics[0][name] for name in same]
    return steps, metrics[0]


def assert_same(
    found: tuple[list[list[Tensor]], Metrics],
    expected: tuple[list[list[Tensor]], Metrics],
    rel: float = 1e-12,
) -> None:
    assert len(found[0]) == len(expected[0]) > 0
    for ours, theirs in zip(found[0], expected[0], strict=True):
        size = math.sqrt(sum(float(one.square().sum()) for one in theirs))
        apart = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
        assert size > 0
        assert apart < rel * size
    for name in expected[1].keys() - OF_THE_RANKS:
        assert found[1][name] == pytest.approx(expected[1][name], rel=1e-8, abs=1e-12), name


@pytest.mark.parametrize(("num_ranks", "size"), TEAMS)
def test_a_path_of_four_budgets_trains_as_on_one_rank(num_ranks: int, size: int) -> None:
    """And with it short ones, of which a team may have none."""
    long = path_of_four_budgets()
    short = [encode_sequence([1, 2, i], [False, True, True]) for i in (3, 4, 5)]
    for sequences in ([long], [long, *short]):
        shards = assign(sequences, num_ranks // size)

        def imitate(trainer: Trainer, team: int) -> Metrics:
            own = [sequences[i] for i in shards[team]]  # noqa: B023
            return trainer.imitate(own, 1.0)

        found = run(num_ranks, size, ARPO(), imitate)
        shards = [list(range(len(sequences)))]
        assert_same(found, run(1, 1, ARPO(), imitate))


@pytest.mark.parametrize(("num_ranks", "size"), TEAMS)
def test_a_tree_of_three_forks_trains_as_on_one_rank(num_ranks: int, size: int) -> None:
    algorithm = ARPO(group_size=4, entropy_bonus=0.1)
    tree = tree_of_three_forks()
    credit = credits_of(algorithm, [tree])[0]
    assert credit is not None
    whole = encode(tree, credit, 0)
    budget = -(-whole.num_tokens // size)
    assert len(pack([whole], size * budget)) == 1
    assert len(pack([whole], budget)) > 1
    shares = partition([whole], num_ranks // size, size * budget)[0]

    def update(trainer: Trainer, team: int) -> Metrics:
        return trainer.update([shares[team]], 1.0)

    found = run(num_ranks, size, algorithm, update, budget)
    shares = [[whole]]
    assert_same(found, run(1, 1, algorithm, update))


@pytest.mark.parametrize("name", ["aepo", "kl in gspo", "both masks"])
def test_updates_of_two_teams_equal_those_of_one_rank(name: str) -> None:
    """Sums over tokens, trajectories and ranks count each team once."""
    algorithm = WHOLE_UPDATES[name]
    minibatches = [encode_all(algorithm, trees) for trees in (grown(1, 2), grown(2, 1))]
    budget = 30
    shares = [partition(one, 2, 2 * budget)[0] for one in minibatches]
    assert any(tree.whole for parts in shares for own in parts for tree in own)

    def update(trainer: Trainer, team: int) -> Metrics:
        return trainer.update([parts[team] for parts in shares], 1.0)

    found = run(4, 2, algorithm, update, budget)
    shares = [[one] for one in minibatches]
    # The weights of the second step are those that AdamW made of the first, near zero of noise.
    assert_same(found, run(1, 1, algorithm, update, 2 * budget), rel=1e-5)


def test_whole_and_cut_pairs_of_dpo_train_as_on_one_rank() -> None:
    scored = [with_reference(pair, [-3.0] * pair.num_action_tokens) for pair in pairs([60, 3, 5])]
    for chosen in (scored, scored[1:]):
        shards = assign(chosen, 2)

        def step(trainer: Trainer, team: int) -> Metrics:
            return prefer(trainer, [chosen[i] for i in shards[team]], 0.5, 1.0)  # noqa: B023

        found = run(4, 2, ARPO(), step)
        shards = [list(range(len(chosen)))]
        assert_same(found, run(1, 1, ARPO(), step))


@pytest.mark.parametrize("kind", ["window", pytest.param("lora")])
def test_attention_windows_and_adapters_train_as_on_one_rank(kind: str) -> None:
    """Layers with a window of 8 tokens; and low-rank adapters."""
    if kind == "window":
        changes = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
        model = exact(tiny_model("qwen2", torch.float64, **changes))
        assert set(model.config.layer_types) == {"sliding_attention"}
    else:
        model = exact(tiny_model(dtype=torch.float64))
        add_adapters(model, LoRAConfig(r=2))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    long = path_of_four_budgets()

    def imitate(trainer: Trainer, _: int) -> Metrics:
        return trainer.imitate([long], 1.0)

    found = run(2, 2, ARPO(), imitate, model=model)
    assert_same(found, run(1, 1, ARPO(), imitate, model=model))


@pytest.mark.parametrize(("heads", "keys", "size"), [(12, 3, 2), (12, 3, 4), (4, 4, 4), (6, 1, 3)])
def test_every_rank_has_the_keys_of_its_queries(heads: int, keys: int, size: int) -> None:
    """Also where values are wider than keys; and the way back is the transpose."""
    total, width = 3 * size, 2
    meeting = Meeting(size)
    torch.manual_seed(0)
    query = torch.randn(1, heads, total, width, dtype=torch.float64)
    key = torch.randn(1, keys, total, width, dtype=torch.float64)
    value = torch.randn(1, keys, total, width + 1, dtype=torch.float64)
    (batch,) = pack([encode_sequence([1] * total, [i > 0 for i in range(total)])], total)

    def attend(rank: int) -> Tensor:
        team = meeting.team_of(rank, size)
        assert team is not None
        share = ContextShare(team, batch)
        own = [one[:, :, share.span].clone() for one in (query, key, value)]
        q, k, v = share.to_heads(*own)
        assert q.shape[1] == heads // size
        return share.to_tokens(attended(q, k, v).transpose(1, 2))

    found = torch.cat(meeting.run(attend), 1)
    expected = attended(query, key, value).transpose(1, 2)
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def test_indivisible_numbers_of_ranks_and_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"context_parallel.*2.*num_ranks.*3"):
        LearnerConfig(num_ranks=3, context_parallel=2)
    with pytest.raises(ConfigError, match=r"context_parallel.*3.*4"):
        check_heads(4, 3)


def test_recurrent_layers_are_refused(tmp_path: Path) -> None:
    Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]).save_pretrained(
        tmp_path
    )
    reason = r"context_parallel = 2: .* lfm2 has layers of type conv.*context_parallel = 1"
    with pytest.raises(ConfigError, match=reason):
        check_model(tmp_path, 2)


async def test_teams_of_processes_equal_one_process(model_dir: Path, tmp_path: Path) -> None:
    """Two teams at stage 3; updates, imitation, preferences, scores, and a checkpoint that a single
    rank resumes."""
    config = two_ranks(
        num_ranks=4,
        zero_stage=3,
        context_parallel=2,
        activation_checkpointing=True,
        max_tokens_per_microbatch=24,
    )
    learner = await DeepSpeedLearner.start(
        config, RANKS_ALGORITHM, model_dir, tmp_path / "learner.log"
    )
    oracle = plain_torch(model_dir, two_ranks(), torch.float32)
    try:
        trees = uneven_trees(7)
        metrics = await learner.update(credited(trees, learner.algorithm))
        expected = train(oracle, trees, config.groups_per_minibatch)
        for name in expected.keys() - OF_THE_RANKS:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        assert "idle_share" in metrics
        long = [path_of_four_budgets(), encode_sequence([1, 2, 3], [False, True, True])]
        for batch in (long, long[1:]):
            metrics, expected = await learner.imitate(batch), oracle.imitate(batch, 1.0)
            assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        scores = await learner.score(long)
        for score, same in zip(scores, oracle.score(long), strict=True):
            assert score.logprobs == pytest.approx(same.logprobs, abs=1e-4)
            assert score.matches == same.matches
        found = weights_in(await learner.publish(tmp_path / "published"))
        assert largest_difference(found, weights_of(oracle)) < 1e-5
        await learner.save(tmp_path / "checkpoint")
        saved = Checkpoint(tmp_path / "checkpoint")
        restore(oracle.backend, saved)
        await learner.load(tmp_path / "checkpoint")
        scored = [with_reference(pair, [-3.0] * pair.num_action_tokens) for pair in pairs([60, 3])]
        metrics, expected = await learner.prefer(scored, 0.5), prefer(oracle, scored, 0.5, 1.0)
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        found = weights_in(await learner.export(tmp_path / "onwards"))
        assert largest_difference(found, weights_of(oracle)) < 1e-5
    finally:
        await learner.close()
