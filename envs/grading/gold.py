"""A gold: its kind, read first and by strict grammars, and the parts of which it consists.

An answer is compared with the gold as that kind; nothing is right because it contains the gold.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Literal

from msgspec import Struct

from agentenv.base.errors import ForeignError
from agentenv.base.untrusted import decode_python
from agentenv.envs.grading import dates, forms
from agentenv.envs.grading.forms import Compare, several, special, truth, without_name
from agentenv.envs.grading.parts import amount_of, is_named, is_range, is_split, rank_of
from agentenv.envs.grading.quantities import Quantity
from agentenv.envs.grading.text import LEVELS, Tables, alternatives, clean, named_again, unify
from agentenv.envs.grading.words import is_wordy

# Identifiers: versions, addresses, scores, seasons, phone numbers, handles and words of code.
#
# An identifier has no value and no parts: it is equal to itself, up to case and the notation of its
# dashes. `10.0.0.1` is no product and `3-1` no difference.

_TABLES = Tables("identifiers")
_FORM = _TABLES.pattern("identifier")
_INSIDE = re.compile(rf"(?<![\w.#-])(?:{_FORM.pattern})(?![\w-]|\.\d)")
_DENIED = _TABLES.pattern("denied")
_PHONE = _TABLES.pattern("phone")
_SECTION = _TABLES.pattern("section")
_LABEL = _TABLES.pattern("label", re.IGNORECASE)
_WRAPPED = _TABLES.pattern("wrapped", re.DOTALL)
_FENCE = re.compile(r"```(?:[a-z]\w*)?\n(.*?)\n?```", re.DOTALL)
_MARKED = _TABLES.pattern("marked")
_PAIR = re.compile(r"(\d{1,3})\s?(?:[-:]| to )\s?(\d{1,3})")
_SEASON = re.compile(r"((?:1[5-9]|20)\d{2})[-/](?:(?:1[5-9]|20)(?=\d{2}))?(\d{2})")
MAX_CHARS = 120
MAX_LITERAL_CHARS = 500


def unfenced(text: str) -> str:
    """The code of a text that is one block of code."""
    fence = _FENCE.fullmatch(text.strip())
    return fence[1] if fence is not None and "```" not in fence[1] else text


def bare(text: str) -> str:
    """A text without quotes and dollars around it, and without a full stop."""
    text = unify(text).strip()
    for _ in range(3):
        match = _WRAPPED.fullmatch(text)
        if match is None:
            break
        text = next(group for group in match.groups() if group is not None).strip()
    return re.sub(r"(?<=\w)\.$", "", text)


def identifier(text: str) -> str:
    """The one form of a text that is an identifier, alone or with the name of its kind, as in
    version 2.1.0; "" for any other."""
    text = _LABEL.sub("", bare(text)) if len(text) <= MAX_CHARS else ""
    section = _SECTION.fullmatch(text)
    if section is not None:
        return f"{section[1].casefold().replace('§', 'section')} {section[2]}"
    if _FORM.fullmatch(text) is None:
        return ""
    season = _SEASON.fullmatch(text)
    if season is not None:
        is_next = (int(season[1]) + 1) % 100 == int(season[2])
        return f"{season[1]}-{season[2]}" if is_next else ""
    pair = _PAIR.fullmatch(text)
    if pair is not None:  # a score; two ascending numbers may be a range
        is_score = int(pair[1]) >= int(pair[2])
        return f"{pair[1]}-{pair[2]}" if is_score else ""
    if _PHONE.fullmatch(text) is not None:
        return "-".join(re.findall(r"\d+", text)) if len(re.findall(r"\d", text)) > 6 else ""
    return re.sub(r"^v(?=\d)", "", text.casefold())


def without_denied(text: str) -> str:
    """It is 3-1, for It is 3-1, not 4-2."""
    return _DENIED.sub("", unify(text)).strip(" ,")


def written_in(text: str) -> list[str]:
    """The texts of the form of an identifier in a text, dates and ranges included."""
    return [match[0] for match in _INSIDE.finditer(unify(text))]


def is_written(text: str) -> bool:
    """Whether a text has the form of an identifier."""
    return len(text) <= MAX_CHARS and _FORM.fullmatch(_LABEL.sub("", bare(text))) is not None


def same_marks(answer: str, gold: str) -> bool:
    """Whether two words of code have the same signs around them, as in #id, --all, **kwargs or
    __init__; a dot or an @ may be missing."""
    one, other = _marks(answer), _marks(gold)
    if len(bare(answer).split()) > 1:  # a sentence
        return not other or gold.strip() in answer
    return one == other or (one + other) in (".", "@") or (one == "____" and not other)


def _marks(text: str) -> str:
    match = _MARKED.fullmatch(bare(text))
    return match[1] + match[3] if match is not None else ""


def literal(text: str) -> object:
    """The value of a literal of Python or JSON in brackets, with texts; None for any other text."""
    text = bare(text)
    if re.match(r"[\[{(].*['\"]", text) is None or len(text) > MAX_LITERAL_CHARS:
        return None
    with suppress(ForeignError):
        return decode_python(text)
    return None


Kind = Literal[
    "identifier", "choice", "truth", "special", "date", "time", "span", "number", "list", "words",
    "math",
]  # fmt: skip
MAX_PIECED_CHARS = 200
MAX_ALONE_CHARS = 200  # of the gold in other words, with nothing beside it
_DASHED = re.compile(r"[\w}]%?\s+[-\u2013\u2014~]\s+.*[^\W\d_]{2}|\.[~\uff5e]")


class Gold(Struct, frozen=True, eq=False):
    """`forms`: as given and cleaned; `elements` of a list, or the text of a choice; `own`: the
    pieces of a phrase; `rank` of a place; `same` compares two cleaned texts as the layers do."""

    text: str
    forms: tuple[str, str]
    kind: Kind
    same: Compare
    is_named: bool
    is_split: bool
    rank: int
    amount: Quantity | None
    elements: tuple[Gold, ...] = ()
    own: tuple[Gold, ...] = ()


def gold_of(given: str, same: Compare) -> Gold:
    """The typed gold of a text."""
    text = clean(given)
    kind = kind_of(text)
    listed = several(without_name(text)) if kind == "list" else None
    label = forms.labeled(text) if kind == "choice" else None
    elements = listed.elements if listed else (label[1],) if label is not None else ()
    pieces = [piece for part in _pieces(text, kind) for piece in [clean(part)] if piece]
    return Gold(
        text,
        (given, text),
        kind,
        same,
        is_named(text),
        is_split(text),
        rank_of(text),
        amount_of(text),
        tuple(gold_of(one, same) for one in elements),
        tuple(gold_of(one, same) for one in pieces) if len(pieces) > 1 else (),
    )


def _pieces(text: str, kind: Kind) -> list[str]:
    pieces = [text]
    is_phrase = kind in ("words", "list") and len(text) < MAX_PIECED_CHARS
    for _, cut in LEVELS[6:-1] if is_phrase else ():
        pieces = [piece for whole in pieces for piece in cut(whole)]
    return pieces


def kind_of(gold: str) -> Kind:
    """The kind of a cleaned gold."""
    if identifier(gold) and not dates.dates(gold) and dates.minutes(gold) is None:
        return "identifier"
    if forms.is_choice(gold) or forms.labeled(gold) is not None:
        return "choice"
    if truth(gold) is not None:
        return "truth"
    if special(gold):
        return "special"
    if dates.minutes(gold) is not None:
        return "time"
    if dates.period(gold) is not None:
        return "span"
    if amount_of(gold) is not None:
        return "number"
    if dates.dates(gold):
        return "date"
    if is_range(gold):
        return "span"
    if several(without_name(gold)) is not None:
        return "list"
    return "words" if is_wordy(gold) else "math"


def meets(gold: Gold, part: str) -> bool:
    """Whether a part is the gold, alone."""
    is_long = len(part) > MAX_ALONE_CHARS + 2 * len(gold.text)
    if is_long or gold.kind in ("choice", "truth"):  # these are read letter by letter, or by word
        return False
    if gold.kind in ("number", "date", "time", "span") and is_split(part):
        return False
    if gold.kind == "number" and (
        _DASHED.search(part) or is_split(part, named_again, alternatives)
    ):
        return False
    if gold.kind == "words" and not gold.is_split and is_split(part):
        return False
    if gold.is_named and is_split(part, alternatives) and not is_split(gold.text, alternatives):
        return False
    text = clean(part)
    return bool(text) and gold.same(text, gold.text) is True
