from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from agentenv.learners.algorithms import losses
from agentenv.learners.algorithms.baselines import GRPO
from tests import check_fixtures

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.json")), ids=lambda path: path.stem)
def test_losses_equal_the_reference_numbers(path: Path) -> None:
    if path.stem not in check_fixtures.CHECKS:
        pytest.skip("another part's fixture")
    passed, failed = check_fixtures.check_file(path)
    assert not failed
    assert passed


def test_check_fixtures_reports_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((FIXTURES / "kl_penalty.json").read_text())
    content["cases"] = content["cases"][:2]
    content["cases"][1]["kl"][0][0] += 1e-3
    (tmp_path / "kl_penalty.json").write_text(json.dumps(content))
    (tmp_path / "unheard_of.json").write_text("{}")
    assert check_fixtures.main([str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert f"passed {content['cases'][0]['name']}" in output
    assert f"FAILED {content['cases'][1]['name']}: kl" in output
    assert "unheard_of.json: skipped" in output
    assert check_fixtures.main([str(tmp_path / "missing")]) == 2


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy and log-probs of a reference, float64 [words], within the bounds of k3."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    return logits[0].requires_grad_(), logits[1].log_softmax(0)


TARGETS = {
    "k1": lambda p, q: (p * (p / q).log()).sum(),  # KL(policy || reference)
    "k2": lambda p, q: (p * (p / q).log()).sum(),
    "k3": lambda p, q: (q * (q / p).log()).sum(),  # KL(reference || policy)
    "low_var_kl": lambda p, q: (q * (q / p).log()).sum(),
    "abs": lambda p, q: (p - q).abs().sum(),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", TARGETS)
def test_the_expected_gradient_of_each_kl_kind(kind: str, seed: int) -> None:
    """Through the objective of an algorithm: each word with its probability as weight, which makes
    the sum an expectation over the samples of the policy."""
    logits, reference = distributions(seed)
    logprobs = logits.log_softmax(0)
    known, zeros = logprobs.detach(), torch.zeros_like(reference)
    scalars = 1.0, zeros[0], zeros[0]
    tokens = known, known, zeros, zeros, zeros, known.exp()
    batch = losses.LossBatch(*tokens, *scalars, zeros + 1, 1.0, reference=reference)
    loss, _ = GRPO(group_size=2, kl_loss=1.0, kl_kind=kind).loss(batch, logprobs, zeros)
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    probabilities = logits.softmax(0)
    true_kl = TARGETS["k1"](probabilities, reference.exp())
    (expected,) = torch.autograd.grad(TARGETS[kind](probabilities, reference.exp()), logits)
    assert float(expected.norm()) > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    if kind in ("k1", "k3", "low_var_kl"):
        torch.testing.assert_close(loss, true_kl)


def test_the_estimators_are_biased_as_documented() -> None:
    """Where policy and reference differ, k3 and abs descend on something else than the KL."""
    logits, reference = distributions(0)
    true = torch.autograd.grad(TARGETS["k1"](logits.softmax(0), reference.exp()), logits)[0]
    for kind, smallest in (("k3", 0.2), ("abs", 0.2)):
        value = TARGETS[kind](logits.softmax(0), reference.exp())
        (other,) = torch.autograd.grad(value, logits)
        assert float((other - true).norm() / true.norm()) > smallest
    far = torch.tensor([-9.0], dtype=torch.float64, requires_grad=True)
    bounded = losses.kl_loss(far, torch.tensor([-1.0], dtype=torch.float64), "k3")
    assert bounded.item() == 10.0
    assert torch.autograd.grad(bounded.sum(), far)[0].item() == 0.0


@pytest.mark.parametrize("loss", [losses.ppo_loss, losses.entropy_balanced_loss])
@pytest.mark.parametrize("dual_clip", [3.0, math.inf])
def test_split_by_sign_equals_the_sum_over_copies(loss, dual_clip) -> None:
    log_ratio = torch.linspace(-2, 2, 41, dtype=torch.float64)
    copies = torch.tensor([0.7, -1.2, 0.4, -0.1], dtype=torch.float64)

    def gradient(advantages: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = log_ratio.clone().requires_grad_()
        ratio = losses.ratio_of(logprobs, torch.zeros_like(logprobs))
        value = sum(loss(ratio, a.expand(41), 0.2, 0.28, dual_clip) for a in advantages)
        value.sum().backward()
        return value.detach(), logprobs.grad

    flat = gradient(list(copies))
    tree = gradient([copies.clamp(min=0).sum(), copies.clamp(max=0).sum()])
    torch.testing.assert_close(tree, flat, rtol=1e-12, atol=1e-12)


def test_entropy_balanced_gradients_follow_the_table() -> None:
    ratio = torch.tensor([1.5, 1.1, 0.5, 0.9, 3.5], dtype=torch.float64)
    for advantage, expected in (
        (2.0, [-2.0 * 1.28, -2.0 * 1.1, -2.0 * 0.5, -2.0 * 0.9, -2.0 * 1.28]),
        (-2.0, [3.0, 2.2, 0.0, 1.8, 0.0]),
        (0.0, [0.0] * 5),
    ):
        logprobs = ratio.log().requires_grad_()
        losses.entropy_balanced_loss(
            losses.ratio_of(logprobs, torch.zeros_like(ratio)),
            torch.full_like(ratio, advantage),
            0.2,
            0.28,
            3.0,
        ).sum().backward()
        torch.testing.assert_close(logprobs.grad, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("loss", [losses.ppo_loss, losses.entropy_balanced_loss])
def test_extreme_ratios_stay_finite(loss) -> None:
    logprobs = torch.tensor([-200.0, 0.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -200.0, -1.0])
    ratio = losses.ratio_of(logprobs, old)
    value = loss(ratio, torch.tensor([0.0, -1.0, 1.0]), 0.2, 0.28, 3.0)
    value.sum().backward()
    assert value.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_entropy_multiplier_is_clamped_and_defined_for_one_token() -> None:
    entropies = torch.tensor([0.0] * 60 + [50.0], dtype=torch.float64)
    statistics = losses.entropy_statistics(entropies, torch.ones_like(entropies))
    multiplier = losses.entropy_multiplier(entropies, *statistics, 0.2)
    assert multiplier.max() == 2.0
    one = torch.tensor([1.5])
    statistics = losses.entropy_statistics(one, torch.ones(1))
    assert losses.entropy_multiplier(one, *statistics, 0.2).item() == 1.0


def test_weighted_statistics_equal_those_of_the_copies() -> None:
    entropies, weights = torch.tensor([0.5, 2.0, 1.0]), torch.tensor([3.0, 1.0, 2.0])
    copies = entropies.repeat_interleave(weights.long())
    mean, std = losses.entropy_statistics(entropies, weights)
    torch.testing.assert_close(mean, copies.mean())
    torch.testing.assert_close(std, copies.std())
