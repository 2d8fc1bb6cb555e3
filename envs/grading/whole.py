"""A gold, and a text cut into parts until each is the gold or contains no separator."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from msgspec.structs import replace

from agentenv.envs.grading import dates, parts
from agentenv.envs.grading import text as texts
from agentenv.envs.grading.gold import Gold, meets
from agentenv.envs.grading.sentences import has_verb, is_statement
from agentenv.envs.grading.words import has_cjk, is_wordy

_VARIABLES = re.compile(r"[A-Za-z]{1,3}(?![A-Za-z])|\([^()]*\)")
_SCORE = re.compile(r"\d+(?:-\d+)+")  # no difference
_SUM_OF = re.compile(
    r"(?:the |a )?(?:sum|product|difference|quotient|ratio|average|mean|total) (?:of|between)\b",
    re.I,
)
MAX_PARTS = 120


def parts_of(gold: Gold, text: str) -> list[parts.Part]:
    """The text cut until each part is the gold or contains no separator."""
    pieces = texts.labels(text) if gold.kind != "math" else [text]
    whole = parts.Part("", is_first=True) if len(pieces) < 2 else parts.Part("", "or")
    cut = chain.from_iterable(_cut(gold, piece, whole) for piece in pieces)
    return list(islice(cut, MAX_PARTS))


def _cut(gold: Gold, text: str, whole: parts.Part, level: int = 0) -> Iterator[parts.Part]:
    """The parts of a text that is attached to its neighbors as `whole` is."""
    text = parts.trimmed(text)
    if not meets(gold, text):
        bare, is_led = parts.without_lead(text, gold.text, is_truth=gold.kind == "truth")
        lead = text[: len(text) - len(bare)].strip(" ,.:;-")
        if not lead or not meets(gold, lead):  # "OK" may be the gold
            text, whole = bare, replace(whole, led=whole.led or is_led)
    if not text.strip(parts.EDGE):
        return
    is_gold = meets(gold, text) or _is_worked_out(gold, text)
    is_sum = gold.kind == "number" and (parts.is_compound(text) or _SUM_OF.match(text))
    if is_gold or is_sum or (level > 3 and parts.BETWEEN.match(text) and parts.is_range(text)):
        yield replace(whole, text=text, meets=is_gold)
        return
    is_clause = False
    for next_level in range(level, len(texts.LEVELS)):
        own, cut = texts.LEVELS[next_level]
        is_clause = is_clause or (
            cut in texts.OF_A_SENTENCE
            and (is_statement(text) or (whole.led and has_verb(text)))
            and not parts.is_named(text)
        )
        head, _, tail = text.partition(",")
        if is_clause and own == "comma" and meets(gold, head):
            yield replace(whole, text=head, joint=whole.joint or own, meets=True)
            bare, is_led = parts.without_lead(tail.strip(), gold.text)
            if is_led and not has_verb(bare):  # which is 14
                yield from _cut(gold, bare, parts.Part("", own, led=True), next_level)
            else:
                yield parts.Part(tail.strip(), own, led=True)
            return
        if not _may_cut(gold, cut, own, text) or (is_clause and cut in texts.OF_A_CLAUSE):
            continue
        pieces = [piece for piece in cut(text) if piece.strip(parts.EDGE)]
        if len(pieces) < 2:
            text = parts.trimmed(pieces[0]) if pieces else text
            continue
        if own == "equals" and not _is_derivation(gold, pieces):
            own = ""
        is_led = whole.led
        if is_clause and own not in ("", "alias"):
            pieces, is_led = [pieces[0], pieces[-1]], True
        joint = whole.joint if whole.joint != "or" or own == "or" else ""  # the first is a part
        is_first = whole.is_first and own not in ("", "or")  # the next part is attached to it
        first = parts.Part(
            "", joint or (own if whole.is_first else ""), led=is_led, is_first=is_first
        )
        rest = parts.Part("", own, led=is_led and is_clause)
        for place, piece in enumerate(pieces):
            step = cut is texts.LEVELS[-1][1]
            yield from _cut(gold, piece, rest if place else first, next_level + step)
        return
    yield replace(whole, text=text)


def _is_worked_out(gold: Gold, text: str) -> bool:
    """Whether a text calculates the number: 5 + 8, or m + n = 5 + 8 = 13, for 13."""
    if gold.kind != "number" or gold.amount is None or is_wordy(text) or _SCORE.fullmatch(text):
        return False
    *names, last = (side.strip(" $") for side in texts.EQUALS.split(text))
    if parts.amount_of(texts.clean(last)) is None:
        is_it = not gold.amount.has_unit and parts.value_of(last) == gold.amount.value
    else:  # an amount with its unit, as the layers compare it
        is_it = bool(names) and meets(gold, last)
    values = [parts.value_of(name) for name in names]
    return is_it and all(
        parts.is_sum_of_names(name) if value is None else value == gold.amount.value
        for name, value in zip(names, values, strict=True)
    )


def _is_derivation(gold: Gold, sides: Sequence[str]) -> bool:
    """Whether an equation names or calculates its right side, and equates no two answers."""
    return any(
        parts.amount_of(texts.clean(side)) is None
        and not is_wordy(_VARIABLES.sub("x", side))
        and (gold.kind in ("number", "math", "list") and not dates.dates(texts.clean(side)))
        for side in sides[:-1]
    )


def _may_cut(gold: Gold, cut: texts.Cut, joint: texts.Joint, text: str) -> bool:
    """Whether a separator may cut a text: brackets, hyphens and commas belong to mathematics,
    equals signs to an equation; to a question of yes or no, "no" is an answer."""
    if cut is texts.corrections:
        return gold.kind != "truth"
    if cut is texts.symbols:
        is_own = len([one for one in cut(gold.text) if one]) > 1
        return (
            gold.kind != "math"
            and (is_wordy(text) or gold.kind != "list")
            and not (is_own or has_cjk(gold.text))
        )
    if cut in (texts.lines, texts.marks):
        return r"\begin" not in text
    if joint == "equals":
        return "=" not in gold.text
    if joint == "dash" and "=" in text and re.search(r"\d\s+[-+*]\s+\d", text):
        return False
    if joint in ("bracket", "dash", "colon", "comma", "list") and not is_wordy(text):
        if gold.kind == "math" or (gold.kind == "list" and joint not in ("comma", "list")):
            return joint == "dash" and re.search("[\u2014\u2015]", text) is not None
        if joint == "dash" and "=" in text:
            return False
    return True
