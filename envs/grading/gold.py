"""A gold: its kind, read first and by strict grammars, and the parts of which it consists.

An answer is compared with the gold as that kind; nothing is right because it contains the gold.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from agentenv.envs.grading import dates, forms
from agentenv.envs.grading.forms import several, special, truth, without_name
from agentenv.envs.grading.identifiers import identifier
from agentenv.envs.grading.parts import (
    amount_of,
    is_named,
    is_range,
    is_split,
    rank_of,
)
from agentenv.envs.grading.quantities import Quantity
from agentenv.envs.grading.text import LEVELS, alternatives, clean, named_again
from agentenv.envs.grading.words import is_wordy

Kind = Literal[
    "identifier", "choice", "truth", "special", "date", "time", "span", "number", "list", "words",
    "math",
]  # fmt: skip
Same = Callable[[str, str], bool | None]
MAX_PIECED_CHARS = 200
MAX_ALONE_CHARS = 200  # of the gold in other words, with nothing beside it
_DASHED = re.compile(r"[\w}]%?\s+[-\u2013\u2014~]\s+.*[^\W\d_]{2}|\.[~\uff5e]")


class Gold(Struct, frozen=True, eq=False):
    """`forms`: as given and cleaned; `elements` of a list, or the text of a choice; `own`: the
    pieces of a phrase; `rank` of a place; `same` compares two cleaned texts as the layers do."""

    text: str
    forms: tuple[str, str]
    kind: Kind
    same: Same
    is_named: bool
    is_split: bool
    rank: int
    amount: Quantity | None
    elements: tuple[Gold, ...] = ()
    own: tuple[Gold, ...] = ()


def gold_of(given: str, same: Same) -> Gold:
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
    if gold.kind in ("choice", "truth"):
        return False  # read letter by letter, and word by word
    if len(part) > MAX_ALONE_CHARS + 2 * len(gold.text):
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
