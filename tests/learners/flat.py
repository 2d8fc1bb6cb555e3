"""The loss of each algorithm on packed tokens, from figures that need no model.

Every trained token of the trees has one current log-prob, `theta`. `tests/learners/oracle.py` has
the flat computation that the whole update must equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.trees.encoded_tree import ActionTokens, encode
from agentenv.learners.trees.minibatch import MiniBatch
from tests.learners.trees import credits_of, random_tree


@dataclass
class Figures:
    """Per trained token in the order of ActionTokens, float64."""

    minibatch: MiniBatch
    theta: Tensor
    entropies: Tensor  # of the current policy, with gradient


def grown(seed: int, count: int = 3) -> list[TrajectoryTree]:
    """Trees whose siblings have unequal returns."""
    trees = [random_tree(Random(seed * 100 + i), index=i, num_leaves=7) for i in range(count)]
    for tree in trees:
        for number, leaf in enumerate(tree.leaves()):
            leaf.reward += 0.37 * (number % 3)
    return trees


def figures(algorithm: Algorithm, trees: list[TrajectoryTree], seed: int = 0) -> Figures:
    """Tree form before the loss: proximal near behavior, current log-probs around both."""
    credits = credits_of(algorithm, trees)
    encoded = [encode(tree, credit, 0) for tree, credit in zip(trees, credits, strict=True)]
    tokens = ActionTokens(encoded)
    rng = np.random.default_rng(seed)
    shape = tokens.behavior.shape
    proximal = tokens.behavior + rng.normal(0, 0.4, shape)
    reference = proximal + rng.normal(0, 0.5, shape) if algorithm.needs_reference else None
    given = (encoded, tokens, proximal, tokens.entropies, reference, algorithm)
    minibatch = MiniBatch(*given, lambda x: [x], np.ones(shape, np.bool_))
    theta = torch.from_numpy(proximal + rng.normal(0, 0.5, shape)).requires_grad_()
    entropies = torch.from_numpy(rng.uniform(0.1, 3, shape)).requires_grad_()
    return Figures(minibatch, theta, entropies)


def tree_form(algorithm: Algorithm, figures: Figures, num_cuts: int = 1) -> Tensor:
    """The loss on packed tokens, cut into micro-batches."""
    minibatch, theta = figures.minibatch, figures.theta
    terms = None
    if algorithm.clips_sequences:
        terms = minibatch.terms(algorithm, theta.detach().numpy(), lambda x: [x])
    order = np.random.default_rng(1).permutation(len(theta))
    total = torch.zeros((), dtype=torch.float64)
    for index in np.array_split(order, num_cuts):
        batch = minibatch.loss_batch(index, theta, terms)
        total = total + algorithm.loss(batch, theta[index], figures.entropies[index])[0]
    return total
