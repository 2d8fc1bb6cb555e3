"""URLs of a configuration."""

from __future__ import annotations

import contextlib
from typing import Any
from urllib.parse import urlsplit

from agentenv.base.errors import ConfigError
from agentenv.base.secrets import SECRETS


def checked_url(url: Any, key: str) -> str:
    """The URL without slashes at its end. Raises ConfigError, which names its `key`, for another
    scheme than http and https, without a host, and for an invalid port."""
    SECRETS.learn(url)
    with contextlib.suppress(ValueError):
        parts = urlsplit(str(url))
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return str(url).rstrip("/")
    shown = str(url).rpartition("@")[2].partition("?")[0]
    raise ConfigError(f"{key}: expected http://HOST:PORT or https://HOST, got {shown!r}")


def public_url(url: str) -> str:
    """A URL without user, password and query, which may contain a key."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
