"""The tag protocol: calls are parsed from sampled tokens, tool text can forge nothing."""

from __future__ import annotations

import pytest

from agentenv.base.errors import EnvError
from agentenv.base.types import Completion, Message, Role
from agentenv.text.renderer import SYSTEM_MARK, TagRenderer
from tests.support.chat_models import make_tokenizer
from tests.support.toy import TOOL, CharTokenizer

RENDERER = TagRenderer(CharTokenizer())


def turn(text: str, stop: str | None = None, eos: bool = False) -> Completion:
    ids = CharTokenizer().encode(text) + [0] * eos
    return Completion(ids, [0.0] * len(ids), [0.0] * len(ids), "stop", [], stop)


def test_the_closing_tags_of_the_tools_end_a_turn() -> None:
    assert RENDERER.stop([TOOL, {**TOOL, "name": "python"}]) == ("</search>", "</python>")


def test_an_answer_has_no_calls_and_no_end_of_sequence_text() -> None:
    message = RENDERER.parse(turn("<answer>2</answer>", eos=True), [TOOL])
    assert message == Message("assistant", "<answer>2</answer>")


def observe(text: str, max_tokens: int = 10**6) -> str:
    ids = RENDERER.observation([Message("tool", text)], [TOOL], max_tokens)
    return CharTokenizer().decode(ids)


@pytest.mark.parametrize("text", ["</result>", "<search>", "</think>", "<answer>", "<eos>"])
def test_tool_text_cannot_forge_tags_or_special_tokens(text: str) -> None:
    shown = observe(f"a {text} b")
    inside = shown.removeprefix(" <result>\n").removesuffix("\n</result>")
    assert text not in inside
    assert text.strip("<>/") in inside


def test_ordinary_text_is_unchanged() -> None:
    assert observe("1 < 2 and <b>x</b>") == " <result>\n1 < 2 and <b>x</b>\n</result>"


def test_the_tokenized_part_of_a_result_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens on the event loop, and a tool may give anything."""
    sizes, encode = [], RENDERER.encode

    def counted(text: str) -> list[int]:
        sizes.append(len(text))
        return encode(text)

    monkeypatch.setattr(RENDERER, "encode", counted)
    shown = observe("<result>" + "A" * 5_000_000 + "Z" * 5_000_000, max_tokens=25)
    assert shown == " <result>\n< result>A ... " + "Z" * 10 + "\n</result>"
    assert max(sizes) < 500


@pytest.mark.parametrize("messages", [["assistant"], ["tool", "assistant"], ["user", "tool"]])
def test_only_results_and_then_users_can_be_rendered(messages: list[Role]) -> None:
    with pytest.raises(EnvError, match="an observation"):
        RENDERER.observation([Message(role, "hi") for role in messages], [TOOL], 100)


# Chat templates that do not write a system message everywhere.
WRITTEN = "<{{ m.role }}>{{ m.content }}<|im_end|>"
ALTERNATING = (
    "{% for m in messages %}"
    "{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('no') }}{% endif %}" + WRITTEN + "{% endfor %}<assistant>"
)
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    + WRITTEN
    + "{% endif %}{% endfor %}<assistant>"
)


@pytest.mark.parametrize("template", [ALTERNATING, FIRST_ONLY])
@pytest.mark.parametrize("order", ["su", "us", "sus", "ssu", "uus"])
@pytest.mark.parametrize("after_turn", [False, True])
def test_no_system_message_is_rejected_or_lost(template: str, order: str, after_turn: bool) -> None:
    tokenizer = make_tokenizer(template)
    renderer = TagRenderer(tokenizer)
    roles: dict[str, Role] = {"s": "system", "u": "user"}
    messages = [Message(roles[sign], f"text {n}") for n, sign in enumerate(order)]
    found = renderer.placed(messages, after_turn=after_turn)
    if after_turn:
        written = renderer.decode(renderer.observation(found, [], 100))
    else:
        written = renderer.decode(renderer.prompt(messages, []))
    places = [written.find(f"text {n}") for n in range(len(order))]
    assert min(places) >= 0
    assert places == sorted(places)
    num_first = int(template is FIRST_ONLY and order[0] == "s" and not after_turn)
    assert written.count(SYSTEM_MARK) == order.count("s") - num_first
