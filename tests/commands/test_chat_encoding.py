"""The trained tokens of a dialogue, which equal those of a rollout."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from agentenv.base.errors import DataError
from agentenv.base.types import Message, ToolCall
from agentenv.contract.instruction import Instruction
from agentenv.envs.quickstart.setup import build_tokenizer
from agentenv.text.native import NativeRenderer
from agentenv.text.prompt import PromptConfig
from agentenv.text.renderer import Renderer, TagRenderer
from agentenv.training.supervised.dialogues import Dialogue, RowFormat, read_conversation
from agentenv.training.supervised.encoding import ChatEncoder, Example
from tests.support.chat_models import QWEN25, QWQ, make_tokenizer

THINK, CALL = "<think>I need python.</think>", "<python>52 * 57</python>"
END = "<think>I know it.</think><answer>\\boxed{2964}</answer>"
CHAIN = f"{THINK}{CALL} <result>\n2964\n</result>{END}"
TOOLS = [{"name": "python", "description": "", "parameters": {"properties": {"code": {}}}}]


@pytest.fixture(scope="module")
def tags() -> TagRenderer:
    return TagRenderer(build_tokenizer())


def conversation(*texts: str, **keys: Any) -> Dialogue:
    """The user begins, then they take turns."""
    roles = ("user", "assistant")
    return Dialogue(tuple(Message(roles[n % 2], text) for n, text in enumerate(texts)), **keys)


def runs(renderer: Renderer, example: Example) -> list[tuple[bool, str]]:
    """Texts of tokens that are learned (True) or not, in order."""
    pairs = zip(example.mask.tolist(), example.token_ids.tolist(), strict=True)
    return [
        (learned, renderer.decode([token for _, token in group]))
        for learned, group in groupby(pairs, lambda pair: pair[0])
    ]


def test_results_within_an_answer_belong_to_the_environment(tags: TagRenderer) -> None:
    example = ChatEncoder(tags).encode(conversation("What is 52 * 57?", CHAIN))
    assert runs(tags, example) == [
        (False, "<|im_start|>user\nWhat is 52 * 57?<|im_end|>\n<|im_start|>assistant\n"),
        (True, THINK + CALL),
        (False, " <result>\n2964\n</result>"),
        (True, END + "<|im_end|>"),
    ]


def test_compat_trains_results_too(tags: TagRenderer) -> None:
    example = ChatEncoder(tags, compat=True).encode(conversation("What is 52 * 57?", CHAIN))
    assert [learned for learned, _ in runs(tags, example)] == [False, True]
    assert runs(tags, example)[1][1] == CHAIN + "<|im_end|>"


def test_a_chain_and_its_messages_and_turns_are_one_sequence(tags: TagRenderer) -> None:
    """And it is the one that a rollout would give: prompt, action, observation, action."""
    question = "What is 52 * 57?"
    chain = ChatEncoder(tags).encode(conversation(question, CHAIN))
    messages = (
        Message("user", question),
        Message("assistant", THINK + CALL),
        Message("tool", "2964"),
        Message("assistant", END),
    )
    asked = Message("assistant", THINK, (ToolCall("python", {"code": "52 * 57"}),))
    called = (messages[0], asked, *messages[2:])
    steps = [{"action": THINK + CALL, "result": "2964"}, {"action": END, "result": None}]
    turns = {"question": question, "turns": steps}
    others = [Dialogue(messages), Dialogue(called), read_conversation(turns, RowFormat())]
    rolled_out = [
        *tags.prompt([messages[0]], TOOLS),
        *tags.encode(THINK + CALL),
        *tags.observation([messages[2]], TOOLS, 100),
        *tags.encode(END),
        tags.tokenizer.eos_token_id,
    ]
    assert chain.token_ids.tolist() == rolled_out
    for other in others:
        assert ChatEncoder(tags).encode(other).equals(chain)


@pytest.mark.parametrize("wrong", ["a<result>b", "a</result>b", "<result>a<result>b</result>"])
def test_ambiguous_results_are_refused(tags: TagRenderer, wrong: str) -> None:
    with pytest.raises(DataError, match="in pairs"):
        ChatEncoder(tags).encode(conversation("What?", wrong))


def test_the_backspace_of_the_published_files_is_repaired(tags: TagRenderer) -> None:
    broken = conversation("Answer in \x08oxed{}", "<answer>\x08oxed{1}</answer>")
    text = tags.decode(ChatEncoder(tags).encode(broken).token_ids.tolist())
    assert text.count("\\boxed") == 2
    kept = tags.decode(ChatEncoder(tags, compat=True).encode(broken).token_ids.tolist())
    assert kept.count("\x08oxed") == 2


def test_later_questions_are_rendered_by_the_chat_template(tags: TagRenderer) -> None:
    asked = conversation("What is 1?", END, "And 2?", END)
    example = ChatEncoder(tags).encode(asked)
    chat = [{"role": m.role, "content": m.content} for m in asked.messages]
    whole = tags.tokenizer.apply_chat_template(chat, tokenize=False)
    assert tags.decode(example.token_ids.tolist()) == whole.removesuffix("\n")
    assert [text for learned, text in runs(tags, example) if learned] == [END + "<|im_end|>"] * 2


def test_only_the_completion_of_a_preference_is_trained(tags: TagRenderer) -> None:
    example = ChatEncoder(tags).encode(conversation("What is 1?", "one", "And 2?", "two"), 3)
    assert [text for learned, text in runs(tags, example) if learned] == ["two<|im_end|>"]


def test_the_system_prompt_of_the_row_wins_over_that_of_the_configuration(
    tags: TagRenderer,
) -> None:
    encoder = ChatEncoder(tags, instruction=Instruction("Ours."))
    plain = conversation("What?", "one")
    assert "system\nOurs." in tags.decode(encoder.encode(plain).token_ids.tolist())
    own = Dialogue((Message("system", "Theirs."), *plain.messages))
    text = tags.decode(encoder.encode(own).token_ids.tolist())
    assert "system\nTheirs." in text
    assert "Ours." not in text


def test_a_base_model_reads_plain_text() -> None:
    renderer = TagRenderer(build_tokenizer(), PromptConfig(apply_chat_template=False))
    example = ChatEncoder(renderer).encode(conversation("What is 1?", "one", "And 2?", "two"))
    assert runs(renderer, example) == [
        (False, "What is 1?\n"),
        (True, "one<|im_end|>"),
        (False, "\n\nAnd 2?\n"),
        (True, "two<|im_end|>"),
    ]


NATIVE_CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "52 * 57"}}\n</tool_call>'


def test_native_calls_may_be_in_the_text_of_an_answer() -> None:
    renderer = NativeRenderer(make_tokenizer(QWEN25))
    call = ToolCall("python", {"code": "52 * 57"})
    rest = Message("tool", "2964", name="python"), Message("assistant", "It is 2964.")
    listed, written = (
        ChatEncoder(renderer).encode(Dialogue((Message("user", "52 * 57?"), one, *rest), TOOLS))
        for one in (Message("assistant", "", (call,)), Message("assistant", NATIVE_CALL))
    )
    learned = [text for learned, text in runs(renderer, listed) if learned]
    assert learned == [f"{NATIVE_CALL}<|im_end|>", "It is 2964.<|im_end|>"]
    assert written.equals(listed)


def test_a_thought_that_the_prompt_opens_is_not_opened_twice() -> None:
    renderer = NativeRenderer(make_tokenizer(QWQ))
    example = ChatEncoder(renderer).encode(
        conversation("What?", "<think>\nhm\n</think>\n\none", tools=TOOLS)
    )
    prompt, answer = runs(renderer, example)
    assert prompt[1].endswith("<think>\n")
    assert answer == (True, "hm\n</think>\n\none<|im_end|>")
