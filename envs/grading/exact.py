"""Exact match: equal as plain numbers, else as normalised text. The quick start's comparison."""

from __future__ import annotations

from collections.abc import Sequence

from agentenv.envs.grading.layers import ONE_ANSWER, names_several
from agentenv.envs.grading.numbers import as_number
from agentenv.envs.grading.spelling import MAX_ANSWER_CHARS, words_of
from agentenv.envs.grading.verdict import Verdict, shown
from agentenv.envs.grading.words import f1
from agentenv.offload import in_thread


class Exact:
    """The matcher of `kind = "exact"`."""

    async def start(self) -> None:
        """Nothing to get ready."""

    async def verdict(self, question: str, answer: str, golds: Sequence[str]) -> Verdict:
        """Right if the answer equals a gold after normalising."""
        right = any(same_answer(answer, gold) for gold in golds)
        reason = f"{'right' if right else 'wrong'} answer: {shown(answer)}"
        return Verdict(right, float(right), reason, "exact")


class TokenF1:
    """The matcher of `kind = "f1"`: SQuAD token F1 as score, right at 1. An answer that names the
    gold and another candidate scores 0: half of F1 for two guesses would pay for guessing."""

    async def start(self) -> None:
        """Nothing to get ready."""

    async def verdict(self, question: str, answer: str, golds: Sequence[str]) -> Verdict:
        """Scored by the nearest gold; Chinese, Japanese and Korean text by characters."""
        if len(answer) > MAX_ANSWER_CHARS:
            return Verdict(False, 0.0, "wrong answer: too long", "f1")
        score = max((f1(answer, gold) for gold in golds), default=0.0)
        if 0 < score < 1 and await in_thread(names_several, answer, golds):
            return Verdict(False, 0.0, "wrong answer: it names several", ONE_ANSWER)
        right = score >= 1.0
        reason = f"{'right' if right else 'wrong'} answer, F1 {score:.3f}: {shown(answer)}"
        return Verdict(right, score, reason, "f1")


def same_answer(answer: str, gold: str) -> bool:
    """Equal as numbers if the gold is a number, else equal as normalised text."""
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    number = as_number(gold)
    if number is not None:  # dropping punctuation would make 5 of -5 and 314 of 3.14
        plain = answer.strip().lstrip("$\N{EURO SIGN}\N{POUND SIGN} ").rstrip("%. ")
        return as_number(plain) == number
    wanted = words_of(gold)
    if not wanted:  # a gold of nothing but punctuation or an article
        return answer.strip() == gold.strip()
    return words_of(answer) == wanted
