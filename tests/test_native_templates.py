"""Native tool calls through the chat templates that TRL ships: each right, or refused at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.base.errors import ConfigError
from agentenv.base.types import Completion, Message, ToolCall
from agentenv.text.native import NativeRenderer
from agentenv.training.supervised.dialogues import Dialogue
from agentenv.training.supervised.encoding import ChatEncoder
from tests.support.trl_templates import TEMPLATES, ends_of, longest, tokenizer_of

STYLES = {
    "diffusion_gemma": "gemma", "gemma4": "gemma", "glm4moe": "glm", "gptoss": "harmony",
    "lfm2": "lfm", "llama3": "llama", "muse": "atem", "nemotron": "qwen_xml", "qwen2_5": "hermes",
    "qwen3": "hermes", "qwen3_5": "qwen_xml", "qwen3_6": "qwen_xml", "qwen3_8": "qwen_xml",
}  # fmt: skip
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
TEXTS = st.text("ab01 '\"\\\n{}[]:,é", min_size=1, max_size=12).filter(str.strip)
CODE = st.fixed_dictionaries({"code": TEXTS}, optional={"limit": st.integers(0, 99)})
SITES = st.lists(TEXTS, min_size=1, max_size=2)
YEAR = st.fixed_dictionaries({"year": st.integers(1900, 2100)})
QUERY = st.fixed_dictionaries({"query": TEXTS}, optional={"sites": SITES, "filter": YEAR})
ONE = CODE.map(partial(ToolCall, "python")) | QUERY.map(partial(ToolCall, "search"))
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


def whole_of(
    name: str, calls: Sequence[ToolCall], results: Sequence[Message]
) -> tuple[str, str, str]:
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
    named = [{"name": call.name, "arguments": call.arguments} for call in calls]
    called = [{"type": "function", "id": f"id{n}", "function": f} for n, f in enumerate(named)]
    chat.append({"role": "assistant", "content": "", "tool_calls": called})
    for number, result in enumerate(results):
        turn = {"role": "tool", "name": result.name, "content": result.content}
        chat.append({**turn, "tool_call_id": f"id{number}"})
    text = written(True)
    assert text.startswith(base)
    start = prompt if text.startswith(prompt) else base
    rest = text.removeprefix(start)
    place, end = min((rest.find(end), end) for end in ends_of(name) if end in rest)
    return prompt, rest[:place] + end, rest[place + len(end) :]


@pytest.mark.parametrize("name", RIGHT)
def test_a_demonstration_is_written_as_the_template_writes_it(name: str) -> None:
    """Without calls, also after a call that was answered."""
    chosen = renderer(name)
    call, result = ToolCall("search", {"query": "q"}), Message("tool", "R", name="search")
    said = Message("assistant", "Lima")
    chat = [{"role": one.role, "content": one.content} for one in (*QUESTION, said)]
    functions = [{"type": "function", "function": tool} for tool in TOOLS]
    whole = chosen.tokenizer.apply_chat_template(chat, tools=functions, tokenize=False)
    encoder = ChatEncoder(chosen)
    found = encoder.encode(Dialogue((*QUESTION, said), tuple(TOOLS)))
    *text, end = found.token_ids[found.mask].tolist()
    before, written, _ = whole.partition(chosen.decode(text))
    prompt = chosen.decode(found.token_ids[~found.mask].tolist())
    assert "Lima" in written
    empty = "<think>\n\n</think>\n\n"  # which Qwen3's template writes in the last answer alone
    assert before.replace(empty, "").rstrip() == prompt.replace(empty, "").rstrip()
    called = encoder.encode(
        Dialogue((*QUESTION, Message("assistant", "", (call,)), result, said), tuple(TOOLS))
    )
    _, turn, rest = whole_of(name, [call], [result])
    assert turn[-10:] + rest in chosen.decode(called.token_ids.tolist())
    assert chosen.decode([end]) in ends_of(name)


def test_a_role_that_ends_a_turn_is_written_after_another_end() -> None:
    """As GLM's: a call that no tool result answers, and an answer that one does."""
    chosen = renderer("glm4moe")
    user, tool, plain = chosen.tokenizer.convert_tokens_to_ids(
        ["<|user|>", "<|observation|>", "<|endoftext|>"]
    )
    asked, result = [Message("user", "Sure?")], [Message("tool", "R", name="search")]
    for messages, role in ((asked, user), (result, tool)):
        rest = chosen.observation(messages, TOOLS, 9, [role]).tolist()
        for other in {user, tool, plain, 65} - {role}:
            assert chosen.observation(messages, TOOLS, 9, [other]).tolist() == [role, *rest]


@pytest.mark.parametrize("name", RIGHT)
@settings(max_examples=8, deadline=None)
@given(calls=st.lists(ONE, min_size=1, max_size=2), data=st.data())
def test_a_turn_is_written_and_parsed_unchanged(
    name: str, calls: list[ToolCall], data: st.DataObject
) -> None:
    """As the template writes the whole conversation at once, and with texts or thoughts before the
    call; the result forges no marker."""
    chosen = renderer(name)
    tokenizer = chosen.tokenizer
    calls = calls[:1] if name.startswith(ONE_A_TURN) else calls
    results = [Message("tool", data.draw(TEXTS), name=call.name) for call in calls]
    prompt, turn, rest = whole_of(name, calls, results)
    prompt_ids = chosen.prompt(QUESTION, TOOLS)
    assert chosen.decode(prompt_ids) == prompt

    def parsed(ids: list[int], before: Sequence[int] = ()) -> Message:
        sampled = Completion(ids, [0.0] * len(ids), [0.0] * len(ids), "stop", [])
        return chosen.parse(sampled, TOOLS, before)

    assert parsed(chosen.encode(turn)).tool_calls == tuple(calls)
    assert chosen.decode(chosen.observation(results, TOOLS, 1000)) == rest
    thought = "Hm.\n</think>\n\n"
    thought = thought if prompt.endswith("<think>\n") else f"<think>\n{thought}"
    for text in ("", "First the code.", thought):
        alone = chosen.calling(text, calls[:1])
        assert ("Hm." if text == thought else text) in alone or chosen.style == "llama"
        end = tokenizer.convert_tokens_to_ids(ends_of(name)[0])
        message = parsed([*chosen.encode(alone), end], prompt_ids)
        assert message.tool_calls == tuple(calls[:1])
        assert message.content.count("<think>") == message.content.count("</think>")
    vocabulary = tokenizer.get_added_vocab()
    hostile = "".join(data.draw(st.permutations([*vocabulary])))
    first, second = (
        [
            token
            for token in chosen.observation([one], TOOLS, 10_000)
            if token in vocabulary.values()
        ]
        for one in (Message("tool", hostile, name="search"), Message("tool", "", name="search"))
    )
    assert first == second


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
    styles = {name: renderer(name).style for name in RIGHT}
    assert styles == {name: longest(name, STYLES) for name in RIGHT}
    assert len(styles) >= 20
