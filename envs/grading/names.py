"""Names of people and things that are the same but for form: titles, initials, acronyms, typos."""

from __future__ import annotations

import re

_TITLES = frozenset(
    str.split(
        "mr mrs ms miss dr doctor prof professor sir dame lord lady king queen prince princess "
        "president saint emperor empress pope rear admiral adm general gen captain capt colonel "
        "col lieutenant lt sergeant sgt senator sen governor gov secretary minister"
    )
)
_CLASSES = re.compile(
    r"(?:the\s+)?(?:(?:islamic\s+|people's\s+)?republic|state|city|town|kingdom|month|year|island"
    r"|province)\s+of\s+(?=\S)|(?:the\s+)?(?:island|year|month)\s+(?=\S)",
    re.IGNORECASE,
)
_KINDS = frozenset(
    str.split(
        "magazine network rocket film movie band company corporation corp inc ltd newspaper mount"
    )
)
_SMALL = frozenset(str.split("of the and for a an in on de"))
_ROMAN = re.compile(r"[IVX]+")
MIN_TYPO_CHARS = 6


def without_class(text: str) -> str:
    """Niger for the Republic of Niger, 1999 for the year 1999."""
    match = _CLASSES.match(text)
    return text[match.end() :] if match is not None else text


def untitled(tokens: list[str]) -> list[str]:
    """Tokens without leading titles and without the kind of thing they name."""
    start = 0
    while start < len(tokens) - 1 and tokens[start] in _TITLES:
        start += 1
    return [token for token in tokens[start:] if token not in _KINDS] or tokens


def same_person(one: list[str], other: list[str]) -> bool:
    """First and last name agree; a middle name may be missing or be an initial."""
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
    initials = "".join(word if _ROMAN.fullmatch(word) else word[0].upper() for word in words)
    return len(words) >= 3 and initials == short


def is_typo(one: list[str], other: list[str]) -> bool:
    """Names of several words that differ by one letter in one long word."""
    if len(one) != len(other) or len(one) < 2:
        return False
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a != b]
    return len(pairs) == 1 and _near(*pairs[0])


def _near(one: str, other: str) -> bool:
    """One letter more, less, different, or two neighbours swapped; not the first letter."""
    if min(len(one), len(other)) < MIN_TYPO_CHARS or not (one + other).isalpha():
        return False
    if one[0] != other[0] or abs(len(one) - len(other)) > 1:
        return False
    start = 0
    while start < min(len(one), len(other)) and one[start] == other[start]:
        start += 1
    rest, other_rest = one[start:], other[start:]
    return (
        rest[1:] == other_rest
        or rest == other_rest[1:]
        or (len(rest) > 1 and rest[2:] == other_rest[2:] and rest[:2] == other_rest[1::-1])
    )
