"""Options that change the computation of a step, and its result by rounding only: `python -m pytest
tests/gpu`. Without a GPU only compilation is tested, and the rest is refused."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from transformers.models.qwen3 import modeling_qwen3

from agentenv.base.errors import ConfigError
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.ranks.deepspeed_learner import DeepSpeedLearner
from agentenv.learners.trees.batch import EncodedTree, encode
from agentenv.learners.trees.partition import pack
from agentenv.learners.trees.policy import Policy, tensors, use_liger
from tests.gpu.place import DEVICE, HAS_GPU, restored
from tests.learners.ranks import (
    ALGORITHM,
    largest_difference,
    save_tiny_model,
    two_ranks,
    uneven_trees,
    weights_in,
)
from tests.learners.trees import credited, random_tree, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
]
HAS_LIGER = HAS_GPU and find_spec("liger_kernel") is not None
# One compiler at a time, and only the trials and kernels that small models need.
SMALL = {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}
WHOLE = 10**6  # tokens of a micro-batch that holds everything


@pytest.fixture
def _compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled code is in the test's folder, and no compiler process remains."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    torch.compiler.reset()
    with inductor.patch(SMALL):
        yield
    torch.compiler.reset()


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


@pytest.mark.usefixtures("_compiler")
def test_compiled_parts_change_nothing_but_rounding() -> None:
    """Layers and micro-batches of other lengths share compiled code; names stay."""
    names = [name for name, _ in tiny_model("llama", head_dim=16).named_parameters()]
    policy = Policy(tiny_model("llama", head_dim=16).to(DEVICE), compiled=True)
    plain = Policy(tiny_model("llama", head_dim=16).to(DEVICE))
    counters.clear()
    for max_tokens in (WHOLE, 60):  # FlexAttention is compiled for a length, then for any
        check_equal(policy, plain, max_tokens)
    compiled = counters["stats"]["unique_graphs"]
    for max_tokens in (80, 100):
        check_equal(policy, plain, max_tokens)
    assert counters["stats"]["unique_graphs"] == compiled > 0
    assert [name for name, _ in policy.model.named_parameters()] == names


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


@pytest.mark.skipif(not HAS_GPU, reason="the allocator is CUDA's")
async def test_the_allocator_changes_nothing(tmp_path: Path) -> None:
    found = []
    for allocator in ("", "expandable_segments:True"):
        folder = tmp_path / (allocator or "default").partition(":")[0]
        folder.mkdir()
        config = two_ranks(num_ranks=1, allocator=allocator)
        model = save_tiny_model(folder / "model")
        learner = await DeepSpeedLearner.start(config, ALGORITHM, model, folder / "log")
        try:
            await learner.update(credited(uneven_trees(4), ALGORITHM))
            found.append(weights_in(await learner.export(folder / "export")))
        finally:
            await learner.close()
    assert largest_difference(*found) < 1e-6
