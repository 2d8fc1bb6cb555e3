"""Signs that carry a value in words: x > 5, A -> B, C++, blood type A-, a profit of -3; a named A.

Each has one form here, a sign or a word, whichever way it is written; what is punctuation (hyphens
in words, ranges, dates, dashes, bullets) has none.
"""

from __future__ import annotations

import re
import unicodedata

MINUS = "\N{MINUS SIGN}"  # texts hold hyphens only, once they are unified
_BACK, _BOTH_WAYS = "\N{LEFTWARDS ARROW}", "\N{LEFT RIGHT ARROW}"
_AT_MOST, _AT_LEAST = "\N{LESS-THAN OR EQUAL TO}", "\N{GREATER-THAN OR EQUAL TO}"
_UNEQUAL, _EITHER = "\N{NOT EQUAL TO}", "\N{PLUS-MINUS SIGN}"
SIGNS = f"<>{_AT_MOST}{_AT_LEAST}{_UNEQUAL}{_BACK}{_BOTH_WAYS}{_EITHER}"
NAMED_A = "\N{FULLWIDTH LATIN SMALL LETTER A}"  # a name, which is no article

_WORDS = frozenset({"a", "plus", "minus", "sharp", "flat", "star"})

_COMMANDS = {
    "le": _AT_MOST, "leq": _AT_MOST, "leqslant": _AT_MOST, "ge": _AT_LEAST, "geq": _AT_LEAST,
    "geqslant": _AT_LEAST, "ne": _UNEQUAL, "neq": _UNEQUAL, "lt": "<", "gt": ">",
    "to": "to", "rightarrow": "to", "Rightarrow": "to", "implies": "to", "longrightarrow": "to",
    "mapsto": "to", "gets": _BACK, "leftarrow": _BACK, "Leftarrow": _BACK, "longleftarrow": _BACK,
    "leftrightarrow": _BOTH_WAYS, "Leftrightarrow": _BOTH_WAYS, "iff": _BOTH_WAYS,
    "rightleftharpoons": _BOTH_WAYS, "pm": _EITHER, "land": "and", "wedge": "and", "lor": "or",
    "vee": "or", "neg": "not", "lnot": "not", "notin": "not in", "cup": "union",
    "cap": "intersection", "times": "x", "sharp": "sharp", "flat": "flat", "infty": "infinity",
}  # fmt: skip
_FORMAT = frozenset(
    str.split(
        "text textbf textit textrm texttt textsf mathrm mathbf mathit mathsf mathcal mathbb mbox"
        " operatorname left right displaystyle boxed fbox frac dfrac tfrac cdot approx sim quad"
        " qquad begin end circ degree big Big bigl bigr hat vec bar overline underline mid"
    )
)
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_TAG = re.compile(r"</?[a-z][a-z\d]*(?:\s[^<>]*)?/?>|^>\s+(?=[^\W\d])", re.MULTILINE)
_NUMBER = r"(?=\s?[$\u20ac\u00a3]?\s?\.?\d)"
_BE = r"\b(?:(?:is|are|was|were) )?(?:strictly )?"
_FORMS = (  # in this order
    (re.compile(r"\bplus or minus\b|\+/?-(?=\s?\d)", re.IGNORECASE), f" {_EITHER} "),
    (re.compile(r"<=>|<-+>|[\u2194\u21d4\u21cc]"), f" {_BOTH_WAYS} "),
    (re.compile(r"(?<![<=])(?:-+>|=+>)|[\u2192\u21d2\u27f6]"), " to "),
    (re.compile(r"(?<=\s)<-+(?=\s)|[\u2190\u21d0]"), f" {_BACK} "),
    (re.compile(r"<="), f" {_AT_MOST} "),
    (re.compile(r">="), f" {_AT_LEAST} "),
    (re.compile(r"!=|<>"), f" {_UNEQUAL} "),
    (re.compile(rf"{_BE}(?:less|fewer|lower|smaller) than{_NUMBER}"), " < "),
    (re.compile(rf"{_BE}(?:more|greater|higher|larger) than{_NUMBER}"), " > "),
    (re.compile(r"(?<=[A-Za-z])(?:#(?!\w)|\u266f)"), " sharp "),
    (re.compile(r"(?<=[A-Za-z])\u266d"), " flat "),
    (re.compile(r"\^\s*\{?\s*(\d*)\s*\+\s*\}?(?!\w)"), r"\1 plus "),
    (re.compile(r"\^\s*\{?\s*(\d*)\s*-\s*\}?(?!\w)"), r"\1 minus "),
    (re.compile(r"(?<=[\w)\]}])\+\+(?!\w)"), " plus plus "),
    (re.compile(r"(?<=[\w)\]}])\+(?![\w(])"), " plus "),
    (re.compile(r"(?<![*\w])([A-Za-z])\*(?![*\w])"), r"\1 star "),
    (
        re.compile(r"(?<![\w-])([A-Z][A-Za-z]{0,2}\d?|e)-(?![\w$-])(?!\s+(?:and|or|to)\b|\s*\d)"),
        r"\1 minus ",
    ),
    (re.compile(r"\b(A|B|AB|O) ?(?:positive|pos)\b"), r"\1 plus "),
    (re.compile(r"\b(A|B|AB|O) ?(?:negative|neg)\b"), r"\1 minus "),
    (re.compile(rf"(?<!\S)\+{_NUMBER}"), ""),
    (re.compile(r"(?<=[\w)\]}])\s*\+\s*(?=[\w(\[{])|(?<=\s)\+(?=\s)"), " and "),
    (re.compile(rf"(?<!\d )(?<!\d)\b(?:minus|negative)\s+{_NUMBER}", re.IGNORECASE), MINUS),
    (
        re.compile(
            rf"(?<!\d\s)(?<![^\s(\[{{=<>:,/$\u20ac\u00a3{SIGNS}])-(?=[$\u20ac\u00a3]?\s?\.?\d)"
        ),
        MINUS,
    ),
    (re.compile(rf"{MINUS}\s?([$\u20ac\u00a3])\s?"), rf"\1{MINUS}"),
    (re.compile(rf"(?<![^\s$\u20ac\u00a3{MINUS}(])\.(?=\d)"), "0."),
)

_GREEK = re.compile("(?<![\u0370-\u03ff])[\u0391-\u03c9](?![\u0370-\u03ff])")

# A.

_A = re.compile(r"(?<![\w'.])[Aa](?![\w'.])")
_LETTERED = re.compile(
    r"\b(?:vitamin|hepatitis|type|grade|group|plan|class|option|section|part|point|team|league|serie"
    r"|series|influenza|factor|angle|set|event|company|level|division|category|appendix|figure"
    r"|exhibit|schedule|model|side|block|building|gate|platform|route|line|unit|zone|ward|list|title"
    r"|table|case|variant|strain|sample|column|row|item|answer|choice|letter|note|protein|virus"
    r"|supergroup|formation|phase|stage|page|apolipoprotein|cyclin|cytochrome|immunoglobulin)\s+$",
    re.IGNORECASE,
)
_BEHIND_A_NAME = re.compile(
    r"\s*(?:$|[,;:!?)\]/-]|(?:and|or|is|was|are|to|in|of|for|at|plus|minus|star|sharp|flat|x|major"
    r"|minor|levels?)\b"
    rf"|[{SIGNS}])"
)


def signed(text: str) -> str:
    """A unified text with its signs in one form each, and LaTeX commands as words."""
    text = _GREEK.sub(_greek, _COMMAND.sub(_named, _TAG.sub(" ", text)))
    for form, plain in _FORMS:
        text = form.sub(plain, text)
    return text


def named_a(text: str) -> str:
    """The text with each A marked that is a name: hepatitis A, plan A, A+, the last word."""

    def marked(match: re.Match[str]) -> str:
        before, behind = text[: match.start()], text[match.end() :]
        is_name = (
            _BEHIND_A_NAME.match(behind)
            or _LETTERED.search(before[-20:])
            or (match[0] == "A" and before.strip() and re.match(r"\s+[a-z]", behind))
        )
        return NAMED_A if is_name and len(text.strip()) > 1 else match[0]

    return _A.sub(marked, text)


def is_sign(token: str) -> bool:
    """Whether a token is a sign, a number below zero or a named A."""
    return token in SIGNS or token.startswith(MINUS) or token in _WORDS


def _named(match: re.Match[str]) -> str:
    name = match[1]
    return " " if name in _FORMAT else f" {_COMMANDS.get(name, name)} "


def _greek(match: re.Match[str]) -> str:
    return f" {unicodedata.name(match[0]).rpartition(' ')[2].lower()} "
