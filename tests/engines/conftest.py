"""Fixtures of the tests of engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.pool_bench import write_folder
from tests.engines.small_models import make
from tests.engines.world import World


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The directory of a small Qwen3, and the model."""
    folder = tmp_path_factory.mktemp("tiny")
    return folder, make(folder)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Four versions of a model."""
    return World(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Those of a model whose output head is its embeddings."""
    return World(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the model of a pool's bench."""
    return write_folder(tmp_path_factory.mktemp("model"))
