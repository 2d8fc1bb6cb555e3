"""`make train` before anything is installed: .ci/environment and the Makefile as users run them."""

from __future__ import annotations

import subprocess
from tests.support.sources import ROOT


def test_a_missing_configuration_is_named_before_anything_is_installed() -> None:
    command = ["make", "train", "CONFIG=mine.toml", "PYTHON=no-python"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 2
    assert result.stderr.splitlines()[0] == (
        "error: CONFIG=mine.toml: no such file; expected a configuration such as "
        "configs/quickstart.toml"
    )
