"""How this package is installed, and how to add an extra: the text of every hint in an error.

The package is on no index under its own name, so a hint names the clone or the wheel at hand.
"""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "agentenv-rl"
ROOT = Path(__file__).resolve().parent.parent  # of a clone; else the folder of installed packages


def install_hint(extra: str) -> str:
    """The command that adds an extra of pyproject.toml to this installation."""
    if (ROOT / "pyproject.toml").is_file():
        place = "." if Path.cwd() == ROOT else str(ROOT)
        return f"pip install -e {shlex.quote(f'{place}[{extra}]')}"
    origin = _origin()
    return f"pip install '{DISTRIBUTION}[{extra}]{origin and f' @ {origin}'}'"


def _origin() -> str:
    """The address that pip installed this package from; empty: an index, or unknown."""
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        found = json.loads(text or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return ""
    url, vcs = str(found.get("url", "")), found.get("vcs_info")
    return f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url
