"""One answer: the candidates that a text names, cut at every kind of separator.

An answer that names two different candidates of the gold's kind is two guesses, whatever joins
them. A part is the text between two separators; a part that reads as a whole answer is a
candidate, a number or a name inside a longer clause is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations

from msgspec import Struct

from agentenv.envs.grading import dates, forms
from agentenv.envs.grading.decoration import undecorated
from agentenv.envs.grading.forms import several, special, truth, without_name
from agentenv.envs.grading.frame import Rest, is_framed, rests
from agentenv.envs.grading.mentions import Mentions
from agentenv.envs.grading.names import STATES
from agentenv.envs.grading.parts import (
    ASIDES,
    BETWEEN,
    EDGE,
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
from agentenv.envs.grading.rivals import NUMBERS
from agentenv.envs.grading.sentences import announcement, has_verb, is_hedged, is_statement
from agentenv.envs.grading.text import Tables, clauses, clean, lines, sentences
from agentenv.envs.grading.words import is_wordy, tokens

_TABLES = Tables("candidates")


class Rivals(Struct, frozen=True):
    """Candidates that are not the gold: those that the rules decide, and expressions that only
    mathematics can compare with it."""

    certain: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()


_HAN_HEDGE = _TABLES.pattern("han_hedge")
_ONE_OF_TWO = _TABLES.pattern("one_of_two", re.I)
_NUMBERS_BETWEEN = re.compile(r"\b(?:between|both)\s+\S*\w(?:\s\w+)?\s+and\s+\S*\w", re.IGNORECASE)
_APPROXIMATE = re.compile(r"\\approx|\u2248|\bapprox|\babout\b|\broughly\b")
_LABEL = re.compile(r"^\W*[A-Ja-j](?:\W+|$)")
_TRUTHS = re.compile(
    r"\b(yes|no|true|false)\b(?=[^\w,]*(?:[.;!\])}]|, the|, it|,? but|$)|\s+(?:is\b|\w+:))", re.I
)
# before a bracket that is not closed: set(['A', 'B'])
_INSIDE = re.compile(r"^.*(?<!\})[(\[{]['\"]?(?=[^()\[\]{}]*$)", re.DOTALL)
_DOUBT = _TABLES.pattern("doubt", re.I)
_MATH_ONLY = _TABLES.pattern("math_only")


class Gold(Mentions):
    """A gold, and the candidates beside it that an answer names."""

    def undecorated(self, text: str) -> str:
        """An answer without its decoration."""
        is_named = self.is_named if self.kind == "words" else self.kind not in ("list", "special")
        return undecorated(text, self.forms, is_named=is_named)

    def is_named_by(self, text: str) -> bool:
        """Whether a text without rivals names the gold in a part of its own, without a doubt."""
        parts = self.parts(text)
        if self.kind in ("choice", "truth", "math") or not parts:
            return False
        if self.kind == "number" and not all(
            part.meets or self._is_explanation(part) for part in parts
        ):
            return False  # a formula, which mathematics compares
        if self.kind == "number" and BETWEEN.match(text):
            return False
        if all(part.meets for part in parts):
            return _DOUBT.search(text) is None
        if len(parts) < 2:
            return False
        if is_hedged(text) or _HAN_HEDGE.search(text):
            return False
        if self.kind == "number" and any(_contains_a_number(part) for part in parts):
            return False
        return any(part.meets for part in parts) and not any(map(self._changes, parts))

    def is_framed_by(self, text: str) -> bool:
        """Whether there are only words of answering around the gold."""
        return is_framed(text, self.forms, is_word=self.kind in ("truth", "choice"))

    def _candidate_rests(self, text: str) -> Iterator[str]:
        """The texts beside the gold, without the words of answering, that read as a whole answer of
        its kind."""
        for rest in rests(text, self.forms):
            bare = clean(trimmed(_INSIDE.sub("", rest.text)))
            is_nation = is_nationality(bare) and not is_nationality(self.text)
            is_reply = rest.is_before and self.kind != "truth" and truth(bare) is not None
            if not bare or self.meets(bare) or is_role(bare) or is_nation or is_reply:
                continue
            if not self._is_alike(bare, rest):
                continue
            is_place = is_of_place(bare.partition(",")[0], self.rank, Part(bare, "comma"))
            is_first = rest.is_before and rest.joint != ""
            part = Part(bare, rest.joint, led=not rest.is_joined, is_first=is_first)
            is_sure = self.kind in ("math", "choice") or self._is_other(bare, rest)
            if is_sure or (not is_place and self.is_rival(part)):
                yield bare

    def _is_other(self, bare: str, rest: Rest) -> bool:
        """Whether an expression is beside a list of words, or words beside one of expressions."""
        is_beside = self.kind == "list" and rest.joint != "bracket" and rest.is_joined
        return is_beside and is_wordy(bare) != is_wordy(self.text)

    def _is_alike(self, bare: str, rest: Rest) -> bool:
        """Whether a text alone reads as an answer of the gold's kind."""
        match self.kind:
            case _ if rest.is_one_clause:
                return False
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
                return is_named(bare) or several(bare) is not None or self._is_other(bare, rest)
            case "words" if is_statement(self.text) and not self.is_named:
                return False
            case "words":
                is_phrase = is_named(bare) or (len(bare.split()) < 9 and not is_statement(bare))
                is_joined = rest.is_joined and rest.is_known
                return is_named(bare) if self.is_named else is_phrase and is_joined
            case "choice":
                letters = forms.chosen(bare) if forms.is_choice(bare) else set()
                label = forms.labeled(bare)
                letters = {label[0]} if label is not None else letters
                return bool(letters) and not letters & forms.chosen(self.text)
            case "math":
                return rest.joint != "equals" and is_expression(bare)

    def _is_explanation(self, part: Part) -> bool:
        """Whether a part is words, another form of the amount, its calculation or a bracket."""
        bare = clean(part.text)
        if is_wordy(bare) or amount_of(bare) is not None:
            return True
        return part.joint == "bracket" or value_of(bare) is not None

    def _changes(self, part: Part) -> bool:
        """Whether a part makes the gold another thing: Paris, Texas; 5 (kilometers)."""
        bare = clean(part.text)
        if part.meets or part.starts:
            return False
        if self.kind == "number":
            return amount_of(bare) is None and unit_of(bare.lower()) is not None
        is_state = bare in STATES or bare in STATES.values()
        return is_state and "county" not in self.text.lower()

    # Parts that are not the gold.

    def _leaves_open(self, text: str) -> bool:
        """Whether a text that is no range leaves open one of two answers: between A and B."""
        if self.kind in ("span", "list", "choice", "truth", "math") or self.meets(text):
            return False
        if self.kind == "number":
            rest, num_found = _NUMBERS_BETWEEN.subn("", text)
            return num_found > 0 and not re.search(r"\d", rest)
        return _ONE_OF_TWO.fullmatch(text) is not None and not has_verb(text)

    def rivals(self, text: str) -> Rivals:
        """The candidates beside the gold. A text that is one part has none: the layers decide
        whether it is the gold."""
        parts = self.parts(text)
        name = self._written_as_a_name(parts)
        if name:
            return self._other(name).rivals(text)
        beside_it = tuple(self._candidate_rests(text))
        if beside_it:
            return Rivals((), beside_it) if self.kind == "math" else Rivals(beside_it)
        if self.kind == "choice":
            return self._other_letters(text, parts)
        unexplained = self.unexplained(text, parts)
        if unexplained:
            return Rivals(tuple(unexplained))
        if self.kind == "truth" and self._affirms_and_denies(text):
            return Rivals((text,))
        announced = text if self._leaves_open(text) else self._announced(text)
        if announced:
            return Rivals((announced,))
        if len(parts) < 2 and not self._reads_whole(text) and self.kind != "date":
            return Rivals()
        if self.kind == "math":
            return self._other_expressions(text, parts)
        amounts = [amount_of(clean(part.text)) for part in parts if part.meets]
        nearby = [amount for amount in amounts if amount is not None]
        found = [*self._twin_rivals(text)]
        ends_right = bool(parts) and parts[-1].meets
        skips = False
        for place, part in enumerate(parts):
            if part.joint in ("", "or"):
                skips = False
            after = parts[place + 1] if place + 1 < len(parts) else None
            if self.kind == "number" and _differs(part, after):
                found.append(part.text)
            if skips or part.meets:
                continue
            words = tokens(part.text)
            is_label = len(words) == 1 or (after is not None and after.joint == "colon")
            if words and words[0] in ASIDES and len(words) < 3 and is_label:
                skips = True
                continue
            if self.kind == "list" and self._is_beside_a_list(part, parts):
                found.append(part.text)
            if not (ends_right and _is_step(parts, place)) and self.is_rival(part, after, nearby):
                found.append(part.text)
        is_sum = self.amount is not None and parts[0].meets and _adds_up(found, self.amount)
        if is_sum and not any(part.starts for part in parts):
            return Rivals()
        return Rivals(tuple(dict.fromkeys(found)))

    def _written_as_a_name(self, parts: Sequence[Part]) -> str:
        """The gold as the answer writes it, if only the answer shows that it is a name: James
        Madison for james madison."""
        if self.kind != "words" or self.is_named or not self.text.islower():
            return ""
        names = [clean(part.text) for part in parts if part.meets]
        return next((name for name in names if " " in name and is_named(name)), "")

    def _is_beside_a_list(self, part: Part, parts: Sequence[Part]) -> bool:
        """Whether an expression beside the list is no element of it."""
        if is_wordy(self.text) or part.joint not in ("", "or", "comma", "list") or part.is_first:
            return False
        is_own = any(one.meets(part.text) for one in self.elements)
        return any(one.meets for one in parts) and is_expression(clean(part.text)) and not is_own

    def _announced(self, text: str) -> str:
        """The words that announce a second answer, unless the gold itself has them."""
        is_own = self.kind == "truth" or announcement(self.text)
        return "" if is_own else announcement(text)

    def _reads_whole(self, text: str) -> bool:
        bare = clean(text)
        return self.kind == "number" and bool(NUMBERS.fullmatch(bare)) and quantity(bare) is None

    def _affirms_and_denies(self, text: str) -> bool:
        """Whether clauses end in yes and in no, or in true and in false."""
        truths = {truth(word) for word in _TRUTHS.findall(text)}
        return len(truths) > 1

    def _twin_rivals(self, text: str) -> Iterator[str]:
        """The pieces in which two sentences differ: The capital is A. The capital is B."""
        pieces = [
            piece.strip(EDGE)
            for line in lines(text)
            for sentence in sentences(line)
            for piece in clauses(sentence)
        ]
        for one, other in combinations([one.split() for one in pieces if one][:20], 2):
            yield from self._twin(one, other)

    def _twin(self, one: list[str], other: list[str]) -> Iterator[str]:
        start = _num_shared(one, other)
        end = _num_shared(one[start:][::-1], other[start:][::-1])
        if start + end >= 2 and any(has_verb(" ".join(side)) for side in (one, other)):
            for side in (" ".join(side[start : len(side) - end]) for side in (one, other)):
                if side and not self.meets(side) and self.is_rival(Part(side)):
                    yield side

    def _other_letters(self, text: str, parts: Sequence[Part]) -> Rivals:
        """Letters of other options, or another text after the same letter."""
        wanted = forms.chosen(self.text)
        groups = forms.letters(text)
        others = {group for group in groups if group - wanted}
        if wanted in groups:
            others |= {group for group in groups if group != wanted}
        if others:
            return Rivals(tuple("".join(sorted(group)) for group in others))
        for worded in self.elements:
            texts = [label[1] for label in map(forms.labeled, map(_text_of, parts)) if label]
            rivals = [one for one in texts if not worded.meets(one) and not has_verb(one)]
            if rivals or not any(worded.meets(part.text) for part in parts):
                return Rivals(tuple(rivals))
            return worded.rivals(_LABEL.sub("", text))
        return Rivals()

    def _other_expressions(self, text: str, parts: Sequence[Part]) -> Rivals:
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
        unsure = [
            without_name(clean(part.text)) for part in others if is_expression(clean(part.text))
        ]
        if _APPROXIMATE.search(text):
            unsure = [text for text in unsure if not re.fullmatch(r"-?\d+\.\d+\S*", text)]
        is_chain = {part.joint for part in parts} <= {"equals"} and len(parts) > 1
        if is_chain and any(_MATH_ONLY.search(part.text) for part in parts[:-1]):
            unsure = []
        return Rivals(tuple(names), tuple(dict.fromkeys(unsure)))


def _num_shared(one: Sequence[str], other: Sequence[str]) -> int:
    """The number of words that two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    shorter = min(len(one), len(other))
    return next((place for place, (a, b) in pairs if a.lower() != b.lower()), shorter)


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


def _contains_a_number(part: Part) -> bool:
    """Whether a clause beside the answer contains a number: 12, although 13 was reported."""
    return not part.meets and has_verb(part.text) and re.search(r"\d", part.text) is not None


def _adds_up(found: Sequence[str], amount: Quantity) -> bool:
    """Whether several numbers are the parts of the answer: 13 (5 red, 8 green)."""
    others = [quantity(clean(text)) for text in found]
    if len(others) < 2 or None in others:
        return False
    return sum(one.value for one in others if one is not None) == amount.value
