"""Learner tests compare with a rank that has one thread, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.learners.ranks import save_tiny_model
from tests.support.rank_nursery import RankNursery


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def nursery() -> Iterator[RankNursery]:
    one = RankNursery()
    yield one
    one.close()


@pytest.fixture(autouse=True)
def _forked_ranks(nursery: RankNursery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learners.ranks.spawn", nursery.spawn)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; nothing is written into it."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))
