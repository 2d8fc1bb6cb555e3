"""The layered grader in this process, mathematics without workers, and tables of answers."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentenv.envs.grading import quantities
from agentenv.envs.grading.equality import risk_of
from agentenv.envs.grading.layers import compare, expressions

FIXTURES = Path(__file__).parents[1] / "fixtures"
TABLES = tomllib.loads((FIXTURES / "graded.toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def equality() -> Any:
    from agentenv.envs.grading.values import Equality  # of the extra math

    quantities.load()
    return Equality()


def is_right(gold: str, answer: str) -> bool:
    """`Layered().verdict` of an answer and one gold."""
    right, _ = compare(answer, gold)
    if right is not None:
        return right
    forms = expressions(answer, gold)
    if any(map(risk_of, forms)):
        return False
    return equality()({"gold": forms[1], "answer": forms[0]})
