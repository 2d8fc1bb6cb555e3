"""Plain text: tables of words and patterns, one plain form for the many ways to write an answer,
and the separators between two parts of an answer, from the strongest to the weakest.

Everything here is linear in the length of the text; callers cap that length first.
"""

from __future__ import annotations

import re
import string
import tomllib
import unicodedata
from collections.abc import Callable, Iterator, Sequence
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
        return _INSERTED.sub(lambda match: self._value(match[1]), joined)

    def _value(self, name: str) -> str:
        return self._inserted[name] if name in self._inserted else self.text(name)


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
_SYMBOLS = str.maketrans(_SPELLING_TABLES.by_form("symbols"))
_SUPERSCRIPTS = {
    chr(code): digit
    for code, digit in zip(
        [0x2070, 0xB9, 0xB2, 0xB3, *range(0x2074, 0x207A), 0x207A, 0x207B],
        "0123456789+-",
        strict=True,
    )
}
_SUPERSCRIPT = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_VULGAR = _SPELLING_TABLES.pattern("vulgar")
_ROOT = re.compile(r"\N{SQUARE ROOT}\s*(?:(\d+(?:\.\d+)?|[A-Za-z])|\(([^()]*)\))")
_PLAIN_ROOT = re.compile(r"(?<![A-Za-z\\])\\?sqrt\s*(?:\(((?:[^()]|\([^()]*\))*)\)|\{([^{}]*)\})")
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
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or ''}}}", text)
    text = _SUPERSCRIPT.sub(
        lambda match: "^{" + "".join(_SUPERSCRIPTS[sign] for sign in match[0]) + "}", text
    )
    text = unicodedata.normalize("NFKC", _VULGAR.sub(" ", text))[:MAX_UNIFIED_CHARS]
    return text.translate(_SYMBOLS)


@lru_cache(maxsize=4096)  # many rules check parts of an answer
def clean(text: str) -> str:
    """An answer without its wrappers: LaTeX delimiters, boxes, bold, lead-ins, a full stop."""
    text = _BOLD.sub(r"\1", unify(text).strip())
    for _ in range(6):  # wrappers nest: **$\boxed{5}$.**
        before = text
        text = _strip_once(text)
        if text == before:
            break
    text = _without_dollars(text)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = _PLAIN_ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or ''}}}", text)
    text = _bare(" ".join(text.split()))
    text = _APPROXIMATELY.sub("", text) if _APPROXIMATELY.match(text) else text
    return _end(text)


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
            inner = next(group for group in match.groups() if group is not None)
            if inner.count("{") == inner.count("}"):
                text = inner.strip()
    match = _LEAD_IN.match(text)
    if match is not None and match.end() < len(text):
        text = text[match.end() :].strip()
    return text


def _bare(text: str) -> str:
    """The text without doubled brackets around it: ((5)) is (5)."""
    depth = min(len(text) - len(text.lstrip("(")), len(text) - len(text.rstrip(")")))
    inner = text[depth : len(text) - depth]
    return inner if depth > 1 and not set("()") & set(inner) else text


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
_ENUMERATED = re.compile(
    r"(?:^|(?<=\s))(?:\(?([1-9a-eA-E\u03b1-\u03b5\u0430-\u0434]|i{1,3}|iv|v)[).:]|#?([1-9])(?:[.)]|\s-))(?=\s)"
)
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
    ends = [(match.start(), match.end()) for match in found if names.count(match[1].lower()) > 1]
    starts = [0, *(end for _, end in ends)]
    stops = [*(start for start, _ in ends), len(text)]
    return [text[start:stop] for start, stop in zip(starts, stops, strict=True)]


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
    found, start = [], 0
    for match in _END.finditer(text):
        if match["stop"] and _is_abbreviated(text[: match.start()], text[match.end() :]):
            continue
        found.append(text[start : match.start()])
        start = match.end()
    return [*found, text[start:]]


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
    found, start = [], 0
    for match in _CORRECTION.finditer(text):
        if not _is_condition(text, match):
            found.append(text[start : match.start()])
            start = match.end()
    return [*found, text[start:]]


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
    for match in reversed(list(_CORRECTION.finditer(text))):
        is_answer = is_truth and match[0].lower().startswith("no")
        if not is_answer and not _is_condition(text, match):
            yield text[match.end() :]


LEVELS: tuple[tuple[Joint, Cut], ...] = (
    ("or", marks),
    ("or", symbols),
    ("", lines),
    ("", corrections),
    ("", sentences),
    ("", clauses),
    ("alias", named_again),
    ("or", alternatives),
    ("bracket", _BRACKET.split),
    ("dash", _DASHES.split),
    ("colon", _COLONS.split),
    ("comma", _COMMAS.split),
    ("list", _LISTS.split),
    ("equals", EQUALS.split),
)
OF_A_CLAUSE = (alternatives, _COMMAS.split, _LISTS.split, EQUALS.split)  # these belong to a clause
OF_A_SENTENCE = tuple(cut for _, cut in LEVELS[6:])
