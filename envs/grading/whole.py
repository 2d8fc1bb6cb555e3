"""A gold, and a text cut into parts until each is the gold or contains no separator."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Self

from agentenv.envs.grading import dates, forms
from agentenv.envs.grading.forms import several, without_name
from agentenv.envs.grading.parts import (
    BETWEEN,
    EDGE,
    Kind,
    Part,
    Same,
    amount_of,
    is_compound,
    is_named,
    is_note,
    is_range,
    is_split,
    is_sum_of_names,
    kind_of,
    rank_of,
    trimmed,
    value_of,
    without_lead,
    without_source,
)
from agentenv.envs.grading.sentences import has_verb, is_hedged, is_statement
from agentenv.envs.grading.text import (
    EQUALS,
    LEVELS,
    OF_A_CLAUSE,
    OF_A_SENTENCE,
    Cut,
    Joint,
    alternatives,
    clean,
    corrections,
    labels,
    lines,
    marks,
    named_again,
    symbols,
)
from agentenv.envs.grading.words import has_cjk, is_wordy

_VARIABLES = re.compile(r"[A-Za-z]{1,3}(?![A-Za-z])|\([^()]*\)")
_DASHED = re.compile(r"[\w}]%?\s+[-\u2013\u2014~]\s+.*[^\W\d_]{2}")
_IN_DOLLARS = re.compile(r"([^\d$]*)\$([^$]+)\$([^\d$]*)")
_SCORE = re.compile(r"\d+(?:-\d+)+")  # no difference
_SUM_OF = re.compile(
    r"(?:the |a )?(?:sum|product|difference|quotient|ratio|average|mean|total) (?:of|between)\b",
    re.I,
)
MAX_ALONE_CHARS = 200  # of the gold in other words, with nothing beside it
MAX_PARTS = 120


class Whole:
    """A gold that controls how an answer is cut; `same` compares a whole part with a gold as the
    layers do."""

    def __init__(self: Self, text: str, same: Same) -> None:
        self.text = clean(text)
        self.forms = (text, self.text)
        self.kind: Kind = kind_of(self.text)
        self._same = same
        listed = several(without_name(self.text)) if self.kind == "list" else None
        self.elements: list[Self] = [self._other(one) for one in listed.elements] if listed else []
        pieces = [piece for part in self._pieces() for piece in [clean(part)] if piece]
        self.own: list[Self] = [self._other(one) for one in pieces] if len(pieces) > 1 else []
        self.is_named = is_named(self.text)
        self.rank = rank_of(self.text)
        self.is_note = not self.is_named and is_note(self.text, Part(self.text, "comma"))
        self._is_split = is_split(self.text)
        self.amount = amount_of(self.text)
        label = forms.labeled(self.text) if self.kind == "choice" else None
        if label is not None:
            self.elements = [self._other(label[1])]

    def _other(self, text: str) -> Self:
        return type(self)(text, self._same)

    def _pieces(self) -> list[str]:
        """The parts of the gold itself."""
        pieces = [self.text]
        for _, cut in (
            LEVELS[6:-1] if self.kind in ("words", "list") and len(self.text) < 200 else ()
        ):
            pieces = [piece for text in pieces for piece in cut(text)]
        return pieces

    def meets(self, part: str) -> bool:
        """Whether a part is the gold, alone."""
        if self.kind in ("choice", "truth"):
            return False  # read letter by letter, and word by word
        if len(part) > MAX_ALONE_CHARS + 2 * len(self.text):
            return False
        if self.kind in ("number", "date", "time", "span") and is_split(part):
            return False
        if self.kind == "number" and (
            _DASHED.search(part) or is_split(part, named_again, alternatives)
        ):
            return False
        if self.kind == "words" and not self._is_split and is_split(part):
            return False
        text = clean(part)
        return bool(text) and self._same(text, self.text) is True

    def parts(self, text: str) -> list[Part]:
        """The text cut until each part is the gold or contains no separator."""
        found: list[Part] = []
        pieces = labels(text) if self._may_cut(labels, "or", text) else [text]
        for piece in pieces:
            joint: Joint = "" if len(pieces) < 2 else "or"
            self._cut(piece, joint, 0, found, is_first=len(pieces) < 2)
        return found[:MAX_PARTS]

    def _cut(
        self,
        text: str,
        joint: Joint,
        level: int,
        found: list[Part],
        *,
        led: bool = False,
        is_first: bool = False,
    ) -> None:
        text = trimmed(text)
        if not self.meets(text):
            bare, has_lead = without_lead(text, is_truth=self.kind == "truth")
            lead = text[: len(text) - len(bare)].strip(" ,.:;-")
            if not lead or not self.meets(lead):  # "OK" may be the gold
                text, led = bare, led or has_lead
            bare = without_source(text)
            text = text if has_verb(bare) else bare
        if not text.strip(EDGE) or len(found) > MAX_PARTS:
            return
        if self.meets(text) or self._is_worked_out(text):
            found.append(Part(text, joint, meets=True, led=led, is_first=is_first))
            return
        if self.kind == "number" and (is_compound(text) or _SUM_OF.match(text)):
            found.append(Part(text, joint, led=led, is_first=is_first))
            return
        if level > 3 and BETWEEN.match(text) and is_range(text):
            found.append(Part(text, joint, led=led, is_first=is_first))
            return
        is_clause = False
        for next_level in range(level, len(LEVELS)):
            own, cut = LEVELS[next_level]
            is_clause = is_clause or (
                cut in OF_A_SENTENCE
                and (is_statement(text) or (led and has_verb(text)))
                and not is_named(text)
            )
            if is_clause and own == "comma" and self.meets(text.partition(",")[0]):
                head, _, tail = text.partition(",")
                found.append(Part(head, joint or own, meets=True, led=led, is_first=is_first))
                bare, has_lead = without_lead(tail.strip())
                if has_lead and not has_verb(bare):  # which is 14
                    self._cut(bare, own, next_level, found, led=True)
                else:
                    found.append(Part(tail.strip(), own, led=True))
                return
            if not self._may_cut(cut, own, text) or (
                is_clause and cut in OF_A_CLAUSE and not self._is_verbless(cut, text)
            ):
                continue
            pieces = [piece for piece in cut(text) if piece and piece.strip(EDGE)]
            if len(pieces) < 2:
                text = trimmed(pieces[0]) if pieces else text
                continue
            if own == "equals" and not self._is_derivation(pieces):
                own = ""
            if is_clause and own not in ("", "alias"):
                pieces, led = [pieces[0], pieces[-1]], True
            pieces = self._with_own_commas(text, pieces) if own == "comma" else pieces
            for place, piece in enumerate(pieces):
                leads = place == 0 and own not in ("", "or")  # the next part is attached to it
                whole = joint if joint != "or" or own == "or" else ""  # the first is only a part
                self._cut(
                    piece,
                    (whole if whole or not is_first else own) if place == 0 else own,
                    next_level + (cut is LEVELS[-1][1]),
                    found,
                    led=led and (place == 0 or is_clause),
                    is_first=is_first and leads,
                )
            return
        found.append(Part(text, joint, led=led, is_first=is_first))

    def _is_verbless(self, cut: Cut, text: str) -> bool:
        """Whether the verb of a clause is in the separator of two names: A followed by B."""
        pieces = cut(text) if cut is alternatives else []
        return len(pieces) > 1 and not any(map(has_verb, pieces))

    def _is_worked_out(self, text: str) -> bool:
        """Whether a text calculates the number: 5 + 8, or m + n = 5 + 8 = 13, for 13."""
        if self.kind != "number" or self.amount is None:
            return False
        formula = _IN_DOLLARS.fullmatch(text)
        if formula is not None and not is_hedged(formula[1] + formula[3]):
            text = formula[2]
        elif is_wordy(text) or _SCORE.fullmatch(text):
            return False
        *names, last = (side.strip(" $") for side in EQUALS.split(text))
        if amount_of(clean(last)) is None:
            is_it = not self.amount.has_unit and value_of(last) == self.amount.value
        else:  # an amount with its unit, as the layers compare it
            is_it = bool(names) and self.meets(last)
        values = [value_of(name) for name in names]
        return is_it and all(
            is_sum_of_names(name) if value is None else value == self.amount.value
            for name, value in zip(names, values, strict=True)
        )

    def _with_own_commas(self, text: str, pieces: list[str]) -> list[str]:
        """Austin, Texas and USA, if the gold is Austin, Texas; the parts of a date together."""
        for place in range(len(pieces) - 1, 0, -1) if self.kind == "date" else ():
            both = f"{pieces[place - 1]} {pieces[place]}"
            if dates.dates(clean(both.strip(EDGE))):
                pieces = [*pieces[: place - 1], both, *pieces[place + 1 :]]
        for count in range(len(pieces) - 1, 1, -1) if "," in self.text else ():
            head = text[: text.rfind(pieces[count])].rstrip(" ,")
            if self.meets(head):
                return [head, *pieces[count:]]
        return pieces

    def _is_derivation(self, sides: Sequence[str]) -> bool:
        """Whether an equation names or calculates its right side, and equates no two answers."""
        return any(
            amount_of(clean(side)) is None
            and not is_wordy(_VARIABLES.sub("x", side))
            and (self.kind in ("number", "math", "list") and not dates.dates(clean(side)))
            for side in sides[:-1]
        )

    def _may_cut(self, cut: Cut, joint: Joint, text: str) -> bool:
        """Whether a separator may cut a text: brackets, hyphens and commas belong to mathematics,
        equals signs to an equation; to a question of yes or no, "no" is an answer."""
        if cut is corrections:
            return self.kind != "truth"
        if cut in (labels, symbols):
            is_own = cut is symbols and len([one for one in cut(self.text) if one]) > 1
            is_han = cut is symbols and has_cjk(self.text)
            return (
                self.kind != "math"
                and (is_wordy(text) or self.kind != "list")
                and not (is_own or is_han)
            )
        if cut in (lines, marks):
            return r"\begin" not in text
        if joint == "equals":
            return "=" not in self.text
        if joint == "dash" and "=" in text and re.search(r"\d\s+[-+*]\s+\d", text):
            return False
        if joint in ("bracket", "dash", "colon", "comma", "list") and not is_wordy(text):
            if self.kind == "math" or (self.kind == "list" and joint not in ("comma", "list")):
                return joint == "dash" and re.search("[\u2014\u2015]", text) is not None
            if joint == "dash" and "=" in text:
                return False
        return True
