"""A gold, and a text cut into parts until each is the gold or contains no separator."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentenv.envs.grading import dates
from agentenv.envs.grading.gold import Gold, meets
from agentenv.envs.grading.parts import (
    BETWEEN,
    EDGE,
    Part,
    amount_of,
    is_compound,
    is_named,
    is_range,
    is_sum_of_names,
    trimmed,
    value_of,
    without_lead,
)
from agentenv.envs.grading.sentences import has_verb, is_hedged, is_statement
from agentenv.envs.grading.text import (
    EQUALS,
    LEVELS,
    OF_A_CLAUSE,
    OF_A_SENTENCE,
    Cut,
    Joint,
    clean,
    corrections,
    labels,
    lines,
    marks,
    symbols,
)
from agentenv.envs.grading.words import has_cjk, is_wordy

_VARIABLES = re.compile(r"[A-Za-z]{1,3}(?![A-Za-z])|\([^()]*\)")
_IN_DOLLARS = re.compile(r"([^\d$]*)\$([^$]+)\$([^\d$]*)")
_SCORE = re.compile(r"\d+(?:-\d+)+")  # no difference
_SUM_OF = re.compile(
    r"(?:the |a )?(?:sum|product|difference|quotient|ratio|average|mean|total) (?:of|between)\b",
    re.I,
)
MAX_PARTS = 120


def parts_of(gold: Gold, text: str) -> list[Part]:
    """The text cut until each part is the gold or contains no separator."""
    found: list[Part] = []
    pieces = labels(text) if gold.kind != "math" else [text]
    joint: Joint = "" if len(pieces) < 2 else "or"
    for piece in pieces:
        _cut(gold, piece, joint, 0, found, is_first=len(pieces) < 2)
    return found[:MAX_PARTS]


def _cut(
    gold: Gold,
    text: str,
    joint: Joint,
    level: int,
    found: list[Part],
    *,
    led: bool = False,
    is_first: bool = False,
) -> None:
    text = trimmed(text)
    if not meets(gold, text):
        bare, has_lead = without_lead(text, gold.text, is_truth=gold.kind == "truth")
        lead = text[: len(text) - len(bare)].strip(" ,.:;-")
        if not lead or not meets(gold, lead):  # "OK" may be the gold
            text, led = bare, led or has_lead
    if not text.strip(EDGE) or len(found) > MAX_PARTS:
        return
    if meets(gold, text) or _is_worked_out(gold, text):
        found.append(Part(text, joint, meets=True, led=led, is_first=is_first))
        return
    if gold.kind == "number" and (is_compound(text) or _SUM_OF.match(text)):
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
        if is_clause and own == "comma" and meets(gold, text.partition(",")[0]):
            head, _, tail = text.partition(",")
            found.append(Part(head, joint or own, meets=True, led=led, is_first=is_first))
            bare, has_lead = without_lead(tail.strip(), gold.text)
            if has_lead and not has_verb(bare):  # which is 14
                _cut(gold, bare, own, next_level, found, led=True)
            else:
                found.append(Part(tail.strip(), own, led=True))
            return
        if not _may_cut(gold, cut, own, text) or (is_clause and cut in OF_A_CLAUSE):
            continue
        pieces = [piece for piece in cut(text) if piece and piece.strip(EDGE)]
        if len(pieces) < 2:
            text = trimmed(pieces[0]) if pieces else text
            continue
        if own == "equals" and not _is_derivation(gold, pieces):
            own = ""
        if is_clause and own not in ("", "alias"):
            pieces, led = [pieces[0], pieces[-1]], True
        for place, piece in enumerate(pieces):
            leads = place == 0 and own not in ("", "or")  # the next part is attached to it
            whole = joint if joint != "or" or own == "or" else ""  # the first is only a part
            _cut(
                gold,
                piece,
                (whole if whole or not is_first else own) if place == 0 else own,
                next_level + (cut is LEVELS[-1][1]),
                found,
                led=led and (place == 0 or is_clause),
                is_first=is_first and leads,
            )
        return
    found.append(Part(text, joint, led=led, is_first=is_first))


def _is_worked_out(gold: Gold, text: str) -> bool:
    """Whether a text calculates the number: 5 + 8, or m + n = 5 + 8 = 13, for 13."""
    if gold.kind != "number" or gold.amount is None:
        return False
    formula = _IN_DOLLARS.fullmatch(text)
    if formula is not None and not is_hedged(formula[1] + formula[3]):
        text = formula[2]
    elif is_wordy(text) or _SCORE.fullmatch(text):
        return False
    *names, last = (side.strip(" $") for side in EQUALS.split(text))
    if amount_of(clean(last)) is None:
        is_it = not gold.amount.has_unit and value_of(last) == gold.amount.value
    else:  # an amount with its unit, as the layers compare it
        is_it = bool(names) and meets(gold, last)
    values = [value_of(name) for name in names]
    return is_it and all(
        is_sum_of_names(name) if value is None else value == gold.amount.value
        for name, value in zip(names, values, strict=True)
    )


def _is_derivation(gold: Gold, sides: Sequence[str]) -> bool:
    """Whether an equation names or calculates its right side, and equates no two answers."""
    return any(
        amount_of(clean(side)) is None
        and not is_wordy(_VARIABLES.sub("x", side))
        and (gold.kind in ("number", "math", "list") and not dates.dates(clean(side)))
        for side in sides[:-1]
    )


def _may_cut(gold: Gold, cut: Cut, joint: Joint, text: str) -> bool:
    """Whether a separator may cut a text: brackets, hyphens and commas belong to mathematics,
    equals signs to an equation; to a question of yes or no, "no" is an answer."""
    if cut is corrections:
        return gold.kind != "truth"
    if cut is symbols:
        is_own = len([one for one in cut(gold.text) if one]) > 1
        return (
            gold.kind != "math"
            and (is_wordy(text) or gold.kind != "list")
            and not (is_own or has_cjk(gold.text))
        )
    if cut in (lines, marks):
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
