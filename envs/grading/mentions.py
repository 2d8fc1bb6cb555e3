"""Mentions: texts of the shape of the gold anywhere in an answer, some explained by grammar."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

from agentenv.envs.grading import dates
from agentenv.envs.grading.forms import truth, without_name
from agentenv.envs.grading.gold import Gold, meets
from agentenv.envs.grading.names import without_class
from agentenv.envs.grading.parts import (
    ASIDES,
    EDGE,
    FRAME,
    FUNCTION_WORDS,
    LABELS,
    MASK,
    OPENING,
    Part,
    amount_of,
    is_conversion,
    is_nationality,
    is_note,
    is_number,
    is_of_place,
    is_role,
    masked,
)
from agentenv.envs.grading.quantities import Quantity, quantity, same_quantity, unit_of
from agentenv.envs.grading.sentences import has_verb
from agentenv.envs.grading.text import Joint, Tables, clean
from agentenv.envs.grading.words import has_cjk

_TABLES = Tables("candidates")
_RETRACTED = _TABLES.pattern("retracted", re.IGNORECASE)
_GOVERNED = _TABLES.pattern("governed", re.IGNORECASE)
_INVERTED = _TABLES.pattern("inverted", re.IGNORECASE)
_AS_IS = re.compile(r"\bas (?:is|was|are)\W*$", re.IGNORECASE)
_CONCLUDED = _TABLES.pattern("concluded", re.IGNORECASE)
_BESIDE = re.compile(rf"\s+(?:\w+\s+)?(?:and|or|to)\s+{MASK}")
_HENCE = re.compile(rf"\s+(?:hence|thus)\s+{MASK}")
_SET = re.compile(r"\b(?:all|the|these|both|his|her|their|its)\s+$", re.IGNORECASE)
_CALCULATED = _TABLES.pattern("calculated", re.IGNORECASE)
ANAPHOR = _TABLES.pattern("anaphor", re.IGNORECASE)
_ARTICLE = re.compile(r"\W*(?:the|an?)\s+", re.IGNORECASE)
_OPERAND = _TABLES.pattern("operand"), _TABLES.pattern("operator")
_CLAUSE = _TABLES.pattern("clause", re.IGNORECASE)
_INSIDE = re.compile(r"of|the|and|for|la|le|v[ao]n|der|d[aei]l?|al")  # a name
_STARTS = re.compile(r"(?:^|[.!?:;\n\"'(*#>|])\s*$")
_ENDS = re.compile(r"[.,;:!?)\]\"'}]$")
_INITIAL = re.compile(r"(?:\b[A-Z]|\b[JSDM]rs?|\bSt)\.$")
_MONTH = re.compile(dates.MONTH, re.IGNORECASE)
_YEAR = re.compile(r"1\d{3}|20\d{2}")
_TOKEN = _TABLES.pattern("token")
_TRUTH = _TABLES.pattern("truth", re.IGNORECASE)
_JOINTS: dict[str, Joint] = {"(": "bracket", ",": "comma", "-": "dash", ":": "colon"}
MAX_WORDS_OF_AMOUNT = 5
_COMMON = FRAME | LABELS | ASIDES | FUNCTION_WORDS


class Mention(Struct, frozen=True):
    """A text, and the texts before and after it with a mask for the gold."""

    text: str
    before: str
    after: str

    @property
    def clause(self) -> tuple[str, str]:
        """The clause without the mention: before and after it."""
        return _CLAUSE.split(self.before)[-1], _CLAUSE.split(self.after)[0]

    @property
    def next_word(self) -> str:
        """The word that follows directly."""
        match = re.match(r"\s+([a-z]+)\b", self.after)
        return match[1] if match is not None else ""


def unexplained(
    gold: Gold, text: str, parts: Sequence[Part], amounts: Sequence[Quantity]
) -> list[str]:
    """The mentions in a text of these parts, which names the gold as one of `amounts`, that nothing
    explains."""
    if gold.kind == "truth":
        truths = {truth(word) for word in _TRUTH.findall(text)}
        return [text] if truths - {None, truth(gold.text)} else []
    is_name = gold.kind == "words" and gold.is_named
    if not is_name and gold.kind not in ("number", "date", "time"):
        return []
    met = [part.text for part in parts if part.meets]
    bare = [one if one in text else whole for whole in met for one in [clean(whole)]]
    bare = [one for one in bare if not is_name or f"{gold.text}, " not in one]
    hidden = masked(text, (*gold.forms, *bare)) if is_name or len(met) < len(parts) else ""
    found, start = [], 0
    for one in _mentions(hidden, is_name):
        start = max(start, _end_of_same(gold, one, amounts))
        if len(one.before) >= start and not _is_explained(gold, one):
            found.append(one.text)
    return found


def _end_of_same(gold: Gold, mention: Mention, amounts: Sequence[Quantity]) -> int:
    """The end of a mention that is the gold, a part of it, the same amount in another unit, or
    of another kind; 0 for another value."""
    bare, end = clean(mention.text), len(mention.before) + len(mention.text)
    if not bare or meets(gold, bare) or restates(gold, bare, ""):
        return end
    if gold.kind in ("date", "time"):
        words = bare.split()
        tails = [" ".join(words[count:]) for count in range(len(words))]
        return 0 if any(_is_time(tail) and not is_same(gold, tail) for tail in tails) else end
    words = mention.after.split(None, MAX_WORDS_OF_AMOUNT)[:MAX_WORDS_OF_AMOUNT]
    for count in range(len(words), -1, -1) if gold.kind == "number" else ():
        whole = clean(" ".join([mention.text, *words[:count]]).rstrip(EDGE))
        if is_same(gold, whole, amounts):
            return end + len(" ".join(words[:count]))
    return 0


def _is_time(text: str) -> bool:
    is_when = dates.dates(text) or dates.minutes(text) is not None
    return bool(is_when) or _YEAR.fullmatch(text) is not None


def is_same(gold: Gold, bare: str, amounts: Sequence[Quantity] = ()) -> bool:
    """Whether a text is the gold, more or less complete, or one of `amounts` in another unit."""
    when = dates.dates(bare)
    if gold.kind in ("date", "time", "span"):
        if gold.kind == "time" and dates.minutes(bare) is not None:
            return dates.minutes(bare) == dates.minutes(gold.text)
        mine, year = dates.dates(gold.text), quantity(bare)
        is_year = year is not None and any(date[0] == year.value for date in mine)
        return is_year or any(_compatible(one, other) for one in when for other in mine)
    if gold.amount is None or when:
        return gold.amount is not None and bool({date[0] for date in when} & {0, gold.amount.value})
    amount = amount_of(without_class(without_name(bare)))
    return amount is not None and any(
        same_quantity(amount, one) or is_conversion(amount, one, bare) for one in amounts
    )


def _is_explained(gold: Gold, mention: Mention) -> bool:
    """Whether grammar explains a mention as no answer."""
    before, _ = mention.clause
    if _RETRACTED.search(f"{mention.before[-80:]}@{mention.after[:30]}"):
        return True
    if _HENCE.match(mention.after) or _INVERTED.search(mention.after) or _AS_IS.search(before):
        return False
    if _CONCLUDED.search(mention.after) and not _CONCLUDED.search(mention.before[-40:] + MASK):
        return True  # we have 3 rows, so the answer is
    if _BESIDE.match(mention.after):
        return False  # between 90 and the gold
    if _is_about_gold(gold, mention):
        return True
    is_governed = _GOVERNED.search(before) is not None
    if gold.kind == "words":
        return is_governed or _is_described(gold, mention)
    if (
        _CALCULATED.search(mention.before)
        or _OPERAND[0].search(mention.before)
        or _OPERAND[1].match(mention.after)
    ):
        return True
    is_counted = _is_noun(mention.next_word)
    is_year = _YEAR.fullmatch(mention.text) is not None
    is_of_a_set = _SET.search(before) is not None and gold.kind == "number"
    return (is_counted and (is_governed or is_year or is_of_a_set)) or (is_governed and is_year)


def _is_described(gold: Gold, mention: Mention) -> bool:
    """Whether a name is a place, a role or an adjective of the gold, or part of a phrase."""
    bare, before = clean(mention.text), mention.before.rstrip()
    part = Part(bare, _JOINTS.get(before[-1:], ""))
    if is_of_place(bare, gold.rank, part) or is_role(bare) or is_note(bare, part):
        return True
    if before.endswith(MASK) or mention.after.lstrip().startswith(MASK):
        return not _STARTS.search(before)
    word = mention.next_word
    is_a_kind = _is_noun(word) and _ARTICLE.fullmatch(mention.clause[0]) is not None
    return is_a_kind or (bool(word) and (is_nationality(bare) or is_note(f"{bare} {word}", part)))


def _is_about_gold(gold: Gold, mention: Mention) -> bool:
    """Whether the clause is a statement about the gold or a pronoun: it hosts the Louvre; not
    "it is", which would name it."""
    before, after = mention.clause
    rest = f"{before} @ {after}"
    words = re.sub(r"\b(?:the|an?)\s*$", "", before).split()
    is_subject = mention.next_word not in FRAME and has_verb(f"N {mention.next_word} N")
    if not is_subject and words and words[-1].strip(EDGE).casefold() in FRAME - {"because"}:
        return False
    if MASK in rest:
        between = rest.partition(MASK)[2] if rest.find(MASK) < rest.find("@") else after
        return has_verb(f"N {between.partition(MASK)[0].partition('@')[0]} N")
    return ANAPHOR.search(rest) is not None and (gold.kind == "words" or has_verb(rest))


def _is_noun(word: str) -> bool:
    """Whether a word may be the noun that a number counts."""
    return bool(word) and word not in FRAME and not OPENING.match(word) and unit_of(word) is None


def _mentions(text: str, is_name: bool) -> Iterator[Mention]:
    """Runs of capitalized words, or of numbers and months, without words of the frame at the
    beginning of a sentence."""
    found = [*_TOKEN.finditer(text)]
    is_one = _is_capital if is_name else _is_numeric
    place = 0
    while place < len(found):
        start = end = place
        place += 1
        if not is_one(found[start][0], ""):
            continue
        while True:
            after = end + 1
            if _ENDS.search(found[end][0]) and not _INITIAL.search(found[end][0]):
                is_day = found[end][0].endswith(",") and not is_name and after < len(found)
                if not (is_day and _YEAR.match(found[after][0])):
                    break
            while is_name and after < len(found) and _INSIDE.fullmatch(found[after][0]):
                after += 1
            if after == len(found) or not is_one(found[after][0], found[end][0]):
                break
            if text[found[after - 1].end() : found[after].start()].strip():
                break
            end = after
        first, last = found[start], found[end]
        inner = text[first.start() : last.end()]
        place = end + 1
        bare = inner.strip(EDGE)
        begin = first.start() + inner.find(bare)
        while is_name and _STARTS.search(text[:begin]):
            word, _, rest = bare.partition(" ")
            known = FRAME | FUNCTION_WORDS if rest else _COMMON
            if not word or not (word.casefold() in known or OPENING.fullmatch(word)):
                break
            begin, bare = begin + len(word) + 1, bare[len(word) + 1 :]
        if len(bare) > 1 or (bare and not is_name):
            yield Mention(bare, text[:begin], text[begin + len(bare) :])


def _is_capital(token: str, _: str) -> bool:
    word = token.strip(EDGE)
    return word[:1].isupper() and word != "I" and not _MONTH.fullmatch(word)


def _is_numeric(token: str, before: str) -> bool:
    """Whether a token is a number, a month, or the am or pm that follows an hour."""
    word = token.strip(EDGE).lstrip("-+$\u20ac\u00a3\\")
    if word.lower() in ("am", "pm", "one"):
        return bool(before) and word.lower() != "one"
    return (
        word[:1].isdigit()
        or is_number(word)
        or (
            (word[:1].isupper() and _MONTH.fullmatch(word) is not None)
            or re.match(r"d?frac\W*\d", word) is not None
        )
    )


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


def _compatible(one: dates.Date, other: dates.Date) -> bool:
    """Whether one date may be the other, more or less complete."""
    return all(a == b or not a or not b for a, b in zip(one, other, strict=True))
