"""Names, phrases and sentences that say the same but for form, and what a last clause says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from agentenv.envs.grading import dates
from agentenv.envs.grading.numbers import han_core, words_as_digits
from agentenv.envs.grading.text import Tables
from agentenv.envs.grading.words import (
    ROMAN_LETTERS,
    glued,
    is_numeral,
    same_signs,
    singular,
    tokens,
    transliterated,
)

MAX_CHARS = 400  # no name is longer
MAX_PLACE_CHARS = 120
_NAME_TABLES = Tables("names")
_TITLES: dict[str, str] = {
    short: long for long, forms in _NAME_TABLES["titles"].items() for short in (long, *forms)
}
_COURTESIES = frozenset(_NAME_TABLES["courtesies"])
_BEFORE_TITLES = frozenset(_NAME_TABLES["before_titles"])
_DEGREES = frozenset(_NAME_TABLES["degrees"])
_KINDS: dict[str, str] = {
    short: long for long, forms in _NAME_TABLES["kinds"].items() for short in (long, *forms)
}
_NO_PERSON = frozenset(_NAME_TABLES["no_person"])
_FEATURES = frozenset(_NAME_TABLES["features"])
_GIVEN = frozenset(_NAME_TABLES["given"])
_PARTICLES = frozenset(str.split("van von de der den la le di da del bin ibn al el dos y"))
_SUFFIXES = frozenset({"junior", "senior", *map(str, range(1, 10))})
_ALIASES: dict[str, str] = _NAME_TABLES["aliases"]
STATES: dict[str, str] = _NAME_TABLES["states"]  # by their letters

_CLASSES = _NAME_TABLES.pattern("classes", re.IGNORECASE)
_OPENING = _NAME_TABLES.pattern("opening", re.IGNORECASE)
_DETERMINER = _NAME_TABLES.pattern("determiner", re.IGNORECASE)
_PART_OF = _NAME_TABLES.pattern("part_of", re.IGNORECASE)
_EPITHET = re.compile(r"(?:[a-z]+ ){1,3}(?=[A-Z])")  # the geologist James Hutton
_NO_EPITHET = _NAME_TABLES.words("no_epithet")
_REALM = re.compile(r"(?<=[a-z] [IVX]|.[IVX][IVX])\s+of (?:the )?[A-Z]\w+(?: [A-Z]\w+)*$")
_THE_YEAR = re.compile(r"\bthe year (?=\d)", re.IGNORECASE)
_STATE = _NAME_TABLES.pattern("state")
_SMALL = frozenset(str.split("of the and for a an in on de"))
_ROMAN_NUMERAL = re.compile(r"[IVX]+")
_COPULA = re.compile(r"\s+(is|are|was|were)\s+")
_NICKNAME = re.compile(r"(\w.*?)\s+[\"'(](\w[\w.-]*)[\"')]\s+(.+)")
_LINK = _NAME_TABLES.pattern("link")

_COUNTRIES: dict[str, str] = {
    " ".join(tokens(name)): country
    for country in _NAME_TABLES["countries"]
    for name in (country, *_NAME_TABLES["country_names"].get(country, ()))
}
_PLACE_FORMS = tuple(
    re.compile(rf"(\S|\S.*\S){form}")
    for form in (
        r"\s*,\s*(?:in\s+)?([^,()]+)",
        r"\s+in\s+([^,()]+)",
        r"\s+\(([^()]+)\)",
    )
)
_VENUE = _NAME_TABLES.pattern("venue", re.IGNORECASE)
_IN_A_CITY = re.compile(r"(\S.*\S)(?:\s+in|,)\s+([A-Z][\w.'-]*(?:\s[A-Z][\w.'-]*){0,2})")


def same_words(answer: str, gold: str) -> bool:
    """Equal as words, up to spacing, accents, titles, common short forms and word order."""
    if len(answer) > MAX_CHARS:
        return tokens(answer) == tokens(gold)
    if _same_name(answer, gold):
        return True
    (place, country), (other, its_country) = placed(answer), placed(gold)
    if bool(country) != bool(its_country) and _same_name(place, other):  # Paris, France
        return True
    spelt = transliterated(answer), transliterated(gold)
    return spelt != (answer, gold) and any(
        _same_name(*pair) for pair in ((spelt[0], gold), (answer, spelt[1]))
    )


def without_class(text: str) -> str:
    """Niger for the Republic of Niger, 1999 for the year 1999."""
    match = _CLASSES.match(text)
    return text[match.end() :] if match is not None else text


def _same_name(answer: str, gold: str) -> bool:
    found, wanted = tokens(answer), tokens(gold)
    if not found or not wanted:
        return answer.strip() == gold.strip()
    if glued(found) == glued(wanted) or _alias(found) == _alias(wanted):
        return True
    if _joined(answer) == _joined(gold):
        return True
    if is_acronym(answer, gold) or is_acronym(gold, answer):
        return True
    if _is_nickname(answer, gold) or _is_nickname(gold, answer):
        return True
    one, other = _core(answer, gold), _core(gold, answer)
    if _opened(one) != _opened(other):
        one, other = _OPENING.sub("", one, count=1), _OPENING.sub("", other, count=1)
    one, other = _core(one, other), _core(other, one)
    if _same_core(one, other) or _is_turned(one, other):
        return True
    return han_core(answer) == han_core(gold) != ""


def _joined(text: str) -> str:
    """Levi's as Levis."""
    return glued(tokens(text.replace("'s", "s").replace("\N{RIGHT SINGLE QUOTATION MARK}s", "s")))


def _core(original: str, other: str) -> str:
    """A phrase without the class of thing and determiners before it, and without a description
    before a name if `other` is a name too; states in full."""
    bare = re.sub(r"^(?:a|an|the)\s+", "", original, flags=re.IGNORECASE)
    text = without_class(_DETERMINER.sub("", bare, count=1))
    epithet = _EPITHET.match(text) if bare != original else None
    if epithet is not None and not _NO_EPITHET & set(epithet[0].split()):
        rest = text[epithet.end() :]
        text = rest if _is_proper(rest) and _is_proper(other) else text
    text = _REALM.sub("", text)
    text = _THE_YEAR.sub("", _PART_OF.sub(r"\1 ", re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)))
    return _STATE.sub(lambda match: f", {STATES.get(match[1], match[1])}", text)


def _opened(text: str) -> bool:
    return _OPENING.match(text) is not None


def _same_core(answer: str, gold: str) -> bool:
    found, wanted = tokens(answer), tokens(gold)
    if not found or not wanted:
        return False
    titles = [_title(side) for side in (found, wanted)]
    if titles[0] and titles[1] and not titles[0] & titles[1]:
        return False
    found, wanted = (_folded(_untitled(side)) for side in (found, wanted))
    kept = _without_kind(found, wanted), _without_kind(wanted, found)
    if glued(kept[0]) == glued(kept[1]):
        return True
    return (
        (_is_named(answer) and _is_named(gold) and same_person(found, wanted))
        or _is_swapped(answer, gold)
        or _ordinal_last(found) == _ordinal_last(wanted)
        or _infinitive(found) == _infinitive(wanted)
    )


# Titles and kinds.


def _title(words: list[str]) -> set[str]:
    """The ranks before a name, in one form; courtesies say nothing."""
    return {_TITLES[word] for word in words[: _num_titles(words)] if word in _TITLES} - _COURTESIES


def is_titled(word: str) -> bool:
    """Whether a word is a rank or an office: king, president, Dr."""
    return word.lower().rstrip(".,") in _TITLES


def _num_titles(words: list[str]) -> int:
    start = 0
    while start < len(words) - 1 and (
        words[start] in _TITLES or (words[start] in _BEFORE_TITLES and words[start + 1] in _TITLES)
    ):
        start += 1
    return 0 if words[start:] and words[start] in _NO_PERSON else start


def _untitled(words: list[str]) -> list[str]:
    words = words[_num_titles(words) :]
    while len(words) > 2 and words[-1] in _DEGREES:
        words = words[:-1]
    return words


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
    if one[-1] in _SUFFIXES or other[-1] in _SUFFIXES:
        if one[-1] != other[-1]:
            return False
        one, other = one[:-1], other[:-1]
    if min(len(one), len(other)) < 2 or one[-1] != other[-1]:
        return False
    if not all(token.isalpha() for token in one + other) or _NO_PERSON & {*one, *other}:
        return False
    short, long = sorted(
        ([word for word in side[:-1] if word not in _PARTICLES] for side in (one, other)), key=len
    )
    if not short:
        return False
    if not _same_given(short[0], long[0]):
        return False
    if len(short) == len(long):
        return all(_same_given(*pair) for pair in zip(short, long, strict=True))
    return len(short) == 1 and len(long) == 2 and short[0] == long[0]


def _is_named(text: str) -> bool:
    """Whether every word is capitalised, up to particles such as van."""
    words = re.findall(r"[^\W\d_][\w.'-]*", text)
    return all(word[0].isupper() or word in _PARTICLES for word in words)


def _is_proper(text: str) -> bool:
    """Whether a text is a name: every word that is no particle or short word is capitalised."""
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


def _is_nickname(short: str, long: str) -> bool:
    """Kimmy Schmidt, or Kimberly Schmidt, for Kimberly "Kimmy" Schmidt."""
    match = _NICKNAME.fullmatch(long.strip())
    if match is None:
        return False
    first, nick, last = map(tokens, match.groups())
    return tokens(short) in ([*nick, *last], [*first, *last], [first[0], *last])


# Word order.


_POSSESSIVE = re.compile(r"(?:the\s+)?(\S[^,']*)'s\s+(\S[^,']*)")


def _is_turned(one: str, other: str) -> bool:
    """Whether what stands round commas, "of", "in" and the like is the same in another order: the
    gorge of the Rhine and the Rhine Gorge; Shakespeare, William; Bay Ridge in Brooklyn; Duke Peter
    I of Bourbon and Peter I, Duke of Bourbon; Paris is the capital and the capital is Paris."""
    one, other = (_POSSESSIVE.sub(r"\2 of \1", text) for text in (one, other))
    parts = [[_numbered(part) for part in _LINK.split(text) if part] for text in (one, other)]
    flat = [[word for part in side for word in part] for side in parts]
    if flat[0] == flat[1]:
        return len(parts[0]) + len(parts[1]) > 2
    for this, that in ((0, 1), (1, 0)):  # A of B as B A
        turned = [word for part in parts[this][::-1] for word in part]
        if len(parts[this]) != 2 or len(parts[that]) == 2:
            continue
        head, tail = parts[this]  # Federal Minister of the Interior as Federal Interior Minister
        if flat[that] in (turned, [*head[:-1], *tail, *head[-1:]]):
            return True
    commas = one.count(","), other.count(",")
    if commas in ((0, 1), (1, 0)) and len(flat[0]) > 1:
        with_comma, without = (one, other) if commas[0] else (other, one)
        last, _, first = with_comma.partition(",")
        if tokens(f"{first} {last}") == tokens(without):
            return True
        num_numbers = sum(word.isdigit() for word in flat[0])  # whose places mean something
        if len(flat[0]) > 2 and num_numbers < 2 and sorted(flat[0]) == sorted(flat[1]):
            return True
    sides = [_COPULA.split(text, maxsplit=1) for text in (one, other)]
    if any(len(side) != 3 for side in sides) or sides[0][1] != sides[1][1]:
        return False
    return [tokens(part) for part in sides[0][::2]] == [tokens(part) for part in sides[1][::-2]]


def _numbered(part: str) -> list[str]:
    return _folded([ROMAN_LETTERS.get(token, token) for token in tokens(part)])


def _ordinal_last(words: list[str]) -> list[str]:
    """The second world war as world war 2."""
    match = re.fullmatch(r"(\d+)(?:st|nd|rd|th)", words[0])
    return [*words[1:], match[1]] if match is not None and len(words) > 1 else words


def _infinitive(words: list[str]) -> list[str]:
    """Protecting the forest as protect the forest."""
    stem = re.sub(r"ing$", "", words[0]) if len(words) > 1 and len(words[0]) > 5 else words[0]
    if stem == words[0]:
        return [re.sub(r"e$", "", stem), *words[1:]]
    return [re.sub(r"([bdgmnprt])\1$", r"\1", stem), *words[1:]]


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


def _alias(found: list[str]) -> str:
    text = " ".join(found)
    return _ALIASES.get(text, text)


_SPELLING = _NAME_TABLES.rewrites("spelling")


def _folded(found: list[str]) -> list[str]:
    """Spelling and number of words in one form: colours as color, toddies as toddy."""
    return [singular(_american(token)) for token in found]


def _american(token: str) -> str:
    for pattern, replacement in _SPELLING:
        token = pattern.sub(replacement, token)
    return token


# Places.


def country_of(name: str) -> str:
    """The country that a text names; "" if it names none."""
    return _COUNTRIES.get(" ".join(tokens(name)), "")


def placed(text: str) -> tuple[str, str]:
    """A place without the country behind it, and the country; a building also without its city.
    The text and "" where there is none, or where the rest names a country too, as in a list."""
    for form in _PLACE_FORMS if len(text) <= MAX_PLACE_CHARS else ():
        match = form.fullmatch(text)
        country = country_of(match[2]) if match is not None else ""
        if match is not None and country and match[1][0].isupper():
            others = re.split(r",|;|\band\b", match[1])
            return (text, "") if any(map(country_of, others)) else (match[1], country)
    match = _IN_A_CITY.fullmatch(text) if len(text) <= MAX_PLACE_CHARS else None
    if match is not None and _VENUE.fullmatch(match[1]) and not _VENUE.fullmatch(match[2]):
        return match[1], match[2]
    return text, ""


_SENTENCE_TABLES = Tables("sentences")
MAX_WORDS = 60
MAX_STATEMENT_CHARS = 500

_VERB = _SENTENCE_TABLES.pattern("verb", re.IGNORECASE)
_CORRECTED = _SENTENCE_TABLES.pattern("corrected", re.IGNORECASE)
_REJECTED = _SENTENCE_TABLES.pattern("rejected", re.IGNORECASE)
_AUXILIARY = _SENTENCE_TABLES.pattern("auxiliary", re.IGNORECASE)
_CONCLUDED = _SENTENCE_TABLES.pattern("concluded", re.IGNORECASE | re.DOTALL)
_CLAUSE = _SENTENCE_TABLES.pattern("clause", re.DOTALL)
_PREDICATE = _SENTENCE_TABLES.pattern("predicate", re.DOTALL)
_SUBJECT = _SENTENCE_TABLES.pattern("subject", re.DOTALL | re.IGNORECASE)
_ELLIPSIS = _SENTENCE_TABLES.pattern("ellipsis", re.I)
_PREAMBLE = re.compile(r"^(?:after|upon|on|having) [\w -]{1,30}ing\b[^,.]{0,40},\s*", re.IGNORECASE)
_CLEFT = _SENTENCE_TABLES.pattern("cleft", re.DOTALL | re.IGNORECASE)
_NEGATION = _SENTENCE_TABLES.pattern("negation", re.IGNORECASE)
_DENIAL = _SENTENCE_TABLES.pattern("denial", re.IGNORECASE)
_CHANGED = _SENTENCE_TABLES.pattern("changed", re.IGNORECASE | re.DOTALL)
_SURE = _SENTENCE_TABLES.pattern("sure", re.IGNORECASE)
_APPOSITION = _SENTENCE_TABLES.pattern("apposition", re.DOTALL)
_MATH = re.compile(r"\$([^$]*[\\=^_][^$]*)\$")
_AMOUNT = _SENTENCE_TABLES.pattern("amount")
_DATE = re.compile(r"(?:\w+ )?\d{1,2},? \w+,? \d{4}|[A-Z]\w+ \d{1,2}, \d{4}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_TOLD = re.compile(
    rf"(?:{_VERB.pattern})(?=\s)"
    r"|\b(?:it|he|she|they|them|there|we|you|me|us|I(?='|\s+[a-z]))\b"
)
_SENTENCE_END = _SENTENCE_TABLES.pattern("sentence_end")


_ANNOUNCED = _SENTENCE_TABLES.pattern("announced", re.IGNORECASE)


def announcement(text: str) -> str:
    """The words that announce a second answer; "" if there are none."""
    match = _ANNOUNCED.search(text)
    return match[0] if match is not None else ""


def is_hedged(text: str) -> bool:
    """Whether the text denies, doubts or leaves open."""
    return _NEGATION.search(text) is not None


def is_denied(text: str) -> bool:
    """Whether the text denies or doubts; a weaker question than whether it is hedged."""
    return _DENIAL.search(text) is not None


def has_verb(text: str) -> bool:
    """Whether the text holds a verb, so that it is a clause and no name or phrase."""
    words = _COMMAND.sub(" ", text).split()
    first = [word for word in words[:1] if not (word[:1].isupper() and word.endswith("ed"))]
    verb = _VERB.search(" ".join([*first, *(word for word in words[1:] if word[:1].islower())]))
    return verb is not None and (len(words) > 2 or not verb[0].endswith("ed"))


def is_statement(text: str) -> bool:
    """Whether a text is a sentence: a subject, a verb; no phrase that begins with a participle. The
    word after an article is no verb: a uniformed officer, in a flowerbed."""
    first = text.partition(" ")[0]
    rest = _OF_A_NOUN.sub("N", text).partition(" ")[2]
    is_subject = _PRONOUN.match(text) is not None and not first.isupper()
    return (is_subject and " " in text) or (
        (first[:1].isupper() or first[:1].isdigit() or first.lower() in _SUBJECTS)
        and _TOLD.search(rest) is not None
    )


def says(found: str, wanted: str, same: Callable[[str], bool]) -> bool:
    """Whether `found` ends in, or names, what `same` accepts."""
    found = _SURE.sub("", _PREAMBLE.sub("", found))
    changed = _CHANGED.fullmatch(found)
    if changed is not None:
        right = changed["right"] or changed["other"]
        return not _NEGATION.search(right) and (same(right) or says(right, wanted, same))
    concluded = _CONCLUDED.fullmatch(found)
    if concluded is not None and not _NEGATION.search(concluded[1]) and same(concluded[1]):
        return True
    kept = _without_rejected(found, wanted)
    if kept != found:
        return not _NEGATION.search(kept) and (same(kept) or says(kept, wanted, same))
    found = _APPOSITION.sub("", found)
    if same(found):
        return True
    first, *others = _SENTENCE_END.split(found)
    if others and ";" not in found and not _DENIAL.search(found) and same(first):
        return True
    clause = (others or [first])[-1].replace("none other than ", "")
    match = _CORRECTED.fullmatch(clause)
    if match is not None and not _NEGATION.search(match["right"]):
        return same(match["right"])
    if len(clause.split()) > MAX_WORDS or _NEGATION.search(clause):
        return False
    return (clause != found and same(clause)) or _clause_says(clause, wanted, same)


def _without_rejected(text: str, wanted: str) -> str:
    """It is X, for It is X, not Y: without what the end says it is not, if that is not X."""
    match = _REJECTED.fullmatch(text)
    if match is None or _AUXILIARY.search(match["right"]):
        return text
    gold = tokens(wanted)
    if not gold or set(gold) <= set(tokens(match["wrong"])):
        return text
    return match["right"]


def _clause_says(clause: str, wanted: str, same: Callable[[str], bool]) -> bool:
    math = _MATH.findall(clause)
    if math:
        return same(math[-1])
    if len(clause.split()) < 3:
        return False
    if "=" in clause and same(clause.rpartition("=")[2]):
        return True
    if not _VERB.search(clause):
        return _amounts_to(clause, wanted, same, has_verb=False)
    if any(same(date) for date in _DATE.findall(clause)[-1:]):
        return True
    for form in (_CLAUSE, _PREDICATE, _SUBJECT, _CLEFT, _ELLIPSIS):
        match = form.fullmatch(clause)
        if match is not None and same(match[1]):
            return True
    return _amounts_to(clause, wanted, same) or _names(clause, wanted)


def _amounts_to(
    clause: str, wanted: str, same: Callable[[str], bool], *, has_verb: bool = True
) -> bool:
    """Whether the last number of the clause is it, alone like the gold or with what follows."""
    clause, wanted = words_as_digits(clause), words_as_digits(wanted)
    amounts = list(_AMOUNT.finditer(clause))
    if not amounts:
        return False
    last = amounts[-1]
    if re.fullmatch(r"[\d.,/$%-]+", wanted):
        return has_verb and same(last[0].rstrip(","))
    return len(amounts) == 1 and same(clause[last.start() :])


def _names(clause: str, wanted: str) -> bool:
    """Whether the clause holds the words of the gold together, and no other name or number."""
    words = clause.split()
    gold = tokens(wanted)
    if not gold or not any(map(str.isalpha, gold)):
        return False
    others = tokens(" ".join([words[0].lower(), *words[1:]]))
    for place in range(len(others) - len(gold) + 1):
        if others[place : place + len(gold)] == gold:
            break
    else:
        return False
    capitals = {token for word in words[1:] if word[:1].isupper() for token in tokens(word)}
    numbers = {token for token in others if is_numeral(token)}
    if not (capitals | numbers) <= set(gold) or not same_signs(clause, wanted):
        return False
    return wanted != wanted.lower() or len(gold) > 1


# Two sentences.

_BE = _SENTENCE_TABLES.text("be")
MIN_STATEMENT_WORDS = 4
_FILLERS = _SENTENCE_TABLES.words("fillers")
_SUBJECTS = frozenset(str.split("the a an one there all both each no some many most every"))
_OF_A_NOUN = re.compile(
    r"(?:^[Aa]n?|\ban?|\b[Tt]he)\s+(?:\w+ly\s+(?=\w+\s+(?!(?:to|in|by|at|on|from|for|the|an?)\b)))?\S+"
)
_PRONOUN = re.compile(r"(?:it|he|she|they|this|that)\b", re.IGNORECASE)
_PHRASES = tuple(
    (re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE), word)
    for word, phrase in _SENTENCE_TABLES["phrases"].items()
)
_SENTENCE_DEGREES = re.compile("\\s*\N{DEGREE SIGN}\\s?C\\b")
_BY = re.compile(r"\bby\b", re.IGNORECASE)
_SYNONYMS: dict[str, str] = {
    word: name for name, words in _SENTENCE_TABLES["synonyms"].items() for word in words
}
_WHERE = _SENTENCE_TABLES.pattern("where")
_PASSIVE = _SENTENCE_TABLES.pattern("passive")


def same_statement(found: str, wanted: str) -> bool:
    """Whether two sentences say the same in the same words: in another order, with common
    synonyms, or with a pronoun for the subject. Names follow each other alike, and stand on the
    same side of the verb unless one sentence is in the passive or both say what something is."""
    if len(found) > MAX_STATEMENT_CHARS:
        return False
    found, wanted = _phrased(found), _phrased(wanted)
    if _turns(found, wanted) or _turns(wanted, found):
        return True
    words, gold = _content(found), _content(wanted)
    if (
        not words
        or len(gold) < MIN_STATEMENT_WORDS
        or not (_VERB.search(found) and _VERB.search(wanted))
    ):
        return False
    if not _same_round(found, wanted):
        return False
    if _PRONOUN.match(found):
        missing = Counter(gold) - Counter(words)
        subject = gold[: sum(missing.values())]
        return Counter(subject) == missing and sorted(words) == sorted(gold[len(subject) :])
    if sorted(words) != sorted(gold):
        return False
    is_passive = bool(_BY.search(found)) != bool(_BY.search(wanted))
    return is_passive or _is_copular(found, wanted) or _subjects(found) == _subjects(wanted)


def _phrased(text: str) -> str:
    text = _SENTENCE_DEGREES.sub(" degrees celsius", text).replace("%", " percent")
    for pattern, word in _PHRASES:
        text = pattern.sub(word, text)
    return text


def _same_round(found: str, wanted: str) -> bool:
    """Whether the names, numbers and common verbs that both hold follow each other alike, from
    whichever one starts."""
    capitals = [
        {token for word in text.split()[1:] if word[:1].isupper() for token in tokens(word)}
        for text in (found, wanted)
    ]
    sides = [
        [
            _SYNONYMS.get(token, token)
            for token in tokens(text)
            if (token in capitals[0] | capitals[1] and token not in dates.MONTHS)
            or token in _SYNONYMS
            or is_numeral(token)
        ]
        for text in (found, wanted)
    ]
    both = set(sides[0]) & set(sides[1])
    one, other = ([token for token in side if token in both] for side in sides)
    if len(one) != len(other) or len(one) > MAX_WORDS:
        return False
    return not one or any(one[turn:] + one[:turn] == other for turn in range(len(one)))


def _subjects(text: str) -> set[str]:
    """The capitalised words, but the first, before the verb."""
    verb = _VERB.search(text)
    words = text[: verb.start() if verb is not None else 0].split()[1:]
    return {token for word in words if word[:1].isupper() for token in tokens(word)}


def _is_copular(*texts: str) -> bool:
    return all(re.search(rf"\b{_BE}\b", text) for text in texts)


def _turns(one: str, other: str) -> bool:
    where = _WHERE.fullmatch(one)
    if where is not None:
        straight = f"{where['what']} in {where['place']}"
        if _content(straight) == _content(other):
            return True
    passive = _PASSIVE.fullmatch(one)
    if passive is None:
        return False
    subject, verb, objects = map(_content, passive.group("subject", "verb", "object"))
    words = _content(other)
    if len(words) != len(subject) + 1 + len(objects) or not subject or not objects:
        return False
    middle = words[len(subject)]
    return (
        words[: len(subject)] == subject
        and words[len(subject) + 1 :] == objects
        and _stem(middle) == _stem(verb[0] if verb else "")
    )


def _content(text: str) -> list[str]:
    found = (token for token in tokens(text) if token not in _FILLERS)
    return [_SYNONYMS.get(token, singular(token)) for token in found]


def _stem(verb: str) -> str:
    """The consonants of a verb without its ending: sings, sang and sung are one."""
    bare = re.sub(r"[aeiou]", "", re.sub(r"(?:s|d|n)$", "", verb[1:]))
    return verb[:1] + re.sub(r"(.)\1", r"\1", bare)
