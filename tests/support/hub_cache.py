"""The cache of the Hugging Face hub, in its own layout: files of a snapshot are relative links to
blobs, which are named by the hash of their content."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_cache(home: Path, kind: str, name: str, files: Path) -> Path:
    """Put the files of a folder there as one repository at one commit; returns the snapshot."""
    folder = home / "hub" / f"{kind}s--{name.replace('/', '--')}"
    snapshot, blobs = folder / "snapshots" / COMMIT, folder / "blobs"
    blobs.mkdir(parents=True)
    for path in sorted(files.rglob("*")):
        if not path.is_file():
            continue
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blob)
        link = snapshot / path.relative_to(files)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return snapshot
