"""Removal of secrets from logs and other outputs of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

REDACTED = "[redacted]"
MIN_CHARS = 8  # of a secret; shorter values occur in ordinary text

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_NAMED = re.compile(r"(?i)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)")
_SECRET_KEY = re.compile(
    r"(?i)(.*[_-])?(api[_-]?key|secret|password|passwd|authorization|cookie|"
    r"(access|auth|refresh|bearer|private)[_-]?token)"
)
_FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    # a bearer token has a digit, or is too long for a word
    (re.compile(r"(?i)\b(bearer\s+)(?=[\w.~+/=-]*\d|[\w.~+/=-]{32})[\w.~+/=-]{8,}"), r"\1"),
    (re.compile(r"(?i)\b(authorization[\"']?\s*[:=]\s*[\"']?basic\s+)[\w+/=-]+"), r"\1"),
    # https://user:password@host, also without a password
    (re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s@\"'<>?#]+(?=@)"), r"\1"),
    (
        re.compile(
            r"(?i)([?&;](?:[\w-]*(?:key|token|secret|password|passwd|signature)|sig)=)"
            r"[^&;\s\"'<>#]+"
        ),
        r"\1",
    ),
    (
        re.compile(
            r"(?i)((?:api[_-]?key|secret|password|passwd|access[_-]?token|auth[_-]?token)"
            r"[\"']?\s*[:=]\s*[\"']?)(?!\[redacted)[^\s\"',;<>&]{8,}"
        ),
        r"\1",
    ),
    (
        re.compile(
            r"\b(?:sk-|pk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|tvly-|AKIA|AIza|wandb_v1_)"
            r"[\w-]{16,}"
        ),
        "",
    ),
)


class Redactor:
    """Removes secrets (keys, tokens, passwords) from texts and JSON values.

    It recognizes them by value: the environment variables with names such as SERPER_API_KEY, and
    those that the configuration names in a key that ends in `_env` or as "${NAME}". And by form:
    bearer tokens, user and password of a URL, keys in its query, keys of known providers. Texts of
    policies and web pages are redacted too, since a tool may have revealed a key.
    """

    def __init__(
        self, settings: Mapping[str, Any], environment: Mapping[str, str] = os.environ
    ) -> None:
        """`settings` is the configuration, which names the variables that hold keys."""
        names = {name for name in environment if _NAMED.search(name)} | set(_variables(settings))
        values = {environment.get(name, "").strip() for name in names}
        known = sorted((one for one in values if len(one) >= MIN_CHARS), key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def text(self, text: str) -> str:
        """The text with each secret replaced by "[redacted]"."""
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        for form, kept in _FORMS:
            text = form.sub(kept + REDACTED, text)
        return text

    def tree(self, value: Any) -> Any:
        """As `text`, for all texts of lists and dicts; the value of a key such as api_key is
        replaced as a whole. The value of a key that ends in `_env` is not a secret."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                (self.text(key) if isinstance(key, str) else key): REDACTED
                if isinstance(key, str)
                and isinstance(one, str)
                and one
                and _SECRET_KEY.fullmatch(key)
                else self.tree(one)
                for key, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.tree(one) for one in value]
        return value


def _variables(settings: Any) -> Iterator[str]:
    """The names of environment variables, in keys such as api_key_env or as ${NAME}."""
    if isinstance(settings, str):
        yield from _VARIABLE.findall(settings)
    elif isinstance(settings, Mapping):
        for key, value in settings.items():
            if isinstance(value, str) and str(key).endswith("_env"):
                yield value
            else:
                yield from _variables(value)
    elif isinstance(settings, list | tuple):
        for one in settings:
            yield from _variables(one)
