"""What the quick start's cold start imitates: traces about a world, and an exercise in copying.

Demonstrations draw fresh facts for every trace: they never show a fact of the knowledge base nor a
development or held-out question, only the same vocabulary.

Part of them is poor on purpose (see HABITS): most give up although a tool would have helped.
Imitating them gives a real but partial skill and leaves reinforcement learning something to
improve.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from envs.quickstart_world import (
    COMPANIES,
    PEOPLE,
    Fact,
    Question,
    ask,
    calculate,
    facts_about,
    vocabulary,
)

# How a demonstration behaves, with its default share. clean: as it should be. refuse: gives up at
# once. quit: gives up after the first tool result. unboxed: right, but without \boxed. slip: the
# last tool call is wrong and its result is believed.
HABITS = {"clean": 0.34, "refuse": 0.28, "quit": 0.28, "unboxed": 0.04, "slip": 0.06}
_COPIED = [*vocabulary(), *(f"{number:02d}" for number in range(100))]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy writes and what the tool answers (None: the turn is an answer)."""

    action: str
    result: str | None = None


GIVE_UP = Turn(r"<think>I do not know.</think><answer>\boxed{unknown}</answer>")


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One trace for imitation; `habit` says which, "clean" being the right one."""

    question: Question
    habit: str
    turns: tuple[Turn, ...]


def _search(fact: Fact) -> Turn:
    think = f"<think>I need the {fact.attribute}.</think>"
    return Turn(f"{think}<search>{fact.query}</search>", fact.text)


def _python(expression: str) -> Turn:
    think = "<think>I need python.</think>"
    return Turn(f"{think}<python>{expression}</python>", calculate(expression))


def _answer(value: str) -> Turn:
    return Turn(rf"<think>I know it.</think><answer>\boxed{{{value}}}</answer>")


def _behave(question: Question, habit: str) -> list[Turn]:
    turns = [_search(fact) for fact in question.facts]
    if question.expression:
        turns.append(_python(question.expression))
    if habit == "refuse":
        return [GIVE_UP]
    if habit == "quit":
        return [turns[0], GIVE_UP]
    if habit == "unboxed":
        answer = f"<think>I know it.</think><answer>{question.answer}</answer>"
        return [*turns, Turn(answer)]
    if habit == "slip":
        turns[-1], value = _slip(question)
        return [*turns, _answer(value)]
    return [*turns, _answer(question.answer)]


def _slip(question: Question) -> tuple[Turn, str]:
    """A last call with the wrong sign, or about the wrong city of the founder, and its result."""
    if question.expression:
        expression = question.expression.replace(" * ", " + ").replace(" - ", " + ")
        return _python(expression), calculate(expression)
    (decoy,) = question.decoy
    return _search(decoy), decoy.value


def demonstration(
    rng: Random, kind: str, reserved: Collection[str], habit: str | None = None
) -> Demonstration:
    """One trace about facts made up for it, none of them (nor the question) in `reserved`.

    The habit is drawn from HABITS unless it is given.
    """
    habit = habit or rng.choices(list(HABITS), list(HABITS.values()))[0]
    while True:
        facts = facts_about(rng, rng.choice(COMPANIES), rng.choice(PEOPLE))
        question = ask(rng, kind, facts)
        if question.question not in reserved and not any(f.text in reserved for f in facts):
            return Demonstration(question, habit, tuple(_behave(question, habit)))


def copy_exercise(rng: Random, length: int = 20) -> str:
    """Names and two-digit numbers in random order, for practice in copying a text word by word.

    Solving a question is mostly copying; this is the shortest way to learn it.
    """
    return "".join(rng.sample(_COPIED, length))
