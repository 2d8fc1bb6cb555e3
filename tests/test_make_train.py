"""`make train` before anything is installed: .ci/environment and the Makefile as users run them."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.snippets import ran

INTERRUPTED = """#!/bin/sh
case "$1" in -m) kill -INT $PPID; exit 130;; -V) echo Python 3.12.0;; esac
"""


def test_a_missing_configuration_is_named_before_anything_is_installed() -> None:
    command = ["make", "train", "CONFIG=mine.toml", "PYTHON=no-python"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    alone.pop("MFLAGS", None)  # these of the command that runs the tests
    result = ran(*command, env=alone, expected=2)
    assert result.stderr.splitlines()[0] == (
        "error: CONFIG=mine.toml: no such file; expected a configuration such as "
        "configs/quickstart.toml"
    )


def test_an_interrupted_installation_reports_how_to_continue(tmp_path: Path) -> None:
    """And no longer that venv has failed, with the advice to install it."""
    python = tmp_path / "python"
    python.write_text(INTERRUPTED)
    python.chmod(0o755)
    env = {"PYTHON": str(python), "VENV": str(tmp_path / "venv"), "EXTRA": "train"}
    env["PATH"] = "/usr/bin:/bin"
    result = ran("sh", ".ci/environment", env=env, expected=130)
    assert result.stderr == (
        "interrupted; the same command begins again, with the packages downloaded so far\n"
    )
