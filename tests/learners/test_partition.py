"""Trees and parts of trees on several ranks equal whole trees on one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import VersionSpan
from agentenv.learners.algorithms.algorithm import Algorithm, Band
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.baselines import GRPO, GSPO, DrGRPO
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.learner import encode_groups, in_order
from agentenv.learners.ranks.trainer import Trainer
from agentenv.learners.trees import partition
from agentenv.learners.trees.encoded_tree import ActionTokens, EncodedTree, from_arrays
from agentenv.learners.trees.minibatch import LeafMap, MiniBatch
from tests.learners.flat import figures, grown, tree_form
from tests.learners.ranks import OF_THE_RANKS, encoded, uneven_trees, weights_of
from tests.learners.test_algorithm_trees import ALGORITHMS, NARROW
from tests.learners.threads import Meeting, trainers
from tests.learners.trees import credits_of, level, random_tree, tiny_model

MODEL = tiny_model(dtype=torch.float64)


def encode_all(algorithm: Algorithm, trees: Sequence[TrajectoryTree], version: int = 0):
    pairs = zip(trees, credits_of(algorithm, list(trees)), strict=True)
    groups = in_order([(tree, credit) for tree, credit in pairs if credit is not None])
    return encode_groups(groups, version, CONFIG, algorithm)


def test_whole_sequences_are_assigned_by_cost() -> None:
    trees = encoded(uneven_trees(8))
    assert partition.assign(trees, 1) == [list(range(len(trees)))]
    shards = partition.assign(trees, 3)
    assert sorted(place for shard in shards for place in shard) == list(range(len(trees)))
    loads = [sum(partition.cost(trees[place]) for place in shard) for shard in shards]
    largest = max(partition.cost(tree) for tree in trees)
    assert max(loads) <= max(largest, 4 / 3 * sum(loads) / 3)
    assert partition.assign(trees[:1], 2) == [[0], []]


def test_one_rank_gets_the_trees_unchanged() -> None:
    trees = encoded(uneven_trees(5))
    (own,), (load_of_it,) = partition.partition(trees, 1, 10**6)
    assert all(one is tree for one, tree in zip(own, trees, strict=True))
    assert load_of_it == pytest.approx(sum(map(partition.cost, trees)))


def test_the_part_of_a_rank_by_hand() -> None:
    """A prompt of 2; a turn of 2 with leaves of 1 and 2 below it; a leaf of 3."""
    action = np.array([False, False, *[True] * 8])
    tree = from_arrays(range(10), action, [0, 2, 4, 5, 7], [-1, 0, 1, 1, 0], weight=[3, 2, 1, 1, 1])
    first, middle = (partition.part(tree, [i], 7, is_home=not i) for i in (0, 1))
    assert first.ints("token_ids").tolist() == [0, 1, 2, 3, 4]
    assert first.actions().tolist() == [False, False, True, True, True]
    assert middle.ints("token_ids").tolist() == [0, 1, 2, 3, 5, 6]
    assert middle.actions().tolist() == [False, False, False, False, True, True]
    assert middle.ints("pred").tolist() == [-1, 0, 1, 2, 3, 4]
    assert middle.of_actions("weight").tolist() == [1, 1]
    assert middle.ints("parents").tolist() == [-1, 0, 1, 1, 0]
    leaves = LeafMap([first, middle])
    assert leaves.lengths.tolist() == [3, 4, 3] * 2
    assert leaves.is_home.tolist() == [True] * 3 + [False] * 3
    assert partition.part(tree, [0, 1, 2], 7, is_home=True) is tree


def test_costs_by_hand() -> None:
    """The same tree. Pairs: of depth d, a token sees d + 1."""
    paths = partition.Paths([2, 2, 1, 2, 3], [-1, 0, 1, 1, 0], 100)

    def work(*positions: int) -> float:
        return len(positions) + 1e-4 * sum(position + 1 for position in positions)

    shared = work(0, 1, 2, 3)
    assert paths.cost([0]) == pytest.approx(shared + work(4))
    assert paths.cost([0, 1]) == pytest.approx(shared + work(4, 4, 5))
    assert paths.cost([0, 2]) == pytest.approx(shared + work(4, 2, 3, 4))
    assert paths.cost(paths.leaves) == pytest.approx(shared + work(4, 4, 5, 2, 3, 4))
    small = partition.Paths([2, 2, 1, 2, 3], [-1, 0, 1, 1, 0], 7)
    assert small.cost([0, 1]) == paths.cost([0, 1])
    assert small.cost(small.leaves) == pytest.approx(paths.cost([0, 1]) + work(0, 1, 2, 3, 4))


@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from([20, 60, 10**6]))
def test_every_token_is_trained_on_one_rank(seed: int, num_ranks: int, max_tokens: int) -> None:
    grown_trees = [random_tree(Random(seed * 10 + i), index=i) for i in range(3)]
    trees = encode_all(GRPO(group_size=6), grown_trees)
    shares, loads = partition.partition(trees, num_ranks, max_tokens)
    assert len(shares) == len(loads) == num_ranks
    parts = [tree for one in shares for tree in one]
    expected = ActionTokens(trees)
    found = ActionTokens(parts)
    for name in ("behavior", "adv_pos", "adv_neg", "weight", "entropies"):
        assert sorted(getattr(found, name)) == sorted(getattr(expected, name))
    assert Counter(_contexts(parts)) == Counter(_contexts(trees))
    assert sum(LeafMap(parts).is_home) == len(LeafMap(trees).lengths)


def _contexts(trees: Sequence[EncodedTree]) -> list[tuple[int, ...]]:
    """Each trained token with all that it sees, in any micro-batch."""
    contexts = []
    for batch in partition.pack(trees, 40):
        for source, target in zip(batch.source.tolist(), batch.targets.tolist(), strict=True):
            seen = [i for i in range(source + 1) if batch.end[i] > source]
            assert batch.position_ids[seen].tolist() == list(range(len(seen)))
            contexts.append((*batch.token_ids[seen].tolist(), target))
    return contexts


def test_loads_equal_the_computations_of_ranks() -> None:
    """Up to the savings of packing if pieces of a tree share a micro-batch."""
    trees = encode_all(ARPO(group_size=16), [grow_large(Random(i), i) for i in range(8)])
    for num_ranks in (1, 4, 8):
        shares, loads = partition.partition(trees, num_ranks, 1500)
        for one, expected in zip(shares, loads, strict=True):
            batches = partition.pack(one, 1500)
            pairs = sum(int(batch.position_ids.sum()) + len(batch.end) for batch in batches)
            found = sum(len(batch.end) for batch in batches) + 1e-4 * pairs
            assert found == pytest.approx(expected, rel=0.05)


def grow_large(random: Random, index: int) -> TrajectoryTree:
    tree = random_tree(random, index=index, num_leaves=16)
    for node in tree.nodes:
        node.observation_ids = node.observation_ids * 20
    return tree


def test_a_tree_is_divided_only_when_that_saves_time() -> None:
    leaves = 16
    wide = partition.Paths([10, *[100] * leaves], [-1, *[0] * leaves], 10**6)
    (first, second) = partition.assign_paths([wide], 2)
    assert first[0] == list(range(8))
    assert second[0] == list(range(8, 16))
    loads = [partition.load(shard, [wide]) for shard in partition.assign_paths([wide], 16)]
    assert partition.idle_share([loads]) < 1e-9
    prompt = partition.Paths([10_000, 1, 1], [-1, 0, 0], 10**6)
    assert partition.assign_paths([prompt], 2) == [{0: [0, 1]}, {}]
    assert partition.assign_paths([wide] * 4, 4) == [{i: list(range(16))} for i in range(4)]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("num_ranks", [2, 5])
def test_losses_of_ranks_sum_to_that_of_one_rank(name: str, num_ranks: int) -> None:
    """Parts of trees on all ranks: the sum of their losses is that of one rank with the trees."""
    algorithm, trees = ALGORITHMS[name], grown(4)
    whole = figures(algorithm, trees)
    batch, theta, current = whole.minibatch, whole.theta.detach(), whole.entropies.detach()
    place = {value: i for i, value in enumerate(batch.tokens.behavior.tolist())}
    shares, _ = partition.partition(batch.trees, num_ranks, 10**6)
    shares.append([])  # a rank without any
    meeting = Meeting(len(shares))

    def loss_of(rank: int) -> float:
        own, gather = shares[rank], meeting.gather_of(rank)
        tokens = ActionTokens(own)
        index = np.array([place[value] for value in tokens.behavior], np.int64)
        reference = None if batch.reference is None else batch.reference[index]
        args = (own, tokens, batch.proximal[index], tokens.entropies, reference)
        mine = MiniBatch(*args, algorithm, gather, np.ones(len(index), np.bool_))
        terms = None
        if algorithm.clips_sequences:
            terms = mine.terms(algorithm, theta[index].numpy(), gather)
        given = mine.loss_batch(np.arange(len(index)), theta, terms)
        for name, value in mine.metrics.items():
            assert value == pytest.approx(batch.metrics[name], rel=1e-9), name
        return float(algorithm.loss(given, theta[index], current[index])[0])

    expected = float(tree_form(algorithm, whole).detach())
    assert sum(meeting.run(loss_of)) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert any(tree.whole is not None for one in shares for tree in one)


WHOLE_UPDATES = {
    **{name: ALGORITHMS[name] for name in ("arpo", "aepo", "gspo", "cispo", "dapo", "rloo")},
    **{name: ALGORITHMS[name] for name in ("grpo as printed", "dr_grpo", "reinforce_pp")},
    "hard sharing": ARPO(group_size=2, sharing="hard", kl_reward=0.1),
    "kl in gspo": GSPO(group_size=2, clip_low=0.1, clip_high=0.1, kl_reward=0.1, kl_loss=0.1),
    "both masks": DrGRPO(group_size=2, sequence_mask=NARROW, token_mask=Band(low=0.2, high=3.0)),
}
MAX_TOKENS = 60
CONFIG = LearnerConfig(
    zero_stage=0,
    num_epochs_per_batch=2,
    max_tokens_per_microbatch=MAX_TOKENS,
    optimizer="adamw",
    learning_rate=1e-3,
)


@pytest.mark.parametrize("name", WHOLE_UPDATES)
def test_updates_of_two_and_four_ranks_equal_those_of_one(name: str) -> None:
    """Weights and metrics after two updates, the second on trees partly of the first's version,
    with parts of trees, a rank without any, and uneven numbers of micro-batches; and with groups of
    equal returns, which have no part in the second step, and are all there is in the third."""
    algorithm = WHOLE_UPDATES[name]
    equal = [level(random_tree(Random(i), index=i), 1.1) for i in (5, 6)]
    first = (grown(1, 2), [*grown(2, 1), equal[0]], equal)
    batches = [
        [encode_all(algorithm, trees) for trees in first],
        [encode_all(algorithm, _versions(grown(3, 2)), 1)],
    ]
    found = {}
    for num_ranks in (1, 2, 4):
        meeting = Meeting(num_ranks)
        ranks = trainers(MODEL, algorithm, CONFIG, meeting)
        metrics = []
        for minibatches in batches:
            shares = [partition.partition(one, num_ranks, MAX_TOKENS)[0] for one in minibatches]
            has_parts = any(tree.whole for parts in shares for own in parts for tree in own)
            assert has_parts == (num_ranks > 1)
            metrics.append(_update(meeting, ranks, shares))
        weights = [torch.cat([w.flatten() for w in weights_of(rank).values()]) for rank in ranks]
        assert all(torch.equal(weights[0], other) for other in weights)
        found[num_ranks] = weights[0], metrics
    for num_ranks in (2, 4):
        difference = (found[1][0] - found[num_ranks][0]).abs()
        assert float(difference.max()) < 1e-5, "AdamW magnifies gradients of almost nothing"
        assert float(difference.mean()) < 1e-8
        for ours, expected in zip(found[num_ranks][1], found[1][1], strict=True):
            for key in expected.keys() - OF_THE_RANKS:
                assert ours[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-7), key


def _update(
    meeting: Meeting, ranks: Sequence[Trainer], shares: list[list[list[EncodedTree]]]
) -> dict[str, float]:
    def update(rank: int) -> dict[str, float]:
        trainer = ranks[rank]
        metrics = trainer.update([parts[rank] for parts in shares], 1.0)
        trainer.moved = False  # as if published
        return metrics

    return meeting.run(update)[0]


def _versions(trees: list[TrajectoryTree]) -> list[TrajectoryTree]:
    """All but the first have one stale turn; all tokens of such a tree are scored again, wherever
    they are."""
    for tree in trees[1:]:
        for node in tree.nodes[2:]:
            node.version_spans = [VersionSpan(1, 0, len(node.action_ids))]
    return trees
