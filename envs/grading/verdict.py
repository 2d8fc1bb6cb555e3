"""What a matcher says of an answer, and the seam of matchers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

MAX_SHOWN_CHARS = 200


class Verdict(Struct, frozen=True):
    """`score` is 1 for a right answer, 0 for a wrong one, between for partial credit; `reason`
    says why, `layer` which rule decided; `parts` are further metrics."""

    right: bool
    score: float
    reason: str
    layer: str = ""
    parts: Mapping[str, float] = {}


class Matcher(Protocol):
    """Compares an answer with the golds of a question."""

    async def start(self) -> None:
        """Get ready; a ConfigError says what is missing."""
        ...

    async def verdict(self, question: str, answer: str, golds: Sequence[str]) -> Verdict:
        """Right if any gold is met. Raises GraderError when no verdict can be had."""
        ...


def shown(text: str) -> str:
    """A text cut for a reason."""
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
