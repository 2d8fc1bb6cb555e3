"""One workspace for all launcher tests; each run has a name of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.warehouse import make_workspace


@pytest.fixture(scope="session")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Path of a configuration that trains on the README's environment with a scripted engine."""
    folder = tmp_path_factory.mktemp("warehouse")
    sys.path.insert(0, str(folder))
    yield make_workspace(folder)
    sys.path.remove(str(folder))
