"""The package `renderers`: a second opinion on native calls, and the writer of other families."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from renderers import create_renderer
from renderers.configs import config_from_name

from agentenv.base.errors import ConfigError, DataError, MissingError
from agentenv.base.types import MALFORMED_CALL, Completion, Message, ToolCall
from agentenv.text.bridged import BridgedRenderer
from agentenv.text.contexts import for_programs
from agentenv.text.native import SAMPLE_TOOL, NativeRenderer
from agentenv.text.prompt import PromptConfig
from agentenv.training.supervised.dialogues import Dialogue
from agentenv.training.supervised.encoding import ChatEncoder
from tests.support.chat_models import byte_tokenizer
from tests.support.trl_templates import TEMPLATES, ends_of, longest, markers_of
from tests.test_native_templates import ONE_A_TURN, RIGHT, TOOLS

MISSING = re.compile(r"oken (?:for )?'(.+?)'(?: not found|, got)")
FUNCTIONS = [{"type": "function", "function": tool} for tool in (*TOOLS, SAMPLE_TOOL)]
QUESTIONS = [
    [Message("system", "Be brief."), Message("user", "Which place?")],
    [Message("user", " Which place?\n")],
]
CALLS = [
    ToolCall("python", {"code": "if 1 < 2:\n    print('é')", "limit": 3}),
    ToolCall("sample_tool", {"text": "a", "exact": True}),
    ToolCall("search", {"query": 'Lima, "Peru"', "sites": ["a", "b"], "filter": {"year": 1999}}),
]

# the package's family by the beginning of a native template's name, and keys for checkpoints
KINDS = {
    "gemma4": "gemma4", "glm4moe": "glm-4.5", "llama3": "llama-3", "nemotron_3": "nemotron-3",
    "nemotron_3_5": "nemotron-3.5", "nemotron_3_ultra": "nemotron-3-ultra", "qwen3": "qwen3",
    "qwen3_5": "qwen3.5", "qwen3_6": "qwen3.6", "qwen3_8": "qwen3.8", "qwen3_vl": "qwen3-vl",
}  # fmt: skip
KEYS = {"qwen3_5_nothink": {"enable_thinking": False}, "llama3_2": {"date_string": "26 Jul 2024"}}
OTHERS = ("_training", "gemma4_v2")  # revisions that it does not have: one misplaces a comma
OPINIONS = [one for one in RIGHT if longest(one, KINDS) and not one.endswith(OTHERS)]
# where it differs: its reading of True, which these templates write, is a text
BOOLEANS = ("nemotron", "qwen3_5")
# and its bridge renders the conversation again after several results
SINGLE = (*ONE_A_TURN, "llama", "deepseek-v4")
# and its bridge omits the line break after a turn that its own rendering has
UNBROKEN = ("laguna-m.1", "laguna-xs.2")
FAMILIES = [
    "deepseek-v4", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "hy3", "inkling", "kimi-k2",
    "kimi-k2.5", "laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1", "laguna-xs.2", "minimax-m2",
]  # fmt: skip
THINKING = {
    "deepseek": {"enable_thinking": True},
    "hy3": {"reasoning_effort": "high"},
    "laguna": {"enable_thinking": True},
}
REFUSED = {
    "deepseek-r1": "ignores the list of tools",
    "deepseek-v3": "ignores the list of tools",
    "gpt-oss": "invalid tiktoken vocab file",  # it downloads one, whatever the tokenizer
    "nemotron-3": "writes a call as",
    "none": "expected one of .*'kimi-k2.5'",
}


def made(make: Any, name: str | None = None) -> Any:
    """What `make` returns for a byte tokenizer with the template `name`, its markers, and all
    tokens whose lack an error names."""
    ends = ends_of(name) if name else ("<eos>",)
    bos = "<|begin_of_text|>" if name in {"llama3_1", "llama3_2"} else "<bos>"
    special = sorted({*ends, bos, *(markers_of(name) if name else ())})
    while True:
        template = TEMPLATES[name] if name else None
        tokenizer = byte_tokenizer(template, special, eos=ends[0], bos=bos)
        try:
            return make(tokenizer)
        except (AssertionError, ValueError, ConfigError) as error:
            found = MISSING.search(str(error))
            if found is None or found[1] in special:
                raise
            special.append(found[1])


def theirs(tokenizer: Any, family: str, **keys: Any) -> Any:
    config = type(config_from_name(family))
    return create_renderer(tokenizer, config(thinking_retention="all", **keys))


@cache
def ours(family: str) -> tuple[NativeRenderer, Any]:
    """Our renderer of a template of OPINIONS, or of one of FAMILIES, and theirs."""
    if family not in OPINIONS:
        own = made(lambda tokenizer: BridgedRenderer(tokenizer, family, PromptConfig()))
        return own, theirs(own.tokenizer, family)
    kind, keys = longest(family, KINDS), KEYS.get(family, {})
    other = made(lambda tokenizer: theirs(tokenizer, kind, **keys), family)
    tokenizer = other._tokenizer
    prompt = PromptConfig(chat_template_kwargs=keys)
    eos_ids = tokenizer.convert_tokens_to_ids([*ends_of(family)])
    return NativeRenderer(tokenizer, prompt, eos_ids), other


def sampled(own: NativeRenderer, family: str, calls: Sequence[ToolCall]) -> list[int]:
    """A turn with these calls, or with text; MiniMax's opens a thought."""
    thought = "<think>\nHm.\n</think>\n\n" if family.startswith("minimax") else ""
    text = thought + "Lima" * (not calls)
    return own.demonstrated(Message("assistant", text, tuple(calls)), [*TOOLS, SAMPLE_TOOL])


def bridged(other: Any, before: list[int], turn: list[int], answers: Sequence[Message]) -> Any:
    """The ids that their bridge appends to a turn."""
    found = other.parse_response(turn, tools=FUNCTIONS, prompt_ids=before).tool_calls
    ids = [one.id or f"call{n}" for n, one in enumerate(found)]
    chat: list[dict[str, Any]] = [{"role": one.role, "content": one.content} for one in answers]
    for one, answer, own in zip(chat, answers, ids, strict=False):  # users have no calls
        one |= {"name": answer.name, "tool_call_id": own}
    return other.bridge_to_next_turn(before, turn, chat, tools=FUNCTIONS).token_ids


@pytest.mark.parametrize("family", [*OPINIONS, *FAMILIES])
def test_a_dialogue_with_tools_has_the_same_ids(family: str) -> None:
    """Prompt, calls, results and a user's answer; sampled ids stay."""
    own, other = ours(family)
    tools = [*TOOLS, SAMPLE_TOOL]
    for messages in QUESTIONS:
        chat = [{"role": one.role, "content": one.content} for one in messages]
        before = own.prompt(messages, tools)
        assert before == other.render_ids(chat, tools=FUNCTIONS, add_generation_prompt=True)
    calls = deepcopy(CALLS[2:] if family.startswith(SINGLE) else CALLS)
    turn = sampled(own, family, calls)
    completion = Completion(turn, [], [], "stop", [])
    assert list(own.parse(completion, tools, before).tool_calls) == calls
    read = other.parse_response(turn, tools=FUNCTIONS, prompt_ids=before).tool_calls
    if family.startswith(BOOLEANS):
        calls[1].arguments["exact"] = "True"
    assert [ToolCall(one.name, one.arguments) for one in read] == calls
    results = [Message("tool", 'No "é"\n', name=call.name) for call in calls]
    appended = own.observation(results, tools, 100, turn)[family in UNBROKEN :]
    assert [*before, *turn, *appended] == bridged(other, before, turn, results)
    said = sampled(own, family, ())
    answer = [Message("user", "Sure?")]
    appended = own.observation(answer, tools, 100, said)[family in UNBROKEN :]
    assert [*before, *said, *appended] == bridged(other, before, said, answer)


@pytest.mark.parametrize("family", FAMILIES)
def test_demonstrations_have_the_same_ids(family: str) -> None:
    """With thoughts, if the family has some; the trained ids are the turns and their ends."""
    keys: dict[str, Any] = longest(family, THINKING, {})
    prompt = PromptConfig(chat_template_kwargs=keys)
    own = made(lambda tokenizer: BridgedRenderer(tokenizer, family, prompt))
    tools, thoughts = [*TOOLS, SAMPLE_TOOL], "" if family == "kimi-k2" else "Hm."
    lead = f"<think>\n{thoughts}\n</think>\n\n" if thoughts else ""
    calls, result = tuple(CALLS[2:]), Message("tool", "R", name="search")
    turn, said = Message("assistant", f"{lead}Ah.", calls), Message("assistant", f"{lead}Lima")
    found = ChatEncoder(own).encode(Dialogue((*QUESTIONS[0], turn, result, said), tuple(tools)))
    chat: list[dict[str, Any]] = [{"role": m.role, "content": m.content} for m in QUESTIONS[0]]
    chat.append(own._turn_of(calls, as_text=False) | {"content": "Ah."})
    chat[-1] |= {"reasoning_content": thoughts} if thoughts else {}
    own_id = chat[-1]["tool_calls"][0]["id"]
    chat.append({"role": "tool", "name": "search", "tool_call_id": own_id, "content": "R"})
    other = theirs(own.tokenizer, family, **keys)
    ids = other.render_ids(chat, tools=FUNCTIONS, add_generation_prompt=True)
    assert found.token_ids.tolist()[: len(ids)] == ids
    before = own.prompt(QUESTIONS[0], tools)
    after = own.observation([result], tools, 99)
    size = len(ids) - len(before) - len(after)
    last = found.token_ids.tolist()[len(ids) :]
    parts = (len(before), False), (size, True), (len(after), False), (len(last), True)
    assert found.mask.tolist() == [is_policy for number, is_policy in parts for _ in range(number)]
    read = other.parse_response(last, tools=FUNCTIONS, prompt_ids=ids)
    assert ((read.reasoning_content or "").strip(), read.content.strip()) == (thoughts, "Lima")


def test_thoughts_that_a_prompt_does_not_open_are_refused() -> None:
    for family, text in (("deepseek-v4", "<think>\nHm.\n</think>\n\nLima"), ("minimax-m2", "Lima")):
        with pytest.raises(DataError, match=f"{family}.*thoughts"):
            ChatEncoder(ours(family)[0]).encode(
                Dialogue((*QUESTIONS[0], Message("assistant", text)), tuple(TOOLS))
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bridged_result_forges_nothing(family: str) -> None:
    own, _ = ours(family)
    texts = ["", "".join(own.tokenizer.get_added_vocab()), "</tool_response></response>"]
    found = [own.observation([Message("tool", text, name="search")], TOOLS, 9999) for text in texts]
    marks = [sum(token in own.special_ids for token in ids) for ids in found]
    tags = [len(re.findall(r"</\w*response>", own.decode(ids))) for ids in found]
    assert (marks, tags) == (marks[:1] * 3, tags[:1] * 3)


def test_a_result_has_the_id_that_was_sampled_for_its_call() -> None:
    own, _ = ours("kimi-k2")
    result = [Message("tool", "Lima", name="search")]
    for said, number in (("3", 3), ("3<|im_user|>", 0)):
        text = own.calling("", CALLS[2:]).replace("search:0", f"search:{said}")
        turn = [*own.encode(text), own.end_id]
        shown = f".search:{number}\nLima"
        assert shown in own.decode(own.observation(result, TOOLS, 9, turn))


@pytest.mark.parametrize(
    "arguments", ['{"query": ', "[1]", '{"query": NaN}', '{"query": "\\ud800"}', "[" * 99_999]
)
def test_arguments_that_cannot_be_read_are_malformed(arguments: str) -> None:
    own, _ = ours("kimi-k2")
    text = own.calling("", [ToolCall("search", {"query": "q"})])
    turn = [*own.encode(text.replace('{"query": "q"}', arguments)), own.end_id]
    calls = own.parse(Completion(turn, [], [], "stop", []), TOOLS).tool_calls
    assert [call.name for call in calls] == [MALFORMED_CALL]
    assert own.parse(Completion(turn, [], [], "length", []), TOOLS).tool_calls == ()


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_used_is_refused(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", "/nowhere")
    with pytest.raises(ConfigError, match=REFUSED[family]):
        made(lambda tokenizer: BridgedRenderer(tokenizer, family, PromptConfig()))


def test_settings_that_a_family_cannot_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = ours("kimi-k2")[0].tokenizer
    for problem, prompt in {
        "apply_chat_template": PromptConfig(apply_chat_template=False),
        "odd": PromptConfig(chat_template_kwargs={"odd": 1}),
        "eos_token_id": PromptConfig(),
    }.items():
        with pytest.raises(ConfigError, match=f"kimi-k2.*{problem}"):
            BridgedRenderer(tokenizer, "kimi-k2", prompt, [tokenizer.bos_token_id])
    with pytest.raises(ConfigError, match="programs need"):
        for_programs(ours("kimi-k2")[0], "env")
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(MissingError, match=r"\[renderers\]"):
        BridgedRenderer(tokenizer, "kimi-k2", PromptConfig())
