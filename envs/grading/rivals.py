"""Parts of an answer besides the gold: another candidate, or a remark on it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentenv.envs.grading import dates
from agentenv.envs.grading.forms import special, truth, without_name
from agentenv.envs.grading.gold import Gold, meets
from agentenv.envs.grading.names import without_class
from agentenv.envs.grading.parts import (
    ARTICLE,
    ASIDES,
    FORMULA,
    FUNCTION_WORDS,
    HEADS,
    LABELS,
    OPENING,
    Part,
    amount_of,
    is_conversion,
    is_named,
    is_nationality,
    is_note,
    is_of_place,
    is_range,
    is_role,
    value_of,
)
from agentenv.envs.grading.quantities import Quantity, quantity, same_quantity
from agentenv.envs.grading.sentences import has_verb, is_statement
from agentenv.envs.grading.text import Joint, Tables, clean
from agentenv.envs.grading.words import has_cjk, is_wordy, tokens

_TABLES = Tables("candidates")

MAX_PHRASE_WORDS = 4
MAX_HAN = 20  # characters of a name
_HAN_CLAUSE = re.compile("[\u7684\u662f\u5728\u4e86\u4e3a\u4e8e\u6709\u88ab\u56e0\u6240]")
_DENIED = _TABLES.pattern("denied", re.IGNORECASE)
_BOUND = re.compile(r"(?:between|from)\b.*\d", re.IGNORECASE)
NUMBERS = re.compile(r"[-+$\u20ac\u00a3]?\d[\d.,/]*%?(?:\s+[-+$\u20ac\u00a3]?\d[\d.,/]*%?)+")
_COMPARED = re.compile(r"(?:\w+er|(?:more|less) \w+) than\b")
_BE = re.compile(r"\s(?:is|are|was|were)\s")


def is_rival(
    gold: Gold, part: Part, after: Part | None = None, nearby: Sequence[Quantity] = ()
) -> bool:
    """Whether a part names a candidate other than the gold and the amounts `nearby` that are
    the gold."""
    bare = clean(part.text)
    if not bare or _DENIED.match(bare) or restates(gold, bare, part.joint):
        return False
    if _is_label(gold, part, bare, after) or _is_statement(gold, part, bare):
        return False
    if part.joint in ("or", "alias", "list") and _is_alternative(gold, part, bare):
        return True
    match gold.kind:
        case "number":
            return _other_amount(gold, part, bare, nearby) or _of_another_kind(gold, part, bare)
        case "date" | "time" | "span":
            return _other_time(gold, part, bare) or _of_another_kind(gold, part, bare)
        case "special":
            return bool(special(bare)) or _of_another_kind(gold, part, bare)
        case "truth" | "math":
            return _of_another_kind(gold, part, bare)
        case "list":
            if any(meets(one, part.text) for one in gold.elements):
                return False
            if any(is_rival(one, part, after) for one in gold.elements[:3]):
                return True
            return is_wordy(gold.text) and _other_words(gold, part, bare)
        case _:
            return _other_words(gold, part, bare)


def _is_statement(gold: Gold, part: Part, bare: str) -> bool:
    """Whether a part is a sentence about the answer; a gold that is a sentence has sentences as
    rivals."""
    if is_named(bare) or (gold.kind == "words" and not gold.is_named and is_statement(gold.text)):
        return False
    is_attached = part.joint in ("comma", "dash", "bracket", "colon")
    if not (gold.is_named and part.joint in ("", "comma", "dash")) and is_named(
        _BE.sub(" of ", bare)
    ):
        return False  # a title: The King is the Best Mayor
    if gold.kind in ("words", "list") and not gold.is_named:
        return is_statement(bare)
    return is_statement(bare) or (has_verb(bare) and (is_attached or gold.kind == "truth"))


def _is_label(gold: Gold, part: Part, bare: str, after: Part | None) -> bool:
    """Whether a part labels the answer: Answer:, the capital -."""
    words = tokens(bare)
    if not words or (len(words) == 1 and len(bare) < 2 and not bare.isdigit()):
        return True
    if words[-1] in ("is", "are", "was", "were"):
        return True  # the technique is
    label = re.sub(r"\s+(?:\d+|[a-z])$", "", bare.lower())
    leads = after is not None and after.joint in ("colon", "dash", "equals")
    return (leads or part.is_first) and (
        label in LABELS or (words[-1] in LABELS and not is_named(bare))
    )


def _is_alternative(gold: Gold, part: Part, bare: str) -> bool:
    """Whether an alternative, or another name, is a phrase: it describes nothing beside it."""
    if part.joint == "alias" and part.is_first and ARTICLE.match(bare):
        return False  # the river, called the Seine
    if _BOUND.match(bare):
        return False  # a range, or an end of one: between 1970 and 1972
    is_amount = amount_of(bare) is not None or value_of(bare) is not None
    if gold.kind in ("choice", "truth", "math") or (gold.kind == "number" and is_amount):
        return False
    words = tokens(bare)
    is_label = part.text.endswith(":") or (
        gold.is_named and len(words) == 1 and words[0] in LABELS | ASIDES
    )
    if not words or len(bare) < 2 or is_label:
        return False
    if not is_wordy(bare) and not is_wordy(gold.text):
        return False
    return not (gold.kind in ("date", "time", "span") and is_same_time(gold, bare))


def is_same_time(gold: Gold, bare: str) -> bool:
    mine = dates.dates(gold.text)
    return any(_compatible(one, other) for one in dates.dates(bare) for other in mine)


def restates(gold: Gold, bare: str, joint: Joint) -> bool:
    """Whether a part is a part of the gold, its Chinese name or its short form."""
    if any(one.text == bare or meets(one, bare) for one in gold.own):
        return True
    if has_cjk(gold.text) != has_cjk(bare):
        return (
            joint == "bracket"
            and gold.kind == "words"
            and any(map(str.isalpha, bare))
            and quantity(bare) is None
        )
    if not has_cjk(bare) or len(bare) < 2:
        return False
    rest = iter(gold.text)
    return all(sign in rest for sign in bare)


def _of_another_kind(gold: Gold, part: Part, bare: str) -> bool:
    """Whether a part is a bare name or number, alone like an answer."""
    kept = ("bracket",) if gold.kind == "number" else ("bracket", "dash", "colon", "comma")
    if (
        part.joint in kept
        or part.led
        or (not part.starts and (part.is_first or not is_named(bare)))
    ):
        return False
    if gold.kind in ("truth", "special") and quantity(bare) is not None:
        return True
    if truth(bare) is not None:
        return gold.kind != "truth"
    if _describes(gold, part, bare):
        return False
    return is_named(bare) or (
        gold.kind != "truth" and is_wordy(bare) and 1 < len(bare.split()) <= 2 * MAX_PHRASE_WORDS
    )


def _other_amount(gold: Gold, part: Part, bare: str, nearby: Sequence[Quantity]) -> bool:
    assert gold.amount is not None
    if NUMBERS.fullmatch(bare) and quantity(bare) is None:
        return True
    amount = amount_of(without_class(without_name(bare)))
    if amount is None:
        years = {date[0] for date in dates.dates(bare) if date[0]}
        return bool(years) and part.starts and gold.amount.value not in years
    if amount.dimension == (("ordinal", 1),) and not re.search(r"\d|\s", bare):
        is_ordinal = gold.amount.dimension == amount.dimension
        return (is_ordinal or part.joint not in ("comma", "colon")) and not same_quantity(
            amount, gold.amount
        )
    known = [gold.amount, *nearby]
    if any(same_quantity(amount, one) or is_conversion(amount, one, bare) for one in known):
        return False
    return not (part.joint == "bracket" and _is_money(amount) and _is_money(gold.amount))


def _other_time(gold: Gold, part: Part, bare: str) -> bool:
    if gold.kind == "time":
        other = dates.minutes(bare)
        return other is not None and other != dates.minutes(gold.text)
    mine, found = dates.dates(gold.text), dates.dates(bare)
    if found and mine:
        return not any(_compatible(one, other) for one in found for other in mine)
    amount = quantity(bare)
    if gold.kind == "span":
        return bool(found) or is_range(bare) or (amount is not None and (part.joint != "bracket"))
    if amount is None or amount.has_unit:
        return is_range(bare) and part.starts
    return not any(date[0] == amount.value for date in mine) and not part.led


def _other_words(gold: Gold, part: Part, bare: str) -> bool:
    """Another name or phrase, unless it describes the gold."""
    if is_of_place(bare, gold.rank, part):
        return False
    if has_cjk(bare):
        return len(bare) <= MAX_HAN and _HAN_CLAUSE.search(bare) is None
    if _describes(gold, part, bare):
        return False
    if amount_of(bare) is not None or dates.dates(bare) or is_range(bare):
        if part.joint == "comma" and re.fullmatch(r"\d{1,3}|[A-Za-z]+", bare):
            return True
        return part.starts
    if truth(bare) is not None:
        return part.starts
    return any(map(str.isalpha, bare))


def _describes(gold: Gold, part: Part, bare: str) -> bool:
    """Whether a part attached to a name describes it; a phrase has no such parts."""
    words = tokens(bare)
    rest = ARTICLE.sub("", bare, count=1)
    is_short = len(words) < 3 and bare[:1].islower() and OPENING.match(bare)  # in plants
    if part.joint == "bracket" and (
        is_short or _COMPARED.match(bare) or (not gold.is_named and FORMULA.fullmatch(bare[:8]))
    ):
        return True  # water (H2O)
    is_attached = part.joint in ("bracket", "dash", "colon", "comma")
    if not gold.is_named or not (is_attached or part.led):
        return False
    if part.is_first:
        return rest != bare and rest[:1].islower()  # the chairman of the board, Frank Lowy
    is_abbreviation = bare[:2].isupper() and bare[:2].isalpha()  # IT products
    if OPENING.match(bare) and not (is_named(bare) and bare[:1].isupper()) | is_abbreviation:
        return True
    if words[0] in HEADS and len(words) > 1 and re.match(r"\w+ (?:of|for|to|in)\b", bare):
        return True
    if is_role(bare) and not is_role(gold.text):
        return True
    if is_named(rest):
        return not is_nationality(gold.text) and is_note(rest, part)
    if part.led:
        return True  # it is well known
    has_function = bool(set(bare.lower().split()) & FUNCTION_WORDS)
    return rest != bare or has_function or len(words) > MAX_PHRASE_WORDS or is_note(rest, part)


def _compatible(one: dates.Date, other: dates.Date) -> bool:
    """Whether one date may be the other, more or less complete."""
    return all(a == b or not a or not b for a, b in zip(one, other, strict=True))


def _is_money(amount: Quantity) -> bool:
    """Whether an amount is in a currency, whose exchange rate is unknown."""
    return any(name.startswith("money") for name, _ in amount.dimension)
