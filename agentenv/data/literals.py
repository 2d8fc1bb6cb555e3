"""Values that a table without types holds as texts."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from agentenv.base.errors import ForeignError
from agentenv.base.untrusted import decode_loose, decode_python

_NUMPY_ARRAY = re.compile(r"\barray\((\[[^()]*\])(?:,\s*dtype=[\w'<>]+)?\)")
_NUMPY_OBJECTS = re.compile(r"\}\s+\{")
_PYTHON_TEXT = r"""(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""
_NUMPY_TEXTS = re.compile(rf"\[\s*{_PYTHON_TEXT}(?:\s+{_PYTHON_TEXT})+\s*\]")


def literal(text: str) -> Any:
    """The value of a text in the notation of JSON, Python or numpy; None for other texts."""
    found = json_of(text)
    if found is not None:
        return found
    text = text.strip()
    if _NUMPY_TEXTS.fullmatch(text):  # ['a' 'b'], which Python would concatenate
        text = f"[{','.join(re.findall(_PYTHON_TEXT, text))}]"
    text = _NUMPY_ARRAY.sub(r"\1", text)
    for written in (text, _NUMPY_OBJECTS.sub("}, {", text)):
        with suppress(ForeignError):
            return decode_python(written)
    return None


def json_of(text: str) -> Any:
    try:
        return decode_loose(text)
    except ForeignError:
        return None
