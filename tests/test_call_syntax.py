"""Tool calls as the families of models write them, well and badly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentenv.base.types import MALFORMED_CALL, ToolCall
from agentenv.text.call_syntax import PARSERS

TOOLS: list[dict[str, Any]] = [
    {
        "name": "search",
        "parameters": {
            "properties": {
                "query": {"type": "string"},
                "count": {"type": "integer"},
                "share": {"type": "number"},
                "exact": {"type": "boolean"},
                "sites": {"type": "array"},
                "filter": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                "either": {"type": ["string", "integer"]},
                "mode": {"enum": ["1", "2"]},
                "anything": {},
            }
        },
    }
]
CALL = ToolCall("search", {"query": "Lima"})


def qwen(*arguments: tuple[str, str]) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function=search>\n{written}</function>\n</tool_call>"


WELL = {
    "hermes": ['<tool_call>{"name": "search", "arguments": {"query": "Lima"}}</tool_call>'],
    "llama": ['{"name": "search", "parameters": {"query": "Lima"}}'],
    "qwen_xml": [
        qwen(("query", "Lima")),
        "<tool_call><function=search><parameter=query>Lima</parameter></function></tool_call>",
    ],
    "glm": [
        "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>Lima</arg_value>\n</tool_call>",
        "<tool_call>search<arg_key>query</arg_key><arg_value>Lima</arg_value></tool_call>",
    ],
    "atem": [
        ' to=search<|message|><atem:function_calls>\n<atem:invoke name="search">\n<atem:parameter '
        'name="query">Lima</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
    ],
    "lfm": [
        "<|tool_call_start|>[search(query='Lima')]<|tool_call_end|>",
        '<|tool_call_start|>search(query="Lima")<|tool_call_end|>',
    ],
    "harmony": [
        ' to=functions.search<|channel|>commentary json<|message|>{"query": "Lima"}',
        '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query":"Lima"}',
    ],
    "gemma": ['<|tool_call>call:search{query:<|"|>Lima<|"|>}<tool_call|>'],
}
THOUGHTS = {
    "harmony": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant{}",
    "atem": " to=self<|message|>{}<|eom|><|start|>assistant{}",
    "gemma": "<|channel>thought\n{}\n<channel|>{}",
}


def test_every_parser_has_examples() -> None:
    assert {*WELL} == {*PARSERS}


@pytest.mark.parametrize(("style", "text"), [(s, text) for s in WELL for text in WELL[s]])
def test_a_call_is_read(style: str, text: str) -> None:
    assert PARSERS[style](text, TOOLS) == (CALL,)
    assert PARSERS[style]("It is Lima.", TOOLS) == ()


@pytest.mark.parametrize("style", WELL)
def test_a_call_within_thoughts_does_not_count(style: str) -> None:
    thoughts = THOUGHTS.get(style, "<think>{}</think>{}")
    text = WELL[style][0]
    if style != "harmony":  # there the recipient is outside of the content
        assert PARSERS[style](thoughts.format(text, "Lima"), TOOLS) == ()
    assert PARSERS[style](thoughts.format("Which?", text), TOOLS) == (CALL,)


@pytest.mark.parametrize(("key", "text", "value"), [
    ("query", "75001", "75001"), ("query", '"quoted"\n  <b>', '"quoted"\n  <b>'),
    ("count", "75001", 75001), ("count", "3.0", 3), ("count", "many", "many"),
    ("count", "true", "true"), ("share", "0.5", 0.5), ("share", "1", 1),
    ("share", "1e999", "1e999"), ("share", "NaN", "NaN"), ("exact", "True", True),
    ("exact", "false", False), ("sites", '["a", "b"]', ["a", "b"]),
    ("sites", "[" * 10_000, "[" * 10_000), ("filter", "None", None),
    ("filter", '{"year": 2020}', {"year": 2020}), ("either", "7", 7), ("either", "seven", "seven"),
    ("mode", "1", "1"), ("anything", "[1]", [1]), ("anything", "one", "one"), ("unknown", "9", 9),
])  # fmt: skip
def test_a_value_without_a_type_has_that_of_the_schema(key: str, text: str, value: object) -> None:
    """A value of another type stays a text, and the error of the tool explains it."""
    (call,) = PARSERS["qwen_xml"](qwen((key, text)), TOOLS)
    assert call == ToolCall("search", {key: value})
    assert type(call.arguments[key]) is type(value)


GLM = "<tool_call>search<arg_key>query</arg_key><arg_value>{}</arg_value></tool_call>"
ATEM = (
    '<atem:invoke name="search">\n<atem:parameter name="query">{}</atem:parameter>\n</atem:invoke>'
)
DEEP = "[" * 20_000
BADLY = [
    ("qwen_xml", "<tool_call>{}</tool_call>", "expected <function=NAME>"),
    ("qwen_xml", qwen(("query", "a")).removesuffix("</tool_call>"), "is not closed"),
    ("qwen_xml", qwen(("query", "a")).replace("</parameter>", ""), "is not an argument"),
    ("qwen_xml", qwen(("query", "a"), ("query", "b")), "'query' is given twice"),
    ("qwen_xml", qwen(("query", "a<parameter=count>\n3")), "holds '<parameter='"),
    ("glm", GLM.format("a<arg_key>count</arg_key><arg_value>3"), "holds '<arg_key>'"),
    ("atem", ATEM.format('a<atem:parameter name="count">3'), "holds '<atem:'"),
    ("hermes", '<tool_call>{"name": "search"}} </tool_call>', "not valid JSON"),
    ("hermes", '<tool_call>{"name": "search"}', "is not closed"),
    ("llama", '{"name": "search", "parameters": {"query": "a</think>b}}', "not valid JSON"),
    ("glm", "<tool_call>search Lima</tool_call>", "'Lima' is not an argument"),
    ("atem", '<atem:invoke name="search">Lima</atem:invoke>', "'Lima' is not an argument"),
    ("lfm", "<|tool_call_start|>[search('Lima')]<|tool_call_end|>", "expected a list of calls"),
    ("lfm", "<|tool_call_start|>[search(query=f(1))]<|tool_call_end|>", "is not a literal"),
    ("lfm", "<|tool_call_start|>[search(count=1e999)]<|tool_call_end|>", "is not a literal"),
    ("lfm", f"<|tool_call_start|>[search(count=-0x{'f' * 5_000})]<|tool_call_end|>", "a literal"),
    ("lfm", r"<|tool_call_start|>[search(query='\ud800')]<|tool_call_end|>", "surrogates"),
    ("lfm", f"<|tool_call_start|>[search(sites={DEEP})]<|tool_call_end|>", "cannot be parsed"),
    ("lfm", "<|tool_call_start|>[search(query='Lima')]", "is not closed"),
    ("harmony", " to=functions.search<|message|>Lima", "not valid JSON"),
    ("harmony", " to=functions.search<|message|>[1]", "not a JSON object"),
    ("harmony", " to=browser.search<|message|>{}", "addressed to 'browser.search'"),
    ("harmony", " to=functions.search<|channel|>commentary", r"no <\|message\|> follows"),
    ("gemma", "<|tool_call>search{}<tool_call|>", "expected call:NAME"),
    ("gemma", "<|tool_call>call:search{query:Lima}<tool_call|>", "cannot be parsed"),
]


@pytest.mark.parametrize(("style", "text", "problem"), BADLY)
def test_the_policy_reads_the_error_of_a_malformed_call(
    style: str, text: str, problem: str
) -> None:
    (call,) = PARSERS[style](text, TOOLS)
    assert call.name == MALFORMED_CALL
    assert problem.replace("\\|", "|") in call.arguments["problem"]
    assert len(call.arguments["problem"]) < 400


def test_several_calls_of_a_turn_are_read_each_on_its_own() -> None:
    bad = "<tool_call>{oops}</tool_call>"
    first, second, third = PARSERS["hermes"](WELL["hermes"][0] + bad + WELL["hermes"][0], TOOLS)
    assert (first, third) == (CALL, CALL)
    assert second.name == MALFORMED_CALL
    text = "<|tool_call_start|>[search(query='Lima'), search(query='Lima')]<|tool_call_end|>"
    assert PARSERS["lfm"](text, TOOLS) == (CALL, CALL)


MARKERS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<|tool_call_start|>",
    "<|tool_call_end|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>",
    "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", "<function=search>", "{", "}",
    "<parameter=query>", "<arg_key>", "<arg_value>", '<atem:invoke name="x">', "[", "]", "a",
    '<atem:parameter name="x">', '{"name": "search", "arguments": {}}', "[search(query='b')]",
    "\\", '"', "'", '\\"', '"""', "\n", ",", ":", "name", " ", "é", "\0",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(MARKERS), max_size=6).map("".join)
VALUES = st.recursive(
    TEXTS | st.integers(-(2**60), 2**60) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("k"), inner),
    max_leaves=4,
)


def in_json(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)


def in_gemma(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_gemma(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(in_gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def in_python(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{key}={one!r}' for key, one in call.arguments.items())})"


WRITERS = {
    "hermes": lambda call: f"<tool_call>\n{in_json(call)}\n</tool_call>",
    "llama": in_json,
    "harmony": lambda call: (
        f" to=functions.{call.name}<|channel|>commentary json<|message|>"
        f"{json.dumps(call.arguments)}<|call|>"
    ),
    "gemma": lambda call: f"<|tool_call>call:{call.name}{in_gemma(call.arguments)}<tool_call|>",
    "lfm": lambda call: f"<|tool_call_start|>[{in_python(call)}]<|tool_call_end|>",
}
CALLS = st.builds(ToolCall, st.just("search"), st.dictionaries(st.sampled_from("abc"), VALUES))


@pytest.mark.parametrize("style", WRITERS)
@settings(max_examples=300, deadline=None)
@given(first=CALLS, second=CALLS, quoted=CALLS, is_thought=st.booleans())
def test_arguments_with_any_markers_survive_the_round_trip(
    style: str, first: ToolCall, second: ToolCall, quoted: ToolCall, is_thought: bool
) -> None:
    """Also after a thought that quotes a call, whose texts close no thought."""
    write = WRITERS[style]
    calls = (first,) if style in ("llama", "harmony") else (first, second)
    text = "\n".join(map(write, calls))
    if is_thought:
        inner = f"<|python_tag|>{write(quoted)}" if style == "llama" else write(quoted)
        inner = "Which?" if style == "harmony" else f"Perhaps {inner}?"
        text = THOUGHTS.get(style, "<think>{}</think>\n{}").format(inner, text)
    assert PARSERS[style](text, TOOLS) == calls


PLAIN = st.lists(
    st.sampled_from([*MARKERS, "</function>", "<arg>", "</atem>"]), min_size=1, max_size=6
).map("".join)


@pytest.mark.parametrize(
    ("style", "form"), [("qwen_xml", qwen(("query", "QUERY"))), ("glm", GLM), ("atem", ATEM)]
)
@settings(max_examples=300, deadline=None)
@given(value=PLAIN, is_thought=st.booleans())
@example(value='</think><atem:parameter name="x">', is_thought=True)
def test_a_tagged_value_is_read_unchanged_or_reported_as_malformed(
    style: str, form: str, value: str, is_thought: bool
) -> None:
    """Never as another value; a closing tag within an argument is ambiguous with its end."""
    text = form.replace("QUERY", "{}").replace("{}", value)
    if is_thought:
        thought = THOUGHTS.get(style, "<think>{}</think>{}")
        text = thought.format("Which?", "{}").replace("{}", text)
    elif "</think>" in value:
        return  # without a thought before it, a value that is malformed may end one
    calls = PARSERS[style](text, TOOLS)
    if calls == (ToolCall("search", {"query": value}),):
        return
    assert calls
    assert calls[0].name == MALFORMED_CALL


@pytest.mark.parametrize("style", [one for one in WELL if one not in ("harmony", "gemma", "atem")])
def test_a_thought_ends_at_its_first_mark_outside_of_a_value(style: str) -> None:
    well = WELL[style][0]
    parse = PARSERS[style]
    assert parse(f"Which?</think>{well}", TOOLS) == (CALL,)  # the prompt has opened it
    assert parse(f"<think>a</think>b<think>c</think>{well}", TOOLS)[-1:] == (CALL,)
    assert parse(f"<think>a</think>b<think>{well}", TOOLS) == ()
    assert parse(f"<think>{well}", TOOLS) == ()


@pytest.mark.parametrize("style", WELL)
def test_markers_without_an_end_are_read_in_linear_time(style: str) -> None:
    """Some thousands of each, as a policy repeats itself; by squares that takes minutes."""
    for marker in (*MARKERS, "<|tool_call_start|>[", "<tool_call>{", "<|tool_call>call:a{"):
        for text in (marker * 10_000, marker * 10_000 + "</think>", f"<think>{marker * 10_000}"):
            PARSERS[style](text + WELL[style][0], TOOLS)


PIECES = (
    [text for texts in WELL.values() for text in texts]
    + ["<tool_call>", "</tool_call>", "<function=search>", "</function>", "<parameter=query>"]
    + ["</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>"]
    + ["</think>", "<|tool_call_start|>", "<|tool_call_end|>", "[search(", "query=", "'", '"']
    + ["<|start|>", "<|message|>", "to=functions.search", "to=", "<|call|>", "<|python_tag|>"]
    + ["<|tool_call>", "<tool_call|>", "call:search{", '<|"|>', "<|channel>", "<channel|>", "}"]
    + ["<atem:invoke", 'name="search">', "</atem:invoke>", "{", ",", ")", "]", "\n", "\0", "\\"]
    + ["9" * 400, "-1e999", DEEP[:2000], "{" * 2000, "(" * 2000, "-" * 9000, "\\ud800", "Lima", "é"]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_no_text_makes_a_parser_raise(text: str) -> None:
    for parse in PARSERS.values():
        for call in parse(text, TOOLS):
            assert isinstance(call, ToolCall)
            json.dumps(call.arguments, allow_nan=False).encode()


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("qwen_xml", "<tool_call><function=search>{}</function></tool_call>"),
        ("glm", "<tool_call>search{}</tool_call>"),
        ("atem", '<atem:invoke name="search">{}</atem:invoke>'),
    ],
)
def test_unclosed_openings_are_searched_once(style: str, text: str) -> None:
    """Each of them to the end of the text would take minutes, more than a test may."""
    for opening in (
        "<parameter=a>",
        "<arg_key>a</arg_key><arg_value>",
        '<atem:parameter name="a">',
    ):
        (call,) = PARSERS[style](text.format(opening * 40_000), TOOLS)
        assert "not an argument" in call.arguments["problem"]
