"""One plain form for the many ways to write an answer: Unicode, LaTeX wrappers, lead-ins.

Everything here is linear in the length of the text; callers cap that length first.
"""

from __future__ import annotations

import re
import string
import unicodedata

from agentenv.envs.grading.tables import Tables

MAX_ANSWER_CHARS = 2000
MAX_UNIFIED_CHARS = 4000  # one sign may become eighteen

MAX_BOX_CHARS = 20_000  # a box that is still open after so many characters counts as open

# How an answer is boxed: BOX is what is asked for, and FRAME how else models write it.
BOX = r"\boxed{"
FRAME = r"\\(?:f?boxed|fbox)\s*\{"
_BRACE = re.compile(r"[{}]")
_TABLES = Tables(__file__, frame=FRAME)
_SYMBOLS = {unicodedata.lookup(name): plain for name, plain in _TABLES["symbols"].items()}
_SUPERSCRIPTS = {
    chr(code): digit
    for code, digit in zip(
        [0x2070, 0xB9, 0xB2, 0xB3, *range(0x2074, 0x207A), 0x207A, 0x207B],
        "0123456789+-",
        strict=True,
    )
}
_SUPERSCRIPT = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_VULGAR = _TABLES.pattern("vulgar")
_ROOT = re.compile(r"\N{SQUARE ROOT}\s*(?:(\d+(?:\.\d+)?|[A-Za-z])|\(([^()]*)\))")
_PLAIN_ROOT = re.compile(r"(?<![A-Za-z\\])\\?sqrt\s*(?:\(((?:[^()]|\([^()]*\))*)\)|\{([^{}]*)\})")
_LATEX = _TABLES.rewrites("latex")
_MOD = re.compile(r"\(?\\?p?mod\s*(?:\{\s*(?=\w+\s*\}))?(\w+)\s*[})]?")
_CHARGE = re.compile(r"\^\{?(\d*[+-])(?:\}|(?![\w({]))")  # Ca^{2+} as Ca2+
_BOLD = re.compile(r"(?<![\w)}*])\*\*([^*\n]+)\*\*(?![\w({*])")
_WRAPPERS = _TABLES.patterns("wrappers")
_INLINE = re.compile(r"(?<![\\\w$])\$(?=\S)([^$\n]{1,120}?)(?<=\S)\$(?![\w$])")
MAX_WORDS_AROUND = 3  # of an answer that is a formula with its unit; more are a sentence
_LEAD_IN = _TABLES.pattern("lead_in", re.IGNORECASE)
_APPROXIMATELY = _TABLES.pattern("approximately", re.IGNORECASE)
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
    return "".join(_SYMBOLS.get(sign, sign) for sign in text)


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
    text = re.sub(r"(?<!\d)_|_(?!\d)", "", text)
    return text.replace(r"\cdot", "*").replace(r"\times", "*")


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
    """Without doubled brackets round the whole: ((5)) is (5)."""
    depth = min(len(text) - len(text.lstrip("(")), len(text) - len(text.rstrip(")")))
    inner = text[depth : len(text) - depth]
    return inner if depth > 1 and not set("()") & set(inner) else text


def _end(text: str) -> str:
    text = _TRAILING.sub("", text.strip())
    if text.endswith((".", ":")) and not text.endswith(".."):
        text = text[:-1].rstrip()
    return text
