"""Learner tests compare with a rank that has one thread, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.learners.ranks import save_tiny_model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _forked_ranks(forked_ranks: None) -> None:
    pass


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; nothing is written into it."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def float64_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of transformers compute in float32 for any dtype of the model."""
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

    def forward(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        scale = (hidden.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return self.weight * (hidden * scale)

    for norm in (Qwen2RMSNorm, Qwen3RMSNorm, LlamaRMSNorm, Qwen3MoeRMSNorm, Glm4MoeRMSNorm):
        monkeypatch.setattr(norm, "forward", forward)
