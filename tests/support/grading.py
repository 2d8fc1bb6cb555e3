"""The layered grader in this process: its rules, and mathematics without workers."""

from __future__ import annotations

from functools import lru_cache

from agentenv.envs.grading import quantities
from agentenv.envs.grading.equality import Equality, risk_of
from agentenv.envs.grading.layers import compare, expressions


@lru_cache(maxsize=1)
def equality() -> Equality:
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
