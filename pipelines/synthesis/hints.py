"""Hint-based sampling: a language-only chain, cut at a doubt or after its answer, goes on with
tools after a sentence of ours (Tool-Star, arXiv 2505.16410, section 3.1).

    uncertain   <think>facts. Perhaps it is Cusco..     ->  <think>facts. HINT
    answer      <think>facts.</think><answer>X</answer> ->  <think>facts. So it would be X. HINT

So the thought stays open and the whole has one answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Literal

from msgspec import Struct

from agentenv.envs.grading.verdict import final_answer
from agentenv.pipelines.config.evaluation import HintsConfig

MARK = "hint"  # in the metadata of a task and of its row

_TAG = re.compile(r"<[^<>]*>")
_SENTENCE_END = re.compile(r"[.!?\u3002\uff01\uff1f](?=\s|$)|[\u3002\uff01\uff1f\n]")


class Hint(Struct, frozen=True):
    """The beginning of a trajectory: `prefix`, which ends with the sentence `text`. `sample` is
    the number of the language-only chain that it was cut from."""

    prefix: str
    place: Literal["uncertain", "answer"]
    text: str
    sample: int


def make_hint(chain: str, sample: int, config: HintsConfig, rng: Random) -> Hint | None:
    """The chain with a hint; None if it has no place for one."""
    if config.place != "answer":
        before = cut_at_doubt(chain, config.phrases)
        if before is not None:
            text = rng.choice(config.verification)
            return Hint(before + text, "uncertain", text, sample)
    if config.place != "uncertain":
        before = reopened(chain)
        if before is not None:
            text = rng.choice(config.reflection)
            return Hint(before + text, "answer", text, sample)
    return None


def cut_at_doubt(chain: str, phrases: Sequence[str]) -> str | None:
    """The chain up to the first sentence of a thought that has one of the phrases, ready for a
    sentence; None without one. Only the part before any answer counts."""
    doubts = re.compile("|".join(map(_pattern, phrases)), re.IGNORECASE)
    for doubt in doubts.finditer(chain):
        before = chain[: doubt.start()]
        thought = before.rfind("<think>")
        if "<answer>" in before:
            return None
        if thought < 0 or "</think>" in before[thought:]:
            continue
        start = thought + len("<think>")
        ends = [end.end() for end in _SENTENCE_END.finditer(before, start)]
        return _ready(before[: ends[-1] if ends else start])
    return None


def reopened(chain: str) -> str | None:
    """The chain as one thought that has come to its answer; None if there is no answer after a
    thought, or more than one of it."""
    before, tag, rest = chain.partition("<answer>")
    thought, closed, between = before.rpartition("</think>")
    body, end, _ = rest.partition("</answer>")
    if not (tag and closed and end) or between.strip() or "<think>" not in thought:
        return None
    answer = " ".join(_TAG.sub(" ", final_answer(f"<answer>{body}</answer>")).split())
    if not answer:
        return None
    return f"{_ready(thought)}So it would be {answer.rstrip('.')}. "


def _pattern(phrase: str) -> str:
    """Whole words, where the script has blanks between words."""
    word = re.escape(phrase.strip())
    return rf"(?<!\w){word}(?!\w)" if phrase.isascii() else word


def _ready(text: str) -> str:
    """With a blank after the last sentence, none after the tag."""
    text = text.rstrip()
    return text if text.endswith(">") else f"{text} "
