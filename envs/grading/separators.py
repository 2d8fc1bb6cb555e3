"""What separates two parts of an answer, from the strongest to the weakest: lines, sentences, words
such as "or" and "aka", brackets, dashes, colons, commas, signs of equality."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Literal

# How a part is attached to the text before it: "" is a new start, as after a full stop; "or" is an
# alternative, which describes nothing that stands beside it.
Joint = Literal["", "or", "alias", "bracket", "dash", "colon", "comma", "list", "equals"]
Cut = Callable[[str], list[str]]

_QUOTES = "\"'\u201c\u201d\u2018\u2019"
_BULLETS = (
    "\u2022\u2023\u25aa\u25ab\u25cf\u25e6\u25cb\u2043\u2219\u25a0\u25a1\u25ba\u25b6\u2726"
    "\u2605\u2713\u2714\u203b\xb6"
)
_LINES = re.compile(
    r"[\n\r\t\v\f\x1c-\x1f\x85\u2028\u2029]+|\\[nrt](?![a-z])|\\\\(?![a-z])"
    r"|\\(?:newline|par|item|q?quad)\b|</?[a-z]{1,10}\s*/?>"
    r"|(?:^|\s)(?:(?:The|My)(?: final| correct| best)? answer"
    r"|(?:Final |Correct |The |My )?Answer|(?:FINAL )?ANSWER)(?: is| was|\s*[:=])\s+"
    r"|(?:^|\s)(?:[-*_=#~]{3,}|#{1,6}|%{1,3}|@)(?=\s)|[\u2002\u2003\u3000\xa0]+"
)
_MARKS = re.compile(  # bullets, cells and spans of markup that follow each other
    rf"\s*[{_BULLETS}]\s*|(?:^|\s)[*+]\s(?=[^\W\d])|\s\xb7\s|(?<=[^\W\d_])\xb7(?=[^\W\d_])"
    r"|\s*\|{2,}\s*|\s\|\s?|\|\s|(?<=\w)[|\u00a6](?=\w)|(?:^|\s)>{1,3}(?=\s)| {3,}"
    rf"|(?<=[*_`$~{_QUOTES}])\s+(?=[*_`$~{_QUOTES}])|(?<=\\[\])])\s*(?=\\[\[(])"
    r"|(?<=\})\s*(?:\(\s*)?(?=\\(?:f?boxed|text\w*|math\w+|mbox)\s*\{)"
)
_ENUMERATED = re.compile(r"(?:^|(?<=\s))(?:\(?([1-9a-eA-E]|i{1,3}|iv|v)[).]|#?([1-9])[.)])(?=\s)")
_END = re.compile(
    rf"(?P<stop>\.)[{_QUOTES})\]*_`$]*(?:\s+|(?=[A-Z\u0410-\u042f][a-z\u0430-\u044f]))"
    rf"|[!?;\u037e\u0387\u061b\u061f\u0964\u203c\u203d\u2047-\u2049\u3002\uff01\uff1b"
    rf"\uff1f\uff0e\uff61]+"
    rf"[{_QUOTES})\]*_`$]*\s*"
    r"|(?:\.\s?){2,}\s*|\u2026+\s*|[\u22ee\u22ef]+"
)
_ABBREVIATIONS = frozenset(
    str.split(
        "mr mrs ms dr adm st mt ft jr sr prof gen col capt lt sgt rev hon gov sen rep no nos vol"
        " vs v approx"
        " ca c b d r inc co ltd corp etc fig eq univ dept jan feb mar apr aug sept sep oct"
        " nov dec bros"
        " e.g i.e ph op pp ed est jul jun sq cu"
    )
)
_LAST_WORD = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]{1,9}$")
_NAMES = (  # what gives another name for what stands before it
    r"a\.?\s?k\.?\s?a\.?|i\.\s?e\.?|ie(?=[,:\s])|viz\.?|e\.\s?g\.?|eg(?=[,:\s])"
    r"|(?:also|otherwise|better|best|sometimes|commonly|formerly|previously|now|originally"
    r"|alternatively|popularly|or)?\s*(?:known|called|named|referred to|written|spelled) as"
    r"|(?:also|otherwise|sometimes|commonly|formerly|originally|alternatively)\s+(?:called|named)"
    r"|(?:called|named|spelled|written)(?!\s+(?:after|for|in|by|on|upon|at|as|to|out|with|a|an)\b)"
    r"|(?:formerly|previously|originally|now|meaning|respectively)(?=:?\s+(?-i:[\"'A-Z\d$\\-]))"
    r"|in other words|that is to say|that is(?=[,:])|namely|alias|equals|is equal to"
    r"|n[\u00e9e]e(?=\s[A-Z])|d/?b/?a"
)
_ADVERBS = (  # conjunctive adverbs, a closed class
    r"hence|thus|therefore|so(?=,? (?-i:[A-Z\d$\\\\]))|then|next|later|ergo|whence"
    r"|consequently|subsequently|accordingly|afterwards|finally|ultimately|overall|additionally|furthermore|moreover|besides"
    r"|similarly|likewise|equivalently|alternatively|alternately|equally|otherwise|or else|else"
    r"|also|not to mention|to say nothing of|in addition to"
    r"|as opposed to (?:possibly|perhaps|maybe)"
    r"|in conclusion|in short|in sum|as a result|all in all|to sum up|but(?: also)?|cf\.?|p\.?s\.?"
)
_ALTERNATIVES = (
    r"(?:and/or|or rather|either|or|nor|xor|and(?= (?:possibly|perhaps|maybe|probably|also)\b)"
    rf"|possibly|perhaps|maybe|probably|if not|failing that|versus|vs\.?|resp\.?|{_ADVERBS}"
    r"|(?:followed|preceded|succeeded|replaced|superseded) by|as well as(?= possibly)"
    r"|another (?:option|possibility|answer)|fallback|runner-up|oder|ou(?: bien)?)"
)
_SUBJECT = (
    r"(?:it|he|she|they|that|this|we|i|one|(?:the|my|another|an?) (?:\w+ )?(?:answer|result"
    r"|solution|guess|option|possibility|candidate))"
)
_CLAUSE = re.compile(  # The answer is A and the answer is B; it is A, it is also B
    r"(?:,\s*|\s+)(?:(?:and|but|or|yet|though|although|while|whereas)\s+)"
    rf"(?={_SUBJECT}(?:'s|\s+\w+)\s)",
    re.IGNORECASE,
)
_SPLICE = re.compile(rf",\s+(?={_SUBJECT}(?:'s|\s+(?:is|was|are|were|could|might|may))\s)", re.I)
_CAPITALS = re.compile(r"(?:[A-Z\d$\"][^\s,]{0,40}\s+){0,8}[A-Z\d$\"][^\s,]{0,40},\s")
_STATES = re.compile(rf"{_SUBJECT}(?:'s|\s+(?:is|was|are|were|could|might|may))\s", re.I)
_ARROWS = (
    r"[-=~]{1,3}>{1,2}|<{1,2}[-=~]{1,3}>?"
    r"|[\u2190-\u21ff\u27f5-\u27ff\u2794\u2799-\u27be\u2b05-\u2b0d]\ufe0f?"
    r"|\\(?:to|gets|implies|iff|mapsto|(?:[Ll]ong)?(?:[Ll]eft)?[Rr]ightarrow)(?![a-zA-Z])"
    r"|>{2,}|<{2,}"
)
_HAN_OR = (
    "\u6216\u8005|(?<=[A-Za-z\\d.)])[\u548c\u4e0e\u53ca](?=[A-Za-z\\d(])|\u6216\u662f|\u6216|\u8fd8\u662f|\u53c8\u540d|\u4ea6\u79f0|\u4e5f\u53eb"
    "|\u53c8\u79f0|\u4ee5\u53ca|\u4e5f\u5c31\u662f|\u5373(?=[\\dA-Za-z])"
)
_NAMED = re.compile(rf",?\s*(?<!\w)(?:{_NAMES})(?!\w),?:?\s*", re.IGNORECASE)
_WORDS = re.compile(
    rf",?\s*(?<![\w-])(?:{_ALTERNATIVES}[,:]?\s+){{0,3}}{_ALTERNATIVES}(?![\w-])[,:]?\s*"
    rf"|\s*(?:{_ARROWS}|{_HAN_OR})\s*",
    re.IGNORECASE,
)
_BRACKET = re.compile(
    "\\s*[\u3010\u300c\u300e\u300a\u3008\u3014\uff08\uff3b\uff5b\xab\u2039\u27e8]\\s*"
    "|\\s*[\u3011\u300d\u300f\u300b\u3009\u3015\uff09\uff3d\uff5d\xbb\u203a\u27e9]\\s*"
    r"|\s+\\?[(\[<]\s*(?=\S)|(?<=[^\W_]|[\"'*`\u201d\u2019])[(\[<](?=\S)(?=[^()\[\]{}<>]*[)\]>])"
    r"|\s*\\?[)\]>](?=\s|$|[.,:])\s*|\s\\?\{\s*(?=[^{}]*\\?\}\s*$)|\s\{\s*(?=\\\w+\{)"
)
_DASHES = re.compile(
    r"\s+(?:[-\u2010-\u2015\u2212~\u223c\u301c\uff5e\u30fc_*+]{1,3})\s+|[\u2014\u2015\u2e3a\u2e3b]+"
    r"|(?<=[^\W_])-{2,}(?=[^\W_])|(?<=[^\W\d_])[\u2012\u2013](?=[^\W_])|(?<=\d)[\u2012\u2013](?=\d)"
    r"|\s+[-\u2012\u2013](?=[^\W\d_])|(?<=\w)[-\u2012\u2013]\s+|(?<=\w)~(?=\w)"
)
_COLONS = re.compile(
    r"\s*[:\uff1a\ufe55\u2236]+(?:\s+|(?=[^\d\s/\\=]))|\s+[:\u2236]+\s*|\uff1a|::+"
)
_COMMAS = re.compile(
    r"[,\uff0c](?!\d{3}(?!\d))\s*(?:(?:and|or)\s+)?|(?<=\D)[,\uff0c]\s*|[\u3001\u060c\uff64\u2e41]\s*"
)
_LISTS = re.compile(
    r"\s+(?:&|and|as well as|along with|together with|plus|with|und|et|y)\s+|\\&"
    r"|(?<=[^\W\d_])\s*[/\u2215\u2044\uff0f]\s*(?=[^\W\d_])|\s+[/\u2215\u2044\uff0f]{1,2}\s*|\s*\\\s+"
    r"|(?<=[^\W_])\\(?=[A-Z0-9])|\\(?:text\s*\{\s*(?:and|or)\s*\}|land|lor|vee|wedge)(?![a-z])"
    r"|(?<=[\u4e00-\u9fff])\s*[\u548c\u4e0e\u53ca]\s*(?=[\u4e00-\u9fff])"
)
EQUALS = re.compile(
    r"\s*(?::=|={1,3}|\u2248|\u2245|\u2243|\u223c|\u2261|~=|\uff1d"
    r"|\\(?:approx|simeq|cong|equiv|doteq|sim)(?![a-zA-Z])|(?<=\s)~(?=\s))\s*"
)
_CORRECTION = re.compile(
    r"(?:(?:^|(?<=[\s,.;:!?(\u2013\u2014-]))(?:no(?=\s*[,.;:!\u2014-])|no(?=\s+(?:wait|it|the"
    r"|that|sorry|\d))"
    r"|nope|oops|sorry|wait|hold on|actually|corrections?|erratum|apologies|pardon(?: me)?"
    r"|my (?:mistake|bad|apologies)|(?:scratch|strike|ignore) that|(?:or )?rather(?! than)|i mean"
    r"|i meant|i stand corrected|i take that back|i was wrong|i made (?:a mistake|an error)"
    r"|let me correct(?: that| myself)?|on second thoughts?|on reflection|make (?:that|it)"
    r"|that(?:'s| is| was) (?:wrong|incorrect|not right)|instead|in fact|corrected(?: answer)?"
    r"|revised(?: answer)?)(?!\w)"
    r"|\b(?:the|my) (?:final|correct|right|actual|real|true|corrected|revised) answer"
    r" (?:is|was|should be|must be)\b|\bfinal answer\s*[:=]|\b(?:it|that|the answer) should be\b"
    "|\u66f4\u6b63|\u4e0d\u5bf9|\u7b49\u7b49|\u7b49\u4e00\u4e0b|\u62b1\u6b49"
    "|\u5e94\u8be5\u662f|\u5e94\u4e3a|\u6700\u7ec8\u7b54\u6848)"
    r"(?:[\s,.;:!?\uff0c\u3002\uff1a]|[\u2013\u2014-](?![\d\\.$]))*",
    re.IGNORECASE,
)


def lines(text: str) -> list[str]:
    """Lines, and answers that are labelled as such."""
    return _LINES.split(text)


def marks(text: str) -> list[str]:
    """Cells, bullets, numbered alternatives, boxes and spans of markup that follow each other."""
    found = list(_ENUMERATED.finditer(text))
    values = [match[1] or match[2] for match in found]
    if len(values) > 1 and values[0] in ("1", "a", "A", "i") and len(set(values)) == len(values):
        ends = [0, *(match.start() for match in found), len(text)]
        pieces = [text[start:end] for start, end in pairwise(ends)]
        bare = [_ENUMERATED.sub("", piece, count=1) for piece in pieces]
        if all(piece.strip() for piece in bare[1:]):
            return [part for piece in bare for part in _MARKS.split(piece)]
    return _MARKS.split(text)


def sentences(text: str) -> list[str]:
    """What full stops, semicolons, marks and ellipses end; not abbreviations and initials."""
    found, start = [], 0
    for match in _END.finditer(text):
        if match["stop"] and _is_abbreviated(text[: match.start()], text[match.end() :]):
            continue
        found.append(text[start : match.start()])
        start = match.end()
    return [*found, text[start:]]


def _is_abbreviated(before: str, after: str) -> bool:
    word = _LAST_WORD.search(before[-20:])
    if word is None:
        return False
    short = word[0].lower()
    if len(short) == 1 and word[0].isupper():
        return word[0] not in "IVX"
    if short in ("no", "nos", "b", "d", "c", "r"):
        return after[:1].isdigit()
    return "." in short or (short in _ABBREVIATIONS and bool(after))


def named_again(text: str) -> list[str]:
    """Around aka, i.e. and "also known as"."""
    return _NAMED.split(text)


def clauses(text: str) -> list[str]:
    """Around "and it is" and "but the answer was", which begin a sentence of their own."""
    halves = _CLAUSE.split(text)
    return [
        one
        for half in halves
        for one in (_SPLICE.split(half) if _STATES.match(half) or _CAPITALS.match(half) else [half])
    ]


def alternatives(text: str) -> list[str]:
    """Around or, hence, possibly and the like, and arrows."""
    return _WORDS.split(text)


def corrections(text: str) -> list[str]:
    """Around no, wait, sorry and "the final answer is"."""
    found, start = [], 0
    for match in _CORRECTION.finditer(text):
        if not _is_condition(text, match):
            found.append(text[start : match.start()])
            start = match.end()
    return [*found, text[start:]]


def _is_condition(text: str, match: re.Match[str]) -> bool:
    """Whether a correction is only thought of, as in "if that is wrong", or is a label that two
    answers have: the final answer is 13, the final answer is 14."""
    before = text[: match.start()]
    is_repeated = "answer" in match[0].lower() and match[0].strip().lower() in before.lower()
    return (
        is_repeated
        or re.search(r"\b(?:if|unless|maybe|perhaps|possibly)\s*$", before, re.I) is not None
    )


def last_correction(text: str, *, is_truth: bool = False) -> Iterator[str]:
    """What follows each correction, the last first; `is_truth`: "no" is an answer and corrects
    nothing."""
    for match in reversed(list(_CORRECTION.finditer(text))):
        is_answer = is_truth and match[0].lower().startswith("no")
        if not is_answer and not _is_condition(text, match):
            yield text[match.end() :]


LEVELS: tuple[tuple[Joint, Cut], ...] = (
    ("or", marks),
    ("", lines),
    ("", corrections),
    ("", sentences),
    ("", clauses),
    ("alias", named_again),
    ("or", alternatives),
    ("bracket", _BRACKET.split),
    ("dash", _DASHES.split),
    ("colon", _COLONS.split),
    ("comma", _COMMAS.split),
    ("list", _LISTS.split),
    ("equals", EQUALS.split),
)
OF_A_CLAUSE = (alternatives, _COMMAS.split, _LISTS.split, EQUALS.split)  # these belong to a clause
OF_A_SENTENCE = tuple(cut for _, cut in LEVELS[5:])
