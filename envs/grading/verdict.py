"""Position of an answer in the policy's text, the verdict of a matcher, and exact match, the
comparison of the quick start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from agentenv.base.errors import GraderError, InfraError
from agentenv.envs.grading import text as texts
from agentenv.envs.grading.numbers import as_number
from agentenv.text.call_syntax import without_thoughts

STOPPED = "stopped"  # the part of a grade without a result of the function
_TAGGED = re.compile(r"(.*?)<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_TABLES = texts.Tables("frame")
_BESIDE = _TABLES.pattern("beside", re.IGNORECASE)
_ANNOUNCED = _TABLES.pattern("announced", re.IGNORECASE)
_ENDED, _LEADS = _TABLES.pattern("ended", re.IGNORECASE), _TABLES.pattern("leads")
MAX_WORDS_ANNOUNCED = 8  # more are a sentence


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...}, braces inside balanced; None when there is none."""
    found = texts.boxes(text[max(text.rfind(texts.BOX), 0) :])
    return found[-1][1] if found else None


def boxed_answer(text: str) -> str | None:
    """The content of the boxes after the last correction: of one box, or of all different ones,
    which are a list, or several guesses. None when the last box is missing or open."""
    last = last_boxed(text)
    if last is None:
        return None
    found = texts.boxes(text)
    before, after = found[0][0].rstrip(), after_box(text, last)
    line, is_own = before.rpartition("\n")[2], "\n" in found[0][0][len(before) :]
    first = _announced(line, found[0][1]) if is_own or _ENDED.search(line) else []
    if first and " " not in first[0][1]:  # a "no" that is an answer corrects nothing
        found[0] = ("", found[0][1])
    claims = [*first, *found, *_announced(after.strip(), last)]
    return one_of(claims)


def after_box(text: str, last: str) -> str:
    """The text after the last box, which holds `last`."""
    rest = text.rpartition(texts.BOX)[2].lstrip()
    return rest[len(last) :].lstrip().removeprefix("}")


def _announced(text: str, boxed: str) -> list[tuple[str, str]]:
    """The answer that the first line of a text announces, as a claim, if the box does not repeat
    it."""
    match = _ANNOUNCED.fullmatch(text.partition("\n")[0].strip(" *_#>$-"))
    if match is None:
        return []
    content = match["content"].strip(" *_$")
    repeats = {*re.findall(r"\w+", boxed)} <= {*re.findall(r"\w+", content)}
    leads = _LEADS.fullmatch(content) is not None
    is_claim = not leads and not repeats and len(content.split()) <= MAX_WORDS_ANNOUNCED
    return [("", content)] if is_claim else []


def one_of(claims: Sequence[tuple[str, str]]) -> str:
    """Answers, each with the text before it: those after the last correction, each once."""
    kept: dict[str, str] = {}
    for before, content in claims:
        if kept and next(texts.last_correction(before), None) is not None:
            kept.clear()
        kept.setdefault("".join(content.split()), content)
    return "; ".join(kept.values())


def final_answer(text: str) -> str:
    """The answer of a message outside of its thoughts, tagged or plain; several different answers
    are joined."""
    text = without_thoughts(text)
    tagged = _TAGGED.findall(text) if "<answer>" in text else ()  # the search alone is quadratic
    if tagged:
        answer = one_of([(before, _boxed_or_all(body)) for before, body in tagged])
        _, closed, after = text.rpartition("</answer>")
        return _with_beside(answer, after) if closed else answer
    return _boxed_or_all(text)


def _boxed_or_all(body: str) -> str:
    boxed = boxed_answer(body)
    if boxed is None:
        return body.strip()
    return _with_beside(boxed, after_box(body, last_boxed(body) or ""))


def _with_beside(answer: str, text: str) -> str:
    """The answer, with the text that is joined to it in the same line."""
    beside = _BESIDE.match(text)
    return answer if beside is None else f"{answer} {beside[1].strip()}"


def check_format(text: str) -> tuple[str, str]:
    r"""The format error ("" if none), and the content of the boxes."""
    num_open, num_close = text.count("<think>"), text.count("</think>")
    if num_open != num_close or not num_open:
        return f"{num_open} <think> and {num_close} </think>, expected pairs", ""
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return "expected exactly one <answer> and one </answer>", ""
    before, opened, rest = without_thoughts(text).partition("<answer>")
    if not opened:
        return "<answer> is within the thoughts", ""
    if "</answer>" in before:
        return "</answer> precedes <answer>", ""
    answer = boxed_answer(rest.partition("</answer>")[0])
    return ("", answer) if answer is not None else (r"no balanced \boxed{} inside the answer", "")


MAX_SHOWN_CHARS = 200


class Verdict(Struct, frozen=True):
    """`score` is 1 for a right answer, 0 for a wrong one, between for partial credit; `reason`
    explains it; `parts` are further metrics."""

    right: bool
    score: float
    reason: str
    parts: Mapping[str, float] = {}


class GraderDownError(InfraError, GraderError):
    """A service of a grader is down: no verdict now, but later."""


class Matcher(Protocol):
    """Compares an answer with the golds of a question."""

    async def start(self) -> None:
        """Get ready, if anything must be; a ConfigError names a missing requirement."""
        return None

    async def verdict(self, question: str, answer: str, golds: Sequence[str]) -> Verdict:
        """Right if any gold is met. Raises GraderError when there is no verdict, and
        GraderDownError when there is none for now."""


def shown(text: str) -> str:
    """A text cut for a reason."""
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


class Exact(Matcher):
    """The matcher of `kind = "exact"`."""

    async def verdict(self, question: str, answer: str, golds: Sequence[str]) -> Verdict:
        """Right if the answer equals a gold after normalizing."""
        right = any(same_answer(answer, gold) for gold in golds)
        reason = f"{'right' if right else 'wrong'} answer: {shown(answer)}"
        return Verdict(right, float(right), reason)


def same_answer(answer: str, gold: str) -> bool:
    """Equal as numbers if the gold is a number, else equal as normalized text."""
    if len(answer) > texts.MAX_ANSWER_CHARS:
        return False
    number = as_number(gold)
    if number is not None:  # dropping punctuation would make 5 of -5 and 314 of 3.14
        plain = answer.strip().lstrip("$\N{EURO SIGN}\N{POUND SIGN} ").rstrip("%. ")
        return as_number(plain) == number
    wanted = texts.words_of(gold)
    if not wanted:  # a gold of only punctuation or an article
        return answer.strip() == gold.strip()
    return texts.words_of(answer) == wanted
