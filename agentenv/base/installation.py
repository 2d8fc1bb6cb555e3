"""The installation of this project: its folders, its extras, and the command that adds one."""

from __future__ import annotations

import json
import shlex
import tomllib
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentenv.base.errors import MissingError

PACKAGES = Path(__file__).resolve().parents[2]  # a clone, or the folder of installed packages
CLONE = PACKAGES / "pyproject.toml"  # only a clone has it
DISTRIBUTION = "agentenv-rl"
TRAIN = ("torch", "transformers", "deepspeed", "safetensors", "tokenizers", "matplotlib")


def package_folders() -> dict[str, Path]:
    """The folders that hold this project's packages: one, or in a clone one per top folder."""
    if not CLONE.is_file():
        return {"agentenv": PACKAGES / "agentenv"}
    tool = tomllib.loads(CLONE.read_text(encoding="utf-8"))["tool"]["setuptools"]
    return {name: PACKAGES / folder for name, folder in tool["package-dir"].items()}


def install_hint(extra: str) -> str:
    """The command that adds an extra of pyproject.toml to this installation."""
    if CLONE.is_file():
        place = "." if Path.cwd() == PACKAGES else str(PACKAGES)
        return f"pip install -e {shlex.quote(f'{place}[{extra}]')}"
    origin = _origin()
    return f"pip install '{DISTRIBUTION}[{extra}]{origin and f' @ {origin}'}'"


def _origin() -> str:
    """The URL that pip installed this package from; empty: an index, or unknown."""
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        found = json.loads(text or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return ""
    url, vcs = str(found.get("url", "")), found.get("vcs_info")
    return f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url


def needed(module: str, extra: str, what: str, *, package: str = "") -> Any:
    """Import a module of an extra. Raises MissingError with the part that needs it (`what`), and
    the install command."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingError(
            f"{what} requires the package {package or module!r} ({error}); install it with: "
            f"{install_hint(extra)}"
        ) from error


def require_train(*modules: str) -> None:
    """Raises MissingError if one of these modules of the extra `train` is missing; imports none."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingError(needs_train(", ".join(missing)))


def needs_train(missing: str) -> str:
    """The error for a missing module of the extra `train`."""
    return f"this requires {missing}, which is not installed: {install_hint('train')}"
