"""One answer: the candidates that a text names, cut at every kind of separator.

An answer that names two different candidates of the gold's kind is two guesses, whatever joins
them. A part is the text between two separators; a part that reads as a whole answer is a
candidate, a number or a name inside a longer clause is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

from agentenv.envs.grading import dates, forms
from agentenv.envs.grading.decoration import undecorated
from agentenv.envs.grading.forms import several, special, truth, without_name
from agentenv.envs.grading.frame import Rest, is_framed, rests
from agentenv.envs.grading.gold import Gold, gold_of, meets
from agentenv.envs.grading.identifiers import identifier
from agentenv.envs.grading.mentions import unexplained
from agentenv.envs.grading.names import STATES
from agentenv.envs.grading.parts import (
    ASIDES,
    BETWEEN,
    Part,
    amount_of,
    is_compound,
    is_expression,
    is_named,
    is_nationality,
    is_of_place,
    is_role,
    trimmed,
    value_of,
)
from agentenv.envs.grading.quantities import Quantity, quantity, unit_of
from agentenv.envs.grading.rivals import NUMBERS, is_rival
from agentenv.envs.grading.sentences import has_verb, is_hedged, is_statement
from agentenv.envs.grading.text import Tables, clean
from agentenv.envs.grading.whole import parts_of
from agentenv.envs.grading.words import is_wordy, tokens

_TABLES = Tables("candidates")


class Rivals(Struct, frozen=True):
    """Candidates that are not the gold: those that the rules decide, and expressions that only
    mathematics can compare with it."""

    certain: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()


_HAN_HEDGE = _TABLES.pattern("han_hedge")
_APPROXIMATE = re.compile(r"\\approx|\u2248|\bapprox|\babout\b|\broughly\b")
_LABEL = re.compile(r"^\W*[A-Ja-j](?:\W+|$)")
# before a bracket that is not closed: set(['A', 'B'])
# before a bracket that is not closed: set(['A', 'B'])
_INSIDE = re.compile(r"^.*(?<!\})[(\[{]['\"]?(?=[^()\[\]{}]*$)", re.DOTALL)
_DOUBT = _TABLES.pattern("doubt", re.I)
_MATH_ONLY = _TABLES.pattern("math_only")


def without_decoration(gold: Gold, text: str) -> str:
    """An answer without its decoration."""
    is_named = gold.is_named if gold.kind == "words" else gold.kind not in ("list", "special")
    return undecorated(text, gold.forms, is_named=is_named)


def is_named_in(gold: Gold, text: str) -> bool:
    """Whether a text without rivals names the gold in a part of its own, without a doubt."""
    parts = parts_of(gold, text)
    if gold.kind in ("choice", "truth", "math") or not parts:
        return False
    if gold.kind == "number" and not all(
        part.meets or _is_explanation(gold, part) for part in parts
    ):
        return False  # a formula, which mathematics compares
    if gold.kind == "number" and BETWEEN.match(text):
        return False
    if all(part.meets for part in parts):
        return _DOUBT.search(text) is None
    if len(parts) < 2:
        return False
    if is_hedged(text) or _HAN_HEDGE.search(text):
        return False
    return any(part.meets for part in parts) and not any(_changes(gold, part) for part in parts)


def is_framed_in(gold: Gold, text: str) -> bool:
    """Whether there are only words of answering around the gold."""
    return is_framed(text, gold.forms, is_word=gold.kind in ("truth", "choice"))


def _candidate_rests(gold: Gold, text: str) -> Iterator[str]:
    """The texts beside the gold, without the words of answering, that read as a whole answer of
    its kind."""
    for rest in rests(text, gold.forms):
        bare = clean(trimmed(_INSIDE.sub("", rest.text)))
        is_nation = is_nationality(bare) and not is_nationality(gold.text)
        is_reply = rest.is_before and gold.kind != "truth" and truth(bare) is not None
        if not bare or meets(gold, bare) or is_role(bare) or is_nation or is_reply:
            continue
        if not _is_alike(gold, bare, rest):
            continue
        is_place = is_of_place(bare.partition(",")[0], gold.rank, Part(bare, "comma"))
        is_first = rest.is_before and rest.joint != ""
        part = Part(bare, rest.joint, led=not rest.is_joined, is_first=is_first)
        is_sure = gold.kind in ("math", "choice") or _is_other(gold, bare, rest)
        if is_sure or (not is_place and is_rival(gold, part)):
            yield bare


def _is_other(gold: Gold, bare: str, rest: Rest) -> bool:
    """Whether an expression is beside a list of words, or words beside one of expressions."""
    is_beside = gold.kind == "list" and rest.joint != "bracket" and rest.is_joined
    return is_beside and is_wordy(bare) != is_wordy(gold.text)


def _is_alike(gold: Gold, bare: str, rest: Rest) -> bool:
    """Whether a text alone reads as an answer of the gold's kind."""
    match gold.kind:
        case _ if rest.is_one_clause:
            return False
        case "identifier":
            return bool(identifier(bare))
        case "number":
            return amount_of(bare) is not None and not is_compound(bare)
        case "date" | "time" | "span":
            is_when = bool(dates.dates(bare)) or dates.minutes(bare) is not None
            return is_when or dates.is_span(bare) or amount_of(bare) is not None
        case "truth":
            return truth(bare) is not None
        case "special":
            return bool(special(bare)) or amount_of(bare) is not None
        case "list":
            return is_named(bare) or several(bare) is not None or _is_other(gold, bare, rest)
        case "words" if is_statement(gold.text) and not gold.is_named:
            return False
        case "words":
            is_phrase = is_named(bare) or (len(bare.split()) < 9 and not is_statement(bare))
            is_joined = rest.is_joined and rest.is_known
            return is_named(bare) if gold.is_named else is_phrase and is_joined
        case "choice":
            letters = forms.chosen(bare) if forms.is_choice(bare) else set()
            label = forms.labeled(bare)
            letters = {label[0]} if label is not None else letters
            return bool(letters) and not letters & forms.chosen(gold.text)
        case "math":
            return rest.joint != "equals" and is_expression(bare)


def _is_explanation(gold: Gold, part: Part) -> bool:
    """Whether a part is words, another form of the amount, its calculation or a bracket."""
    bare = clean(part.text)
    if is_wordy(bare) or amount_of(bare) is not None:
        return True
    return part.joint == "bracket" or value_of(bare) is not None


def _changes(gold: Gold, part: Part) -> bool:
    """Whether a part makes the gold another thing: Paris, Texas; 5 (kilometers)."""
    bare = clean(part.text)
    if part.meets or part.starts:
        return False
    if gold.kind == "number":
        return amount_of(bare) is None and unit_of(bare.lower()) is not None
    is_state = bare in STATES or bare in STATES.values()
    return is_state and "county" not in gold.text.lower()


# Parts that are not the gold.


def rivals_in(gold: Gold, text: str) -> Rivals:
    """The candidates beside the gold. A text that is one part has none: the layers decide
    whether it is the gold."""
    parts = parts_of(gold, text)
    name = _written_as_a_name(gold, parts)
    if name:
        return rivals_in(gold_of(name, gold.same), text)
    beside_it = tuple(_candidate_rests(gold, text))
    if beside_it:
        return Rivals((), beside_it) if gold.kind == "math" else Rivals(beside_it)
    if gold.kind == "choice":
        return _other_letters(gold, text, parts)
    others = unexplained(gold, text, parts)
    if others:
        return Rivals(tuple(others))
    if len(parts) < 2 and not _reads_whole(gold, text) and gold.kind != "date":
        return Rivals()
    if gold.kind == "math":
        return _other_expressions(gold, text, parts)
    amounts = [amount_of(clean(part.text)) for part in parts if part.meets]
    nearby = [amount for amount in amounts if amount is not None]
    found: list[str] = []
    ends_right = bool(parts) and parts[-1].meets
    skips = False
    for place, part in enumerate(parts):
        if part.joint in ("", "or"):
            skips = False
        after = parts[place + 1] if place + 1 < len(parts) else None
        if gold.kind == "number" and _differs(part, after):
            found.append(part.text)
        if skips or part.meets:
            continue
        words = tokens(part.text)
        is_label = len(words) == 1 or (after is not None and after.joint == "colon")
        if words and words[0] in ASIDES and len(words) < 3 and is_label:
            skips = True
            continue
        if not (ends_right and _is_step(parts, place)) and is_rival(gold, part, after, nearby):
            found.append(part.text)
    is_sum = gold.amount is not None and parts[0].meets and _adds_up(found, gold.amount)
    if is_sum and not any(part.starts for part in parts):
        return Rivals()
    return Rivals(tuple(dict.fromkeys(found)))


def _written_as_a_name(gold: Gold, parts: Sequence[Part]) -> str:
    """The gold as the answer writes it, if only the answer shows that it is a name: James
    Madison for james madison."""
    if gold.kind != "words" or gold.is_named or not gold.text.islower():
        return ""
    names = [clean(part.text) for part in parts if part.meets]
    return next((name for name in names if " " in name and is_named(name)), "")


def _reads_whole(gold: Gold, text: str) -> bool:
    bare = clean(text)
    return gold.kind == "number" and bool(NUMBERS.fullmatch(bare)) and quantity(bare) is None


def _other_letters(gold: Gold, text: str, parts: Sequence[Part]) -> Rivals:
    """Letters of other options, or another text after the same letter."""
    wanted = forms.chosen(gold.text)
    groups = forms.letters(text)
    others = {group for group in groups if group - wanted}
    if wanted in groups:
        others |= {group for group in groups if group != wanted}
    if others:
        return Rivals(tuple("".join(sorted(group)) for group in others))
    for worded in gold.elements:
        texts = [label[1] for label in map(forms.labeled, map(_text_of, parts)) if label]
        rivals = [one for one in texts if not meets(worded, one) and not has_verb(one)]
        if rivals or not any(meets(worded, part.text) for part in parts):
            return Rivals(tuple(rivals))
        return rivals_in(worded, _LABEL.sub("", text))
    return Rivals()


def _other_expressions(gold: Gold, text: str, parts: Sequence[Part]) -> Rivals:
    """Expressions beside the gold, if a part alone is an expression that may be the gold."""
    others = [part for part in parts if not part.meets]
    names = [
        part.text
        for part in others
        if part.starts
        and not part.led
        and is_wordy(clean(part.text))
        and is_named(clean(part.text))
    ]
    unsure = [without_name(clean(part.text)) for part in others if is_expression(clean(part.text))]
    if _APPROXIMATE.search(text):
        unsure = [text for text in unsure if not re.fullmatch(r"-?\d+\.\d+\S*", text)]
    is_chain = {part.joint for part in parts} <= {"equals"} and len(parts) > 1
    if is_chain and any(_MATH_ONLY.search(part.text) for part in parts[:-1]):
        unsure = []
    return Rivals(tuple(names), tuple(dict.fromkeys(unsure)))


def _text_of(part: Part) -> str:
    return part.text


def _is_step(parts: Sequence[Part], place: int) -> bool:
    """Whether a part is an intermediate result: 5 + 8 = 13, or x = 5 if x has no second value."""
    after = parts[place + 1] if place + 1 < len(parts) else None
    is_equated = after is not None and after.joint == "equals"
    if parts[place].joint != "equals" or not place:
        return False
    if is_equated and amount_of(clean(parts[place].text)) is not None:
        return False  # 13 = 14
    name, *later = (part.text.strip(" $") for part in (parts[place - 1], *parts[place + 1 :]))
    if len(name) < 3 and re.match(r"\w\s*=", later[-1]) and name not in " ".join(later):
        return False  # A = 13; B = 14
    return not any(re.match(rf"{re.escape(name)}\s*(?:=|$)", text) for text in later)


def _differs(part: Part, after: Part | None) -> bool:
    """Whether a sum is equated with a number other than its value: 5 + 8 = 14."""
    if after is None or after.joint != "equals":
        return False
    value, amount = value_of(part.text), amount_of(clean(after.text))
    return value is not None and amount is not None and amount.value not in (value, 100 * value)


def _adds_up(found: Sequence[str], amount: Quantity) -> bool:
    """Whether several numbers are the parts of the answer: 13 (5 red, 8 green)."""
    others = [quantity(clean(text)) for text in found]
    if len(others) < 2 or None in others:
        return False
    return sum(one.value for one in others if one is not None) == amount.value
