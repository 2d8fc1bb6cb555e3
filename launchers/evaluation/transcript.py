"""From a stored trajectory back to what its grader saw: the policy's own messages and calls."""

from __future__ import annotations

import re
from collections import Counter

from agentenv.renderer import TAGS, THOUGHT_OPEN
from agentenv.types import Message, ToolCall
from envs.grading.answer import final_answer
from launchers.evaluation.rows import EvalRow

_CALL_TAG = re.compile(rf"</(?!(?:{'|'.join(TAGS)})>)(\w+)>\Z")


def written(row: EvalRow) -> list[Message]:
    """The policy's messages in order, as the renderer parsed them: without end-of-sequence tokens;
    where the text before a turn ends with an open <think>, the message starts with it.

    A turn that the env answered, or that ends with a tool's tag, has a call; of several in one turn
    only one stands there, by name only: graders read the text.
    """
    messages: list[Message] = []
    before = ""
    calls = iter(row.tool_calls)
    for place, segment in enumerate(row.segments):
        text = segment.get("policy")
        if text is None:
            before = segment.get("env", "")
            continue
        if before.rstrip().endswith(THOUGHT_OPEN):
            text = f"{THOUGHT_OPEN}\n{text}"
        before = ""
        answered = place + 1 < len(row.segments) and "env" in row.segments[place + 1]
        called = next(calls, None) if answered else None
        tag = _CALL_TAG.search(text)
        name = called["name"] if called is not None else tag[1] if tag is not None else ""
        found = (ToolCall(name, {}),) if name else ()
        messages.append(Message("assistant", text, found))
    return messages


def calls_that_ran(row: EvalRow) -> Counter[str]:
    """How many calls of each tool ran without error."""
    return Counter(call["name"] for call in row.tool_calls if call.get("ok", True))


def prediction(messages: list[Message]) -> str:
    """The answer that the graders read: of the last message, tagged, boxed, or plain."""
    return final_answer(messages[-1].content) if messages else ""


def whole_text(row: EvalRow) -> str:
    """Everything after the prompt, tool results included."""
    texts = [segment.get("policy", segment.get("env", "")) for segment in row.segments]
    return "".join(texts[1:] if row.segments and "env" in row.segments[0] else texts)
