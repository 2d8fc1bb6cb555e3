"""Parts of a long page: around the snippet that led to it, or around the words of a query."""

from __future__ import annotations

from collections import Counter
from math import log

from envs.search.corpus import words

CHUNK_CHARS = 500
MIN_OVERLAP = 0.3  # share of the snippet's words below which the page's beginning is taken


def window(text: str, snippet: str, max_chars: int) -> str:
    """`max_chars` of the text round the place most like the snippet; the beginning if none is."""
    if len(text) <= max_chars:
        return text
    wanted = set(words(snippet))
    chunks = _chunks(text)
    overlaps = [len(wanted.intersection(words(text[a:b]))) for a, b in chunks]
    best = max(overlaps)
    if not wanted or best < MIN_OVERLAP * len(wanted):
        return text[:max_chars]
    start, end = chunks[overlaps.index(best)]
    first = max(0, min((start + end - max_chars) // 2, len(text) - max_chars))
    return text[first : first + max_chars]


def passages(text: str, query: str, max_chars: int) -> str:
    """The chunks that best match the query, in their order, at most `max_chars` in all.

    Without a query, or when no word of it occurs, the beginning.
    """
    if len(text) <= max_chars:
        return text
    chunks = _chunks(text)
    contents = [Counter(words(text[a:b])) for a, b in chunks]
    wanted = set(words(query))
    rarity = {
        word: log(1 + len(chunks) / (1 + sum(word in found for found in contents)))
        for word in wanted
    }
    scores = [sum(rarity[word] for word in wanted if word in found) for found in contents]
    if not any(scores):
        return text[:max_chars]
    chosen: list[int] = []
    room = max_chars
    for place in sorted(range(len(chunks)), key=lambda place: (-scores[place], place)):
        start, end = chunks[place]
        if not scores[place] or room < min(end - start, CHUNK_CHARS // 4) + 5:
            break
        chosen.append(place)
        room -= end - start + 5
    pieces = []
    previous = None
    for place in sorted(chosen):
        joint = "" if previous in (None, place - 1) else " ... "
        pieces.append(joint + text[slice(*chunks[place])])
        previous = place
    return "".join(pieces)[:max_chars].strip()


def _chunks(text: str) -> list[tuple[int, int]]:
    """Consecutive pieces of about CHUNK_CHARS that end at white space where they can."""
    found: list[tuple[int, int]] = []
    start = 0
    while start < len(text):
        end = min(len(text), start + CHUNK_CHARS)
        if end < len(text):
            space = max(text.rfind(mark, start + CHUNK_CHARS // 2, end) for mark in ("\n", " "))
            end = space + 1 if space > 0 else end
        found.append((start, end))
        start = end
    return found
