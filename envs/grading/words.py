"""Words in one form, and token F1; CJK text counts by characters."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import lru_cache

from anyascii import anyascii

from agentenv.envs.grading.numbers import words_as_digits
from agentenv.envs.grading.text import COMMANDS, Tables, notation, rewritten, unify, words_of

MINUS = "\N{MINUS SIGN}"  # unified texts contain only hyphens
SIGNS = "<>" + "".join(word for word in COMMANDS.values() if not word.isascii())
NAMED_A = "\N{FULLWIDTH LATIN SMALL LETTER A}"  # a name, which is no article

_TABLES = Tables("words", signs=SIGNS)
_SIGN_WORDS = frozenset({"a", "plus", "minus", "sharp", "flat", "star"})

_FORMAT = _TABLES.words("format")
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_TAG = re.compile(r"</?[a-z][a-z\d]*(?:\s[^<>]*)?/?>|^>\s+(?=[^\W\d])", re.MULTILINE)
_FORMS = _TABLES.rewrites("forms")

_GREEK = re.compile("(?<![\u0370-\u03ff])[\u0391-\u03c9](?![\u0370-\u03ff])")
_A = re.compile(r"(?<![\w'.])[Aa](?![\w'.])")
_LETTERED = _TABLES.pattern("lettered", re.IGNORECASE)
_BEHIND_A_NAME = _TABLES.pattern("behind_a_name")
_SHORT = _TABLES.by_form("short")
_LATIN = re.compile("[\u00c0-\u024f\u0300-\u036f\u1e00-\u1eff]+")
_VOWELS, _SPELLING = _TABLES.rewrites("vowels"), _TABLES.rewrites("spelling")
_INITIALS = re.compile(r"\b((?:[a-z]\.)+[a-z]\b\.?|(?:[a-z]\.){2,}|ph\.\s?d\b\.?)")
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_CJK_CHARACTER = re.compile(f"[{_CJK}]")
_CHARACTER = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
_TOKEN = re.compile(rf"[{_CJK}{SIGNS}]|\N{{MINUS SIGN}}?\d+(?:\.\d+)*[^\W{_CJK}]*|[^\W{_CJK}]+")
_ROMAN_NUMERAL = re.compile(r"(?=[ivxl]{2})(xl|l?x{0,3})(ix|iv|v?i{0,3})([a-e]?)")
_TENS = ["", "x", "xx", "xxx", "xl", "l", "lx", "lxx", "lxxx"]
_ONES = ["", "i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix"]
_SAME = {"&": "and", "st": "saint", "mt": "mount", "vs": "versus", **_SHORT}
ROMAN_LETTERS = {"i": "1", "v": "5", "x": "10"}  # numerals after a name only: Saturn V
_ORDINAL = re.compile(r"(\d+)(?:st|nd|rd|th)")
_CURRENCY = re.compile(r"([$\u20ac\u00a3\u00a5\u20b9\u20a9])\s?-?\d(?![\d.,]*\s*\$)")
_EXCLUSIVE = frozenset({"yes", "no", "noanswer"})


def has_cjk(text: str) -> bool:
    """Whether any character is Chinese, Japanese or Korean."""
    return _CJK_CHARACTER.search(text) is not None


def f1(answer: str, gold: str) -> float:
    """Token F1 with SQuAD's normalization: 0 when one side is yes or no and the other is not.
    Chinese, Japanese and Korean text counts by characters."""
    found, wanted = words_of(answer), words_of(gold)
    if has_cjk(answer + gold):
        return token_f1(_CHARACTER.findall(found), _CHARACTER.findall(wanted))
    if found != wanted and (found in _EXCLUSIVE or wanted in _EXCLUSIVE):
        return 0.0
    return token_f1(found.split(), wanted.split())


def token_f1(found: list[str], wanted: list[str]) -> float:
    """Harmonic mean of precision and recall of two bags of tokens."""
    common = sum((Counter(found) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def tokens(text: str) -> list[str]:
    """Words in one form: no case, accents, punctuation or articles; numerals as digits. Signs that
    carry a value are kept: comparators, arrows, a minus before a number, + and # after a letter."""
    text = _named_a(_signed(unify(text))).casefold()
    text = re.sub(r"(?<=\w)'s\b", "", text).replace("&", " and ")
    text = re.sub(r"(?<=\w) vs?\. (?=\w)", " versus ", text)
    text = re.sub(r"\bno\.?\s*(?=\d)|#\s*(?=\d)", "number ", text)
    text = _INITIALS.sub(lambda match: match[0].replace(".", ""), text)
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = _LATIN.sub(lambda match: anyascii(match[0]), text.replace("'", ""))
    found = _TOKEN.findall(words_as_digits(text).replace("_", " "))
    found = [_SAME.get(token, _with_number(token)) for token in found]
    for place in range(1, len(found)):
        is_numeral = found[place] != "i" or place == len(found) - 1
        if is_numeral and found[place - 1].isalpha():
            found[place] = ROMAN_LETTERS.get(found[place], found[place])
    if len(found) > 1:  # Elizabeth the Second
        found[-1] = _ORDINAL.sub(r"\1", found[-1])
    kept = [token for token in found if token not in ("a", "an", "the")]
    return [token.replace(NAMED_A, "a") for token in kept or found]


def glued(found: list[str]) -> str:
    """Tokens as one text, to compare words that one side separates; numbers stay separate."""
    return re.sub(r"(?<=\d) (?=\d)", "|", " ".join(found)).replace(" ", "")


def same_signs(one: str, other: str) -> bool:
    """Whether both texts contain the same signs that carry a value, and no two currencies."""
    sides = [Counter(filter(_is_sign, tokens(text))) for text in (one, other)]
    money = [set(_CURRENCY.findall(unify(text))) for text in (one, other)]
    return sides[0] == sides[1] and (not money[0] or not money[1] or money[0] == money[1])


def transliterated(text: str) -> str:
    """German and Nordic vowels with two letters: Ergaenzung, Soeren, Aarhus."""
    text = rewritten(unicodedata.normalize("NFD", text), _VOWELS)
    return unicodedata.normalize("NFC", text)


@lru_cache(maxsize=4096)
def folded(token: str) -> str:
    """Spelling and number of a word in one form: British as American, toddies as toddy."""
    return rewritten(token, _SPELLING)


def _with_number(token: str) -> str:
    """XXXIII as 33, IIIE (of a rocket) as 3e."""
    match = _ROMAN_NUMERAL.fullmatch(token)
    if match is None:
        return token
    return f"{10 * _TENS.index(match[1]) + _ONES.index(match[2])}{match[3]}"


_FUNCTIONS = frozenset(
    str.split(
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt pi min "
        "max mod gcd lcm det deg arg cis"
    )
)
_WORD = re.compile(r"[^\W\d_]{2,}")


def is_wordy(text: str) -> bool:
    """Whether a cleaned gold is words rather than mathematics."""
    if has_cjk(text):
        return True
    plain = re.sub(r"\\(?:begin|end)\s*\{\w*\*?\}|\\[a-zA-Z]+", " ", text)
    plain = re.sub(r"\b(?:[A-Z]\.)+[A-Z]?(?![A-Za-z])", "initials", plain)
    found = [word for word in _WORD.findall(plain) if word.lower() not in _FUNCTIONS]
    if not found:
        return False
    if max(map(len, found)) <= 3 and re.search(r"[\\^_=+*/<>|]|\d", text):
        return " " in plain.strip() and not re.search(r"[\\^_=+*/<>|]", text)
    return True


# Signs that carry a value in words: x > 5, A -> B, C++, blood type A-, a profit of -3; a named A.
# Each has one form, a sign or a word, in any notation; punctuation (hyphens in words, ranges,
# dates, dashes, bullets) has none.


@lru_cache(maxsize=4096)
def _signed(text: str) -> str:
    """A unified text with its signs in one form each, and LaTeX commands as words."""
    text = _GREEK.sub(_greek, _COMMAND.sub(_named, notation(_TAG.sub(" ", text))))
    return rewritten(text, _FORMS)


def _named_a(text: str) -> str:
    """The text with a mark for each A that is a name: hepatitis A, plan A, A+, the last word."""

    def marked(match: re.Match[str]) -> str:
        before, behind = text[: match.start()], text[match.end() :]
        is_name = (
            _BEHIND_A_NAME.match(behind)
            or _LETTERED.search(before[-20:])
            or (match[0] == "A" and before.strip() and re.match(r"\s+[a-z]", behind))
        )
        return NAMED_A if is_name and len(text.strip()) > 1 else match[0]

    return _A.sub(marked, text)


def _is_sign(token: str) -> bool:
    """Whether a token is a sign, a number below zero or a named A."""
    return token in SIGNS or token.startswith(MINUS) or token in _SIGN_WORDS


def _named(match: re.Match[str]) -> str:
    name = match[1]
    return " " if name in _FORMAT else f" {COMMANDS.get(name, name)} "


def _greek(match: re.Match[str]) -> str:
    return f" {unicodedata.name(match[0]).rpartition(' ')[2].lower()} "
