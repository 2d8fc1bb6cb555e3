"""Names and phrases that are the same but for form: titles, initials, acronyms, places."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from envs.grading.numbers import han_as_digits
from envs.grading.spelling import unify
from envs.grading.words import ROMAN_LETTERS, has_cjk, tokens

_NAMES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_TITLES, _KINDS = frozenset(_NAMES["titles"]), frozenset(_NAMES["kinds"])
_BEFORE_TITLES = frozenset(_NAMES["before_titles"])
_SUFFIXES = frozenset({"junior", "senior", *map(str, range(1, 10))})
_ALIASES: dict[str, str] = _NAMES["aliases"]
_CLASSES = re.compile(
    r"(?:the\s+)?(?:(?:islamic\s+|people's\s+)?republic|state|city|town|kingdom|month|year|island"
    r"|province)\s+of\s+(?=\S)|(?:the\s+)?(?:island|year|month)\s+(?=\S)",
    re.IGNORECASE,
)
_SMALL = frozenset(str.split("of the and for a an in on de"))
_ROMAN_NUMERAL = re.compile(r"[IVX]+")


def without_class(text: str) -> str:
    """Niger for the Republic of Niger, 1999 for the year 1999."""
    match = _CLASSES.match(text)
    return text[match.end() :] if match is not None else text


def untitled(tokens: list[str]) -> list[str]:
    """Tokens without leading titles and without the kind of thing they name."""
    start = 0
    while start < len(tokens) - 1 and (
        tokens[start] in _TITLES
        or (tokens[start] in _BEFORE_TITLES and tokens[start + 1] in _TITLES)
    ):
        start += 1
    return [token for token in tokens[start:] if token not in _KINDS] or tokens


def same_person(one: list[str], other: list[str]) -> bool:
    """First and last name agree; a middle name may be missing or be an initial. A junior or a
    third must be one on both sides."""
    if one[-1] in _SUFFIXES or other[-1] in _SUFFIXES:
        if one[-1] != other[-1]:
            return False
        one, other = one[:-1], other[:-1]
    if min(len(one), len(other)) < 2 or (one[0], one[-1]) != (other[0], other[-1]):
        return False
    if not all(token.isalpha() for token in one + other):
        return False
    short, long = sorted((one[1:-1], other[1:-1]), key=len)
    if len(short) == len(long):
        pairs = zip(short, long, strict=True)
        return all(a == b or (a[0] == b[0] and 1 in (len(a), len(b))) for a, b in pairs)
    return not short and len(long) == 1


def is_acronym(short: str, long: str) -> bool:
    """FBI of Federal Bureau of Investigation, JFK of John F. Kennedy, WWII of World War II."""
    short = re.sub(r"^the\s+", "", short.strip(), flags=re.IGNORECASE).replace(".", "")
    if not (3 <= len(short) <= 8 and short.isalpha() and short.isupper()):
        return False
    words = [word for word in re.findall(r"\w+", long) if word.lower() not in _SMALL]
    initials = "".join(
        word if _ROMAN_NUMERAL.fullmatch(word) else word[0].upper() for word in words
    )
    return len(words) >= 3 and initials == short


_SPELLING = re.compile(r"our\b|(?<=\w)tre\b|ise\b|ae|oe")
_CJK_CLAUSE = re.compile(
    "^(?:[^,\u4e0d\u6ca1\u975e]{0,8}(?:\u662f|\u62c5\u4efb|\u4e3a|\u53eb)|\u4e2d\u56fd(?=..))"
)
_CJK_TITLE = re.compile(
    "(?<=..)(?:\u5e02|\u7701|\u53bf|\u6559\u6388|\u5148\u751f|\u5973\u58eb|\u535a\u58eb|\u8001\u5e08)$"
)
_CJK_TITLES: list[str] = _NAMES["han_titles"]
_CJK_COUNTED = re.compile(
    "(?<=\\d)[\u4e2a\u540d\u4f4d](?!\u6708)|^\u5206\u522b(?:\u4e3a|\u662f)|\u804c\u52a1$"
)
_CJK_SEPARATOR = re.compile("\\s*[\u3001\u548c\u4e0e\u53ca,;]\\s*")


def same_words(answer: str, gold: str) -> bool:
    """Equal as words, up to spacing, titles, common short forms and middle names."""
    found, wanted = tokens(answer), tokens(gold)
    if not found or not wanted:
        return answer.strip() == gold.strip()
    if "".join(found) == "".join(wanted):
        return True
    if _alias(found) == _alias(wanted) or _turned(answer) == wanted or _turned(gold) == found:
        return True
    if is_acronym(answer, gold) or is_acronym(gold, answer):
        return True
    found, wanted = tokens(without_class(answer)), tokens(without_class(gold))
    found, wanted = _folded(untitled(found)), _folded(untitled(wanted))
    if found == wanted or same_person(found, wanted):
        return True
    if _is_turned(answer, gold) or _is_nickname(answer, gold) or _is_nickname(gold, answer):
        return True
    return _cjk_core(answer) == _cjk_core(gold) != ""


def _is_turned(one: str, other: str) -> bool:
    """The gorge of the Rhine and the Rhine Gorge; Duke Peter I of Bourbon and Peter I, Duke of
    Bourbon; Paris is the capital and the capital is Paris."""
    for this, that in ((one, other), (other, one)):
        head, of, tail = this.partition(" of ")
        if of and " of " not in tail and tokens(f"{tail} {head}") == tokens(that):
            return True
    if (one.count(","), other.count(",")) in ((0, 1), (1, 0)):
        bags = sorted(_in_place(one)), sorted(_in_place(other))
        if len(bags[0]) > 2 and bags[0] == bags[1]:
            return True
    sides = [_COPULA.split(text, maxsplit=1) for text in (one, other)]
    if any(len(parts) != 3 for parts in sides) or sides[0][1] != sides[1][1]:
        return False
    return [tokens(part) for part in sides[0][::2]] == [tokens(part) for part in sides[1][::-2]]


def _in_place(text: str) -> list[str]:
    """The words, each part between commas with its numerals."""
    return [token for part in text.split(",") for token in _numbered(part)]


def _numbered(part: str) -> list[str]:
    return [ROMAN_LETTERS.get(token, token) for token in tokens(part)]


_COPULA = re.compile(r"\s+(is|are|was|were)\s+")
_NICKNAME = re.compile(r"(\w.*?)\s+[\"'(](\w[\w.-]*)[\"')]\s+(.+)")


def _is_nickname(short: str, long: str) -> bool:
    """Kimmy Schmidt, or Kimberly Schmidt, for Kimberly "Kimmy" Schmidt."""
    match = _NICKNAME.fullmatch(long.strip())
    if match is None:
        return False
    first, nick, last = map(tokens, match.groups())
    return tokens(short) in ([*nick, *last], [*first, *last], [first[0], *last])


def _folded(found: list[str]) -> list[str]:
    """Spelling and number of words in one form: colours as color, toddies as toddy."""
    return [_singular(_SPELLING.sub(_american, token)) for token in found]


def _american(match: re.Match[str]) -> str:
    return {"our": "or", "tre": "ter", "ise": "ize"}.get(match[0], "e")


def _singular(token: str) -> str:
    if len(token) > 4 and token.endswith("ies"):
        return token[:-3] + "y"
    if len(token) > 3 and token.endswith("s") and not token.endswith(("ss", "us", "is")):
        return token[:-1]
    return token


def _cjk_core(text: str) -> str:
    """A Chinese name without what stands round it: a title, the kind of place, a short clause."""
    if not has_cjk(text):
        return ""
    text = _CJK_CLAUSE.sub("", unify(text).strip(" ."))
    text = _CJK_SEPARATOR.sub(",", _CJK_COUNTED.sub("", han_as_digits(text)))
    for _ in range(2):
        title = next(
            (one for one in _CJK_TITLES if one in (text[: len(one)], text[-len(one) :])), ""
        )
        rest = text[len(title) :] if text.startswith(title) else text[: -len(title)]
        text = rest if title and 1 < len(rest) <= 4 else text
    return _CJK_TITLE.sub("", text) or text


def _turned(name: str) -> list[str]:
    """Shakespeare, William as William Shakespeare."""
    last, comma, first = name.partition(",")
    return tokens(f"{first} {last}") if comma and "," not in first else []


def _alias(found: list[str]) -> str:
    text = " ".join(found)
    return _ALIASES.get(text, text)
