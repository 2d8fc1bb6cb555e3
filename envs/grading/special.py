"""Answers that are no values: yes and no, no solution, undefined, infinity."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from agentenv.envs.grading.words import tokens

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_TRUTH = {word: says == "yes" for says, words in _TABLES.items() for word in words}
_SPECIAL = (
    ("nothing",
     r"(?:there (?:is|are) )?no (?:real |valid |integer )?(?:solutions?|roots?)(?: exists?)?"
     r"|no such \w+(?: exists?)?|(?:the )?empty set|\\emptyset|\\?\{\s*\\?\}|\\phi|none"),
    ("absent", r"(?:it )?does not exist|(?:it )?doesn't exist|dne|(?:the )?limit does not exist"),
    ("undefined", r"(?:it is )?(?:undefined|not defined)"),
    ("infinity", r"\+?\s*\\infty|\+?\s*(?:positive )?infinity|infinite|inf"),
    ("minus infinity", r"-\s*\\infty|(?:-\s*|negative |minus )infinity"),
    ("infinitely many", r"infinitely many(?: solutions)?|infinite (?:number of )?solutions"),
    ("all reals", r"all real(?:s| numbers)?|\\mathbb\s*\{?R\}?|\(-\s*\\infty,\s*\\infty\)"
     r"|\(-\s*\\infty,\s*\+\s*\\infty\)|(?:the )?real numbers"),
)  # fmt: skip
_SPECIAL_FORMS = [(name, re.compile(form, re.IGNORECASE)) for name, form in _SPECIAL]
_NO_ANSWER = re.compile(
    r"no (?:idea|clue|answer|information|one|evidence|data)\b|no,? (?:but|wait)\b"
)
_CLAIM = re.compile(r"^(?:the|this|that) (?:claim|statement|answer|proposition) is ")


# A first word answers only before a pause or a clause: No, they ...; Yes it is; not No Country for
# Old Men, right triangle or n - 1.
_OPENING = re.compile(
    r"(?:yes|no|yep|yeah|yup|nope|true|false|correct|incorrect|indeed|affirmative|negative|certainly"
    r"|definitely|absolutely|wrong|right)\b"
    r"(?:\s*[.,;:!()\n\u2013\u2014]|\s+-+\s|\s+(?:it|they|he|she|that|this|these|those|both|neither|we|i|there|the"
    r"|because|since|as|not|one|only|all|none|each|its|his|her|their|in fact|indeed|a|an)\b|\s*$)"
    r"|[\u4e00-\u9fff]"
)
_SHORT_TRUTH = re.compile(
    r"(?:they|it|he|she|both|we|these|those|they both|both of them)\s+"
    r"(?:are|is|was|were|did|do|does|has|have|had|can|could)(?: both)?"
    r"\s*(not|n't)?|(?P<bare>not)"
)


def truth(text: str) -> bool | None:
    """True for yes, False for no, None for anything else."""
    return _TRUTH.get(text.lower())


def truth_of(found: str) -> bool | None:
    """What an answer says, alone or as the first word of a sentence that does not say both."""
    low = found.lower().strip(" .!")
    if low in _TRUTH:
        return _TRUTH[low]
    short = _SHORT_TRUTH.fullmatch(low)
    if short is not None:
        return short[1] is None and short["bare"] is None
    if _NO_ANSWER.match(low):
        return None
    claim = _CLAIM.sub("", low)
    words = tokens(claim)
    opening = _OPENING.match(claim)
    first = _TRUTH.get(words[0]) if words and opening is not None else None
    if first is None or any(_TRUTH.get(word) is (not first) for word in words[1:]):
        return None
    return first


def special(text: str) -> str:
    """The name of the special value that the text is; "" if none."""
    return next((name for name, form in _SPECIAL_FORMS if form.fullmatch(text)), "")
