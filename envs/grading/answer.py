r"""Where an answer stands in what the policy wrote: answer tags and \boxed{}."""

from __future__ import annotations

import re

MAX_BOX_CHARS = 20_000  # a box that is still open after so many characters counts as open

_BRACE = re.compile(r"[{}]")
_BOX = r"\boxed{"


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


def final_answer(text: str) -> str:
    """The answer that a message gives, tagged or plain."""
    _, tag, rest = text.rpartition("<answer>")
    body = rest.partition("</answer>")[0] if tag else text.rpartition("</think>")[2]
    boxed = last_boxed(body)
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
    answer = last_boxed(rest.partition("</answer>")[0])
    if answer is None:
        return r"no balanced \boxed{} inside the answer", ""
    return "", answer
