"""The flat computation that each algorithm's tree form must equal, and the tree form.

Every trained token of the trees has one current log-prob, `theta`. The flat form gives each
trajectory a separate row and gathers from `theta`, so gradients add up over shared tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms import losses
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.credit import group_advantages, leave_one_out
from agentenv.learners.trees.batch import ActionTokens, encode
from agentenv.learners.trees.minibatch import MiniBatch, prepare
from tests.learners.trees import credits_of, random_tree
from tests.support.released_losses import gspo_loss


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
    tokens = ActionTokens.of(encoded)
    rng = np.random.default_rng(seed)
    shape = tokens.behavior.shape
    proximal = tokens.behavior + rng.normal(0, 0.4, shape)
    reference = proximal + rng.normal(0, 0.5, shape) if algorithm.needs_reference else None
    minibatch = prepare(
        encoded, tokens, proximal, tokens.entropies, reference, algorithm, lambda x: [x]
    )
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


def flat_form(algorithm: Algorithm, trees: list[TrajectoryTree], figures: Figures) -> Tensor:
    """The same loss, a row for each trajectory, each with its own advantage."""
    minibatch = figures.minibatch
    place = {value: i for i, value in enumerate(minibatch.tokens.behavior.tolist())}
    rows, groups = [], []
    for number, tree in enumerate(trees):
        for path in tree.trajectories():
            rows.append([place[value] for node in path.path for value in node.logprobs])
            groups.append((number, path.reward))
    length = max(map(len, rows))
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (length - len(row)) for row in rows]).double()
    index = torch.tensor([row + [0] * (length - len(row)) for row in rows])

    def matrix(values: np.ndarray | Tensor) -> Tensor:
        return torch.as_tensor(values)[index]

    current, proximal = matrix(figures.theta), matrix(minibatch.proximal)
    behavior = matrix(minibatch.tokens.behavior)
    advantages = _advantages(algorithm, groups, minibatch, mask, matrix)[:, None].expand_as(mask)
    if getattr(algorithm, "entropy_advantage", 0):
        entropies = matrix(minibatch.entropies)
        chosen = entropies[mask > 0]
        score = (entropies - chosen.mean()) / chosen.std()
        advantages = advantages * (1 + algorithm.entropy_advantage * score).clamp(0, 2)
    low, high = algorithm.clip_low, algorithm.clip_high
    if algorithm.clips_sequences:
        bound = losses.MAX_LOG_RATIO
        token_loss, _ = gspo_loss(current, proximal, advantages, mask, low, high, bound)
    else:
        token_loss = algorithm.token_loss((current - proximal).exp(), advantages)
    token_loss = token_loss * _corrections(algorithm, proximal, behavior, mask)
    loss = _mean(algorithm, token_loss, mask)
    if algorithm.kl_loss:
        kl = losses.kl_loss(current, matrix(minibatch.reference), algorithm.kl_kind)
        loss = loss + algorithm.kl_loss * _mean(algorithm, kl, mask)
    return loss - algorithm.entropy_bonus * _mean(algorithm, matrix(figures.entropies), mask)


def _advantages(algorithm, groups, minibatch, mask, matrix) -> Tensor:
    returns = torch.tensor([reward for _, reward in groups], dtype=torch.float64)
    if algorithm.kl_reward:
        log_ratio = matrix(minibatch.proximal - minibatch.reference)
        returns = returns - algorithm.kl_reward * (log_ratio * mask).sum(-1)
    name = algorithm.__struct_config__.tag
    out = torch.zeros_like(returns)
    for number in dict.fromkeys(number for number, _ in groups):
        mine = torch.tensor([group == number for group, _ in groups])
        values = returns[mine].numpy()
        if name == "rloo":
            found = leave_one_out(values)
        else:
            found = group_advantages(values, norm_by_std=name not in ("dr_grpo", "reinforce_pp"))
        out[mine] = torch.from_numpy(found)
    if name == "reinforce_pp":
        chosen = out[:, None].expand_as(mask)[mask > 0]
        out = (out - chosen.mean()) / (chosen.std() + 1e-6)
    return out


def _corrections(algorithm, proximal, behavior, mask) -> Tensor:
    log_ratio = proximal - behavior
    weight = log_ratio.exp().clamp(max=algorithm.importance_cap)
    if algorithm.token_mask:
        ratio = log_ratio.exp()
        weight = weight * (
            (ratio >= algorithm.token_mask.low) & (ratio <= algorithm.token_mask.high)
        )
    if algorithm.sequence_mask:
        mean = ((log_ratio * mask).sum(-1) / mask.sum(-1)).exp()
        kept = (mean >= algorithm.sequence_mask.low) & (mean <= algorithm.sequence_mask.high)
        weight = weight * kept[:, None]
    return weight


def _mean(algorithm: Algorithm, values: Tensor, mask: Tensor) -> Tensor:
    kept, mode = torch.where(mask > 0, values, torch.zeros_like(values)), algorithm.aggregation
    if mode == "token-mean":
        return kept.sum() / mask.sum()
    if mode == "seq-mean-token-mean":
        return (kept.sum(-1) / mask.sum(-1)).mean()
    return kept.sum(-1).mean() / (algorithm.norm_length if mode.endswith("norm") else 1)
