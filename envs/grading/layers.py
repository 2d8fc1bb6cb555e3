"""The layered grader: cheap rules first, mathematics last.

string -> choice letters -> ranges and bounds -> yes and no -> numbers and units -> dates
-> lists -> words
-> math-verify in a killable worker, unless the expression is too risky to evaluate.
"""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

from msgspec import Struct

from envs.grading import choice, dates, spans, units
from envs.grading.math import LIMIT_S, shared_math
from envs.grading.numbers import quantity, same_quantity
from envs.grading.spelling import MAX_ANSWER_CHARS, clean, squashed
from envs.grading.verdict import Verdict, final_answer, shown
from envs.grading.words import f1, has_cjk, same_words, tokens, without_class

# Several answers in one: 1, 2 and 3; {1, 2}; (3, 4); x = 1 or x = -1; \pm 2.

MAX_ELEMENTS = 40

Compare = Callable[[str, str], bool | None]

_AND = re.compile(
    "\\s*[\u3001\u548c\u4e0e\u53ca]\\s*"
    r"|\s+&\s+|\s*(?:,|;)\s*(?:and|or)\s+|\s+(?:and|or|\\text\{and\})\s+|\s*;\s*",
    re.IGNORECASE,
)
_NAMED_VALUE = re.compile(
    r"(?:[A-Za-z](?:_\{?\w{1,3}\}?)?(?:\([a-z]\))?|[A-Za-z]{2,}(?: [A-Za-z]+){0,3})\s*=\s*(.*)",
    re.DOTALL,
)
_ITEM = re.compile(r"(?:^|\s*[,;]?\s+)(?:\(?\d{1,2}[.)]|[-*\N{BULLET}])\s+")
_OR = re.compile(r"\bor\b", re.IGNORECASE)
_OPEN = {"(": ")", "[": "]", "{": "}"}


class Several(Struct, frozen=True):
    """Elements, and the brackets round them: braces and none mean that order does not count."""

    elements: tuple[str, ...]
    opening: Literal["", "{", "(", "["] = ""
    closing: Literal["", "}", ")", "]"] = ""

    @property
    def ordered(self) -> bool:
        return self.opening in ("(", "[")


def several(text: str) -> Several | None:
    """The elements of a list, set, tuple or interval; None for a single value."""
    text = (
        re.sub(r"\\([{}])", r"\1", text.strip()).replace(r"\lbrace", "{").replace(r"\rbrace", "}")
    )
    opening = closing = ""
    if len(text) > 1 and text[0] in _OPEN and text[-1] in ")]}" and _wraps(text):
        opening, closing, text = text[0], text[-1], text[1:-1]
    if re.match(r"\(?1[.)]\s|[-*\N{BULLET}]\s+[^\W\d_]", text):  # an enumeration
        text = _ITEM.sub(",", text).lstrip(",")
    parts = _split(_AND.sub(",", text))
    parts = [both for part in parts for both in _both_signs(part)]
    if len(parts) > MAX_ELEMENTS or not all(parts) or (len(parts) < 2 and opening != "{"):
        return None
    return Several(tuple(parts), opening, closing)  # type: ignore[arg-type]


def same_list(answer: Several, gold: Several, same: Compare) -> bool | None:
    """Whether the elements agree; None when a pair of elements cannot be decided."""
    if len(answer.elements) != len(gold.elements):
        return False
    if answer.ordered and gold.ordered:
        if (answer.opening, answer.closing) != (gold.opening, gold.closing):
            return False
    elif (answer.ordered and gold.opening == "{") or (gold.ordered and answer.opening == "{"):
        return False
    if answer.ordered or gold.ordered:
        outcomes = [same(*pair) for pair in zip(answer.elements, gold.elements, strict=True)]
        return False if False in outcomes else None if None in outcomes else True
    return _same_set(list(answer.elements), list(gold.elements), same)


def without_name(text: str) -> str:
    """The right side of x = 5 or f(x) = x + 1; the text itself when it is no such equation."""
    match = _NAMED_VALUE.fullmatch(text)
    return match[1] if match is not None and "=" not in match[1] else text


def _same_set(answers: list[str], golds: list[str], same: Compare) -> bool | None:
    undecided = False
    for gold in golds:
        outcomes = [same(answer, gold) for answer in answers]
        if True in outcomes:
            del answers[outcomes.index(True)]
        elif None in outcomes:
            undecided = True
        else:
            return False
    return None if undecided else True


def _wraps(text: str) -> bool:
    """Whether the first bracket closes only at the end."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0:
            return place == len(text) - 1
    return False


def _split(text: str) -> list[str]:
    """Parts between commas that stand in no bracket and group no thousands."""
    parts, depth, start = [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()]


def _both_signs(part: str) -> list[str]:
    if part.count(r"\pm") != 1:
        return [part]
    before, _, after = part.partition(r"\pm")
    after = after.strip()
    if before.strip() and not before.strip().endswith("="):
        return [f"{before.strip()} + {after}", f"{before.strip()} - {after}"]
    return [before + after, f"{before}-{after}"]


# Numbers in a base.

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


# An answer in a sentence: what its last clause says, if the sentence denies and hedges nothing.

MAX_WORDS = 60

_VERB = re.compile(
    r"\b(?:is|are|was|were|be|equals?|makes?|gives?|has|had|have|went|goes|won|died|born|took"
    r"|opened|arrived|says?|found|happened|occurred|located|called|named|hence|therefore|\w{3,}ed"
    r"|began|broke|built|came|became|fell|grew|held|kept|led|left|lost|made|met|ran|rose|sank|sold"
    r"|sang|saw|set|spoke|stood|struck|taught|told|wrote|drew|flew|knew|gave|got|hit|lies|lives"
    r"|comes|works)\b|^(?:it|he|she|they|we|this|that)\s+\w+",
    re.IGNORECASE,
)
_CORRECTED = re.compile(r"(?:.*,\s*)?not\s+(?:\S+\s+){1,4}?but\s+(?:rather\s+)?(.+)", re.IGNORECASE)
_CONCLUDED = re.compile(
    r".*\b(?:answer|result)\s+(?:is|was|must be|should be)\s*:?\s+(.+)", re.IGNORECASE | re.DOTALL
)
_CLAUSE = re.compile(
    r".*\b(?:is|are|was|were|equals|in|on|by|to|as|=)\s+(?:(?:the|a|an|called|named)\s+)?(.+)",
    re.DOTALL,
)
_NEGATION = re.compile(
    r"\b(?:not|never|no|neither|nor|or|either|unless|maybe|perhaps|possibly|instead|rather|wrong"
    r"|incorrect|false|except|without|near|than|if|whom|whose|ruled out|excluded|denied|before"
    r"|after|unlike|contrary)\b|n't\b",
    re.IGNORECASE,
)
_APPOSITION = re.compile(r",\s+(?:an?|the|who|which|whose|where)\s.*", re.DOTALL)
_MATH = re.compile(r"\$([^$]*[\\=^_][^$]*)\$")
_NUMBER = re.compile(r"[$\u20ac\u00a3]?-?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")
_DATE = re.compile(r"(?:\w+ )?\d{1,2},? \w+,? \d{4}|[A-Z]\w+ \d{1,2}, \d{4}")


def says(found: str, wanted: str, same: Callable[[str], bool]) -> bool:
    """Whether the last clause of `found` ends in, or names, what `same` accepts."""
    concluded = _CONCLUDED.fullmatch(found)
    if concluded is not None and not _NEGATION.search(concluded[1]) and same(concluded[1]):
        return True
    found = _APPOSITION.sub("", found)
    if same(found):
        return True
    clause = re.split(r";\s+|(?<=[a-z\d])[.:]\s+", found)[-1]
    clause = clause.replace("none other than ", "")
    match = _CORRECTED.fullmatch(clause)
    if match is not None and not _NEGATION.search(match[1]):
        return same(match[1])
    if len(clause.split()) > MAX_WORDS or _NEGATION.search(clause):
        return False
    if clause != found and same(clause):
        return True
    math = _MATH.findall(clause)
    if math:
        return same(math[-1])
    if not _VERB.search(clause) or len(clause.split()) < 3:
        return False
    if any(same(date) for date in _DATE.findall(clause)[-1:]):
        return True
    match = _CLAUSE.fullmatch(clause)
    if match is not None and same(match[1]):
        return True
    numbers = _NUMBER.findall(clause)
    if numbers and re.fullmatch(r"[\d.,/$%-]+", wanted):
        return same(numbers[-1].rstrip(","))
    return _names(clause, wanted)


def _names(clause: str, wanted: str) -> bool:
    """Whether the clause holds the words of the gold together, and no other name or number."""
    words = clause.split()
    gold = tokens(wanted)
    if not gold or not any(map(str.isalpha, gold)):
        return False
    others = tokens(" ".join([words[0].lower(), *words[1:]]))
    for place in range(len(others) - len(gold) + 1):
        if others[place : place + len(gold)] == gold:
            break
    else:
        return False
    capitals = {token for word in words[1:] if word[:1].isupper() for token in tokens(word)}
    numbers = {token for token in others if token.isdigit()}
    return (capitals | numbers) <= set(gold) and (wanted != wanted.lower() or len(gold) > 1)


# Answers that are no values: yes and no, no solution, undefined, infinity.

_TRUTH = {
    "yes": True, "true": True, "no": False, "false": False,
    "yep": True, "yeah": True, "nope": False, "correct": True, "incorrect": False,
    "\u662f": True, "\u5bf9": True, "\u6b63\u786e": True, "\u5426": False, "\u9519": False,
    "\u4e0d\u662f": False, "\u9519\u8bef": False,
}  # fmt: skip
_SPECIAL = (
    ("nothing",
     r"(?:there (?:is|are) )?no (?:real |valid |integer )?(?:solutions?|roots?)(?: exists?)?"
     r"|no such \w+(?: exists?)?|(?:the )?empty set|\\emptyset|\\?\{\s*\\?\}|\\phi|none"),
    ("absent", r"(?:it )?does not exist|(?:it )?doesn't exist|dne|(?:the )?limit does not exist"),
    ("undefined", r"(?:it is )?(?:undefined|not defined)"),
    ("infinity", r"\+?\s*\\infty|\+?\s*(?:positive )?infinity|infinite|inf"),
    ("minus infinity", r"-\s*\\infty|(?:-\s*|negative |minus )infinity"),
    ("infinitely many", r"infinitely many(?: solutions)?|infinite (?:number of )?solutions"),
    ("all reals", r"all real(?:s| numbers)?|\\mathbb\s*\{?R\}?|\(-\s*\\infty,\s*\\infty\)"
     r"|\(-\s*\\infty,\s*\+\s*\\infty\)|(?:the )?real numbers"),
)  # fmt: skip
_SPECIAL_FORMS = [(name, re.compile(form, re.IGNORECASE)) for name, form in _SPECIAL]
_CLAIM = re.compile(r"^(?:the|this|that) (?:claim|statement|answer|proposition) is ")


_SHORT_TRUTH = re.compile(
    r"(?:they|it|he|she|both|we|these|those)\s+(?:are|is|was|were|did|do|does|has|have|had|can|could)"
    r"\s*(not|n't)?|(?P<bare>not)"
)


def truth(text: str) -> bool | None:
    """True for yes, False for no, None for anything else."""
    return _TRUTH.get(text.lower())


def truth_of(found: str) -> bool | None:
    """What an answer says, alone or as the first word of a sentence that does not say both."""
    low = found.lower()
    if low in _TRUTH:
        return _TRUTH[low]
    short = _SHORT_TRUTH.fullmatch(low)
    if short is not None:
        return short[1] is None and short["bare"] is None
    words = tokens(_CLAIM.sub("", low))
    first = _TRUTH.get(words[0]) if words else None
    if first is None or any(_TRUTH.get(word) is (not first) for word in words[1:]):
        return None
    return first


def special(text: str) -> str:
    """The name of the special value that the text is; "" if none."""
    return next((name for name, form in _SPECIAL_FORMS if form.fullmatch(text)), "")


QUICK_CHARS = 300

_FUNCTIONS = frozenset(
    str.split(
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt pi min "
        "max mod gcd lcm det deg arg cis"
    )
)
_WORD = re.compile(r"[^\W\d_]{2,}")
_NOTE = re.compile(r"(.*\S)\s+\(([^()]{1,80})\)|(.*\S)\uff08([^()\uff08\uff09]{1,80})\uff09")


def _load() -> None:
    """A second's imports, now rather than on the event loop with the first answer that asks."""
    units.load()
    for name in ("cn2an", "dateutil.parser"):
        importlib.import_module(name)


class Layered:
    """The matcher of `kind = "layered"`. `math` false leaves math-verify out; `partial_credit`
    scores a wrong answer to a word question by its token F1, as ARPO does."""

    def __init__(
        self, *, math: bool = True, partial_credit: bool = False, limit_s: float = LIMIT_S
    ) -> None:
        self.partial_credit = partial_credit
        self._asks_math, self._limit_s = math, limit_s

    async def start(self) -> None:
        """Load what knows the units, and math-verify, if it is used."""
        await asyncio.to_thread(_load)
        if self._asks_math:
            await shared_math(self._limit_s).start()

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
        for gold in open_golds if self._asks_math else ():
            found, wanted = clean(answer), clean(gold)
            if not ("=" in found and "=" in wanted):  # else two equations, to compare as such
                found, wanted = without_name(found), without_name(wanted)
            right, why = await shared_math(self._limit_s).equal(found, wanted)
            layer = "math"
            if right:
                return _right(answer, gold, "math")
        if open_golds and not self._asks_math:
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
    if not found or (found.endswith("?") and not wanted.endswith("?")):
        return False, "string"
    right, layer = _compare(found, wanted)
    if right is not False:
        return right, layer
    for one, other in ((found, wanted), (wanted, found)):  # 72 (seventy-two), a note in brackets
        note = _NOTE.fullmatch(one)
        is_hedged = note is not None and _NEGATION.search(note[2] or note[4])
        if note is not None and not is_hedged and not choice.is_choice(other):
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
    by_span = _span(found, wanted)
    if by_span is not None:
        return by_span
    if truth(wanted) is not None:
        return truth_of(found) is truth(wanted), "yes or no"
    if special(wanted):
        return special(found) == special(wanted), "special value"
    if "\u5e74" in wanted and dates.dates(wanted):  # else a number of years
        return bool(dates.dates(wanted) & dates.dates(found)), "date"
    by_number = _number(found, wanted)
    if by_number is not None:
        return by_number, "number"
    by_base = in_base(found, wanted)
    if by_base is not None:
        return by_base, "number in a base"
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
    if choice.is_either(found):
        return False
    chosen = choice.chosen(found)
    return chosen == choice.chosen(wanted) if chosen else None


def _span(found: str, wanted: str) -> tuple[bool | None, str] | None:
    """By what lies between two ends, is left open on one side, or is a period of years."""
    periods = spans.period(wanted), spans.period(found)
    if periods[0] is not None and periods[1] is not None:
        return periods[0] == periods[1], "period"
    bounds = spans.bound(wanted), spans.bound(found)
    if bounds[0] is not None and bounds[1] is not None:
        is_same = bounds[0][0] == bounds[1][0]
        return (is_same and _compare(bounds[1][1], bounds[0][1])[0] is True), "bound"
    ends = spans.span(wanted), spans.span(found)
    if ends[0] is not None and ends[1] is not None:
        return spans.same_span(ends[1], ends[0]), "range"
    return None


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
    if is_wordy(wanted) and _OR.search(found) and not _OR.search(wanted):
        return False  # one of them, not all
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
