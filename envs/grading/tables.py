"""Word lists and regular expressions that stand in the TOML file beside a module.

A regular expression is a text, or a list of texts that are joined; `{name}` in it is the text of
that name, in `[patterns]` or given by the caller.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

_INSERTED = re.compile(r"(?<!\\)\{([a-z_]+)\}")


class Tables:
    """The tables of the TOML file beside a Python file."""

    def __init__(self, module: str, **inserted: str) -> None:
        text = Path(module).with_suffix(".toml").read_text(encoding="utf-8")
        self._tables: dict[str, Any] = tomllib.loads(text)
        self._inserted = inserted

    def __getitem__(self, name: str) -> Any:
        return self._tables[name]

    def words(self, name: str) -> frozenset[str]:
        """A list as a set."""
        return frozenset(self._tables["words"][name])

    def text(self, name: str) -> str:
        """The text of a regular expression."""
        return self._filled(self._tables["patterns"][name])

    def pattern(self, name: str, flags: int = 0) -> re.Pattern[str]:
        """A regular expression."""
        return re.compile(self.text(name), flags)

    def patterns(self, name: str) -> dict[str, re.Pattern[str]]:
        """A table of regular expressions, in its order."""
        return {key: re.compile(self._filled(form)) for key, form in self._tables[name].items()}

    def rewrites(self, name: str) -> tuple[tuple[re.Pattern[str], str], ...]:
        """Regular expressions, each with the replacement of its matches, in their order."""
        return tuple(
            (re.compile(self._filled(form)), self._filled(replacement))
            for form, replacement in self._tables["rewrites"][name]
        )

    def _filled(self, text: str | list[str]) -> str:
        joined = text if isinstance(text, str) else "".join(text)
        return _INSERTED.sub(lambda match: self._value(match[1]), joined)

    def _value(self, name: str) -> str:
        return self._inserted[name] if name in self._inserted else self.text(name)
