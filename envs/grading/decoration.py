"""Decoration: text around an answer that cannot be one, removed before any layer reads it.

Wrappers, a stated confidence, numbers of pages and steps, footnotes, lead-ins, and clauses of plain
words, which name nothing. A kind of decoration is kept if it contains the gold, so that an answer
is never right for removed text: "page 12" keeps its number for the gold 12.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from agentenv.envs.grading.frame import ANSWERING
from agentenv.envs.grading.parts import FUNCTION_WORDS
from agentenv.envs.grading.quantities import unit_of
from agentenv.envs.grading.sentences import is_denied
from agentenv.envs.grading.text import Tables

_TABLES = Tables("decoration")
_KINDS = {
    name: _TABLES.rewrites(name)
    for name in ("wrapper", "table", "confidence", "step", "reference", "lead")
}
_THING = re.compile(rf"\b{_TABLES.text('thing')}(?!\w)", re.IGNORECASE)
_NAMING = _TABLES.pattern("naming", re.IGNORECASE)
_AMOUNT = _TABLES.pattern("amount", re.IGNORECASE)
_PLAIN = _TABLES.pattern("plain")
_OPENING = _TABLES.pattern("opening")
_SINGLE = re.compile(r"\b(?![aiI]\b)[A-Za-z]\b(?<!'[stdm])")
_PIECE = re.compile(r"((?:[.!?;:,\n]+[\"'\u201d\u2019)]*(?=\s|$)|\n)\s*|$)")
_TAG = re.compile(r"<([A-Za-z][A-Za-z0-9]*)>")
_ATTRIBUTES = re.compile(r"<([A-Za-z]\w*)((?:\s+[\w-]+\s*=\s*(?:\"[^\"<>]*\"|'[^'<>]*'))+)\s*/?>")
_ATTRIBUTE = re.compile(r"([\w-]+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)')")
_STYLE = {"class", "style", "id", "href", "color", "type", "lang", "align", "size", "face", "src"}
_VOID = {"br", "hr", "p", "li", "td", "tr", "th", "item"}
_MARK = re.compile(r"(?m)(?:^|;)\s*(\[\d{1,2}\]|[\u00b9\u00b2\u00b3\u2070-\u2079]|\u2020)\s*(.+)$")
_CITATION = _TABLES.pattern("citation", re.IGNORECASE)
_RUN = re.compile(r"(\s)\1{3,}")
MIN_WORDS = 3  # of a clause; fewer may be a name


def undecorated(answer: str, golds: Sequence[str], *, is_named: bool) -> str:
    """The answer without its decoration, or unchanged if nothing would remain. `is_named`: the gold
    is a name, an amount or a date, which no clause of plain words can be."""
    holds = _holder(golds)
    text = _RUN.sub(r"\1\1\1", answer)  # the forms below try each space of a run
    text = _with_notes(_with_tags(text), holds)
    for name, forms in _KINDS.items():
        if name == "reference" and any(map(_THING.search, golds)):
            continue  # Article 5 for Article Five
        text = _without(text, forms, holds, keeps=name in ("wrapper", "table", "lead"))
    if is_named:
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
