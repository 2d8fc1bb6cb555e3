"""The grammars of turns, by the xgrammar of vLLM's environment."""

from __future__ import annotations

import json
import subprocess

import pytest

from agentenv.base.types import NextTurn, ToolCall
from agentenv.text.call_syntax import PARSERS
from agentenv.text.guides import FORMS, guide_of
from tests.engines.vllm_server import PYTHON, require_vllm

pytestmark = pytest.mark.engine_vllm

SCHEMA = {
    "type": "object",
    "properties": {"q": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["q"],
}
TOOLS = [{"name": name, "parameters": SCHEMA} for name in ("search", "other")]
CALLS = {
    "hermes": '<tool_call>\n{"name": "NAME", "arguments": {"q": "x", "n": 3}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=NAME>\n<parameter=q>\nx\n</parameter>\n<parameter=n>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>NAME\n<arg_key>q</arg_key>\n<arg_value>x</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
}
ACCEPTS = """
import json, sys, xgrammar
from xgrammar.testing import _is_grammar_accept_string as accepts
for guide, text in json.load(sys.stdin):
    print(int(accepts(xgrammar.Grammar.from_structural_tag(guide), text)))
"""


class Written:
    """The part of a renderer."""

    end_id = 0

    def __init__(self, style: str, is_open: bool) -> None:
        self.style, self.is_open = style, is_open

    def opens_thought(self, prefix_ids: object) -> bool:
        return self.is_open


def test_the_grammars_accept_what_they_must_and_nothing_else() -> None:
    require_vllm()
    cases: list[tuple[str, str, bool]] = []

    def add(turn: NextTurn, style: str, good: list[str], bad: list[str], is_open: bool = False):
        guide = guide_of(turn, Written(style, is_open), TOOLS, [])  # type: ignore[arg-type]
        cases.extend((guide, text, text in good) for text in (*good, *bad))

    assert FORMS.keys() == CALLS.keys()
    for style, form in CALLS.items():
        call, other = form.replace("NAME", "search"), form.replace("NAME", "other")
        assert PARSERS[style](call, TOOLS) == (ToolCall("search", {"q": "x", "n": 3}),)
        good = [call, f"hi {call}", f"<think>\na <tool_call>\n</think>\n\n{call}"]
        bad = ["hi", other, call + other, f"<think>\n{call}", f"hi <think>{call}"]
        twice = [f"{call}\n{call}"]
        add(NextTurn(forced=("search",)), style, good + twice, bad)
        add(NextTurn(forced=("search",), single=True), style, good, bad + twice)
        add(NextTurn(forced=("search",)), style, [f"a</think>\n\n{call}"], [call], is_open=True)
    good = ['{"q":"a"}', '<think>a</think>\n\n{"q": "a", "n": 1}']
    add(NextTurn(schema=SCHEMA), "hermes", good, ["hi", "{}", '{"q": 1}'])
    add(NextTurn(schema=SCHEMA), "hermes", ['a</think>{"q":"a"}'], ['{"q":"a"}'], is_open=True)
    given = json.dumps([case[:2] for case in cases])
    done = subprocess.run([PYTHON, "-c", ACCEPTS], input=given, capture_output=True, text=True)
    found = [one == "1" for one in done.stdout.split()]
    assert found == [is_good for _, _, is_good in cases], done.stderr
