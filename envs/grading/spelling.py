"""One plain form for the many ways to write an answer: Unicode, LaTeX wrappers, lead-ins.

Everything here is linear in the length of the text; callers cap that length first.
"""

from __future__ import annotations

import re
import string
import tomllib
import unicodedata
from pathlib import Path

MAX_ANSWER_CHARS = 2000
MAX_UNIFIED_CHARS = 4000  # one sign may become eighteen

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
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
_VULGAR = re.compile(
    "(?<=\\d)(?=[\N{VULGAR FRACTION ONE QUARTER}-\N{VULGAR FRACTION THREE QUARTERS}"
    "\N{VULGAR FRACTION ONE SEVENTH}-\N{VULGAR FRACTION SEVEN EIGHTHS}])"
)
_ROOT = re.compile(r"\N{SQUARE ROOT}\s*(?:(\d+(?:\.\d+)?|[A-Za-z])|\(([^()]*)\))")
_PLAIN_ROOT = re.compile(r"(?<![A-Za-z\\])\\?sqrt\s*(?:\(((?:[^()]|\([^()]*\))*)\)|\{([^{}]*)\})")
_LATEX = (
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![a-zA-Z])"), ""),
    (re.compile(r"\\!\s*"), ""),
    (re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])"), " "),
    (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), r"\\pi"),
    (re.compile(r"(?<!\\)\\([%$&#_])"), r"\1"),
    (re.compile("\u767e\u5206\u4e4b(.+)"), r"\1%"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\^\{?\s*\\circ\s*\}?|\\degree(?:s)?(?![a-zA-Z])"), "\N{DEGREE SIGN}"),
    (re.compile(r"\\leq?(?:slant)?(?![a-zA-Z])|<=(?!>)"), r"\\le "),
    (re.compile(r"\\geq?(?:slant)?(?![a-zA-Z])|>="), r"\\ge "),
    (re.compile(r"\\neq?(?![a-zA-Z])|!="), r"\\ne "),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(r"\\(?:long)?rightarrow(?![a-zA-Z])|(?<![<=-])-+>"), r"\\to "),
    (re.compile(r"(?<=\s)<-+(?=\s)"), r"\\leftarrow "),
    (re.compile(r"<-+>"), r"\\leftrightarrow "),
    (re.compile(r"\\(?:wedge)(?![a-zA-Z])"), r"\\land "),
    (re.compile(r"\\(?:vee)(?![a-zA-Z])"), r"\\lor "),
    (re.compile(r"\^\s*\{?\s*(?:\\text\s*\{)?\s*(st|nd|rd|th)\s*\}{0,2}(?![a-z])"), r"\1"),
    (re.compile(r"(?<![A-Za-z\\])(log|ln|sin|cos|tan)(?=[_^(\s\d]|$)"), r"\\\1"),
    (re.compile(r"\\log_\{?e\}?(?![a-z])"), r"\\ln"),
    (
        re.compile(
            r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
        ),
        r" \1 ",
    ),
    (re.compile(r"\\sqrt\s*([0-9A-Za-z])"), r"\\sqrt{\1}"),
)
_MOD = re.compile(r"\(?\\?p?mod\s*(?:\{\s*(?=\w+\s*\}))?(\w+)\s*[})]?")
_CHARGE = re.compile(r"\^\{?(\d*[+-])(?:\}|(?![\w({]))")  # Ca^{2+} as Ca2+
_BOLD = re.compile(r"(?<![\w)}*])\*\*([^*\n]+)\*\*(?![\w({*])")
_WRAPPERS = (
    re.compile(r'\{\s*"\w+"\s*:\s*"?([^{}"]*)"?\s*\}'),
    re.compile(r"\$\$([^$]*)\$\$"),
    re.compile(r"\$(\$\d[^$]*)\$"),
    re.compile(r"\$([^$]*[^$\s][^$]*)\$", re.DOTALL),
    re.compile(r"\\\(((?:(?!\\[()]).)*)\\\)", re.DOTALL),
    re.compile(r"\\\[((?:(?!\\[\[\]]).)*)\\\]", re.DOTALL),
    re.compile(r"\*\*((?:(?!\*\*).)*)\*\*", re.DOTALL),
    re.compile(r"`+([^`]*)`+"),
    re.compile(r'"([^"]*)"'),
    re.compile(r"'([^']*)'"),
    re.compile(r"\\f?boxed\s*\{(.*)\}|\\fbox\s*\{(.*)\}", re.DOTALL),
    re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"),
)
_INLINE = re.compile(r"(?<![\\\w$])\$(?=\S)([^$\n]{1,120}?)(?<=\S)\$(?![\w$])")
MAX_WORDS_AROUND = 3  # of an answer that is a formula with its unit; more are a sentence
_LEAD_IN = re.compile(
    r"(?:=+>|-+>|=|\\to(?![a-z])|\\Rightarrow|\\therefore)\s*(?=[^\s=])"
    r"|(?:in|on|at)\s+(?=(?:the year )?\d)"
    r"|(?:(?:so|thus|therefore|hence)\b,?\s*)?"
    r"(?:(?:the|my|our)\s+)?(?:final\s+|correct\s+)?(?:answer|result|solution)"
    r"\s*(?:\bis\b|\bare\b|\bequals\b|=|:)+(?:\s*:)?\s*"
    r"|(?:it\s+is|it's|that\s+is|they\s+are)\s+"
    r"|(?:definitely|certainly|clearly|simply|exactly|precisely|indeed|just"
    r"|surely|undoubtedly|obviously|a total of|namely)\s+(?=\S)"
    r"|(?:no|neither|not) (?:more|fewer|less) (?:and|or|nor) (?:no |not )?"
    r"(?:more|fewer|less) than\s+"
    r"|(?:so|thus|therefore|hence),?\s+(?=\S)"
    r"|(?:\u516c\u5143|\u662f|\u4e3a|\u5728|\u4e8e|\u76f8\u5dee)(?=[\d\u96f6\u3007\u4e00\u4e8c\u4e09\u56db\u4e94\u516d\u4e03\u516b\u4e5d\u5341\u4e24])"
    r"|(?:none other than|no other than|nothing but|none but|the so-called)\s+(?=\S)"
    r"|(?:\u4e00\u5171|\u603b\u5171|\u5171\u8ba1|\u5408\u8ba1|\u5171)(?:\u6709|\u662f|\u4e3a)?\s*(?=\S)"
    r"|\u6700\u7ec8\u7b54\u6848(?:\u662f|\u4e3a|:)?\s*|\u7b54\u6848?(?:\u662f|\u4e3a|:)\s*",
    re.IGNORECASE,
)
_APPROXIMATELY = re.compile(
    r"(?:\\approx|\\sim|approximately|approx\.?|about|around|roughly|nearly|almost|circa|(?-i:ca?\.)|\u5927\u7ea6|\u7ea6|~)"
    r"\s*(?=[\d$.\\-])",
    re.IGNORECASE,
)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_TRAILING = re.compile(r"(?<!\\)[;,]\s*\Z")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


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
    for pattern in _WRAPPERS:
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
