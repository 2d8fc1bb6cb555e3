"""Options that are requested where they are unavailable."""

from __future__ import annotations

import sys

import pytest
import torch

from agentenv.base.errors import ConfigError
from agentenv.learners.trees.liger import use_liger
from tests.learners.trees import tiny_model


def test_liger_without_a_gpu_or_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"learner.fused"):
        use_liger(tiny_model())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"pip install liger-kernel"):
        use_liger(tiny_model())
