"""The head against log_softmax on whole logits: values, gradients, memory."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from agentenv.learners.trees import policy as logprob_head
from agentenv.learners.trees.policy import PLAIN, LogitShape, LogprobHead, chunk_tokens
from tests.learners.trees import tiny_model
from tests.support.snippets import run_python

TOKENS, WIDTH, VOCABULARY = 11, 6, 19


@pytest.fixture(params=["one chunk", "chunks"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens at once, and three at a time with few rows of the weight."""
    if request.param == "chunks":
        monkeypatch.setitem(logprob_head.CHUNK_BYTES, "cpu", 3 * VOCABULARY * 8)
        monkeypatch.setitem(logprob_head.TILE_BYTES, "cpu", 4 * WIDTH * 8)


def example(
    dtype: torch.dtype, bias: bool = True, shape: LogitShape = PLAIN
) -> tuple[LogprobHead, Tensor, Tensor]:
    torch.manual_seed(0)
    head = LogprobHead.of(nn.Linear(WIDTH, VOCABULARY, bias=bias).to(dtype), shape)
    hidden = (3 * torch.randn(TOKENS, WIDTH)).to(dtype).requires_grad_()
    return head, hidden, torch.randint(VOCABULARY, (TOKENS,))


def reference(
    head: LogprobHead,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor | None = None,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = head.shape.scale * nn.functional.linear(hidden, head.weight, head.bias)
    if head.shape.cap is not None:
        logits = head.shape.cap * torch.tanh(logits / head.shape.cap)
    if temperature is not None:
        logits = logits / temperature[:, None]
    if kept is not None:
        outside = torch.tensor([[i not in row for i in range(VOCABULARY)] for row in kept.tolist()])
        logits = logits.masked_fill(outside & (kept[:, :1] >= 0), -torch.inf)
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs.clamp(min=-1e9)).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy, logits.argmax(-1)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("is_changed", [False, True])
@pytest.mark.parametrize(
    ("bias", "shape"),
    [(True, PLAIN), (False, PLAIN), (True, LogitShape(0.25)), (False, LogitShape(2.0, cap=3.0))],
)
def test_values_and_gradients_equal_those_of_whole_logits(
    bias: bool, shape: LogitShape, is_changed: bool
) -> None:
    """Also at temperatures, of the ids that a truncation kept; of some tokens all."""
    head, hidden, targets = example(torch.float64, bias, shape)
    inputs: tuple[Tensor, ...] = (hidden, targets)
    if is_changed:
        kept = torch.cat([targets[:, None], torch.randint(VOCABULARY, (TOKENS, 4))], 1)
        kept[3:5] = -1
        inputs += torch.linspace(0.3, 2.0, TOKENS), kept
    found = head(*inputs)
    expected = reference(head, *inputs)
    assert torch.equal(found[2], expected[2])
    coefficients = torch.randn(2, TOKENS, dtype=torch.float64)
    weights = [hidden, *head.parameters()]
    for used in ((1, 0), (0, 1), (1, 1)):
        losses = [
            sum(use * (c * f).sum() for use, c, f in zip(used, coefficients, figures, strict=False))
            for figures in (found, expected)
        ]
        torch.testing.assert_close(*losses)
        grads = [torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("_chunks")
def test_gradcheck_of_logprobs_and_entropies() -> None:
    head, hidden, targets = example(torch.float64)
    weight, bias = head.weight, head.bias
    assert bias is not None

    def both(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        figures = logprob_head.SelectedLogprobs.apply(*inputs, targets)
        return figures[0], figures[1]

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


@pytest.mark.usefixtures("_chunks")
def test_half_precision_is_summed_in_float32() -> None:
    head, hidden, targets = example(torch.bfloat16)
    exact = LogprobHead.of(nn.Linear(WIDTH, VOCABULARY).double())
    exact.load_state_dict(head.state_dict())
    wide = hidden.detach().double().requires_grad_()
    found, expected = head(hidden, targets), reference(exact, wide, targets)
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    (found[0] + found[1]).sum().backward()
    (expected[0] + expected[1]).sum().backward()
    for one, other in ((hidden, wide), *zip(head.parameters(), exact.parameters(), strict=True)):
        assert one.grad is not None
        assert one.grad.dtype == torch.bfloat16
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=5e-3, atol=1e-3)


class Largest(TorchDispatchMode):
    """The largest number of bytes of a float32 tensor that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dtype == torch.float32:
            self.num_bytes = max(self.num_bytes, found.numel() * 4)
        return found


def test_a_head_in_half_precision_is_never_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in float32 would grow with the model, and be made again for each chunk."""
    most = 4 * VOCABULARY * 4
    monkeypatch.setitem(logprob_head.CHUNK_BYTES, "cpu", most)
    monkeypatch.setitem(logprob_head.TILE_BYTES, "cpu", most)
    head, hidden, targets = example(torch.bfloat16, bias=False)
    head.weight.requires_grad_(False)
    with Largest() as largest:
        logprobs, entropies, _ = head(hidden, targets)
        (logprobs + entropies).sum().backward()
    assert 0 < largest.num_bytes <= most < head.weight.numel() * 4


def test_extreme_logits_give_finite_log_probs_and_entropies() -> None:
    head, hidden, targets = example(torch.float32)
    found = head(hidden * 1e4, targets)
    (found[0] + found[1]).sum().backward()
    assert all(one.isfinite().all() for one in (*found, hidden.grad, head.weight.grad))
    assert found[1].abs().max() < 1e-3


def test_the_head_is_a_linear_layer_with_the_same_parameters() -> None:
    model = tiny_model("qwen3")
    head = LogprobHead.of(model.lm_head)
    assert head.weight is model.lm_head.weight is model.model.embed_tokens.weight
    hidden = torch.randn(2, 3, 32)
    assert torch.equal(head(hidden), model.lm_head(hidden))
    assert head.state_dict().keys() == model.lm_head.state_dict().keys()


MEASURE = """
import torch
from pathlib import Path
from torch import nn
from agentenv.learners.trees.policy import LogprobHead
torch.set_num_threads(1)
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
def measure(dtype):
    head = LogprobHead.of(nn.Linear(32, 151_936, bias=False, dtype=dtype))
    hidden = torch.randn(512, 32, dtype=dtype, requires_grad=True)
    targets = torch.randint(151_936, (512,))
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    logprobs, entropies, _ = head(hidden, targets)
    (logprobs.sum() + 0.01 * entropies.sum()).backward()
    print((peak() - before) / 1e9)
measure(torch.float32)
measure(torch.bfloat16)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_vocabulary_needs_little_memory() -> None:
    """512 tokens are five chunks already (measured: 0.30 GB in float32). Their whole logits, with
    gradients, need 0.97 GB."""
    of_float32, of_bfloat16 = map(float, run_python(MEASURE).stdout.split())
    assert 0.1 < of_float32 <= 0.5
    assert 0.1 < of_bfloat16 <= 0.5


def test_chunks_are_bounded_by_bytes() -> None:
    weight = torch.empty(151_936, 1)
    assert chunk_tokens(weight, torch.float32) * 151_936 * 4 <= 64 << 20
    assert chunk_tokens(torch.empty(1 << 24, 1), torch.float64) == 1
