"""The layered grader: cheap rules first, mathematics last.

string -> choice letters -> ranges and bounds -> yes and no -> numbers and units -> dates
-> lists -> words
-> math-verify in a killable worker, unless the expression is too risky to evaluate.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct

from agentenv.base.offload import in_thread
from agentenv.envs.grading import candidates, dates, forms, quantities
from agentenv.envs.grading.equality import shared_math
from agentenv.envs.grading.forms import same_answers, special, truth, truth_of, without_name
from agentenv.envs.grading.formulas import formulas
from agentenv.envs.grading.gold import (
    Gold,
    gold_of,
    identifier,
    is_written,
    kind_of,
    literal,
    same_marks,
    unfenced,
    without_denied,
    written_in,
)
from agentenv.envs.grading.names import same_words, without_class
from agentenv.envs.grading.numbers import is_rounded, same_plain
from agentenv.envs.grading.parts import amount_of
from agentenv.envs.grading.quantities import same_quantity
from agentenv.envs.grading.sentences import affirmed, is_denied, states
from agentenv.envs.grading.text import MAX_ANSWER_CHARS, Tables, clean, last_correction, squashed
from agentenv.envs.grading.verdict import Matcher, Verdict, final_answer, shown
from agentenv.envs.grading.words import f1, glued, is_wordy, same_signs, tokens

QUICK_CHARS = 100
ONE_ANSWER = "one answer"  # the layer of an answer that names several candidates
MAX_LINES = 4  # after an answer in a line of its own
FORMULA_KINDS = ("number", "math", "list", "special", "words")

_NOTE = re.compile(r"(?<=\S)\s*[(\uff08]([^()\uff08\uff09]{1,80})[)\uff09]")
_LETTERS = re.compile(r"(?![A-J]{1,5}$)[^\W\d_]{3,}(?: [^\W\d_]{3,}){0,3}")  # no choice
_CODE = re.compile(r"[A-Z]{1,4}[- ]?\d{1,4}[A-Z]?")
_AUTHOR = re.compile(r"[\"*]?,?\s+by\s+[A-Z][\w.'-]*(?:\s+[A-Z][\w.'-]*){0,3}$")
_DASHED = re.compile(r"\d+(?:-\d+)+")
_DOUBLED = re.compile(r"(?<=[\w)}\]])!!(?!!)")  # a double factorial
_VECTORS = Tables("reading").pattern("vectors")
_OBJECT = Tables("reading").pattern("object", re.IGNORECASE)
_BASE = re.compile(r"([0-9A-Z]+)\s*_\s*\{?\s*(\w+)\s*\}?")


class Layered:
    """The matcher of `kind = "layered"`. `math` false leaves math-verify out; `partial_credit`
    scores a wrong answer to a word question by its token F1, as ARPO does, unless it names several
    candidates; with `ordered` the order of a list counts."""

    def __init__(
        self, *, math: bool = True, partial_credit: bool = False, ordered: bool = False
    ) -> None:
        self.partial_credit, self.ordered = partial_credit, ordered
        self._uses_math = math

    async def start(self) -> None:
        """Load the registry of units, and math-verify, if it is used."""
        await in_thread(quantities.load)
        if self._uses_math:
            await shared_math().start()

    async def verdict(self, question: str, answer: str, golds: Sequence[str]) -> Verdict:
        """Right if any gold is met; otherwise the reason of the nearest miss."""
        if len(answer) > MAX_ANSWER_CHARS:
            reason = f"wrong: the answer is longer than {MAX_ANSWER_CHARS} characters"
            return Verdict(False, 0.0, reason)
        unsure, misses = [], []
        for gold in golds:
            if len(answer) <= QUICK_CHARS:
                found = _found_again(answer, gold, self.ordered)
            else:  # milliseconds at worst, but off the event loop
                found = await in_thread(find, answer, gold, self.ordered)
            if found.right:
                return _right(answer, gold, found.layer)
            if found.right is None:
                unsure.append((gold, found))
            else:
                misses.append(found.layer)
        why = f"not equal by {misses[0]}" if misses else "no gold answer"
        if ONE_ANSWER in misses:
            why = "the answer lists several"
        for gold, found in unsure if self._uses_math else ():
            right, why = await self._equal(found, gold)
            if right:
                return _right(answer, gold, found.layer if found.agrees else "math")
        if unsure and not self._uses_math:
            why = "different expressions, and math is off"
        score = self._partial(answer, golds)
        reason = f"wrong: {shown(answer)!r} against {shown(str(list(golds)))}: {why}"
        return Verdict(False, score, reason, {"f1": score} if score else {})

    async def _equal(self, found: Finding, gold: str) -> tuple[bool, str]:
        """Whether mathematics finds the answer equal, and no part of it another expression."""
        right, why = (True, "") if found.agrees else await self._same(found.answer, gold)
        if not right or not found.parts:
            return right, why
        verdicts = [(await self._same(part, gold))[0] for part in found.parts]
        if all(verdicts) or not (found.agrees or any(verdicts)):
            return True, why
        return False, "the answer lists several"

    async def _same(self, answer: str, gold: str) -> tuple[bool, str]:
        equal = shared_math().equal
        right, why = await equal(*expressions(answer, gold))
        pairs = forms.in_order(clean(answer), clean(gold)) if right and self.ordered else ()
        for pair in pairs:  # math compares lists as sets
            if not (await equal(*expressions(*pair)))[0]:
                return False, "the items have another order"
        return right, why

    def _partial(self, answer: str, golds: Sequence[str]) -> float:
        if not self.partial_credit or names_several(answer, golds):
            return 0.0
        return max((f1(answer, gold) for gold in golds if is_wordy(clean(gold))), default=0.0)


class TokenF1(Matcher):
    """The matcher of `kind = "f1"`: SQuAD token F1 as score, right at 1. An answer that names the
    gold and another candidate scores 0: half of F1 for two guesses would reward guessing."""

    async def verdict(self, question: str, answer: str, golds: Sequence[str]) -> Verdict:
        """The score of the nearest gold; Chinese, Japanese and Korean text counts by characters."""
        if len(answer) > MAX_ANSWER_CHARS:
            return Verdict(False, 0.0, "wrong answer: too long")
        score = max((f1(answer, gold) for gold in golds), default=0.0)
        if 0 < score < 1 and await in_thread(names_several, answer, golds):
            return Verdict(False, 0.0, "wrong answer: it lists several")
        right = score >= 1.0
        reason = f"{'right' if right else 'wrong'} answer, F1 {score:.3f}: {shown(answer)}"
        return Verdict(right, score, reason)


def same_dot(answer: str, gold: str) -> bool:
    """Whether two dot products have the same factors."""
    sides = [squashed(text.strip().strip("$")).split(r"\cdot") for text in (answer, gold)]
    return len(sides[0]) == 2 and sorted(sides[0]) == sorted(sides[1])


def expressions(answer: str, gold: str) -> tuple[str, str]:
    """Both as formulas, when only mathematics can decide."""
    found, wanted = clean(answer), clean(gold)
    if not ("=" in found and "=" in wanted):  # else two equations, to compare as such
        found, wanted = without_name(found), without_name(wanted)
    return formulas(found, wanted) or (found, wanted)


def names_several(answer: str, golds: Sequence[str]) -> bool:
    """Whether an answer names a gold and other candidates too, so that it is worth nothing."""
    is_short = len(answer) <= MAX_ANSWER_CHARS  # of a longer one all remains, which is stricter
    return any(
        candidates.rivals_in(
            one, candidates.without_decoration(one, answer) if is_short else answer
        ).certain
        for one in (_gold(gold, False) for gold in golds)
    )


def _right(answer: str, gold: str, layer: str) -> Verdict:
    return Verdict(True, 1.0, f"right: {shown(answer)!r} equals {shown(gold)!r} by {layer}")


class Finding(Struct, frozen=True):
    """The result of the rules: `right` is None when only mathematics can decide whether `answer`
    equals the gold, or, where the layers agree already (`agrees`), whether its other `parts` do."""

    right: bool | None
    layer: str
    answer: str = ""
    parts: tuple[str, ...] = ()
    agrees: bool = False


def compare(answer: str, gold: str) -> tuple[bool | None, str]:
    """Whether they agree, and the layer that decides; None when only mathematics can decide."""
    found = find(answer, gold)
    return found.right, found.layer


def find(answer: str, gold: str, ordered: bool = False) -> Finding:
    """The verdict of the layers on an answer that names one candidate, or corrects itself and ends
    in one. No layer compares an answer with two candidates."""
    plain = same_plain(answer, gold)  # as most answers are: no layer would decide otherwise
    if plain is not None:
        return Finding(plain, "number")
    if "<answer>" in answer or r"\boxed" in answer:
        answer = final_answer(answer)
    answer = answer[:MAX_ANSWER_CHARS]
    answer = unfenced(answer) if "```" in answer else answer
    if _OBJECT.search(gold) is None:
        answer = _OBJECT.sub(r"\1\2", answer)
    found, wanted = clean(answer), clean(gold)
    if _LETTERS.fullmatch(gold) and answer.strip().casefold() == gold.casefold():
        return Finding(True, "words")
    if not same_marks(answer, gold) or _DOUBLED.findall(answer) != _DOUBLED.findall(gold):
        return Finding(False, "identifier")
    if literal(gold) is not None and literal(answer) is not None:
        return Finding(literal(answer) == literal(gold), "identifier")
    if answer.strip() == gold.strip() or (wanted and squashed(found) == squashed(wanted)):
        return Finding(bool(answer.strip() or not gold.strip()), "string")
    if is_written(gold) and not all(
        _compare(clean(one), wanted)[0] for one in written_in(without_denied(answer))
    ):
        return Finding(False, ONE_ANSWER)
    if _gold(gold, ordered).kind == "identifier":
        return _of_identifier(without_denied(answer), _gold(gold, ordered))
    if _VECTORS.search(gold):
        return Finding(same_dot(answer, gold), "products of vectors")
    answer = candidates.without_decoration(_gold(gold, ordered), answer)
    found = clean(answer)
    if not found or (found.endswith("?") and not wanted.endswith("?")):
        return Finding(False, "string")
    if candidates.is_framed_in(_gold(gold, ordered), answer):
        return Finding(True, "string")
    one = _of_one_answer(answer, gold, ordered)
    is_truth = truth(wanted) is not None
    for corrected in last_correction(answer, is_truth=is_truth) if one.right is False else ():
        if clean(corrected) and not is_denied(affirmed(corrected, wanted)):
            again = _of_one_answer(corrected, gold, ordered)
            return again if again.right is not False else one
    return one


def _of_identifier(answer: str, gold: Gold) -> Finding:
    """The verdict on an answer that must be an identifier, alone or in a sentence that names no
    other."""
    code = identifier(gold.text)
    if identifier(answer) == code or candidates.is_framed_in(gold, answer):
        return Finding(True, "identifier")
    right, layer = _agree(candidates.without_decoration(gold, answer), gold.text)
    return Finding(right is True, layer)


def _of_one_answer(answer: str, gold: str, ordered: bool) -> Finding:
    right, layer = _agree(answer, gold, ordered)
    wanted = _gold(gold, ordered)
    if right is False and not candidates.is_named_in(wanted, answer):
        return Finding(False, layer)
    rivals = candidates.rivals_in(wanted, answer)
    if rivals.certain:
        return Finding(False, ONE_ANSWER)
    if right is False or (right is None and candidates.is_named_in(wanted, answer)):
        return Finding(True, layer)
    if right and rivals.unsure:
        return Finding(None, layer, answer, rivals.unsure, agrees=True)
    return Finding(right, layer, answer, rivals.unsure if right is None else ())


@lru_cache(maxsize=1024)
def _gold(gold: str, ordered: bool) -> Gold:
    return gold_of(gold, _same(ordered))


def _same(ordered: bool) -> forms.Compare:
    return lambda one, other: _compare(one, other, ordered)[0]


def _agree(answer: str, gold: str, ordered: bool = False) -> tuple[bool | None, str]:
    """The verdict of the layers on an answer whose parts are unchecked."""
    found, wanted = clean(answer), clean(gold)
    right, layer = _compare(found, wanted, ordered)
    if right or layer == "identifier":
        return right, layer
    kind = _gold(gold, ordered).kind
    if kind in FORMULA_KINDS and (not is_wordy(wanted) or "\\" in wanted):
        forms = formulas(found, wanted)
        if forms is None:
            return False, "unit"
        if forms != (found, wanted):
            again = _compare(*forms, ordered)
            right, layer = again if again[0] or right is False else (right, layer)
    if right is None and kind not in FORMULA_KINDS:
        right = False
    if right is not False:
        return right, layer
    same = _same(ordered)
    if kind == "words" and _gold(gold, ordered).is_named and " by " not in wanted:
        work = _AUTHOR.sub("", found)
        if work != found and same(clean(work), wanted):
            return True, layer
    if _with_notes(found, wanted, same) or _by_lines(answer, wanted, same):
        return True, layer
    return states(found, wanted, lambda text: same(clean(text), wanted) is True), layer


def _with_notes(found: str, wanted: str, same: forms.Compare) -> bool:
    """Whether they agree without a note in brackets: 72 (seventy-two), 5 ft (1.5 m) long."""
    notes = [_NOTE.findall(text) for text in (found, wanted)]
    if not any(notes) or any(map(is_denied, notes[0] + notes[1])):
        return False
    if all(notes) and not same(notes[0][0], notes[1][0]):
        return False
    bare = [" ".join(_NOTE.sub(" ", text).split()) for text in (found, wanted)]
    is_note = not forms.is_choice(found) and any(same(found, note) for note in notes[1])
    return is_note or same(*bare) is True


def _by_lines(answer: str, wanted: str, same: forms.Compare) -> bool:
    """Whether the first line is the gold, and the others deny nothing."""
    first, _, rest = answer.strip().partition("\n")
    if not rest or is_denied(answer) or len(rest.strip().splitlines()) > MAX_LINES:
        return False
    return bool(clean(first)) and same(clean(first), wanted) is True


_found_again = lru_cache(maxsize=16_384)(find)  # samples of a question answer alike


@lru_cache(maxsize=16_384)
def _compare(found: str, wanted: str, ordered: bool = False) -> tuple[bool | None, str]:
    """Whether they are the same (None: undecided), and the layer that decides."""
    if "\\" not in wanted and squashed(found) == squashed(wanted):
        return True, "string"
    if kind_of(wanted) == "identifier":
        code = identifier(wanted)
        return identifier(found) == code or found == code.rpartition(" ")[2], "identifier"
    by_choice = _choice(found, wanted)
    if by_choice is not None:
        return by_choice, "choice"
    by_span = _span(found, wanted)
    if by_span is not None:
        return by_span
    if truth(wanted) is not None:
        return truth_of(found) is truth(wanted), "yes or no"
    if special(wanted):
        return special(found) == special(wanted), "special value"
    if re.search("[\u5e74\u6708]", wanted) and dates.dates(wanted):  # else a number of years
        return bool(dates.dates(wanted) & dates.dates(found)), "date"
    if dates.minutes(wanted) is not None and dates.minutes(found) is not None:
        return dates.minutes(found) == dates.minutes(wanted), "time"
    by_number = _number(found, wanted)
    if by_number is not None:
        return by_number, "number"
    by_base = _in_base(found, wanted)
    if by_base is not None:
        return by_base, "number in a base"
    when = dates.dates(wanted)
    if when:
        return bool(when & dates.dates(found)), "date"
    if _DASHED.fullmatch(found) or (identifier(found) and " " not in found):
        return False, "identifier"  # no difference, no product
    by_list = same_answers(found, wanted, _same(ordered), ordered=ordered)
    if by_list is not None:
        return by_list, "list"
    if is_wordy(wanted):
        return same_words(found, wanted) and same_signs(found, wanted), "words"
    if is_wordy(found):  # C# as C sharp
        return glued(tokens(found)) == glued(tokens(wanted)), "words"
    if _CODE.fullmatch(found) and _CODE.fullmatch(wanted):  # F-16
        return re.sub(r"[ -]", "", found) == re.sub(r"[ -]", "", wanted), "code"
    if len(found) == len(wanted) == 1 and (found + wanted).isalpha():
        return False, "letter"  # a and A are two variables
    if without_name(found) != found or without_name(wanted) != wanted:
        found, wanted = without_name(found), without_name(wanted)
        if squashed(found) == squashed(wanted) or _number(found, wanted):
            return True, "equation"
    return None, "math"


def _choice(found: str, wanted: str) -> bool | None:
    label = forms.labeled(wanted)
    if label is not None:
        letter, text = label
        other = forms.labeled(found)
        if other is not None:
            return other[0] == letter and (same_words(other[1], text) or not other[1])
        chosen = forms.chosen(found)
        return chosen == {letter} if chosen else bool(_compare(found, clean(text))[0])
    if not forms.is_choice(wanted):
        return None
    chosen = forms.chosen(found)
    is_open = len(forms.letters(found)) > 1
    return chosen == forms.chosen(wanted) if chosen or is_open else None


def _span(found: str, wanted: str) -> tuple[bool | None, str] | None:
    """The comparison of ranges, of bounds and of periods of years."""
    periods = dates.period(wanted), dates.period(found)
    if periods.count(None) == 1 and _is_bare(wanted if periods[0] is None else found):
        return False, "period"  # a decade is no year
    for layer, read, same in _SPANS:
        mine, other = read(wanted), read(found)
        if mine is not None and other is not None:
            return same(other, mine), layer
    return None


def _same_bound(one: tuple[str, str], other: tuple[str, str]) -> bool:
    return one[0] == other[0] and _compare(one[1], other[1])[0] is True


_SPANS: tuple[tuple[str, Callable[[str], Any], Callable[[Any, Any], bool]], ...] = (
    ("period", dates.period, operator.eq),
    ("bound", dates.bound, _same_bound),
    ("range of dates", dates.days, dates.same_days),
    ("range", dates.span, dates.same_span),
    ("frequency", dates.frequency, operator.eq),
)


def _is_bare(text: str) -> bool:
    """Whether a text is a number without a unit, or a date."""
    amount = amount_of(text)
    return bool(dates.dates(text)) or (amount is not None and not amount.dimension)


def _number(found: str, wanted: str) -> bool | None:
    """None when the gold is not a number, or the answer may still be an expression."""
    gold = amount_of(wanted)
    if gold is None:
        return None
    answer = amount_of(without_class(without_name(found)))
    if answer is not None:
        is_exact = not gold.has_unit and is_rounded(answer.value, gold.value, found, wanted)
        return is_exact or same_quantity(answer, gold)
    if gold.words:  # a noun phrase such as 3 blind mice: words can decide
        return None
    return False if is_wordy(found) or re.fullmatch(r"[\w\s.,]*", found) else None


def _in_base(found: str, wanted: str) -> bool | None:
    """Digits with a base as subscript; an answer may omit the base."""
    gold = _BASE.fullmatch(wanted)
    if gold is None:
        return None
    answer = _BASE.fullmatch(found)
    if answer is None:
        return found == gold[1]
    return answer[1] == gold[1] and tokens(answer[2]) == tokens(gold[2])
