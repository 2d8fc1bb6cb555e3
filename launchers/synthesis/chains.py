"""Trajectories as the text to learn from: tags unified, and their pairs and order checked.

    (<think>..</think>)+ with calls <TOOL>..</TOOL><result>..</result> between them, then
    <answer>..</answer> and nothing more

Text of the policy and results of tools are told apart by who wrote them, never by their tags, so
nothing that a page says passes for structure (as it does in the published format rule).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import msgspec

from agentenv.renderer import THOUGHT_OPEN
from envs.grading.answer import last_boxed
from launchers.evaluation.rows import EvalRow

ALIASES = {
    "thinking": "think",
    "thought": "think",
    "reasoning": "think",
    "final_answer": "answer",
    "final answer": "answer",
}
OURS = ("think", "answer", "result")

Part = tuple[bool, str]  # whether the policy wrote it, and its text
Problem = tuple[str, str]  # reason, "" if there is none, and what was found


def parts_of(row: EvalRow, tools: Sequence[str]) -> list[Part]:
    """The trajectory behind its prompt. Text of the policy in unified tags, a thought that the
    prompt has opened included; results without theirs."""
    if not row.segments:
        return []
    first = row.segments[0].get("env", "")
    parts = [
        (True, unify_tags(one["policy"], tools))
        if "policy" in one
        else (False, _without_frame(one["env"]))
        for one in row.segments[1:]
    ]
    if parts and parts[0][0] and first.rstrip().endswith(THOUGHT_OPEN):
        parts[0] = (True, f"{THOUGHT_OPEN}\n{parts[0][1]}")
    return parts


def chain_text(parts: Sequence[Part]) -> str:
    """The one turn of a dialogue: <think>..<search>..</search><result>..</result>..<answer>.."""
    texts = [text if by_policy else f"<result>\n{text}\n</result>" for by_policy, text in parts]
    return "".join(texts).strip()


def unify_tags(text: str, tools: Sequence[str]) -> str:
    """Tags in one spelling: < Think >, <THINKING> and </ thought> become those of the protocol."""
    pattern, names = _spellings(tuple(tools))
    return pattern.sub(lambda tag: f"<{tag[1]}{names[tag[2].casefold()]}>", text)


def check_chain(parts: Sequence[Part], tools: Sequence[str], *, require_box: bool) -> Problem:
    """The first thing that is wrong with tags, in this order: unpaired_tag, wrong_order,
    no_thought, no_answer, no_box."""
    opened, called, num_thoughts, num_answers = "", False, 0, 0
    for by_policy, tag in _tags(parts, tools):
        name = tag.strip("</>")
        if not by_policy:
            if opened:
                return "unpaired_tag", f"a result stands within <{opened}>"
            if not called:
                return "wrong_order", "a result follows no call"
            called = False
        elif name == "result":
            return "wrong_order", f"the policy wrote {tag} itself"
        elif tag.startswith("</"):
            if opened != name:
                return "unpaired_tag", f"{tag} closes {f'<{opened}>' if opened else 'nothing'}"
            opened, called = "", name in tools
        elif opened:
            return "unpaired_tag", f"{tag} stands within <{opened}>"
        elif called:
            return "wrong_order", f"{tag} stands where a result should"
        elif num_answers:
            return "wrong_order", f"{tag} follows the answer"
        else:
            opened = name
            num_thoughts += name == "think"
            num_answers += name == "answer"
    if opened:
        return "unpaired_tag", f"<{opened}> is not closed"
    if called:
        return "wrong_order", "a call has no result"
    if not num_thoughts:
        return "no_thought", "there is no <think>"
    if not num_answers:
        return "no_answer", "there is no <answer>"
    last = parts[-1][1]
    if last.rpartition("</answer>")[2].strip():
        return "wrong_order", "there is text behind the answer"
    if require_box and last_boxed(last.rpartition("<answer>")[2]) is None:
        return "no_box", "the answer has no balanced \\boxed{}"
    return "", ""


def call_keys(row: EvalRow) -> list[str]:
    """What tells the calls of a trajectory apart: tool and arguments, blanks and case aside."""
    return [
        msgspec.json.encode(
            [call.get("name"), _plain(call.get("arguments"))], order="sorted", enc_hook=str
        ).decode()
        for call in row.tool_calls
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.casefold().split())
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value


def _tags(parts: Sequence[Part], tools: Sequence[str]) -> Iterator[tuple[bool, str]]:
    pattern = _protocol(tuple(tools))
    for by_policy, text in parts:
        if by_policy:
            yield from ((True, tag[0]) for tag in pattern.finditer(text))
        else:
            yield False, "<result>"


@cache
def _spellings(tools: tuple[str, ...]) -> tuple[re.Pattern[str], dict[str, str]]:
    """A tag in any spelling, and the protocol's name by the folded one."""
    names = {**ALIASES, **{name.casefold(): name for name in (*OURS, *tools)}}
    either = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"<\s*(/?)\s*({either})\s*>", re.IGNORECASE), names


@cache
def _protocol(tools: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"</?(?:{'|'.join(map(re.escape, (*OURS, *tools)))})>")


def _without_frame(text: str) -> str:
    return text.strip().removeprefix("<result>").removesuffix("</result>").strip()
