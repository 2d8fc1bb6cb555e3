"""What benchmarks/experiments/gradients.py and the forecasts of forks.py rest on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Task
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.trees.encoded_tree import ActionTokens, encode
from agentenv.learners.trees.minibatch import MiniBatch
from agentenv.learners.trees.partition import pack
from benchmarks.experiments import gradients as estimates
from benchmarks.experiments.forks import ROOTS, of_branches, scores
from tests.learners.flat import grown
from tests.learners.ranks import save_tiny_model
from tests.learners.trees import credited

TRUTH = np.array([3.0, 0.0, 0.0])


def noisy(mean: list[float], num: int, noise: float = 2.0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array(mean) + noise * rng.normal(size=(num, len(mean)))


def test_the_square_of_a_mean_is_that_over_pairs_of_trees() -> None:
    one, other = np.array([1.0, 2.0, 0.0]), np.array([3.0, -1.0, 5.0])
    assert estimates.square(np.array([one, other])) == pytest.approx(one @ other)
    draws = [noisy([1.0, 1.0, 0.0], 8, seed=seed) for seed in range(4000)]
    assert np.mean([estimates.square(draw) for draw in draws]) == pytest.approx(2.0, abs=0.15)
    assert np.mean([draw.mean(0) @ draw.mean(0) for draw in draws]) > 3.0  # 3 x 4 / 8 of noise


def test_the_signal_is_that_along_the_true_gradient_a_call() -> None:
    parts, calls = noisy([1.0, 0.0, 0.0], 20_000), np.full(20_000, 2.0)
    found = estimates.signal(parts, calls, TRUTH)
    assert found == pytest.approx(1 / 4 / 2, rel=0.1)
    assert estimates.signal(parts, 2 * calls, TRUTH) == pytest.approx(found / 2)
    assert estimates.signal(10 * parts, calls, TRUTH) == pytest.approx(found)
    # But the cosine.
    assert estimates.signal(parts + np.array([0.0, 5.0, 0.0]), calls, TRUTH) == pytest.approx(found)
    assert np.isnan(estimates.signal(parts - parts.mean(0), calls, TRUTH))


def test_bias_lowers_the_cosine_of_the_mean_and_noise_that_of_an_update() -> None:
    truths = noisy([2.0, 0.0, 0.0], 5000)
    biased = noisy([1.0, 3.0**0.5, 0.0], 5000, seed=1)
    assert estimates.cosine(truths, truths) == pytest.approx(1.0, abs=0.01)
    assert estimates.cosine(biased, truths) == pytest.approx(0.5, abs=0.05)
    assert estimates.cosine(biased, truths, 4) == pytest.approx(
        0.5 * (4 / (4 + 3)) ** 0.5, abs=0.05
    )


def test_the_interval_of_a_mean_is_that_of_its_standard_error() -> None:
    values = noisy([5.0], 2000)[:, 0]
    value, half = estimates.interval(lambda block: float(estimates.kept(values, block).mean()))
    assert value == pytest.approx(values.mean())
    assert half == pytest.approx(1.96 * 2 / 2000**0.5, rel=0.5)


def test_parts_of_trees_add_up_to_the_gradient_of_their_mini_batch(tmp_path: Path) -> None:
    gradients, algorithm = estimates.Gradients(save_tiny_model(tmp_path)), GRPO(group_size=2)
    trees = grown(4)
    parts = gradients.parts(trees, algorithm)
    assert parts.shape == (2, len(trees), estimates.DIRECTIONS)
    pairs = credited(trees, algorithm)
    assert len(pairs) == len(trees)
    encoded = [encode(tree, credit, 0) for tree, credit in pairs]
    tokens = ActionTokens(encoded)
    fixed = (tokens.behavior, tokens.entropies, None)
    batch = MiniBatch(encoded, tokens, *fixed, algorithm, lambda own: [own])
    (micro,) = pack(encoded, 10_000)
    logprobs, entropies, _ = gradients.backend.forward(micro)
    loss, _ = algorithm.loss(batch.loss_batch(micro.index, logprobs, None), logprobs, entropies)
    flat = torch.cat([one.ravel() for one in torch.autograd.grad(loss, gradients.parameters)])
    whole = np.bincount(gradients.places, gradients.signs * flat.numpy(), estimates.DIRECTIONS)
    assert np.abs(whole).max() > 1e-3
    assert parts[0].sum(0) / -batch.denominator == pytest.approx(whole, abs=1e-5)


def test_the_gradient_of_first_turns_is_that_of_the_tree_cut_after_them(tmp_path: Path) -> None:
    (tree,), algorithm = grown(5, 1), GRPO(group_size=2)
    credit = algorithm.credit(tree)
    assert credit is not None
    first = estimates.of_first_turns(tree, credit)
    later = np.array([node.parent not in (None, tree.root.index) for node in tree.nodes])
    assert later.any()
    assert not np.stack([first.adv_pos, first.adv_neg, first.weight])[:, later].any()
    kept_weight = dataclasses.replace(first, weight=credit.weight)
    gradients = estimates.Gradients(save_tiny_model(tmp_path))
    found = gradients.of(tree, first, algorithm)
    assert np.abs(found).max() > 1e-3
    assert found == pytest.approx(gradients.of(tree, kept_weight, algorithm), abs=1e-4)


def probed(number: int, of_roots: int, of_siblings: int) -> TrajectoryTree:
    """As `forks.ProbePlan` grows it: roots of two turns, siblings at the first of the probes."""
    roots, siblings = Random(f"roots {of_roots}"), Random(f"siblings {of_siblings}")
    tree = TrajectoryTree(Task(f"q{number}", "toy", "?", ()), index=number)
    tree.add(None, observation_ids=[0])
    for root in range(ROOTS):
        ids = {"action_ids": [1], "entropies": [roots.random()]}
        turn = tree.add(tree.root, branch=str(root), observation_ids=[2], **ids)
        for name, rng in ((str(root), roots), (f"{root}.1+1", siblings)):
            ids = {"action_ids": [1], "entropies": [rng.random()]}
            reward = float(rng.random() < 0.5)
            tree.add(turn, branch=name, end="terminated", reward=reward, **ids)
    return tree


def test_a_tree_of_some_branches_is_the_tree_without_others() -> None:
    tree = of_branches(probed(0, 1, 1), ["1", "5"])
    assert [node.branch for node in tree.nodes] == ["", "1", "1", "5", "5"]
    assert [node.parent for node in tree.nodes] == [None, 0, 1, 0, 3]
    assert [node.index for node in tree.nodes] == list(range(5))


def test_a_score_knows_neither_siblings_nor_outcomes_of_its_half() -> None:
    known = scores([probed(number, number, 1) for number in range(8)])
    assert known["q0", "0", 1].keys() == {"learned", "tree"}
    others = [probed(number, number, 2 if number == 2 else 1) for number in range(8)]
    changed = {place[0] for place in known if known[place] != scores(others)[place]}
    assert changed == {"q1", "q3", "q5", "q7"}
    other = scores([probed(number, 99 if number == 2 else number, 1) for number in range(8)])
    changed = {place[0] for place in known if known[place] != other[place]}
    assert changed == {"q2", "q1", "q3", "q5", "q7"}
