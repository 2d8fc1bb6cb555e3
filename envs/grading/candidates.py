"""One answer: the candidates that a text names, beside the gold.

An answer that names two different candidates is two guesses, whatever joins them: a part that is
not the gold and neither restates nor describes it, or a name or an amount anywhere that no fact of
grammar explains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from msgspec import Struct

from agentenv.envs.grading import dates, forms
from agentenv.envs.grading.decoration import undecorated
from agentenv.envs.grading.forms import truth, without_name
from agentenv.envs.grading.frame import FRAME, MASK, is_framed, masked
from agentenv.envs.grading.gold import Gold, meets
from agentenv.envs.grading.names import STATES, without_class
from agentenv.envs.grading.parts import (
    ARTICLE,
    ASIDES,
    BETWEEN,
    EDGE,
    FORMULA,
    FUNCTION_WORDS,
    LABELS,
    OPENING,
    Part,
    amount_of,
    is_conversion,
    is_expression,
    is_named,
    is_nationality,
    is_note,
    is_number,
    is_of_place,
    is_range,
    is_role,
    value_of,
)
from agentenv.envs.grading.quantities import Quantity, quantity, same_quantity, unit_of
from agentenv.envs.grading.sentences import has_verb, is_hedged, is_statement
from agentenv.envs.grading.text import Joint, Tables, clean
from agentenv.envs.grading.whole import parts_of
from agentenv.envs.grading.words import has_cjk, is_wordy, tokens

_TABLES = Tables("candidates")


class Rivals(Struct, frozen=True):
    """Candidates that are not the gold: those that the rules decide, and expressions that only
    mathematics can compare with it."""

    certain: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()


_LABEL = re.compile(r"^\W*[A-Ja-j](?:\W+|$)")
_DOUBT = _TABLES.pattern("doubt", re.I)


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
    if is_hedged(text):
        return False
    return any(part.meets for part in parts) and not any(_changes(gold, part) for part in parts)


def is_framed_in(gold: Gold, text: str) -> bool:
    """Whether there are only words of answering around the gold."""
    return is_framed(text, gold.forms, is_word=gold.kind in ("truth", "choice"))


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
    if gold.kind == "choice":
        return _other_letters(gold, text, parts)
    others = unexplained(gold, text, parts)
    if others:
        return Rivals(tuple(others))
    if len(parts) < 2 and gold.kind != "date":
        return Rivals()
    if gold.kind == "math":
        return _other_expressions(gold, text, parts)
    amounts = [amount_of(clean(part.text)) for part in parts if part.meets]
    nearby = [amount for amount in amounts if amount is not None]
    found: list[str] = []
    is_aside = False
    for part, after in zip_longest(parts, parts[1:]):
        words = tokens(part.text)
        is_label = len(words) == 1 or (after is not None and after.joint == "colon")
        is_aside = (is_aside and not part.starts) or (
            is_label and not part.meets and {*words[:1]} <= ASIDES and 0 < len(words) < 3
        )
        if gold.kind == "number" and _differs(part, after):
            found.append(part.text)
        if not (is_aside or part.meets) and is_rival(gold, part, after, nearby):
            found.append(part.text)
    return Rivals(tuple(dict.fromkeys(found)))


def _differs(part: Part, after: Part | None) -> bool:
    """Whether a sum is equated with a number other than its value: 5 + 8 = 14."""
    if after is None or after.joint != "equals":
        return False
    value, amount = value_of(part.text), amount_of(clean(after.text))
    return value is not None and amount is not None and amount.value not in (value, 100 * value)


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
        texts = [label[1] for label in map(forms.labeled, (part.text for part in parts)) if label]
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
    return Rivals(tuple(names), tuple(dict.fromkeys(unsure)))


# Parts beside the gold.


MAX_PHRASE_WORDS = 4
MAX_HAN = 20  # characters of a name
_COMPARED = re.compile(r"(?:\w+er|(?:more|less) \w+) than\b")
_HAN_CLAUSE = re.compile("[\u7684\u662f\u5728\u4e86\u4e3a\u4e8e\u6709\u88ab\u56e0\u6240]")
_DENIED = _TABLES.pattern("denied", re.IGNORECASE)
_BOUND = re.compile(r"(?:between|from)\b.*\d\D+\d", re.IGNORECASE)
NUMBERS = re.compile(r"[-+$\u20ac\u00a3]?\d[\d.,/]*%?(?:\s+[-+$\u20ac\u00a3]?\d[\d.,/]*%?)+")


def is_rival(
    gold: Gold, part: Part, after: Part | None = None, nearby: Sequence[Quantity] = ()
) -> bool:
    """Whether a part names a candidate other than the gold and the amounts `nearby` that are
    the gold: all do that neither restate nor describe it."""
    bare = clean(part.text)
    if not bare or _DENIED.match(bare) or restates(gold, bare, part.joint):
        return False
    if gold.kind not in ("words", "list") and _BOUND.match(bare) and not part.starts:
        return False
    if _is_label(gold, part, bare, after):
        return False
    is_phrase = gold.kind == "words" and not gold.is_named and is_statement(gold.text)
    has_phrases = gold.kind in ("words", "list") and not gold.is_named
    is_clause = is_statement(bare) or (not has_phrases and has_verb(bare))
    if is_clause and not (is_phrase or is_named(bare)):
        return False  # a sentence about the answer
    if any(meets(one, part.text) for one in gold.elements) or _is_same(gold, bare, nearby):
        return False
    return not _describes(gold, part, bare)


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


def _is_same(gold: Gold, bare: str, nearby: Sequence[Quantity]) -> bool:
    """Whether a part is the value of the gold in another unit, or more or less complete."""
    if gold.kind in ("date", "time", "span"):
        if gold.kind == "time" and dates.minutes(bare) is not None:
            return dates.minutes(bare) == dates.minutes(gold.text)
        year = quantity(bare)
        is_year = year is not None and any(date[0] == year.value for date in dates.dates(gold.text))
        return is_year or is_same_time(gold, bare)
    amount = amount_of(without_class(without_name(bare))) if gold.amount else None
    if gold.amount is None or amount is None:
        return gold.amount is not None and gold.amount.value in {
            date[0] for date in dates.dates(bare) if date[0]
        }
    return any(
        same_quantity(amount, one) or is_conversion(amount, one, bare)
        for one in (gold.amount, *nearby)
    )


def _describes(gold: Gold, part: Part, bare: str) -> bool:
    """Whether a part attached to a name or a value describes it; a phrase has no such parts."""
    words = tokens(bare)
    is_attached = part.joint in ("bracket", "dash", "colon", "comma") or part.led
    is_phrase = gold.kind in ("words", "list") and not gold.is_named
    if gold.kind == "list" and not is_wordy(gold.text):
        is_value = is_wordy(bare) or amount_of(bare) is not None
        return not (part.starts and is_value)  # mathematics compares elements
    if is_of_place(bare, gold.rank, part):
        return True
    amount, is_when = amount_of(bare), bool(dates.dates(bare)) or dates.minutes(bare) is not None
    is_value = is_when or is_range(bare) or NUMBERS.fullmatch(bare) is not None
    if gold.kind == "truth":
        return is_attached or truth(bare) is not None or not (amount or is_named(bare))
    if gold.kind == "number" and gold.amount is not None:
        if amount or NUMBERS.fullmatch(bare):
            return False
        if is_when or is_range(bare) or not is_wordy(bare):
            return not part.starts
    if gold.kind in ("date", "time", "span") and (amount or is_value):
        return is_attached and not is_value and amount is not None and amount.has_unit
    if part.joint in ("or", "alias", "list") and gold.kind != "math":
        return len(bare) < 2
    if amount or is_value or truth(bare) is not None:
        return is_attached and not re.fullmatch(r"\d{1,3}", bare)
    if gold.kind not in ("words", "list"):
        if is_attached and (part.led or part.joint == "bracket" or gold.kind != "number"):
            return True
        is_alone = part.starts or not part.is_first
        return not is_alone or not (
            is_named(bare) or (part.starts and is_wordy(bare) and 1 < len(words) < 9)
        )
    if has_cjk(bare):
        return len(bare) > MAX_HAN or _HAN_CLAUSE.search(bare) is not None
    if (
        part.joint == "bracket"
        and (
            (len(words) < 3 and bare[:1].islower() and OPENING.match(bare))  # in plants
            or _COMPARED.match(bare)
            or (is_phrase and FORMULA.fullmatch(bare[:8]))  # water (H2O)
        )
    ):
        return True
    if is_phrase or not is_attached:
        return False
    rest = ARTICLE.sub("", bare, count=1)
    if part.is_first:
        return rest != bare and rest[:1].islower()  # the chairman of the board, Frank Lowy
    is_abbreviation = bare[:2].isupper() and bare[:2].isalpha()  # IT products
    if OPENING.match(bare) and not (is_named(bare) and bare[:1].isupper()) | is_abbreviation:
        return True
    if is_role(bare) and not is_role(gold.text):
        return True
    if is_named(rest):
        return not is_nationality(gold.text) and is_note(rest, part)
    has_function = bool(set(bare.lower().split()) & FUNCTION_WORDS)
    return part.led or rest != bare or has_function or len(words) > 4 or is_note(rest, part)


def _compatible(one: dates.Date, other: dates.Date) -> bool:
    """Whether one date may be the other, more or less complete."""
    return all(a == b or not a or not b for a, b in zip(one, other, strict=True))


# Mentions: texts of the shape of the gold anywhere in an answer.

_RETRACTED = _TABLES.pattern("retracted", re.IGNORECASE)
_GOVERNED = _TABLES.pattern("governed", re.IGNORECASE)
_INVERTED = _TABLES.pattern("inverted", re.IGNORECASE)
_AS_IS = re.compile(r"\bas (?:is|was|are)\W*$", re.IGNORECASE)
_CONCLUDED = _TABLES.pattern("concluded", re.IGNORECASE)
_BESIDE = re.compile(rf"\s+(?:\w+\s+)?(?:and|or|to)\s+{MASK}")
_HENCE = re.compile(rf"\s+(?:hence|thus)\s+{MASK}")
_SET = re.compile(r"\b(?:all|the|these|both|his|her|their|its)\s+$", re.IGNORECASE)
_CALCULATED = _TABLES.pattern("calculated", re.IGNORECASE)
_ANAPHOR = _TABLES.pattern("anaphor", re.IGNORECASE)
_ARTICLE = re.compile(r"\W*(?:the|an?)\s+", re.IGNORECASE)
_OPERAND = _TABLES.pattern("operand"), _TABLES.pattern("operator")
_INSIDE_A_NAME = _TABLES.words("inside_a_name")
_CLAUSE = re.compile(
    r"[.;!?\n()\[\]\u2014\u2013:]|,\s|\b(?:and|or|but|while|whereas|though)\b", re.I
)
_STARTS = re.compile(r"(?:^|[.!?:;\n\"'(*#>|])\s*$")
_ENDS = re.compile(r"[.,;:!?)\]\"'}]$")
_INITIAL = re.compile(r"(?:\b[A-Z]|\b[JSDM]rs?|\bSt)\.$")
_MONTH = re.compile(dates.MONTH, re.IGNORECASE)
_YEAR = re.compile(r"1\d{3}|20\d{2}")
_TOKEN = _TABLES.pattern("token")
_TRUTH = re.compile(
    r"\b(?:yes|no(?! (?-i:[a-z]))|true|false)\b"
    r"|(?:^|(?<=[:)] )|(?<=\bi\. ))no\b(?! (?:doubt|question)\b)",
    re.IGNORECASE,
)
_JOINTS: dict[str, Joint] = {"(": "bracket", ",": "comma", "-": "dash", ":": "colon"}
MAX_WORDS_OF_AMOUNT = 5
_COMMON = FRAME | LABELS | ASIDES | FUNCTION_WORDS | _INSIDE_A_NAME


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


def unexplained(gold: Gold, text: str, parts: Sequence[Part]) -> list[str]:
    """The mentions in a text of these parts, which names the gold, that nothing explains."""
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
    same = [amount for amount in (gold.amount, *map(amount_of, map(clean, met))) if amount]
    found, start = [], 0
    for one in _mentions(hidden, is_name):
        end = _end_of_same(gold, one, same)
        start = max(start, end)
        if len(one.before) >= start and not _is_explained(gold, one):
            found.append(one.text)
    return found


def _end_of_same(gold: Gold, mention: Mention, same: list[Quantity]) -> int:
    """The end of a mention that is the gold, a part of it, the same amount in another unit, or
    of another kind; 0 for another value."""
    bare, end = clean(mention.text), len(mention.before) + len(mention.text)
    if not bare or meets(gold, bare) or restates(gold, bare, ""):
        return end
    when = dates.dates(bare)
    if gold.kind in ("date", "time"):
        words = bare.split()
        tails = [" ".join(words[count:]) for count in range(len(words))]
        return 0 if any(_is_another_time(gold, tail) for tail in tails) else end
    if gold.kind != "number":
        return 0  # a name
    if when:
        return end if {date[0] for date in when} & {0, same[0].value} else 0
    words = mention.after.split(None, MAX_WORDS_OF_AMOUNT)[:MAX_WORDS_OF_AMOUNT]
    for count in range(len(words), -1, -1):
        whole = clean(" ".join([mention.text, *words[:count]]).rstrip(EDGE))
        amount = amount_of(whole)
        if amount is not None and any(
            same_quantity(amount, one) or is_conversion(amount, one, whole) for one in same
        ):
            return end + len(" ".join(words[:count]))
    return 0


def _is_another_time(gold: Gold, text: str) -> bool:
    is_when = dates.dates(text) or dates.minutes(text) is not None or _YEAR.fullmatch(text)
    return bool(is_when) and not is_same_time(gold, text)


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
    return _ANAPHOR.search(rest) is not None and (gold.kind == "words" or has_verb(rest))


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
            while is_name and after < len(found) and found[after][0] in _INSIDE_A_NAME:
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
            if not word or word.casefold() not in (FRAME | _INSIDE_A_NAME if rest else _COMMON):
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
