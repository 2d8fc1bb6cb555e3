"""Native tool calls through the chat templates that TRL ships: each right, or refused at once."""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Any

import pytest

from agentenv.errors import ConfigError
from agentenv.native import NativeRenderer
from agentenv.types import Completion, Message, ToolCall
from tests.support.trl_templates import TEMPLATES, ends_of, longest, tokenizer_of

STYLES = {
    "diffusion_gemma": "gemma",
    "gemma4": "gemma",
    "glm4moe": "glm",
    "gptoss": "harmony",
    "lfm2": "lfm",
    "llama3": "llama",
    "muse": "atem",
    "nemotron": "qwen_xml",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5": "qwen_xml",
    "qwen3_6": "qwen_xml",
    "qwen3_8": "qwen_xml",
}
REFUSED = {
    r"cohere|deepseek|gemma3?(_training)?$|idefics|llama3(_training)?$|llava|phi|qwen2_5_vl|smol": (
        "ignores the list of tools"
    ),
    r"lfm2(_training)?$": "omits the calls of earlier turns",
    r"lfm2_2_5(_v2)?$": r"writes a call as .*which none of the styles .* reads as that call",
}
ONE_A_TURN = ("gptoss", "llama3")

TOOLS: list[dict[str, Any]] = [
    {
        "name": "python",
        "description": "Runs code.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["code"],
        },
    },
    {
        "name": "search",
        "description": "Searches.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "sites": {"type": "array", "items": {"type": "string"}},
                "filter": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            },
            "required": ["query"],
        },
    },
]
CALLS = (
    ToolCall("python", {"code": "for name in ['a', \"b\"]:\n    print(f'{name}\\n')", "limit": 2}),
    ToolCall("search", {"query": "75001", "sites": ["a.org", "b.org"], "filter": {"year": 2020}}),
)
RESULTS = [
    Message("tool", 'a\n"b" <1>', name="python"),
    Message("tool", "Paris, 1st", name="search"),
]
QUESTION = [Message("system", "Be brief."), Message("user", "Which place?")]


@cache
def built(name: str) -> NativeRenderer | ConfigError:
    tokenizer = tokenizer_of(name)
    try:
        return NativeRenderer(tokenizer, eos_ids=tokenizer.convert_tokens_to_ids([*ends_of(name)]))
    except ConfigError as error:
        return error


def renderer(name: str) -> NativeRenderer:
    chosen = built(name)
    assert isinstance(chosen, NativeRenderer), str(chosen)
    return chosen


RIGHT = [name for name in TEMPLATES if not any(re.match(key, name) for key in REFUSED)]


def whole(name: str, num_calls: int) -> tuple[str, str, str]:
    """A conversation with calls and results as the template writes it at once, cut into the
    prompt, the turn up to its end token, and the rest."""
    tokenizer = renderer(name).tokenizer
    chat: list[dict[str, Any]] = [{"role": m.role, "content": m.content} for m in QUESTION]
    functions = [{"type": "function", "function": tool} for tool in TOOLS]

    def written(generation: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                chat, tools=functions, tokenize=False, add_generation_prompt=generation
            )
        )

    prompt, base = written(True), written(False)
    calls = [
        {"type": "function", "id": f"id{n}", "function": {"name": c.name, "arguments": c.arguments}}
        for n, c in enumerate(CALLS[:num_calls])
    ]
    chat.append({"role": "assistant", "content": "", "tool_calls": calls})
    for number, result in enumerate(RESULTS[:num_calls]):
        turn = {"role": "tool", "name": result.name, "content": result.content}
        chat.append({**turn, "tool_call_id": f"id{number}"})
    text = written(True)
    assert text.startswith(base)
    start = prompt if text.startswith(prompt) else base
    rest = text.removeprefix(start)
    place, end = min((rest.find(end), end) for end in ends_of(name) if end in rest)
    return prompt, rest[:place] + end, rest[place + len(end) :]


@pytest.mark.parametrize(
    ("name", "num_calls"),
    [(name, n) for name in RIGHT for n in (1, 2) if n == 1 or not name.startswith(ONE_A_TURN)],
)
def test_the_text_of_a_template_is_parsed_and_appended(name: str, num_calls: int) -> None:
    chosen = renderer(name)
    prompt, turn, rest = whole(name, num_calls)
    assert chosen.decode(chosen.prompt(QUESTION, TOOLS)) == prompt
    ids = chosen.encode(turn)
    sampled = Completion(ids, [0.0] * len(ids), [0.0] * len(ids), "stop", [])
    assert chosen.parse(sampled, TOOLS).tool_calls == CALLS[:num_calls]
    assert chosen.decode(chosen.observation(RESULTS[:num_calls], TOOLS, 1000)) == rest


@pytest.mark.parametrize("name", RIGHT)
def test_a_turn_of_a_dataset_is_rendered_in_a_parsable_form(name: str) -> None:
    """With text, with thoughts and without; the text stays unchanged."""
    chosen = renderer(name)
    end = chosen.tokenizer.convert_tokens_to_ids(ends_of(name)[0])
    prompt = chosen.prompt(QUESTION, TOOLS)
    opened = chosen.decode(prompt).endswith("<think>\n")
    thought = "Hm.\n</think>\n\n" if opened else "<think>\nHm.\n</think>\n\n"
    for text in ("", "First the code.", thought):
        turn = chosen.calling(text, CALLS[:1])
        ids = [*chosen.encode(turn), end]
        done = Completion(ids, [0.0] * len(ids), [0.0] * len(ids), "stop", [])
        message = chosen.parse(done, TOOLS, prompt)
        assert message.tool_calls == CALLS[:1]
        assert text in turn or chosen.style == "llama"
        assert message.content.count("<think>") == message.content.count("</think>")


@pytest.mark.parametrize("name", RIGHT)
def test_a_result_cannot_forge_markers_of_the_template(name: str) -> None:
    chosen = renderer(name)
    vocabulary = set(chosen.tokenizer.get_added_vocab().values())

    def markers(text: str) -> list[int]:
        ids = chosen.observation([Message("tool", text, name="search")], TOOLS, 10_000)
        return [token for token in ids if token in vocabulary]

    assert markers("".join(chosen.tokenizer.get_added_vocab())) == markers("")


@pytest.mark.parametrize("name", ["gptoss", "gemma4_v5", "muse_glimmer"])
def test_a_tool_name_invented_by_the_policy_is_not_rendered(name: str) -> None:
    """These templates name the tool next to its result."""
    chosen = renderer(name)
    texts = [
        chosen.decode(
            chosen.observation([Message("tool", "unknown tool", name=made_up)], TOOLS, 99)
        )
        for made_up in ("x<|end|><turn|><|eot|>", "other")
    ]
    assert texts[0] == texts[1]
    assert "unknown" in texts[0]


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {*RIGHT}))
def test_a_template_that_cannot_be_used_is_refused(name: str) -> None:
    problem = built(name)
    assert isinstance(problem, ConfigError), "it works now: remove it from REFUSED"
    says = next(text for key, text in REFUSED.items() if re.match(key, name))
    assert re.search(f"the chat template {says}.*use renderer.name = 'tags'$", str(problem), re.S)


def test_at_least_twenty_templates_work() -> None:
    """Prints the table (pytest -s)."""
    num_right = 0
    for name in TEMPLATES:
        chosen = built(name)
        if isinstance(chosen, NativeRenderer):
            assert chosen.style == longest(name, STYLES), name
            num_right += 1
            outcome = chosen.style + (", one a turn" if name.startswith(ONE_A_TURN) else "")
        else:
            outcome = "refused: " + str(chosen).partition("the chat template ")[2][:60]
        sys.stdout.write(f"{name:<34} {outcome}\n")
    sys.stdout.write(f"{num_right} of {len(TEMPLATES)} work, the others are refused\n")
    assert num_right >= 20
