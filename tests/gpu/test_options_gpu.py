"""Kernels that change the computation of a step, and its result by rounding only: `python -m pytest
tests/gpu`. Without a GPU they are refused."""

from __future__ import annotations

from importlib.util import find_spec
from random import Random

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3

from agentenv.base.errors import ConfigError
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.trees.encoded_tree import EncodedTree, encode
from agentenv.learners.trees.liger import use_liger
from agentenv.learners.trees.partition import pack
from agentenv.learners.trees.policy import Policy, tensors
from tests.gpu.place import DEVICE, HAS_GPU, restored
from tests.learners.trees import random_tree, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
HAS_LIGER = HAS_GPU and find_spec("liger_kernel") is not None
WHOLE = 10**6  # tokens of a micro-batch that holds everything


def some_trees() -> list[EncodedTree]:
    algorithm = GRPO(group_size=8)
    trees = [random_tree(Random(i), index=i, num_leaves=8) for i in range(3)]
    return [encode(tree, algorithm.credit(tree), 0) for tree in trees]


def figures(policy: Policy, max_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss with log-probs and entropies, and its gradient."""
    policy.zero_grad()
    total = torch.zeros((), device=DEVICE)
    for batch in pack(some_trees(), max_tokens):
        logprobs, entropies, _ = policy(*tensors(batch, torch.device(DEVICE)))
        loss = (logprobs * torch.linspace(-1, 1, len(logprobs), device=DEVICE)).sum()
        loss = loss + 0.1 * entropies.sum()
        loss.backward()
        total += loss.detach()
    grads = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return total, torch.cat(grads)


def check_equal(policy: Policy, plain: Policy, max_tokens: int) -> None:
    for one, other in zip(figures(policy, max_tokens), figures(plain, max_tokens), strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


def test_kernels_of_liger_change_nothing_but_rounding() -> None:
    model = tiny_model("qwen3", head_dim=16).to(DEVICE)
    if not HAS_LIGER:
        why = "cannot be imported" if HAS_GPU else "only run on GPUs"
        with pytest.raises(ConfigError, match=f"learner.fused = liger: .*{why}"):
            use_liger(model)
        return
    plain = Policy(tiny_model("qwen3", head_dim=16).to(DEVICE))
    with restored(modeling_qwen3):
        use_liger(model)
        for max_tokens in (WHOLE, 60):
            check_equal(Policy(model), plain, max_tokens)
