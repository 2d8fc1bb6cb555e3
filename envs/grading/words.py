"""Words in one form, and token F1; CJK text counts by characters."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections import Counter
from pathlib import Path

from envs.grading.numbers import CARDINALS, ORDINALS
from envs.grading.spelling import unify, words_of

_SHORT: dict[str, str] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)["short"]
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
_SAME = {"&": "and", "st": "saint", "mt": "mount", "vs": "versus", **_SHORT, **_ROMAN}
ROMAN_LETTERS = {"i": "1", "v": "5", "x": "10"}  # numerals behind a name only: Saturn V
_NUMBER_WORDS = {word: str(number) for word, number in CARDINALS.items() if number <= 20}
_EXCLUSIVE = frozenset({"yes", "no", "noanswer"})


def has_cjk(text: str) -> bool:
    """Whether any character is Chinese, Japanese or Korean."""
    return _CJK_CHARACTER.search(text) is not None


def f1(answer: str, gold: str) -> float:
    """Token F1 with SQuAD's normalisation: 0 when one side is yes or no and the other is not.
    Chinese, Japanese and Korean text counts by characters."""
    found, wanted = words_of(answer), words_of(gold)
    if has_cjk(answer + gold):
        return token_f1(_TOKEN.findall(found), _TOKEN.findall(wanted))
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
    """Words in one form: no case, accents, punctuation or articles; numerals as digits."""
    text = re.sub(r"\\[a-zA-Z]+", " ", unify(text)).casefold()
    text = re.sub(r"(?<=\w)'s\b", "s", text).replace("&", " and ")
    text = re.sub(r"(?<=\w) vs?\. (?=\w)", " versus ", text)
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
    for place in range(1, len(found)):
        is_numeral = found[place] != "i" or place == len(found) - 1
        if is_numeral and found[place - 1].isalpha():
            found[place] = ROMAN_LETTERS.get(found[place], found[place])
    if len(found) > 1 and found[-1] in ORDINALS:  # Elizabeth the Second
        found[-1] = str(ORDINALS[found[-1]])
    kept = [_NUMBER_WORDS.get(token, token) for token in found if token not in ("a", "an", "the")]
    return kept or found


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
