"""Fixtures of the tests of engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.small_models import make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The directory of a small Qwen3, and the model."""
    folder = tmp_path_factory.mktemp("tiny")
    return folder, make(folder)
