"""Names, phrases and places that differ in form only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pycountry

from agentenv.envs.grading.numbers import han_core
from agentenv.envs.grading.text import Tables, rewritten
from agentenv.envs.grading.words import ROMAN_LETTERS, folded, glued, tokens, transliterated

MAX_CHARS = 400  # no name is longer
MAX_PLACE_CHARS = 120
_NAME_TABLES = Tables("names")
_LONG = [*_NAME_TABLES["plain_titles"], *_NAME_TABLES["titles"]]
_TITLES = {**{name: name for name in _LONG}, **_NAME_TABLES.by_form("titles")}
_COURTESIES = frozenset(_NAME_TABLES["courtesies"])
_BEFORE_TITLES = frozenset(_NAME_TABLES["before_titles"])
_BEFORE_RANKS = frozenset(_NAME_TABLES["before_ranks"])
_LONG_KINDS = [*_NAME_TABLES["plain_kinds"], *_NAME_TABLES["kinds"]]
_KINDS = {**{name: name for name in _LONG_KINDS}, **_NAME_TABLES.by_form("kinds")}
_NO_PERSON = frozenset(_NAME_TABLES["no_person"])
_FEATURES = frozenset(_NAME_TABLES["features"])
_GIVEN = frozenset(_NAME_TABLES["given"])
_PARTICLES = frozenset(str.split("van von de der den la le di da del bin ibn al el dos y"))
_SUFFIXES = frozenset({"junior", "senior", *map(str, range(1, 10))})


def _places(places: Iterable[Any]) -> dict[str, str]:
    """The usual names of places of ISO 3166 by their official ones, both in tokens."""
    usual = [(one, re.split(r"[,[(]", getattr(one, "common_name", one.name))[0]) for one in places]
    return {_plain(getattr(one, "official_name", name)): _plain(name) for one, name in usual}


def _plain(text: str) -> str:
    return " ".join(tokens(text))


_NATIONS = _places(pycountry.countries)
_ALIASES = _NATIONS | {_plain(form): name for form, name in _NAME_TABLES.by_form("aliases").items()}
STATES: dict[str, str] = {
    one.code[3:]: one.name for one in pycountry.subdivisions if one.country_code == "US"
}

_CLASSES = _NAME_TABLES.pattern("classes", re.IGNORECASE)
_OPENING = _NAME_TABLES.pattern("opening", re.IGNORECASE)
_DETERMINER = _NAME_TABLES.pattern("determiner", re.IGNORECASE)
_EPITHET = re.compile(r"(?:[a-z]+ ){1,3}(?=[A-Z])")  # the geologist James Hutton
_NO_EPITHET = _NAME_TABLES.words("no_epithet")
_STATE = _NAME_TABLES.pattern("state")
_SMALL = frozenset(str.split("of the and for a an in on de"))
_ROMAN_NUMERAL = re.compile(r"[IVX]+")
_CORE, _TURNS = _NAME_TABLES.rewrites("core"), _NAME_TABLES.rewrites("turns")
_POSSESSIVE = re.compile(r"(?:the\s+)?((?!of\b)\S[^,']*)'s\s+(\S[^,']*)")
_LINKS = re.compile(r",|\b(?:by|of|in|at|from|the)\b")

_COUNTRIES = {*_NATIONS.values(), *_NAME_TABLES["countries"]}
_PLACE = re.compile(r"(\S|\S.*\S)(?:\s*,\s*(?:in\s+)?|\s+in\s+|\s+\()([^,()]+)\)?")
_VENUE = _NAME_TABLES.pattern("venue", re.IGNORECASE)
_CITY = re.compile(r"[A-Z][\w.'-]*(?:\s[A-Z][\w.'-]*){0,2}")


def same_words(answer: str, gold: str) -> bool:
    """Equal as words, up to spacing, accents, titles, common short forms and word order."""
    if len(answer) > MAX_CHARS:
        return tokens(answer) == tokens(gold)
    pairs = [(answer, gold), (transliterated(answer), gold), (answer, transliterated(gold))]
    (place, country), (other, its_country) = placed(answer), placed(gold)
    if bool(country) != bool(its_country):  # Paris, France
        pairs.append((place, other))
    return any(_same_name(*pair) for pair in dict.fromkeys(pairs))


def without_class(text: str) -> str:
    """Niger for the Republic of Niger, 1999 for the year 1999."""
    return _CLASSES.sub("", text)


def _same_name(answer: str, gold: str) -> bool:
    found, wanted = tokens(answer), tokens(gold)
    if not found or not wanted:
        return answer.strip() == gold.strip()
    if glued(found) == glued(wanted) or _alias(answer) == _alias(gold):
        return True
    if is_acronym(answer, gold) or is_acronym(gold, answer):
        return True
    if bool(_OPENING.match(answer)) != bool(_OPENING.match(gold)):
        answer, gold = _OPENING.sub("", answer), _OPENING.sub("", gold)
    one, other = _core(answer, gold), _core(gold, answer)
    if _same_core(one, other) or _is_sorted(one, other):
        return True
    orders = [[glued(_numbered(order)) for order in _orders(side)] for side in (one, other)]
    if orders[0][0] in orders[1] or orders[1][0] in orders[0]:
        return True
    return han_core(answer) == han_core(gold) != ""


def _orders(text: str) -> list[str]:
    """A phrase with "of" for a possessive, and its other forms, as another order of its words."""
    first = _POSSESSIVE.sub(r"\2 of \1", text)
    turned = [form.sub(plain, first) for form, plain in _TURNS if form.search(first)]
    return [first, *turned, re.sub("['\u2019]s\\b", "s", text)]


def _numbered(text: str) -> list[str]:
    return _folded([ROMAN_LETTERS.get(word, word) for word in tokens(text)])


def _core(original: str, other: str) -> str:
    """A phrase without the class of thing and determiners before it, and without a description
    before a name if `other` is a name too; states in full."""
    bare = re.sub(r"^(?:a|an|the)\s+", "", original, flags=re.IGNORECASE)
    text = without_class(_DETERMINER.sub("", bare, count=1))
    epithet = _EPITHET.match(text) if bare != original else None
    if epithet is not None and not _NO_EPITHET & set(epithet[0].split()):
        rest = text[epithet.end() :]
        text = rest if _is_proper(rest) and _is_proper(other) else text
    text = rewritten(text, _CORE)
    return _STATE.sub(lambda match: f", {STATES.get(match[1], match[1])}", text)


def _same_core(answer: str, gold: str) -> bool:
    found, wanted = tokens(answer), tokens(gold)
    if not found or not wanted:
        return False
    (titles, found), (others, wanted) = _untitled(found), _untitled(wanted)
    if titles and others and not titles & others:
        return False
    kept = [found, wanted]
    if ("'s" in answer) == ("'s" in gold):  # the language of the Turks is not Turkish
        kept = [_without_kind(found, wanted), _without_kind(wanted, found)]
    if glued(kept[0]) == glued(kept[1]):
        return True
    is_person = _is_proper(answer) and _is_proper(gold) and same_person(found, wanted)
    return is_person or _is_swapped(answer, gold)


def _is_sorted(one: str, other: str) -> bool:
    """Duke Peter I of Bourbon and Peter I, Duke of Bourbon: one of them has a comma."""
    sides = [sorted(_numbered(_LINKS.sub(" ", side))) for side in (one, other)]
    has_order = sum(word.isdigit() for word in sides[0]) > 1 or len(sides[0]) < 3
    return sides[0] == sides[1] and not has_order and {one.count(","), other.count(",")} == {0, 1}


# Titles and kinds.


def is_titled(word: str) -> bool:
    """Whether a word is a rank or an office: king, president, Dr."""
    return word.lower().rstrip(".,") in _TITLES


def _untitled(words: list[str]) -> tuple[set[str], list[str]]:
    """The ranks before a name, in one form, without courtesies; and the name, its words folded."""
    start = 0
    while start < len(words) - 1 and (
        words[start] in _TITLES
        or (words[start] in _BEFORE_TITLES and words[start + 1] in _TITLES)
        or (words[start] in _BEFORE_RANKS and words[start + 1] in _TITLES and words[start + 2 :])
    ):
        start += 1
    if words[start] in _NO_PERSON:
        start = 0
    titles = {_TITLES[word] for word in words[:start] if word in _TITLES} - _COURTESIES
    return titles, _folded(words[start:])


def _without_kind(words: list[str], other: list[str]) -> list[str]:
    """Words without the kind of thing they name, if the other side names none or the same."""
    kinds = [{_KINDS[word] for word in side if word in _KINDS} for side in (words, other)]
    if kinds[0] and kinds[1] and kinds[0] != kinds[1]:
        return words
    return [word for word in words if word not in _KINDS] or words


# Persons.


def same_person(one: list[str], other: list[str]) -> bool:
    """First and last name agree; a middle name may be missing or be an initial. A junior or a third
    must be one on both sides."""
    if one[-1] == other[-1] and one[-1] in _SUFFIXES:
        one, other = one[:-1], other[:-1]
    if min(len(one), len(other)) < 2 or one[-1] != other[-1]:
        return False
    if not all(token.isalpha() for token in one + other) or _NO_PERSON & {*one, *other}:
        return False
    short, long = sorted(
        ([word for word in side[:-1] if word not in _PARTICLES] for side in (one, other)), key=len
    )
    if len(short) == len(long):
        return short != [] and all(map(_same_given, short, long))
    return len(short) == 1 and len(long) == 2 and short[0] == long[0]


def _is_proper(text: str) -> bool:
    """Whether a text is a name: every word that is no particle or short word is capitalized."""
    words = re.findall(r"[^\W\d_][\w.'-]*", text)
    long = [word for word in words if word.lower() not in _SMALL | _PARTICLES]
    return bool(long) and all(word[0].isupper() for word in long)


def _same_given(one: str, other: str) -> bool:
    return one == other or (one[0] == other[0] and 1 in (len(one), len(other)))


def _is_swapped(one: str, other: str) -> bool:
    """The family name first, or last, of two names that are not both given names: Deak Ferenc."""
    names = one.split(), other.split()
    if any(len(side) != 2 or not all(name[:1].isupper() for name in side) for side in names):
        return False
    found, wanted = tokens(one), tokens(other)
    if len(found) != 2 or found != wanted[::-1]:
        return False
    if _FEATURES & set(found):  # Lake Victoria
        return True
    if _NO_PERSON & set(found):
        return False
    return not _GIVEN.issuperset(found) and all(name.isalpha() for name in found)


# Short forms and spelling.


def is_acronym(short: str, long: str) -> bool:
    """FBI of Federal Bureau of Investigation, JFK of John F. Kennedy, WWII of World War II."""
    short = re.sub(r"^the\s+", "", short.strip(), flags=re.IGNORECASE).replace(".", "")
    if not (3 <= len(short) <= 8 and short.isalpha() and sum(map(str.isupper, short)) >= 3):
        return False
    every = re.findall(r"\w+", long)
    words = [word for word in every if word.lower() not in _SMALL]
    return len(words) >= 3 and short.upper() in (_initials(words), _initials(every))


def _initials(words: list[str]) -> str:
    return "".join(word if _ROMAN_NUMERAL.fullmatch(word) else word[0].upper() for word in words)


def _alias(name: str) -> str:
    text = _plain(name)
    return _ALIASES.get(text, text)


def _folded(found: list[str]) -> list[str]:
    return [folded(token) for token in found]


# Places.


def country_of(name: str) -> str:
    """The country that a text names; "" if it names none."""
    country = _alias(name)
    return country if country in _COUNTRIES else ""


def provinces(*countries: str) -> set[str]:
    """The states and provinces of countries, which are given by their letters, in tokens."""
    kinds = ("State", "Province", "Country")
    every = (one for one in pycountry.subdivisions if one.country_code in countries)
    return {*_places(one for one in every if one.type in kinds).values()}


def placed(text: str) -> tuple[str, str]:
    """A place without the country after it, and the country; a building also without its city.
    The text and "" where there is none, or where the rest names a country too, as in a list."""
    match = _PLACE.fullmatch(text) if len(text) <= MAX_PLACE_CHARS else None
    if match is None or not match[1][0].isupper():
        return text, ""
    country = country_of(match[2])
    if country and not any(map(country_of, re.split(r",|;|\band\b", match[1]))):
        return match[1], country
    if _VENUE.fullmatch(match[1]) and _CITY.fullmatch(match[2]) and not _VENUE.fullmatch(match[2]):
        return match[1], match[2]
    return text, ""
