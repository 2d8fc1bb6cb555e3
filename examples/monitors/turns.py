"""The turns of a stored trajectory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct, field

from agentenv.assembly.reports.records import is_result


class TranscriptTurn(Struct, kw_only=True):
    """A turn. `key` identifies it within its question. `calls`: records of tool calls, with name,
    arguments, ok, error, duration_s. `answer`: the observation after them."""

    key: str
    text: str
    answer: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    num_context: int | None = None  # tokens before the turn
    num_tokens: int | None = None  # sampled tokens
    facts: dict[str, Any] = field(default_factory=dict)


def turns_of(
    segments: Iterable[dict[str, str]], calls: Sequence[dict[str, Any]]
) -> tuple[str, list[TranscriptTurn]]:
    """Prompt and turns of the segments of a row. A row does not record the turn of each call: each
    answered turn gets one call, and the last answered turn all remaining calls."""
    prompt, turns, answered = "", list[TranscriptTurn](), list[TranscriptTurn]()
    for segment in segments:
        if "policy" in segment:
            text = segment["policy"] + segment.get("eos", "")
            turns.append(TranscriptTurn(key=f"turn-{len(turns) + 1}", text=text))
        elif not turns:
            prompt += segment.get("env", "")
        else:
            turns[-1].answer += segment.get("env", "")
            if is_result(segment) and turns[-1] not in answered:
                answered.append(turns[-1])
    left = list(calls)
    for turn in answered:
        turn.calls = left[:1] if turn is not answered[-1] else left
        left = left[1:]
    if left and not answered and turns:  # calls whose result no turn follows
        turns[-1].calls = left
    return prompt, turns
