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
