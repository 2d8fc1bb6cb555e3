"""Packages that only some backends need."""

from __future__ import annotations

import importlib
from typing import Any

from agentenv.errors import ConfigError


def needed(module: str, package: str, extra: str, what: str) -> Any:
    """The module, imported now; a ConfigError says what needs it and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs the package {package!r} ({error}); "
            f'install it with: pip install "agentenv[{extra}]"'
        ) from error


def wanted(module: str) -> Any:
    """The module if it is installed, else None."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
