"""Options that are requested where they are unavailable, and their way to a rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor

from agentenv.base.errors import ConfigError
from agentenv.learners.learner import LearnerConfig
from agentenv.learners.ranks.rank_group import RankGroup
from agentenv.learners.trees.model_check import check_model
from agentenv.learners.trees.policy import compile_parts, use_liger
from agentenv.processes.supervisor import LocalPlacement, ProcessSpec
from tests.learners.trees import tiny_model


def test_compilation_without_a_compiler_is_refused_before_weights_load(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with (
        inductor.patch({"compile_threads": 1, "cpp.cxx": ("/nonexistent/g++",)}),
        pytest.raises(ConfigError, match=r"compile fails for .*family qwen3: .*C\+\+ compiler"),
    ):
        check_model(model_dir, compiled=True)


def test_a_model_without_parts_to_compile_is_refused() -> None:
    model = torch.nn.Module()
    model.base_model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="no supported feed-forward part or norm"):
        compile_parts(model)


def test_liger_without_a_gpu_or_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"kernels only run on GPUs; set learner.fused = none"):
        use_liger(tiny_model())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"cannot be imported .* pip install liger-kernel"):
        use_liger(tiny_model())


async def test_the_allocator_reaches_a_rank_under_the_name_that_torch_reads(tmp_path: Path) -> None:
    """And not under its older name, which torch prefers."""
    started: list[ProcessSpec] = []

    class Recording(LocalPlacement):
        async def start(self, spec: ProcessSpec) -> None:
            started.append(spec)

    for allocator in ("", "expandable_segments:True"):
        config = LearnerConfig(allocator=allocator)
        group = RankGroup(config, tmp_path / "learner.log")
        await group._start(Recording(grace_s=0.0), 0, "127.0.0.1:1", "token")
    plain, chosen = started
    assert "PYTORCH_ALLOC_CONF" not in plain.env
    assert "PYTORCH_CUDA_ALLOC_CONF" not in plain.unset
    assert chosen.env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" in chosen.unset
