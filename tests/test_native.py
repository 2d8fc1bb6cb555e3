"""Native tool calls through the chat templates of four model families, append-only."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.errors import ConfigError, EnvError
from agentenv.base.model_files import read_eos_ids
from agentenv.base.types import Completion, Message, ToolCall
from agentenv.contract.env import forget_shared, shared_stats
from agentenv.engines.chat import ChatPiece, ChatRenderer, Pieces
from agentenv.engines.openai import unmeasured
from agentenv.text.native import NativeRenderer
from agentenv.text.prompt import PromptConfig, preset
from agentenv.text.renderer import TagRenderer
from tests.support import chat_models

TOOLS = [
    {
        "name": name,
        "description": "",
        "parameters": {"type": "object", "properties": {argument: {"type": "string"}}},
    }
    for name, argument in (("search", "query"), ("python", "code"))
]
QUESTION = [Message("system", "Be brief."), Message("user", "Capital of Peru?")]
FAMILIES = {
    "Qwen2.5": chat_models.QWEN25,
    "Qwen3": chat_models.QWEN3,
    "QwQ": chat_models.QWQ,
    "Llama 3.1": chat_models.LLAMA31,
}
HERMES = '<tool_call>\n{"name": "search", "arguments": {"query": "Peru"}}\n</tool_call>'
CALL = (ToolCall("search", {"query": "Peru"}),)


@cache
def renderer(family: str, **template_kwargs: bool) -> NativeRenderer:
    prompt = PromptConfig(chat_template_kwargs=dict(template_kwargs))
    return NativeRenderer(chat_models.make_tokenizer(FAMILIES[family]), prompt=prompt)


def turn(chosen: NativeRenderer | TagRenderer, text: str, end: str | None = None) -> Completion:
    ids = chosen.encode(text)
    ids.append(chosen.tokenizer.convert_tokens_to_ids(end or chosen.tokenizer.eos_token))
    return Completion(ids, [0.0] * len(ids), [0.0] * len(ids), "stop", [])


def test_a_turn_truncated_by_a_limit_has_no_calls() -> None:
    chosen = renderer("Qwen2.5")
    completion = turn(chosen, HERMES)
    completion.finish_reason = "length"
    assert chosen.parse(completion, TOOLS).tool_calls == ()


def test_llama_runs_the_code_after_its_python_tag() -> None:
    chosen = renderer("Llama 3.1")
    message = chosen.parse(turn(chosen, "<|python_tag|>print(1)"), TOOLS)
    assert message.tool_calls == (ToolCall("python", {"code": "print(1)"}),)


def test_the_begin_of_text_token_is_not_doubled() -> None:
    chosen = renderer("Llama 3.1")
    bos = chosen.tokenizer.bos_token_id
    assert chosen.tokenizer.encode("x")[0] == bos  # it adds one by itself
    assert chosen.prompt(QUESTION, TOOLS).count(bos) == 1
    assert TagRenderer(chosen.tokenizer).prompt(QUESTION, TOOLS).count(bos) == 1
    base = TagRenderer(chosen.tokenizer, PromptConfig(apply_chat_template=False))
    assert base.prompt(QUESTION, TOOLS).count(bos) == 1


def test_every_end_token_of_the_generation_config_ends_a_turn(tmp_path: Path) -> None:
    tokenizer = chat_models.make_tokenizer(chat_models.LLAMA31)
    ends = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    ids = [tokenizer.convert_tokens_to_ids(end) for end in ends]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[:2]}))
    assert read_eos_ids(tmp_path, tokenizer) == set(ids)
    chosen = NativeRenderer(tokenizer, eos_ids=ids)
    tags = TagRenderer(tokenizer, eos_ids=ids)
    for end in ends:
        assert chosen.parse(turn(chosen, "Lima", end), TOOLS).content == "Lima"
        assert tags.parse(turn(tags, "Lima", end), TOOLS).content == "Lima"


@pytest.mark.parametrize("make", [NativeRenderer, TagRenderer])
def test_a_thought_that_the_prompt_opened_counts(
    make: type[NativeRenderer] | type[TagRenderer],
) -> None:
    """The format check of a grader sees as many <think> as </think>."""
    chosen = make(chat_models.make_tokenizer(chat_models.QWQ))
    prompt = chosen.prompt(QUESTION, TOOLS)
    assert chosen.decode(prompt).endswith("<think>\n")
    said = "so Lima</think><answer>Lima</answer>"
    assert chosen.parse(turn(chosen, said), TOOLS, prompt).content == "<think>\n" + said
    later = prompt + chosen.encode("x</think>")
    assert chosen.parse(turn(chosen, said), TOOLS, later).content == said


def test_template_arguments_reach_the_template() -> None:
    closed = "<think>\n\n</think>\n\n"
    with_thoughts, without = renderer("Qwen3"), renderer("Qwen3", enable_thinking=False)
    assert not with_thoughts.decode(with_thoughts.prompt(QUESTION, TOOLS)).endswith(closed)
    assert without.decode(without.prompt(QUESTION, TOOLS)).endswith(closed)
    result = without.observation([Message("tool", "Lima")], TOOLS, 100)
    assert without.decode(result).endswith(closed)
    tags = TagRenderer(
        without.tokenizer, PromptConfig(chat_template_kwargs={"enable_thinking": False})
    )
    assert tags.decode(tags.prompt(QUESTION, TOOLS)).endswith(closed)


@pytest.mark.parametrize(
    ("text", "replaced"),
    [(preset("search"), preset("native")), ("Write <search> q </search>.", None), ("Call.", None)],
)
@pytest.mark.parametrize("kind", ["policy", "endpoint"])
def test_a_prompt_of_tags_is_replaced_or_reported_for_native_calls(
    kind: str, text: str, replaced: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    forget_shared()
    messages = [Message("system", text), Message("user", "1 + 1?")]
    if kind == "policy":
        chosen = renderer("Qwen3")
        written = chosen.decode(chosen.prompt(messages, TOOLS))
    else:
        pieces = Pieces()
        written = pieces.read(ChatRenderer(pieces, native=True).prompt(messages, TOOLS))[0].text
    assert (replaced or text) in written
    assert len(caplog.records) == int("<search>" in text)
    name = "native/num_prompts_" + ("replaced" if replaced else "with_tags")
    assert shared_stats() == ({name: 1.0} if "<search>" in text else {})


TURNS = {
    "<think>x</think> <search>Lima</search>": 1,
    "<think><search>Lima</search></think> Lima": 0,
    "The tag <search> is not closed": 0,
    "<other>Lima</other>": 0,
}


@pytest.mark.parametrize("said", TURNS)
@pytest.mark.parametrize("kind", ["policy", "endpoint"])
def test_a_turn_with_the_tags_of_a_tool_is_counted_for_native_calls(kind: str, said: str) -> None:
    forget_shared()
    chosen: Any = renderer("Qwen3") if kind == "policy" else ChatRenderer(Pieces(), native=True)
    if kind == "policy":
        found = turn(chosen, said)
    else:
        found = unmeasured(chosen.pieces.add(ChatPiece(text=said, is_turn=True), 1), "stop", None)
    for _ in range(2):
        assert chosen.parse(found, TOOLS).tool_calls == ()
    assert shared_stats().get("native/num_turns_with_tags", 0) == 2 * TURNS[said]


def test_an_env_may_speak_as_the_user() -> None:
    chosen = renderer("Qwen3")
    shown = chosen.decode(chosen.observation([Message("user", "Sure?")], TOOLS, 100))
    assert shown == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(EnvError, match="not 'assistant'"):
        chosen.observation([Message("assistant", "me")], TOOLS, 100)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (chat_models.MOVES_TOOLS, "cannot append: with .* added it writes"),
        (chat_models.QWEN25.replace("if tools", "if false"), "ignores the list of tools"),
        (chat_models.QWEN25.replace("'\\n<tool_response>\\n' + message.content", "'<hidden>'"),
         "omits or changes the text"),
        ("{{ raise_exception('no tools here') }}<tool_call>", "no tools here"),
        (chat_models.QWEN25.replace("</tool_call>' }}{%- endfor %}\n{{- '<|im_end|>",
                                    "</tool_call>' }}{%- endfor %}\n{{- '<end>"),
         "any of the end tokens"),
        (chat_models.QWEN25.replace('"arguments"', '"with"'), "of models/Odd .*'<tool_call>"),
        (chat_models.QWEN25.replace("in message.tool_calls or []", "in []"), "calls of earlier"),
        (chat_models.QWEN25.replace("call.function", "message.tool_calls[-1].function"),
         "writes two calls"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_used_is_refused_with_the_reason(
    template: str, says: str
) -> None:
    tokenizer = chat_models.make_tokenizer(template)
    tokenizer.name_or_path = "models/Odd"
    with pytest.raises(ConfigError, match=says):
        NativeRenderer(tokenizer)


def test_a_template_may_require_arguments_as_json_text() -> None:
    template = chat_models.QWEN25.replace(
        "{{- call.function.arguments | tojson }}", "{{- '' + call.function.arguments }}"
    )
    chosen = NativeRenderer(chat_models.make_tokenizer(template))
    assert chosen.style == "hermes"
    assert chosen.parse(turn(chosen, HERMES), TOOLS).tool_calls == CALL


def test_native_calls_are_refused_for_base_models() -> None:
    tokenizer = chat_models.make_tokenizer(chat_models.QWEN25)
    with pytest.raises(ConfigError, match=r"renderer\.name.*'tags'"):
        NativeRenderer(tokenizer, PromptConfig(apply_chat_template=False))
    base = TagRenderer(tokenizer, PromptConfig(apply_chat_template=False))
    assert base.decode(base.prompt(QUESTION, TOOLS)) == "Be brief.\n\nCapital of Peru?\n"
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        TagRenderer(tokenizer)
