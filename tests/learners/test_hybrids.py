"""Models with convolutions and recurrent layers: at a fork these continue from the state of its
path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from agentenv.learners.trees.attention import TreeLayout
from agentenv.learners.trees.partition import pack
from agentenv.learners.trees.policy import Policy, tensors
from tests.learners import test_tree_equality as equality
from tests.learners.trees import HYBRIDS, tiny_model


@pytest.fixture
def _float64_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and recurrent layers of transformers compute in float32 for any dtype of the model."""
    plain = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **keys: Any) -> torch.Tensor:
        narrows = self.dtype == torch.float64 and torch.float32 in (*args, *keys.values())
        return self if narrows else plain(self, *args, **keys)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "float", lambda self: to(self, torch.float32))


@pytest.mark.usefixtures("_float64_throughout")
@pytest.mark.parametrize("name", HYBRIDS)
def test_loss_and_gradient_equal_the_flat_ones_in_float64(name: str) -> None:
    plain, model = (tiny_model(name, torch.float64) for _ in range(2))
    equality.assert_equal_to_flat(plain, model, equality.ALGORITHMS["ppo"], 1e-9)


@pytest.mark.parametrize("name", HYBRIDS)
def test_checkpointing_changes_nothing(name: str) -> None:
    _, packed = equality.some_trees(9)
    (batch,) = pack(packed, equality.WHOLE)
    found = []
    for checkpointing in (False, True):
        model = tiny_model(name)
        logprobs, entropies, _ = Policy(model, checkpointing=checkpointing)(
            *tensors(batch, torch.device("cpu"))
        )
        found.append(equality.gradients(model, (logprobs + 0.1 * entropies).sum()))
    assert equality.relative(*found) < 1e-6


def test_segments_of_a_layout() -> None:
    """Two trees in one row; the first forks after token 1, its second branch after token 3."""
    end = np.array([7, 7, 3, 7, 5, 7, 7, 9, 9])
    starts, parents = TreeLayout(end, torch.device("cpu")).segments
    assert starts.tolist() == [0, 2, 3, 4, 5, 7, 9]
    assert parents.tolist() == [-1, 0, 0, 2, 2, -1]
