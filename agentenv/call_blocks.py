"""Where calls and thoughts begin and end in the text of a turn.

A value is read as one from the marker that opens its call on, whatever markers its texts hold: only
behind it can the call end, and only outside of it a thought.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from agentenv.errors import ForeignError
from agentenv.untrusted import decode_first

THOUGHT_OPEN, THOUGHT_CLOSE = "<think>", "</think>"
MAX_QUOTED = 100  # markers in a thought that open nothing; beyond, none is tried any more

ValueEnd = Callable[[str, int], int]  # where the value that begins there ends; -1 if none does


class MalformedCall(Exception):
    """What is wrong with a call."""


class Markers(NamedTuple):
    """What stands around a call, where the value in it ends, and what stands around a thought: None
    where a style keeps its thoughts in messages of their own."""

    opening: str
    closing: str
    value_end: ValueEnd
    thought: tuple[str, str] | None = (THOUGHT_OPEN, THOUGHT_CLOSE)


def after_thoughts(text: str) -> str:
    """What follows the last thought of a text without calls; nothing while one is still open."""
    after = text.rpartition(THOUGHT_CLOSE)[2]
    return "" if THOUGHT_OPEN in after else after


def blocks(text: str, markers: Markers) -> Iterator[Any]:
    """The texts between the markers outside of thoughts; for one that is not closed, what is
    wrong. A turn may begin within a thought, which the prompt has opened."""
    opens, _ = markers.thought or (None, None)
    found = re.compile("|".join(map(re.escape, filter(None, (opens, markers.opening)))))
    place = max(0, thought_end(text, 0, markers))
    while (mark := found.search(text, place)) is not None:
        place = mark.end()
        if mark[0] == opens:
            place = thought_end(text, place, markers)
            if place < 0:
                return
            continue
        end = text.find(markers.closing, max(place, markers.value_end(text, place)))
        if end < 0:
            yield MalformedCall(f"{markers.opening} is not closed by {markers.closing}")
            return
        yield text[place:end]
        place = end + len(markers.closing)


def thought_end(text: str, place: int, markers: Markers) -> int:
    """The offset after the first mark that closes a thought outside of a value; -1 for none."""
    _, closes = markers.thought or (None, None)
    if closes is None or closes not in text:
        return -1
    found = re.compile(f"{re.escape(closes)}|{re.escape(markers.opening)}")
    num_quoted = 0
    while (mark := found.search(text, place)) is not None:
        place = mark.end()
        if mark[0] == closes:
            return place
        end = markers.value_end(text, place) if num_quoted < MAX_QUOTED else -1
        num_quoted += end < 0
        place = max(place, end)
    return -1


_BLANKS = re.compile(r"\s*")


def json_end(text: str, start: int) -> int:
    """The offset after the JSON object or list that begins there, blanks skipped."""
    start = _BLANKS.match(text, start).end()  # type: ignore[union-attr]  # it always matches
    if text[start : start + 1] not in ("{", "["):
        return -1
    try:
        return decode_first(text, start)[1]
    except ForeignError:
        return -1
