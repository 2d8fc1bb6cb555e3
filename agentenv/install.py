"""How this package is installed, and how to add an extra: the text of every hint in an error.

The package is on no index under its own name, so a hint names the clone or the wheel at hand.
"""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from agentenv.errors import ConfigError

DISTRIBUTION = "agentenv-rl"
TRAIN = ("torch", "transformers", "deepspeed", "safetensors", "tokenizers", "matplotlib")
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


def require_train(*modules: str) -> None:
    """Raises ConfigError if one of these modules of the extra `train` is missing; loads none."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ConfigError(needs_train(", ".join(missing)))


def needs_train(missing: str) -> str:
    """The error for a missing module of the extra `train`."""
    return f"this needs {missing}, missing here: {install_hint('train')}"
