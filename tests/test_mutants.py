"""Mutants stay what they are: a patch that does not apply any more proves nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATCHES = sorted((ROOT / "tests" / "mutants").glob("*.patch"))


def test_every_patch_applies() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    command = ["git", "apply", "--check"]
    failed = [
        path.name
        for path in PATCHES
        if subprocess.run(
            [*command, str(path)], cwd=ROOT, capture_output=True, check=False
        ).returncode
    ]
    assert len(PATCHES) > 50
    assert failed == []
