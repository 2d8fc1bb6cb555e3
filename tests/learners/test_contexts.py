"""Training on trees with several contexts per leaf equals training on each context separately, with
the advantage of its leaf."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Task, VersionSpan
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.algorithms.credit import group_advantages
from agentenv.learners.algorithms.losses import LossBatch
from agentenv.learners.trees.encoded_tree import LAYOUTS, encode
from tests.learners.trees import tiny_model, tree_loss

ALGORITHM = GRPO(group_size=3, dual_clip=float("inf"))
VOCABULARY = 60


def planner_and_worker(seed: int) -> TrajectoryTree:
    """Branch 0 calls a worker between two turns and forks after its answer; a retry is discarded;
    branch 1 has one context."""
    random = Random(seed)
    tree = TrajectoryTree(Task(f"t{seed}", "env", "?", ()), index=seed)

    def ids(count: int) -> list[int]:
        return [random.randrange(VOCABULARY) for _ in range(count)]

    def turn(parent: Node, branch: str) -> Node:
        size = random.randint(2, 5)
        node = tree.add(parent, branch=branch, action_ids=ids(size))
        node.logprobs = [random.uniform(-6, -2) for _ in range(size)]
        node.entropies, node.version_spans = [1.0] * size, [VersionSpan(0, 0, size)]
        return node

    def context(branch: str, last: Node, **info: object) -> Node:
        return tree.add(
            None, branch=branch, observation_ids=ids(4), continues=last.index, info=dict(info)
        )

    root = tree.add(None, observation_ids=ids(5))
    plan = turn(root, "0")
    worker = context("0", plan, context="sub_agent")
    wrong = turn(worker, "0")
    again = context("0", wrong, context="retry", discards=[wrong.index])
    work = turn(again, "0")
    back = tree.add(plan, branch="0", observation_ids=ids(3), info={"context": "resumed"})
    leaves = [turn(back, "0"), turn(back, f"0.{3}+1"), turn(root, "1")]
    for leaf, reward in zip(leaves, (1.0, 0.0, 0.3), strict=True):
        leaf.end, leaf.reward = "terminated", reward
    history = [root, plan, worker, again, work, back, leaves[1]]
    assert tree.history(leaves[1]) == history
    return tree


def flat(model: PreTrainedModel, trees: list[TrajectoryTree]) -> Tensor:
    logprobs, old, advantages = [], [], []
    for tree in trees:
        leaves = tree.leaves()
        figures = group_advantages([leaf.reward for leaf in leaves])
        for leaf, advantage in zip(leaves, figures, strict=True):
            contexts: dict[int, list[Node]] = {}
            for node in tree.history(leaf):
                contexts.setdefault(tree.path(node)[0].index, []).append(node)
            for nodes in contexts.values():
                ids = [t for node in nodes for t in node.action_ids + node.observation_ids]
                mask = [
                    one
                    for node in nodes
                    for one in [True] * len(node.action_ids) + [False] * len(node.observation_ids)
                ]
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
                chosen = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
                logprobs.append(chosen[torch.tensor(mask)[1:]])
                old += [value for node in nodes for value in node.logprobs]
                advantages += [float(advantage)] * sum(mask)
    found = torch.cat(logprobs)
    behavior, given = (torch.tensor(one).to(found) for one in (old, advantages))
    ones = torch.ones_like(found)
    zero, one = torch.zeros((), dtype=found.dtype), torch.ones((), dtype=found.dtype)
    gains, losses, size = given.clamp(min=0), given.clamp(max=0), float(len(old))
    batch = LossBatch(behavior, behavior, ones, gains, losses, ones, size, one, zero, ones, size)
    return ALGORITHM.loss(batch, found, ones)[0]


@pytest.mark.parametrize(("max_tokens", "layout"), list(product((10**6, 24), LAYOUTS)))
def test_each_context_counts_with_the_advantage_of_its_leaf(max_tokens: int, layout: str) -> None:
    trees = [planner_and_worker(seed) for seed in range(3)]
    encoded = []
    for tree in trees:
        credit = ALGORITHM.credit(tree)
        assert credit is not None
        encoded.append(encode(tree, credit, 0))
    plain, model = tiny_model(), tiny_model()
    expected = flat(plain, trees)
    loss = tree_loss(model, encoded, ALGORITHM, max_tokens=max_tokens, layout=layout)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    expected.backward()
    loss.backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=1e-3, atol=1e-6)
