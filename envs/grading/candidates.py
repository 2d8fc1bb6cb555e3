"""One answer: the candidates that a text names, beside the gold.

An answer that names two different candidates is two guesses, whatever joins them: a part that is
not the gold and neither restates nor describes it, or a name or an amount anywhere that no fact of
grammar explains.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import zip_longest

from msgspec import Struct
from msgspec.structs import replace

from agentenv.envs.grading import dates, forms
from agentenv.envs.grading.forms import truth, without_name
from agentenv.envs.grading.gold import Gold, meets
from agentenv.envs.grading.mentions import ANAPHOR, is_same, restates, unexplained
from agentenv.envs.grading.names import STATES
from agentenv.envs.grading.parts import (
    ANSWERING,
    ARTICLE,
    ASIDES,
    BETWEEN,
    FORMULA,
    FUNCTION_WORDS,
    LABELS,
    OPENING,
    Part,
    amount_of,
    is_expression,
    is_framed,
    is_named,
    is_nationality,
    is_note,
    is_of_place,
    is_range,
    is_role,
    value_of,
)
from agentenv.envs.grading.quantities import Quantity, unit_of
from agentenv.envs.grading.sentences import has_verb, is_denied, is_hedged, is_statement
from agentenv.envs.grading.text import Tables, clean
from agentenv.envs.grading.whole import parts_of
from agentenv.envs.grading.words import has_cjk, is_wordy, tokens

# Decoration: text around an answer that cannot be one, removed before any layer reads it.
#
# Wrappers, a stated confidence, numbers of pages and steps, footnotes, lead-ins, and clauses of
# plain words, which name nothing. A kind of decoration is kept if it contains the gold, so that an
# answer is never right for removed text: "page 12" keeps its number for the gold 12.

_DECORATION = Tables("decoration")
_KINDS = {
    name: _DECORATION.rewrites(name)
    for name in ("wrapper", "table", "confidence", "step", "reference", "lead")
}
_THING = re.compile(rf"\b{_DECORATION.text('thing')}(?!\w)", re.IGNORECASE)
_NAMING = _DECORATION.pattern("naming", re.IGNORECASE)
_AMOUNT = _DECORATION.pattern("amount", re.IGNORECASE)
_PLAIN = _DECORATION.pattern("plain")
_OPENING = _DECORATION.pattern("opening")
_SINGLE = re.compile(r"\b(?![aiI]\b)[A-Za-z]\b(?<!'[stdm])")
_PIECE = re.compile(r"((?:[.!?;:,\n]+[\"'\u201d\u2019)]*(?=\s|$)|\n)\s*|$)")
_TAG = re.compile(r"<([A-Za-z][A-Za-z0-9]*)>")
_ATTRIBUTES = re.compile(r"<([A-Za-z]\w*)((?:\s+[\w-]+\s*=\s*(?:\"[^\"<>]*\"|'[^'<>]*'))+)\s*/?>")
_ATTRIBUTE = re.compile(r"([\w-]+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)')")
_STYLE = {"class", "style", "id", "href", "color", "type", "lang", "align", "size", "face", "src"}
_VOID = {"br", "hr", "p", "li", "td", "tr", "th", "item"}
_MARK = re.compile(r"(?m)(?:^|;)\s*(\[\d{1,2}\]|[\u00b9\u00b2\u00b3\u2070-\u2079]|\u2020)\s*(.+)$")
_CITATION = _DECORATION.pattern("citation", re.IGNORECASE)
_RUN = re.compile(r"(\s)\1{3,}")
MIN_WORDS = 3  # of a clause; fewer may be a name


def without_decoration(gold: Gold, answer: str) -> str:
    """The answer without its decoration, or unchanged if nothing would remain."""
    holds = _holder(gold.forms)
    text = _RUN.sub(r"\1\1\1", answer)  # the forms below try each space of a run
    text = _with_notes(_with_tags(text), holds)
    for name, of_kind in _KINDS.items():
        if name == "reference" and any(map(_THING.search, gold.forms)):
            continue  # Article 5 for Article Five
        text = _without(text, of_kind, holds, keeps=name in ("wrapper", "table", "lead"))
    is_named = gold.is_named if gold.kind == "words" else gold.kind not in ("list", "special")
    if is_named:  # a name, an amount or a date, which no clause of plain words can be
        text = _without_clauses(text, holds)
    return text if re.search(r"\w", text) else answer


def _holder(golds: Sequence[str]) -> Callable[[str], bool]:
    """A test whether a text contains one of the golds as whole words."""
    either = "|".join(re.escape(gold.strip()) for gold in golds if gold.strip())
    form = re.compile(rf"(?<!\w)(?:{either})(?!\w)" if either else "(?!)", re.IGNORECASE)
    return lambda text: form.search(text) is not None


def _without(
    text: str,
    forms: Sequence[tuple[re.Pattern[str], str]],
    holds: Callable[[str], bool],
    *,
    keeps: bool,
) -> str:
    """The text without the decoration of one kind, if no gold is lost with it; a kind that `keeps`
    removes neither numbers nor names."""
    before = text
    for form, plain in forms:
        if not keeps and any(holds(match[0]) for match in form.finditer(text)):
            return before
        text = form.sub(plain, text)
    return text


def _with_tags(text: str) -> str:
    """Unclosed tags and the values of attributes as notes: 5 <6>, <answer alt="6">."""

    def attributes_as_notes(match: re.Match[str]) -> str:
        values = [
            one[1] or one[2] for one in _ATTRIBUTE.findall(match[2]) if one[0].lower() not in _STYLE
        ]
        return f"<{match[1]}>" + "".join(f"({one}) " for one in values)

    def tag_as_note(match: re.Match[str]) -> str:
        is_tag = match[1].lower() in _VOID or f"</{match[1]}>" in text
        return match[0] if is_tag else f"({match[1]})"

    if "<" not in text:
        return text
    text = _ATTRIBUTES.sub(attributes_as_notes, text)
    return _TAG.sub(tag_as_note, text)


def _with_notes(text: str, holds: Callable[[str], bool]) -> str:
    """The text without marks of footnotes; a note that cites a source is removed as well."""
    for note in _MARK.finditer(text):
        if text.count(note[1], 0, note.start()) != 1:
            continue
        is_source = _CITATION.search(note[2]) and not _NAMING.search(note[2]) and not holds(note[2])
        text = text.replace(note[0], "" if is_source else f"\n{note[2]}")
        text = text.replace(note[1], "", 1)
    return text


def _without_clauses(text: str, holds: Callable[[str], bool]) -> str:
    """The text without clauses of plain words."""
    pieces = _PIECE.split(text)
    kept: list[str] = []
    is_before = True
    for place in range(0, len(pieces) - 1, 2):
        piece, end = pieces[place], pieces[place + 1]
        is_gold = holds(piece)
        is_before = is_before and not is_gold
        starts = not kept or re.search(r"[.!?\n:,;]\s*$", kept[-1]) is not None
        is_last = not "".join(pieces[place + 2 :]).strip()
        is_plain = starts and not is_gold and not (is_before and is_last)
        if not (is_plain and _is_clause(piece, end, is_before=is_before)):
            kept.append(piece + end)
    return "".join(kept)


def _is_count(noun: str | None) -> bool:
    """Whether a number word counts things: two encyclopedias, not three years."""
    return noun is not None and unit_of(noun) is None


def _is_clause(piece: str, end: str, *, is_before: bool) -> bool:
    """Whether a piece of a text is a plain clause that names, doubts and denies nothing."""
    bare = piece.strip(" \"'\u201c\u201d()")
    if not bare or _NAMING.search(bare) or _SINGLE.search(bare):
        return False
    amounts = [*_AMOUNT.finditer(bare)]
    if amounts and not (is_before and all(_is_count(one["noun"]) for one in amounts)):
        return False
    if is_denied(bare) or "?" in end or _PLAIN.fullmatch(bare) is None:
        return False
    opener = re.split(r"[\W_]", bare.casefold())[0]
    if opener not in ANSWERING | FUNCTION_WORDS and not _OPENING.match(bare):
        return False
    return len(bare.split()) >= MIN_WORDS or "!" in end


_TABLES = Tables("candidates")


class Rivals(Struct, frozen=True):
    """Candidates that are not the gold: those that the rules decide, and expressions that only
    mathematics can compare with it."""

    certain: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()


_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])")
_LABEL = re.compile(r"^\W*[A-Ja-j](?:\W+|$)")
_DOUBT = _TABLES.pattern("doubt", re.I)


def is_named_in(gold: Gold, text: str) -> bool:
    """Whether a text without rivals names the gold in a part of its own, without a doubt."""
    parts = parts_of(gold, text)
    if gold.kind in ("choice", "truth", "math") or not parts:
        return False
    if gold.kind == "number" and not all(part.meets or _is_explanation(part) for part in parts):
        return False  # a formula, which mathematics compares
    if gold.kind == "number" and BETWEEN.match(text):
        return False
    if all(part.meets for part in parts):
        return _DOUBT.search(text) is None
    if is_hedged(text):
        return False
    return any(part.meets for part in parts) and not any(_changes(gold, part) for part in parts)


def is_framed_in(gold: Gold, text: str) -> bool:
    """Whether there are only words of answering around the gold."""
    return is_framed(text, gold.forms, is_word=gold.kind in ("truth", "choice"))


def _is_explanation(part: Part) -> bool:
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
    if any(part.meets and " " in part.text and is_named(part.text) for part in parts):
        gold = replace(gold, is_named=gold.is_named or gold.kind == "words")
    met = [amount_of(clean(part.text)) for part in parts if part.meets]
    amounts = [amount for amount in (gold.amount, *met) if amount is not None]
    if _adds_up(gold, text):
        return Rivals()
    others = unexplained(gold, text, parts, amounts)
    if others or (len(parts) < 2 and gold.kind != "date"):
        return Rivals(tuple(others))
    if gold.kind == "math":
        return _other_expressions(parts)
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
        if not (is_aside or part.meets or _is_used(part, parts)) and is_rival(
            gold, part, after, amounts
        ):
            found.append(part.text)
    return Rivals(tuple(dict.fromkeys(found)))


def _adds_up(gold: Gold, text: str) -> bool:
    """Whether the numbers beside the gold are its parts: 13 (5 red, 8 green)."""
    if gold.kind != "number" or gold.amount is None or is_hedged(text):
        return False
    numbers = [Fraction(one.replace(",", "")) for one in _NUMBER.findall(text)]
    is_split_up = len(numbers) > 2 and numbers[0] == gold.amount.value == sum(numbers[1:])
    return is_split_up and re.search(r"[(]|\bwhich\b", text) is not None and "/" not in text


def _is_used(part: Part, parts: Sequence[Part]) -> bool:
    """Whether a part calculates a number, or is one, from which the gold is calculated later."""
    number = str(value_of(part.text))
    used = [_NUMBER.findall(one.text) for one in parts if one.meets]
    return any(len(numbers) > 1 and number in numbers for numbers in used)


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


def _other_expressions(parts: Sequence[Part]) -> Rivals:
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


MAX_HAN = 20  # characters of a name
_COMPARED = re.compile(r"(?:\w+er|(?:more|less) \w+) than\b")
_HAN_CLAUSE = re.compile("[\u7684\u662f\u5728\u4e86\u4e3a\u4e8e\u6709\u88ab\u56e0\u6240]")
_REMARK = re.compile(rf"{ANAPHOR.pattern}|^\w+ed (?:in|on|at|by|as|from|for|to)\b", re.IGNORECASE)
_DENIED = _TABLES.pattern("denied", re.IGNORECASE)
_BOUND = re.compile(r"(?:between|from)\b.*\d\D+\d", re.IGNORECASE)
NUMBERS = re.compile(r"[-+$\u20ac\u00a3]?\d[\d.,/]*%?(?:\s+[-+$\u20ac\u00a3]?\d[\d.,/]*%?)+")


def is_rival(gold: Gold, part: Part, after: Part | None, amounts: Sequence[Quantity]) -> bool:
    """Whether a part names a candidate other than the gold, which is one of `amounts`: all do that
    neither restate nor describe it."""
    bare = clean(part.text)
    if not bare or _DENIED.match(bare) or restates(gold, bare, part.joint):
        return False
    if gold.kind not in ("words", "list") and _BOUND.match(bare) and not part.starts:
        return False
    if _is_label(gold, part, bare, after):
        return False
    is_phrase = gold.kind == "words" and not gold.is_named and is_statement(gold.text)
    is_remark = part.joint == "" and gold.is_named and _REMARK.search(bare) is not None
    has_phrases = gold.kind in ("words", "list") and not gold.is_named
    is_clause = is_statement(bare) if has_phrases else has_verb(bare) or is_remark
    if is_clause and not (is_phrase or is_named(bare)):
        return False  # a sentence about the answer
    if any(meets(one, part.text) for one in gold.elements) or is_same(gold, bare, amounts):
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
    is_kind = words[-1] in LABELS and not is_named(bare) and (gold.is_named or gold.kind != "words")
    return (leads or part.is_first) and (label in LABELS or is_kind)


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
