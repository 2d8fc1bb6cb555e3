"""Plain text: tables of words and patterns, one plain form for the many ways to write an answer,
and the separators between two parts of an answer, from the strongest to the weakest.

Everything here is linear in the length of the text; callers cap that length first.
"""

from __future__ import annotations

import re
import string
import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

_INSERTED = re.compile(r"(?<!\\)\{([a-z_]+)\}")


class Tables:
    """The word lists and regular expressions of a TOML file of this folder.

    A regular expression is a text, or a list of texts that are joined; `{name}` in it is the text
    of that name, in `[patterns]` or given by the caller.
    """

    def __init__(self, name: str, **inserted: str) -> None:
        text = Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8")
        self._tables: dict[str, Any] = tomllib.loads(text)
        self._inserted = inserted

    def __getitem__(self, name: str) -> Any:
        return self._tables[name]

    def words(self, name: str) -> frozenset[str]:
        """A list as a set."""
        return frozenset(self._tables["words"][name])

    def by_form(self, name: str) -> dict[str, str]:
        """A table of words, each with a list of its other forms, by the form."""
        return {form: word for word, forms in self._tables[name].items() for form in forms}

    def text(self, name: str) -> str:
        """The text of a regular expression."""
        return self._filled(self._tables["patterns"][name])

    def pattern(self, name: str, flags: int = 0) -> re.Pattern[str]:
        """A regular expression."""
        return re.compile(self.text(name), flags)

    def patterns(self, name: str) -> dict[str, re.Pattern[str]]:
        """A table of regular expressions, in its order."""
        return {key: re.compile(self._filled(form)) for key, form in self._tables[name].items()}

    def rewrites(self, name: str) -> Rewrites:
        """Regular expressions, each with the replacement of its matches, in their order."""
        return tuple(
            (re.compile(self._filled(form)), self._filled(replacement))
            for form, replacement in self._tables["rewrites"][name]
        )

    def _filled(self, text: str | list[str]) -> str:
        joined = text if isinstance(text, str) else "".join(text)
        return _INSERTED.sub(lambda name: self._inserted.get(name[1]) or self.text(name[1]), joined)


Rewrites = Sequence[tuple[re.Pattern[str], str]]


def rewritten(text: str, rewrites: Rewrites) -> str:
    """The text after all rewrites, one after the other."""
    for pattern, replacement in rewrites:
        text = pattern.sub(replacement, text)
    return text


MAX_ANSWER_CHARS = 2000
MAX_UNIFIED_CHARS = 4000  # one sign may become eighteen

MAX_BOX_CHARS = 20_000  # a box that is still open after so many characters counts as open

# Boxes around an answer: prompts ask for BOX, models also write FRAME.
BOX = r"\boxed{"
FRAME = r"\\(?:f?boxed|fbox)\s*\{"
_BRACE = re.compile(r"[{}]")
_SPELLING_TABLES = Tables("spelling", frame=FRAME)
_NAMES_OF_COMMANDS: dict[str, list[str]] = _SPELLING_TABLES["commands"]
COMMANDS = {names[0]: word for word, names in _NAMES_OF_COMMANDS.items()}  # words by command
_CANONICAL = {form: rf"\{names[0]} " for names in _NAMES_OF_COMMANDS.values() for form in names}
_SIGNS = _SPELLING_TABLES.by_form("punctuation")
_SIGNS |= {sign: command for sign, command in _CANONICAL.items() if not sign.isascii()}
_TRANSLATED = str.maketrans(_SIGNS)
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207b]+")
_VULGAR = re.compile("(?<=\\d)(?=[\u00bc-\u00be\u2150-\u215e])")
_ROOT = re.compile(r"\N{SQUARE ROOT}\s*(?:(\d+(?:\.\d+)?|[A-Za-z])|\(([^()]*)\))")
_LATEX = _SPELLING_TABLES.rewrites("latex")
_MOD = re.compile(r"\(?\\?p?mod\s*(?:\{\s*(?=\w+\s*\}))?(\w+)\s*[})]?")
_CHARGE = re.compile(r"\^\{?(\d*[+-])(?:\}|(?![\w({]))")  # Ca^{2+} as Ca2+
_PRODUCT = re.compile(r"(?<=\d)\\(?:cdot|times)(?=\d)")  # two products of vectors
_BOLD = re.compile(r"(?<![\w)}*])\*\*([^*\n]+)\*\*(?![\w({*])")
_WRAPPERS = _SPELLING_TABLES.patterns("wrappers")
_INLINE = re.compile(r"(?<![\\\w$])\$(?=\S)([^$\n]{1,120}?)(?<=\S)\$(?![\w$])")
MAX_WORDS_AROUND = 3  # of an answer that is a formula with its unit; more are a sentence
_LEAD_IN = _SPELLING_TABLES.pattern("lead_in", re.IGNORECASE)
_APPROXIMATELY = _SPELLING_TABLES.pattern("approximately", re.IGNORECASE)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_TRAILING = re.compile(r"(?<!\\)[;,]\s*\Z")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def boxes(text: str) -> list[tuple[str, str]]:
    r"""Each \boxed{...} that is closed, braces inside balanced, with the text before it."""
    found, place, before = [], 0, 0
    while (start := text.find(BOX, place)) >= 0:
        place = start + len(BOX)
        depth = 1
        for brace in _BRACE.finditer(text, place, place + MAX_BOX_CHARS):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                found.append((text[before:start], text[place : brace.start()].strip()))
                place = before = brace.end()
                break
    return found


def unify(text: str) -> str:
    """Unicode forms unified: NFKC after mapping the signs that NFKC would lose."""
    text = _ROOT.sub(r"\\sqrt{\1\2}", text)
    text = _VULGAR.sub(" ", _SUPERSCRIPT.sub(r"^{\g<0>}", text))
    text = unicodedata.normalize("NFKC", text)[:MAX_UNIFIED_CHARS]
    return text.translate(_TRANSLATED)


@lru_cache(maxsize=4096)  # many rules check parts of an answer
def clean(text: str) -> str:
    """An answer without its wrappers: LaTeX delimiters, boxes, bold, lead-ins, a full stop."""
    text = _BOLD.sub(r"\1", unify(text).strip())
    for _ in range(6):  # wrappers nest: **$\boxed{5}$.**
        before = text
        text = _strip_once(text)
        if text == before:
            break
    text = notation(_without_dollars(text))
    text = " ".join(text.split())
    text = _APPROXIMATELY.sub("", text) if _APPROXIMATELY.match(text) else text
    return _end(text)


def notation(text: str) -> str:
    r"""Commands of LaTeX and ASCII signs in one form: \le for \leq and <=."""
    return rewritten(_COMMAND.sub(lambda match: _CANONICAL.get(match[1], match[0]), text), _LATEX)


def _without_dollars(text: str) -> str:
    """5 cm for $5$ cm."""
    if "$" not in text or len(_INLINE.sub(" ", text).split()) > MAX_WORDS_AROUND:
        return text
    if any(re.search(r"(?<![\\A-Za-z])[A-Za-z]{3}", inner) for inner in _INLINE.findall(text)):
        return text  # between two amounts of dollars
    return _INLINE.sub(r"\1", text)


def squashed(text: str) -> str:
    """The cleaned text without spaces and optional braces, to compare as a string."""
    text = _MOD.sub(r"(mod\1)", text)
    text = re.sub(r"\s+", "", _CHARGE.sub(r"\1", text))
    text = re.sub(r"\{([0-9A-Za-z])\}", r"\1", text)
    text = re.sub(r"(?<=[A-Za-z])_(?=\d)", "", text)
    return _PRODUCT.sub("*", text)


def words_of(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces; compatibility forms unified."""
    text = unicodedata.normalize("NFKC", text).lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", text).split())


def _strip_once(text: str) -> str:
    text = _end(text)
    for pattern in _WRAPPERS.values():
        match = pattern.fullmatch(text)
        if match is not None:
            inner = match[match.lastindex or 0]
            if inner.count("{") == inner.count("}"):
                text = inner.strip()
    match = _LEAD_IN.match(text)
    if match is not None and match.end() < len(text):
        text = text[match.end() :].strip()
    return text


def _end(text: str) -> str:
    text = _TRAILING.sub("", text.strip())
    if text.endswith((".", ":")) and not text.endswith(".."):
        text = text[:-1].rstrip()
    return text


_SEPARATOR_TABLES = Tables("separators", frame=FRAME)

# How a part is attached to the text before it: "" is a new start, as after a full stop; "or" is an
# alternative, which does not describe its neighbor.
Joint = Literal["", "or", "alias", "bracket", "dash", "colon", "comma", "list", "equals"]
Cut = Callable[[str], list[str]]

_LINES = _SEPARATOR_TABLES.pattern("lines")
_LABEL = re.compile(r"(?:^|(?<=[\s,;.(\"'{]))([^\W\d]+)\s?#?(?:\d{1,2})?[\"']?\s*[:=]\s*")
_SEPARATOR_SYMBOLS = _SEPARATOR_TABLES.pattern("symbols")
_SCRIPTS = _SEPARATOR_TABLES.pattern("scripts")
_MARKS = _SEPARATOR_TABLES.pattern("marks")
_ENUMERATED = _SEPARATOR_TABLES.pattern("enumerated")
_END = _SEPARATOR_TABLES.pattern("end")
_ABBREVIATIONS = _SEPARATOR_TABLES.words("abbreviations")
_LAST_WORD = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]{1,9}$")
_NAMES = _SEPARATOR_TABLES.text("names")
_SUBJECT = _SEPARATOR_TABLES.text("subject")
_CLAUSE = _SEPARATOR_TABLES.pattern("clause", re.IGNORECASE)
_SPLICE = re.compile(rf",\s+(?={_SUBJECT}(?:'s|\s+(?:is|was|are|were|could|might|may))\s)", re.I)
_CAPITALS = re.compile(r"(?:[A-Z\d$\"][^\s,]{0,40}\s+){0,8}[A-Z\d$\"][^\s,]{0,40},\s")
_STATES = re.compile(rf"{_SUBJECT}(?:'s|\s+(?:is|was|are|were|could|might|may))\s", re.I)
_NAMED = re.compile(rf",?\s*(?<!\w)(?:{_NAMES})(?!\w),?:?\s*", re.IGNORECASE)
_WORDS = _SEPARATOR_TABLES.pattern("words", re.IGNORECASE)
_BRACKET = _SEPARATOR_TABLES.pattern("bracket")
_DASHES = _SEPARATOR_TABLES.pattern("dashes")
_COLONS = _SEPARATOR_TABLES.pattern("colons")
_COMMAS = _SEPARATOR_TABLES.pattern("commas")
_LISTS = _SEPARATOR_TABLES.pattern("lists")
EQUALS = _SEPARATOR_TABLES.pattern("equals")
_CORRECTION = _SEPARATOR_TABLES.pattern("correction", re.IGNORECASE)


def lines(text: str) -> list[str]:
    """Cut at lines and before labeled answers."""
    return _LINES.split(text)


def labels(text: str) -> list[str]:
    """Around labels that come twice: Result: A Result: B; answer 1 = A, answer 2 = B."""
    found = list(_LABEL.finditer(text))
    names = [match[1].lower() for match in found]
    return _around(text, [match for match in found if names.count(match[1].lower()) > 1])


def _around(text: str, cuts: Iterable[re.Match[str]]) -> list[str]:
    spans = [(0, 0), *(match.span() for match in cuts), (len(text), len(text))]
    return [text[start:stop] for (_, start), (stop, _) in pairwise(spans)]


def symbols(text: str) -> list[str]:
    """Around signs that are no letters, digits or punctuation of a name, and words of another
    script than the text before and after."""
    return [part for piece in _SCRIPTS.split(text) for part in _SEPARATOR_SYMBOLS.split(piece)]


def marks(text: str) -> list[str]:
    """Cells, bullets, numbered alternatives, boxes and spans of markup that follow each other."""
    found = list(_ENUMERATED.finditer(text))
    values = [match[1] or match[2] for match in found]
    if len(values) > 1 and values[0] in "1aAi\u03b1\u0430" and len(set(values)) == len(values):
        ends = [0, *(match.start() for match in found), len(text)]
        pieces = [text[start:end] for start, end in pairwise(ends)]
        bare = [_ENUMERATED.sub("", piece, count=1) for piece in pieces]
        if all(piece.strip() for piece in bare[1:]):
            return [part for piece in bare for part in _MARKS.split(piece)]
    return _MARKS.split(text)


def sentences(text: str) -> list[str]:
    """Cut after full stops, semicolons, marks and ellipses; not abbreviations and initials."""
    ends = [
        match
        for match in _END.finditer(text)
        if not (match["stop"] and _is_abbreviated(text[: match.start()], text[match.end() :]))
    ]
    return _around(text, ends)


def _is_abbreviated(before: str, after: str) -> bool:
    word = _LAST_WORD.search(before[-20:])
    if word is None:
        return False
    short = word[0].lower()
    if len(short) == 1 and word[0].isupper():
        return word[0] not in "IVX"
    if short in ("no", "nos", "b", "d", "c", "r"):
        return after[:1].isdigit()
    return "." in short or (short in _ABBREVIATIONS and bool(after))


def named_again(text: str) -> list[str]:
    """Around aka, i.e. and "also known as"."""
    return _NAMED.split(text)


def clauses(text: str) -> list[str]:
    """Around "and it is" and "but the answer was", which begin a sentence of their own."""
    halves = _CLAUSE.split(text)
    return [
        one
        for half in halves
        for one in (_SPLICE.split(half) if _STATES.match(half) or _CAPITALS.match(half) else [half])
    ]


def alternatives(text: str) -> list[str]:
    """Around or, hence, possibly and the like, and arrows."""
    return _WORDS.split(text)


def corrections(text: str) -> list[str]:
    """Around no, wait, sorry and "the final answer is"."""
    return _around(text, _corrections(text))


def _corrections(text: str) -> list[re.Match[str]]:
    return [match for match in _CORRECTION.finditer(text) if not _is_condition(text, match)]


def _is_condition(text: str, match: re.Match[str]) -> bool:
    """Whether a correction is hypothetical, as in "if that is wrong", or is a label that two
    answers have: the final answer is 13, the final answer is 14."""
    before = text[: match.start()]
    is_repeated = "answer" in match[0].lower() and match[0].strip().lower() in before.lower()
    is_question = text[match.end() :].rstrip(" .)]\"'").endswith("?")  # or rather Paris?
    return (
        is_repeated
        or is_question
        or re.search(r"\b(?:if|unless|maybe|perhaps|possibly)\s*$", before, re.I) is not None
    )


def last_correction(text: str, *, is_truth: bool = False) -> Iterator[str]:
    """The text after each correction, the last first; `is_truth`: "no" is an answer and corrects
    nothing."""
    for match in reversed(_corrections(text)):
        if not (is_truth and match[0].lower().startswith("no")):
            yield text[match.end() :]


LEVELS: tuple[tuple[Joint, Cut], ...] = (
    ("or", marks), ("or", symbols), ("", lines), ("", corrections), ("", sentences), ("", clauses),
    ("alias", named_again), ("or", alternatives), ("bracket", _BRACKET.split),
    ("dash", _DASHES.split), ("colon", _COLONS.split), ("comma", _COMMAS.split),
    ("list", _LISTS.split), ("equals", EQUALS.split),
)  # fmt: skip
OF_A_CLAUSE = (alternatives, _COMMAS.split, _LISTS.split, EQUALS.split)  # these belong to a clause
OF_A_SENTENCE = tuple(cut for _, cut in LEVELS[6:])
