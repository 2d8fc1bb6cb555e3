"""Numbers in a base other than ten."""

from __future__ import annotations

import re

from agentenv.envs.grading.words import tokens

_BASE = re.compile(r"([0-9A-Z]+)\s*_\s*\{?\s*(\w+)\s*\}?")


def in_base(found: str, wanted: str) -> bool | None:
    """Digits with a base as subscript; an answer may leave the base out."""
    gold = _BASE.fullmatch(wanted)
    if gold is None:
        return None
    answer = _BASE.fullmatch(found)
    if answer is None:
        return found == gold[1]
    return answer[1] == gold[1] and tokens(answer[2]) == tokens(gold[2])
