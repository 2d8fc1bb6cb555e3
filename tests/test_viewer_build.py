"""The built page equals the build of its source: npm installs, esbuild bundles, bytes are equal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.snippets import ran

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "viewer"
BUILT = ROOT / "lab" / "viewing" / "static"
MAX_BYTES = 1 << 20


def test_the_built_page_is_small() -> None:
    assert sum(path.stat().st_size for path in BUILT.iterdir()) < MAX_BYTES


def test_the_lock_file_has_every_checksum_and_no_host() -> None:
    text = (SOURCE / "package-lock.json").read_text(encoding="utf-8")
    packages = json.loads(text)["packages"]
    del packages[""]
    assert packages
    assert not [name for name, one in packages.items() if "resolved" in one]
    assert not [name for name, one in packages.items() if "integrity" not in one]


@pytest.mark.viewer
@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm: apt-get install npm")
def test_the_page_is_built_from_its_source(tmp_path: Path) -> None:
    copy = tmp_path / "viewer"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("node_modules"))

    ran("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", cwd=copy)
    ran("npx", "--no-install", "tsc", "--noEmit", cwd=copy)
    ran("node", "build.mjs", tmp_path / "out", cwd=copy)
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert found == {path.name: path.read_bytes() for path in BUILT.iterdir()}, (
        "lab/viewing/static is not what viewer/ builds; run: make viewer"
    )
