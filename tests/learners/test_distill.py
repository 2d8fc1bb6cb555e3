"""Distillation: both estimators against the true gradient of the KL, and the parts they are made
of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agentenv.learners.algorithms.distill import Distill
from agentenv.learners.algorithms.losses import coarse_kl, ppo_loss
from agentenv.learners.trees.policy import LogitShape, LogprobHead

VOCABULARY = 7


def policies() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the policy, with gradient, and log-probs of a teacher."""
    torch.manual_seed(0)
    policy = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True)
    return policy, torch.randn(VOCABULARY, dtype=torch.float64).log_softmax(-1)


def true_gradient(policy: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    own = policy.log_softmax(-1)
    (found,) = torch.autograd.grad((own.exp() * (own - teacher)).sum(), policy)
    return found


def test_the_sampled_token_has_the_gradient_of_the_kl_on_average() -> None:
    policy, teacher = policies()
    own = policy.log_softmax(-1)
    gap = (teacher - own).detach()
    ratio = (own - own.detach()).exp()
    loss = ppo_loss(ratio, gap, 0.2, 0.28, Distill().dual_clip)
    (found,) = torch.autograd.grad((own.detach().exp() * loss).sum(), policy)
    torch.testing.assert_close(found, true_gradient(policy, teacher))


@pytest.mark.parametrize("k", [2, VOCABULARY - 1])
def test_the_likeliest_ids_have_the_gradient_of_a_lower_bound(k: int) -> None:
    policy, teacher = policies()
    own = policy.log_softmax(-1)
    ids = teacher.topk(k).indices
    kl = coarse_kl(own[None, ids], teacher[None, ids])[0]
    whole = (own.exp() * (own - teacher)).sum()
    assert 0 < kl.item() <= whole.item() + 1e-12
    (found,) = torch.autograd.grad(kl, policy)
    if k == VOCABULARY - 1:  # the rest is one id
        torch.testing.assert_close(kl, whole)
        torch.testing.assert_close(found, true_gradient(policy, teacher))
    own = policy.log_softmax(-1)
    none = coarse_kl(own[None, ids], torch.full((1, k), torch.nan, dtype=torch.float64))
    (found,) = torch.autograd.grad(none.sum(), policy)
    assert none.item() == 0
    assert found.abs().max() < 1e-12


@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(0.5, cap=3.0)])
@pytest.mark.parametrize("temperature", [None, torch.tensor([0.5, 1.0, 2.0])])
def test_other_ids_have_their_log_probs_and_gradients(
    shape: LogitShape, temperature: torch.Tensor | None
) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(5, VOCABULARY, bias=True).double()
    hidden = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    targets, others = torch.tensor([0, 3, 6]), torch.tensor([[1, 0], [3, 5], [2, 4]])
    head = LogprobHead.of(linear, shape)
    *_, found, _ = head(hidden, targets, temperature, None, others)
    logits = shape.apply(linear(hidden))
    if temperature is not None:
        logits = logits / temperature[:, None]
    expected = logits.log_softmax(-1).gather(-1, others)
    torch.testing.assert_close(found, expected)
    *_, best, ids = head(hidden, targets, temperature, None, 3)
    for own, wanted in zip((best, ids), logits.log_softmax(-1).topk(3), strict=True):
        torch.testing.assert_close(own, wanted)
    weights = torch.randn(3, 2, dtype=torch.float64)
    inputs = hidden, linear.weight, linear.bias
    gradients = torch.autograd.grad((found * weights).sum(), inputs, retain_graph=True)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other)
