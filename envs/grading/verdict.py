"""Where an answer stands in what the policy wrote, and what a matcher says of the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from agentenv.errors import GraderError, InfraError

MAX_BOXES = 40
MAX_BOX_CHARS = 20_000  # a box that is still open after so many characters counts as open

_BRACE = re.compile(r"[{}]")
_BOX = r"\boxed{"
_JOINT = re.compile(  # what stands between two boxes of a list
    r"\}(?:\$|\\[)\]])?\s*(?:,|,?\s*(?:\\text\{\s*)?\band\b(?:\s*\})?)\s*(?:\$|\\[(\[])?\s*\Z"
)


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...}, braces inside balanced; None when there is none."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for brace in _BRACE.finditer(text, start, start + MAX_BOX_CHARS):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.start()].strip()
    return None


def last_boxes(text: str) -> str | None:
    r"""The last \boxed{...}; as a list with those before it, if only commas or "and" stand between
    them and they differ: \boxed{1}, \boxed{2} and \boxed{3}."""
    boxes: list[str] = []
    while len(boxes) < MAX_BOXES:
        box = last_boxed(text)
        if box is None:
            break
        boxes.insert(0, box)
        text = text[: text.rfind(_BOX)]
        if _JOINT.search(text) is None:
            break
    return ", ".join(dict.fromkeys(boxes)) if boxes else None


def final_answer(text: str) -> str:
    """The answer that a message gives, tagged or plain."""
    _, tag, rest = text.rpartition("<answer>")
    body = rest.partition("</answer>")[0] if tag else text.rpartition("</think>")[2]
    boxed = last_boxes(body)
    return body.strip() if boxed is None else boxed


def check_format(text: str) -> tuple[str, str]:
    r"""What is wrong with the format ("" if nothing), and the content of the last \boxed{}."""
    num_open, num_close = text.count("<think>"), text.count("</think>")
    if num_open != num_close or not num_open:
        return f"{num_open} <think> and {num_close} </think>, expected pairs", ""
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return "expected exactly one <answer> and one </answer>", ""
    before, _, rest = text.partition("<answer>")
    if "</answer>" in before:
        return "</answer> stands before <answer>", ""
    answer = last_boxes(rest.partition("</answer>")[0])
    if answer is None:
        return r"no balanced \boxed{} inside the answer", ""
    return "", answer


MAX_SHOWN_CHARS = 200


class Verdict(Struct, frozen=True):
    """`score` is 1 for a right answer, 0 for a wrong one, between for partial credit; `reason`
    says why, `layer` which rule decided; `parts` are further metrics."""

    right: bool
    score: float
    reason: str
    layer: str = ""
    parts: Mapping[str, float] = {}


class GraderDownError(InfraError, GraderError):
    """What a grader asks is down: there is no verdict now, and one later."""


class Matcher(Protocol):
    """Compares an answer with the golds of a question."""

    async def start(self) -> None:
        """Get ready; a ConfigError says what is missing."""
        ...

    async def verdict(self, question: str, answer: str, golds: Sequence[str]) -> Verdict:
        """Right if any gold is met. Raises GraderError when no verdict can be had, and
        GraderDownError when none can be had now."""
        ...


def shown(text: str) -> str:
    """A text cut for a reason."""
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
