"""Word answers: exact match and SQuAD F1 on tokens; CJK text counts by characters."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from envs.grading.names import is_acronym, is_typo, same_person, untitled, without_class
from envs.grading.normalise import unify, words_of
from envs.grading.places import compatible, place

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_CJK_CHARACTER = re.compile(f"[{_CJK}]")
_TOKEN = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
_ROMAN = {
    numeral: str(number)
    for number, numeral in enumerate(
        str.split("ii iii iv v vi vii viii ix x xi xii xiii xiv xv xvi xvii xviii xix xx"),
        start=2,
    )
    if numeral not in ("v", "x")
}
_SAME = {"&": "and", "st": "saint", "mt": "mount", "vs": "versus", **_ROMAN}
_NUMBER_WORDS = {
    word: str(number)
    for number, word in enumerate(
        str.split(
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
            "fifteen sixteen seventeen eighteen nineteen twenty"
        )
    )
}
_ALIASES = {
    "us": "united states",
    "usa": "united states",
    "united states of america": "united states",
    "uk": "united kingdom",
    "nyc": "new york city",
    "uae": "united arab emirates",
    "ussr": "soviet union",
    "eu": "european union",
    "un": "united nations",
}
_SPELLING = re.compile(r"our\b|(?<=\w)tre\b|ise\b|ae|oe")
_CJK_CLAUSE = re.compile(
    "^(?:[^,\u4e0d\u6ca1\u975e]{1,8}(?:\u662f|\u62c5\u4efb|\u4e3a|\u53eb)|\u4e2d\u56fd(?=..))"
)
_CJK_TITLE = re.compile(
    "(?<=..)(?:\u5e02|\u7701|\u53bf|\u6559\u6388|\u5148\u751f|\u5973\u58eb|\u535a\u58eb|\u8001\u5e08)$"
)
_EXCLUSIVE = frozenset({"yes", "no", "noanswer"})


def has_cjk(text: str) -> bool:
    """Whether any character is Chinese, Japanese or Korean."""
    return _CJK_CHARACTER.search(text) is not None


def squad_f1(answer: str, gold: str) -> float:
    """Token F1 with SQuAD's normalisation; 0 when one side is yes or no and the other is not."""
    found, wanted = words_of(answer), words_of(gold)
    if found != wanted and (found in _EXCLUSIVE or wanted in _EXCLUSIVE):
        return 0.0
    return token_f1(found.split(), wanted.split())


def f1(answer: str, gold: str) -> float:
    """squad_f1, but Chinese, Japanese and Korean text counts by characters."""
    if not has_cjk(answer + gold):
        return squad_f1(answer, gold)
    return token_f1(_TOKEN.findall(words_of(answer)), _TOKEN.findall(words_of(gold)))


def token_f1(found: list[str], wanted: list[str]) -> float:
    """Harmonic mean of precision and recall of two bags of tokens."""
    common = sum((Counter(found) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def tokens(text: str) -> list[str]:
    """Words in one form: no case, accents, punctuation or articles; numerals as digits."""
    text = re.sub(r"\\[a-zA-Z]+", " ", unify(text)).casefold()
    text = re.sub(r"(?<=\w)'s\b", "s", text).replace("&", " and ")
    text = re.sub(
        r"\b((?:[a-z]\.)+[a-z]\b\.?|(?:[a-z]\.){2,})", lambda match: match[0].replace(".", ""), text
    )
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = text.replace("'", "")
    plain = "".join(
        sign for sign in unicodedata.normalize("NFD", text) if not unicodedata.combining(sign)
    )
    plain = unicodedata.normalize("NFC", plain)
    found = [_SAME.get(token, token) for token in _TOKEN.findall(plain.replace("_", " "))]
    kept = [_NUMBER_WORDS.get(token, token) for token in found if token not in ("a", "an", "the")]
    return kept or found


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
    (where, behind), (gold_where, gold_behind) = place(answer), place(gold)
    if (behind or gold_behind) and compatible(behind, gold_behind):
        return tokens(where) == tokens(gold_where)
    found, wanted = tokens(without_class(answer)), tokens(without_class(gold))
    found, wanted = _folded(untitled(found)), _folded(untitled(wanted))
    if found == wanted or same_person(found, wanted):
        return True
    names = answer != answer.lower() and gold != gold.lower()
    return (names and is_typo(found, wanted)) or _cjk_core(answer) == _cjk_core(gold) != ""


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
    return _CJK_TITLE.sub("", text) or text


def _turned(name: str) -> list[str]:
    """Shakespeare, William as William Shakespeare."""
    last, comma, first = name.partition(",")
    return tokens(f"{first} {last}") if comma and "," not in first else []


def _alias(found: list[str]) -> str:
    text = " ".join(found)
    return _ALIASES.get(text, text)
