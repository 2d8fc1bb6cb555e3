"""The layered grader: cheap rules first, mathematics last.

string -> choice letters -> yes and no -> numbers and units -> dates -> lists -> words
-> math-verify in a killable worker, unless the expression is too risky to evaluate.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import lru_cache

from envs.grading import choice, dates
from envs.grading.answer import final_answer
from envs.grading.equivalence import MathEquivalence, shared_math
from envs.grading.lists import same_list, several, without_name
from envs.grading.names import without_class
from envs.grading.normalise import MAX_ANSWER_CHARS, clean, squashed
from envs.grading.notations import in_base, in_radians, same_range
from envs.grading.quantities import quantity, same_quantity
from envs.grading.sentences import says
from envs.grading.special import special, truth, truth_of
from envs.grading.verdict import Verdict, shown
from envs.grading.words import f1, has_cjk, same_words

QUICK_CHARS = 300

_FUNCTIONS = frozenset(
    str.split(
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt pi min "
        "max mod gcd lcm det deg arg cis"
    )
)
_WORD = re.compile(r"[^\W\d_]{2,}")
_NOTE = re.compile(r"(.*\S)\s+\(([^()]{1,80})\)|(.*\S)\uff08([^()\uff08\uff09]{1,80})\uff09")


class Layered:
    """The matcher of `kind = "layered"`. `math` false leaves math-verify out; `partial_credit`
    scores a wrong answer to a word question by its token F1, as ARPO does."""

    def __init__(
        self, *, math: bool = True, partial_credit: bool = False, limit_s: float | None = None
    ) -> None:
        self.partial_credit = partial_credit
        self._math: MathEquivalence | None = None
        if math:
            self._math = shared_math() if limit_s is None else shared_math(limit_s)

    async def start(self) -> None:
        """Load math-verify, if it is used."""
        if self._math is not None:
            await self._math.start()

    async def verdict(self, question: str, answer: str, golds: Sequence[str]) -> Verdict:
        """Right if any gold is met; otherwise the reason of the nearest miss."""
        if len(answer) > MAX_ANSWER_CHARS:
            reason = f"wrong: the answer is longer than {MAX_ANSWER_CHARS} characters"
            return Verdict(False, 0.0, reason, "length")
        open_golds, misses = [], []
        for gold in golds:
            if len(answer) <= QUICK_CHARS:
                right, layer = _compare_again(answer, gold)
            else:  # milliseconds at worst, but off the event loop
                right, layer = await asyncio.to_thread(compare, answer, gold)
            if right:
                return _right(answer, gold, layer)
            if right is None:
                open_golds.append(gold)
            else:
                misses.append(layer)
        why = f"not equal by {misses[0]}" if misses else "there is no gold"
        layer = misses[0] if misses else ""
        for gold in open_golds if self._math is not None else ():
            assert self._math is not None
            found, wanted = clean(answer), clean(gold)
            if not ("=" in found and "=" in wanted):  # else two equations, to compare as such
                found, wanted = without_name(found), without_name(wanted)
            right, why = await self._math.equal(in_radians(found), in_radians(wanted))
            layer = "math"
            if right:
                return _right(answer, gold, "math")
        if open_golds and self._math is None:
            layer, why = "string", "different expressions, and math is switched off"
        score = self._partial(answer, golds)
        reason = f"wrong: {shown(answer)!r} against {shown(str(list(golds)))}: {why}"
        return Verdict(False, score, reason, layer, {"f1": score} if score else {})

    def _partial(self, answer: str, golds: Sequence[str]) -> float:
        if not self.partial_credit:
            return 0.0
        return max((f1(answer, gold) for gold in golds if is_wordy(clean(gold))), default=0.0)


def _right(answer: str, gold: str, layer: str) -> Verdict:
    return Verdict(True, 1.0, f"right: {shown(answer)!r} equals {shown(gold)!r} by {layer}", layer)


def compare(answer: str, gold: str) -> tuple[bool | None, str]:
    """Whether they agree, and the layer that says so; None when only mathematics can tell."""
    if "<answer>" in answer or r"\boxed" in answer:
        answer = final_answer(answer)
    found, wanted = clean(answer[:MAX_ANSWER_CHARS]), clean(gold)
    if answer.strip() == gold.strip() or (wanted and squashed(found) == squashed(wanted)):
        return bool(answer.strip() or not gold.strip()), "string"
    if not found:
        return False, "string"
    right, layer = _compare(found, wanted)
    if right is not False:
        return right, layer
    for one, other in ((found, wanted), (wanted, found)):  # 72 (seventy-two), a note in brackets
        note = _NOTE.fullmatch(one)
        if note is not None and not choice.is_choice(other):
            texts = (
                (note[1] or note[3], note[2] or note[4]) if one is wanted else (note[1] or note[3],)
            )
            if any(_compare(text, other)[0] for text in texts):
                return True, layer
    return says(found, wanted, lambda text: _compare(clean(text), wanted)[0] is True), layer


_compare_again = lru_cache(maxsize=16_384)(compare)  # samples of a question answer alike


def is_wordy(text: str) -> bool:
    """Whether a cleaned gold is words rather than mathematics."""
    if has_cjk(text):
        return True
    plain = re.sub(r"\\(?:begin|end)\s*\{\w*\*?\}|\\[a-zA-Z]+", " ", text)
    plain = re.sub(r"\b(?:[A-Z]\.)+[A-Z]?(?![A-Za-z])", "initials", plain)
    found = [word for word in _WORD.findall(plain) if word.lower() not in _FUNCTIONS]
    if not found:
        return False
    if max(map(len, found)) <= 3 and re.search(r"[\\^_=+*/<>|]|\d", text):
        return " " in plain.strip() and not re.search(r"[\\^_=+*/<>|]", text)
    return True


def _compare(found: str, wanted: str) -> tuple[bool | None, str]:
    by_choice = _choice(found, wanted)
    if by_choice is not None:
        return by_choice, "choice"
    if truth(wanted) is not None:
        return truth_of(found) is truth(wanted), "yes or no"
    if special(wanted):
        return special(found) == special(wanted), "special value"
    by_number = _number(found, wanted)
    if by_number is not None:
        return by_number, "number"
    by_base = in_base(found, wanted)
    if by_base is not None:
        return by_base, "number in a base"
    by_range = same_range(found, wanted)
    if by_range is not None:
        return by_range, "range"
    when = dates.dates(wanted)
    if when:
        return bool(when & dates.dates(found)), "date"
    if dates.minutes(wanted) is not None and dates.minutes(found) is not None:
        return dates.minutes(found) == dates.minutes(wanted), "time"
    by_list = _list(found, wanted)
    if by_list is not None:
        return by_list, "list"
    if is_wordy(wanted):
        return same_words(found, wanted), "words"
    if is_wordy(found):
        return False, "words"
    if len(found) == len(wanted) == 1 and (found + wanted).isalpha():
        return False, "letter"  # a and A are two variables
    if without_name(found) != found or without_name(wanted) != wanted:
        found, wanted = without_name(found), without_name(wanted)
        if squashed(found) == squashed(wanted) or _number(found, wanted):
            return True, "equation"
    return None, "math"


def _choice(found: str, wanted: str) -> bool | None:
    label = choice.labelled(wanted)
    if label is not None:
        letter, text = label
        other = choice.labelled(found)
        if other is not None:
            return other[0] == letter and (same_words(other[1], text) or not other[1])
        chosen = choice.chosen(found)
        return chosen == {letter} if chosen else bool(_compare(found, clean(text))[0])
    if not choice.is_choice(wanted):
        return None
    chosen = choice.chosen(found)
    return chosen == choice.chosen(wanted) if chosen else None


def _number(found: str, wanted: str) -> bool | None:
    """None when the gold is no number, or the answer may still be an expression."""
    gold = quantity(wanted)
    if gold is None:
        return None
    answer = quantity(without_class(without_name(found)))
    if answer is not None:
        return same_quantity(answer, gold)
    if gold.words:  # a noun phrase such as 3 blind mice: words can tell
        return None
    if is_wordy(found) or re.fullmatch(r"[\w\s.,]*", found):
        return False
    return None


def _list(found: str, wanted: str) -> bool | None:
    golds = several(without_name(wanted))
    answers = several(without_name(found))
    if golds is None or answers is None:
        if golds is not None and golds.opening == "{" and len(golds.elements) == 1:
            return _element(found, golds.elements[0])
        if answers is not None and answers.opening == "{" and len(answers.elements) == 1:
            return _element(answers.elements[0], wanted)
        return None
    same = same_list(answers, golds, _element)
    if same is False and is_wordy(wanted):
        return None  # a comma in a name or a place
    if same is False and (answers.ordered or golds.ordered):
        return None if answers.ordered != golds.ordered else False
    return same


def _element(found: str, wanted: str) -> bool | None:
    if "=" in found and "=" in wanted and _name(found) != _name(wanted):
        return False
    found, wanted = clean(without_name(found)), clean(without_name(wanted))
    if squashed(found) == squashed(wanted):
        return True
    return _compare(found, wanted)[0]


def _name(equation: str) -> str:
    return equation.partition("=")[0].strip()
