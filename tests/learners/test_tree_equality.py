"""Training on packed trees equals training on the flat trajectories, to rounding.

Transformers computes its norms in float32 for any dtype of the model; here they are kept in
float64, so that only the order of sums differs. Flat: every trajectory alone through the unmodified
model, with its own advantage.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, product
from random import Random

import pytest
import torch
from torch import Tensor

from agentenv.base.errors import DataError
from agentenv.base.tree import TrajectoryTree, of_frame, to_frame
from agentenv.learners.algorithms.aepo import AEPO
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.trees import attention as attention_blocked
from agentenv.learners.trees.encoded_tree import LAYOUTS, ActionTokens, EncodedTree, Layout, encode
from agentenv.learners.trees.partition import pack, partition
from agentenv.learners.trees.policy import Policy, tensors
from tests.learners.trees import MODELS, flat_loss, random_tree, tiny_model, tree_loss

ALGORITHMS: dict[str, Algorithm] = {
    "ppo": GRPO(group_size=6, dual_clip=float("inf")),
    "dual clip": GRPO(group_size=6, dual_clip=3.0),
    "aepo": AEPO(group_size=6, dual_clip=3.0),
}
WHOLE = 10**6  # tokens of a micro-batch that holds everything


@pytest.fixture(params=["blocks", "as chosen"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trees this small would mostly be computed under one mask."""
    if request.param == "blocks":
        monkeypatch.setattr(attention_blocked, "CALL_PAIRS", 0)
    return iter([None])


def some_trees(
    seed: int, temperatures: Sequence[float] = (1.0,)
) -> tuple[list[TrajectoryTree], list[EncodedTree]]:
    trees = [random_tree(Random(seed * 100 + i), index=i, num_leaves=8) for i in range(3)]
    for tree in trees[1:]:
        for node in tree.nodes[1:]:
            node.temperature = temperatures[node.index % len(temperatures)]
            if node.temperature > 1:
                rows = [{token, *range(1, 60, 7 + token % 30)} for token in node.action_ids]
                node.num_kept = array("i", map(len, rows))
                node.kept_ids = array("i", chain.from_iterable(rows))
    credits = [GRPO(group_size=6).credit(tree) for tree in trees]
    return trees, [encode(tree, credit, 0) for tree, credit in zip(trees, credits, strict=True)]


def gradients(model: torch.nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def assert_equal_to_flat(
    plain: torch.nn.Module,
    model: torch.nn.Module,
    algorithm: Algorithm,
    limit: float,
    layouts: Sequence[Layout] = ("tree",),
    temperatures: Sequence[float] = (1.0,),
) -> None:
    """The loss of some trees and its gradient, in micro-batches of any size, are those of their
    separate sequences."""
    trees, encoded = some_trees(7, temperatures)
    flat = flat_loss(plain, trees, algorithm)
    expected = gradients(plain, flat)
    for max_tokens, layout in product((WHOLE, 60), layouts):
        loss = tree_loss(model, encoded, algorithm, max_tokens=max_tokens, layout=layout)
        assert relative(loss, flat) < limit
        assert relative(gradients(model, loss), expected) < limit


@pytest.mark.usefixtures("float64_norms", "_blocks")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_loss_and_gradient_equal_the_flat_ones(
    name: str, algorithm: str, dtype: torch.dtype, limit: float
) -> None:
    plain, model = tiny_model(name, dtype), tiny_model(name, dtype)
    assert_equal_to_flat(plain, model, ALGORITHMS[algorithm], limit, LAYOUTS)


@pytest.mark.usefixtures("float64_norms")
def test_turns_of_a_tree_may_have_different_temperatures_and_truncations() -> None:
    """Next to a tree at temperature 1, also on a rank with a part of a tree."""
    plain, model = (tiny_model(dtype=torch.float64) for _ in range(2))
    algorithm = GRPO(group_size=6)
    temperatures = (0.5, 1.0, 1.7)
    assert_equal_to_flat(plain, model, algorithm, 1e-9, LAYOUTS, temperatures)
    trees, encoded = some_trees(7, temperatures)
    parts, _ = partition(encoded, 2, WHOLE)
    assert any(one.whole is not None and one.temperatures and one.num_kept for one in parts[0])
    found = [tree_loss(model, one, algorithm) * ActionTokens(one).weight.sum() for one in parts]
    total = sum(found) / ActionTokens(encoded).weight.sum()
    assert relative(total, flat_loss(plain, trees, algorithm)) < 1e-9
    assert not any(one.temperatures + one.num_kept for one in some_trees(7)[1])
    assert encode(of_frame(to_frame(trees[2])), algorithm.credit(trees[2]), 0) == encoded[2]
    trees[0].nodes[1].temperature = 0.0
    with pytest.raises(DataError, match="greedy"):
        encode(trees[0], algorithm.credit(trees[0]), 0)


def test_the_trees_cover_both_signs_and_every_clip_edge() -> None:
    """Tokens with advantages of both signs, and ratios on every side of every clip edge."""
    _, encoded = some_trees(7)
    tokens = ActionTokens(encoded)
    assert ((tokens.adv_pos > 0) & (tokens.adv_neg < 0)).any()
    (batch,) = pack(encoded, WHOLE)
    logprobs, _, _ = Policy(tiny_model())(*tensors(batch, torch.device("cpu")))
    ratio = (logprobs.detach() - torch.from_numpy(tokens.behavior[batch.index])).exp()
    positive = torch.from_numpy(tokens.adv_pos[batch.index]) > 0
    negative = torch.from_numpy(tokens.adv_neg[batch.index]) < 0
    shared = torch.from_numpy(tokens.weight[batch.index]) > 1
    for side in (
        positive & (ratio > 1.28),
        negative & (ratio < 0.8),
        negative & (ratio > 3.0),
        (ratio > 0.8) & (ratio < 1.28),
    ):
        assert (side & shared).any()
    for edge in (0.8, 1.28, 3.0):
        assert (ratio - edge).abs().min() > 1e-4, "too near to a clip edge to be compared"


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_changes_nothing_but_memory(name: str) -> None:
    _, encoded = some_trees(9)
    (batch,) = pack(encoded, WHOLE)
    found, kept = [], []
    for checkpointing in (False, True):
        model = tiny_model(name)
        policy = Policy(model, checkpointing=checkpointing)
        sizes: list[int] = []

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs, entropies, _ = policy(*tensors(batch, torch.device("cpu")))
        kept.append(sum(sizes))
        found.append(gradients(model, (logprobs + 0.1 * entropies).sum()))
    assert torch.equal(*found)
    assert kept[1] < kept[0] / 2
