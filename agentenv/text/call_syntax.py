"""Tool-call formats of models, and parsers that extract calls from the text of a turn.

    hermes    <tool_call>{"name": "search", "arguments": {"query": "Lima"}}</tool_call>   Qwen2.5, 3
    llama     {"name": "search", "parameters": {"query": "Lima"}} and nothing else, or code after
              <|python_tag|>                                                              Llama 3.1
    qwen_xml  <tool_call><function=search><parameter=query>Lima</parameter></function></tool_call>
                                                                        Qwen3.5 to 3.8, Nemotron 3
    glm       <tool_call>search<arg_key>query</arg_key><arg_value>Lima</arg_value></tool_call>
    atem      <atem:invoke name="search"><atem:parameter name="query">Lima</atem:parameter>
              </atem:invoke>                                                          Muse Glimmer
    lfm       <|tool_call_start|>[search(query='Lima')]<|tool_call_end|>                      LFM2
    harmony   to=functions.search<|channel|>commentary json<|message|>{"query": "Lima"}    gpt-oss
    gemma     <|tool_call>call:search{query:<|"|>Lima<|"|>}<tool_call|>                    Gemma 4

agentenv/text/tags.py has the format of the tag protocol.

A parser takes the text and the schemas of the tools, which determine the types of values in
formats without types. It never raises: an invalid call becomes a call of MALFORMED_CALL, whose
result tells the policy the error. Calls within thoughts are ignored.

Markers inside the strings of a call's value are part of the value: they end neither the call nor a
thought. The tag formats do not quote their values; a value with an opening tag is malformed.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from agentenv.base.errors import ForeignError
from agentenv.base.types import MALFORMED_CALL, ToolCall
from agentenv.base.untrusted import decode, decode_first, schema_types, typed
from agentenv.contract.function_tool import inlined

_THOUGHT = THOUGHT_OPEN, THOUGHT_CLOSE = "<think>", "</think>"
_CHANNEL = "<|channel>thought", "<channel|>"  # of gemma
THOUGHTS = re.compile(  # also an unfinished one
    r"<think>.*?(?:</think>|\Z)|<\|channel>thought.*?(?:<channel\|>|\Z)", re.DOTALL
)
MESSAGED, MESSAGE = ("harmony", "atem"), "<|message|>"  # their turns have messages with headers
_MESSAGE_END = re.compile(r"<\|(?:end|eom)\|>")
_TO_SELF, _ADDRESSED = re.compile(r"to=self(?![\w.:/-])"), re.compile(r"<\|channel\|>|to=")
MAX_QUOTED = 100  # invalid call markers in a thought, after which the rest are not parsed

ValueEnd = Callable[[str, int], int]  # (text, start of a value) -> its end, or -1 if invalid


class MalformedCall(Exception):
    """An invalid call."""


class Markers(NamedTuple):
    """Markers around a call, a function that finds the end of its value, and markers around a
    thought; None if the style puts thoughts in separate messages.
    """

    opening: str
    closing: str
    value_end: ValueEnd
    thought: tuple[str, str] | None = (THOUGHT_OPEN, THOUGHT_CLOSE)


def without_thoughts(text: str) -> str:
    """The text of a turn of any style outside of its thoughts, of which the prompt may have opened
    the first. An unfinished one lasts to the end."""
    text = THOUGHTS.sub("", _of_messages(text)[1] if MESSAGE in text else text)
    for _, closes in (_THOUGHT, _CHANNEL):
        text = text.rpartition(closes)[2]
    return text


class FoundCalls(NamedTuple):
    """The calls that a part of a turn writes, and the offsets of the part."""

    calls: tuple[ToolCall, ...]
    start: int
    end: int


Written = tuple[Any, int, int]  # the text of calls, or a MalformedCall, and the offsets around it


def blocks(text: str, markers: Markers) -> Iterator[Written]:
    """The texts between the markers, outside of thoughts, with the offsets of their markers; a
    MalformedCall for an unclosed one. A turn may begin inside a thought, which the prompt
    opened."""
    opens, _ = markers.thought or (None, None)
    found = re.compile("|".join(map(re.escape, filter(None, (opens, markers.opening)))))
    place = max(0, thought_end(text, 0, markers))
    while (mark := found.search(text, place)) is not None:
        begin, place = mark.span()
        if mark[0] == opens:
            place = thought_end(text, place, markers)
            if place < 0:
                return
            continue
        end = text.find(markers.closing, max(place, markers.value_end(text, place)))
        if end < 0:
            problem = MalformedCall(f"{markers.opening} is not closed by {markers.closing}")
            yield problem, begin, len(text)
            return
        body, place = text[place:end], end + len(markers.closing)
        yield body, begin, place


def thought_end(text: str, place: int, markers: Markers) -> int:
    """The offset after the first marker that closes a thought, outside of values; -1 if none."""
    _, closes = markers.thought or (None, None)
    if closes is None or closes not in text:
        return -1
    found = re.compile(f"{re.escape(closes)}|{re.escape(markers.opening)}")
    num_quoted = 0
    while (mark := found.search(text, place)) is not None:
        place = mark.end()
        if mark[0] == closes:
            return place
        end = markers.value_end(text, place) if num_quoted < MAX_QUOTED else -1
        num_quoted += end < 0
        place = max(place, end)
    return -1


CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
CALL_MARKS = {  # the beginning of a turn's first call; the tag protocol uses the tool's tag
    "llama": "<|python_tag|>", "atem": "<atem:invoke", "lfm": "<|tool_call_start|>",
    "harmony": "<|channel|>commentary", "gemma": "<|tool_call>",
}  # fmt: skip


def call_marks(style: str, tools: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The texts that can begin a call; `style` is that of a renderer."""
    if style == "tags":
        return tuple(f"<{tool['name']}>" for tool in tools)
    return (CALL_MARKS.get(style, CALL_OPEN),)


CALL_ENDS = {
    "hermes": CALL_CLOSE, "qwen_xml": CALL_CLOSE, "glm": CALL_CLOSE, "gemma": "<tool_call|>",
    "atem": "</atem:invoke>",
}  # fmt: skip


def split_thoughts(text: str, style: str, marks: Sequence[str]) -> tuple[str, str]:
    """The leading thoughts of a turn, whose opening marker is in the text also where the prompt
    ends with it, and its text before the first call, which begins with one of `marks`. Incomplete
    turns are accepted."""
    if style in MESSAGED:
        return _of_messages(text)
    opens, closes = _CHANNEL if style == "gemma" else _THOUGHT
    thoughts = ""
    body = text.lstrip()
    if body.startswith(opens):
        thoughts, _, text = body.removeprefix(opens).partition(closes)
        thoughts = thoughts.strip()
    if style == "llama" and marks and text.lstrip().startswith("{"):
        return thoughts, ""
    places = [place for mark in marks if (place := text.find(mark)) >= 0]
    return thoughts, text[: min(places)] if places else text


def _of_messages(text: str) -> tuple[str, str]:
    """Thoughts and text of a turn of messages; those to a tool are neither."""
    thoughts, texts = [], []
    for part in text.split("<|start|>assistant"):
        head, _, body = part.partition(MESSAGE)
        body = _MESSAGE_END.split(body)[0]
        if "<|channel|>analysis" in head or _TO_SELF.search(head):
            thoughts.append(body)
        elif "<|channel|>final" in head or not _ADDRESSED.search(head):
            texts.append(body)
    return "\n".join(thoughts), "".join(texts)


_BLANKS = re.compile(r"\s*")


def _after_blanks(text: str, start: int) -> int:
    return _BLANKS.match(text, start).end()  # type: ignore[union-attr]  # it always matches


def json_end(text: str, start: int) -> int:
    """The offset after the JSON object or list at `start`, leading blanks skipped; -1 if none."""
    start = _after_blanks(text, start)
    if text[start : start + 1] not in ("{", "["):
        return -1
    try:
        return decode_first(text, start)[1]
    except ForeignError:
        return -1


PYTHON_TAG = "<|python_tag|>"
EXPECTED = 'expected {"name": "...", "arguments": {...}}'

Tools = Sequence[dict[str, Any]]
Finder = Callable[[str, Tools], Sequence[FoundCalls]]
Parser = Callable[[str, Tools], tuple[ToolCall, ...]]


# JSON forms


def _llama_calls(text: str, tools: Tools) -> list[FoundCalls]:
    """The single call that follows the thoughts of a turn, or none."""
    start, end = _after_blanks(text, 0), 0
    markers = Markers(PYTHON_TAG, "", json_end)
    while end >= 0 and not _is_llama_call(text, start):
        end = thought_end(text, start, markers)
        start = _after_blanks(text, end) if end >= 0 else len(text)
    if not _is_llama_call(text, start):
        return []
    body = text[start:].removeprefix(PYTHON_TAG).strip()
    if body.startswith("{"):
        return _each([(body, start, len(text))], _json_call)
    calls = (malformed(f"no tool runs code; {EXPECTED}"),)
    for tool in tools:
        if tool["name"] == "python":
            calls = (ToolCall("python", {next(iter(tool["parameters"]["properties"])): body}),)
    return [FoundCalls(calls, start, len(text))]


def _is_llama_call(text: str, start: int) -> bool:
    if text.startswith(PYTHON_TAG, start):
        return True
    return text.startswith("{", start) and '"name"' in text[start : start + 200]


_HARMONY_MARK = re.compile(r"<\|(?:start|message)\|>")
_HARMONY_END = re.compile(r"<\|(?:start|end|call|return)\|>")


def _harmony_calls(text: str, tools: Tools) -> list[FoundCalls]:
    """The messages of a turn that are addressed to a function; other channels have no calls."""
    found: list[FoundCalls] = []
    place = 0
    while place < len(text):
        begin, mark = place, _HARMONY_MARK.search(text, place)
        header = text[place : mark.start() if mark else None]
        place = mark.end() if mark else len(text)
        if mark is None or mark[0] == "<|start|>":
            if re.match(r"\s*(?:assistant\s+)?to=", header):
                problem = malformed(f"no <|message|> follows {header.strip()[:60]!r}")
                found.append(FoundCalls((problem,), begin, begin + len(header)))
            continue
        address = re.search(r"(?:^|\s)to=(\S+?)(?=\s|<\||$)", header)
        if address is not None:
            end = _HARMONY_END.search(text, max(place, json_end(text, place)))
            body = text[place : end.start() if end else None]
            place += len(body)
            found += _each([((address[1], body), begin, place)], _harmony_call)
        following = text.find("<|start|>", place)
        place = len(text) if following < 0 else following + len("<|start|>")
    return found


def _json_call(body: str) -> list[ToolCall]:
    raw = _read(body, "not valid JSON", EXPECTED)
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        raise MalformedCall(f"no name; {EXPECTED}")
    arguments = raw.get("arguments", raw.get("parameters", {}))
    return [ToolCall(raw["name"], _object(arguments))]


def _read(text: str, problem: str, expected: str) -> Any:
    try:
        return decode(text)
    except ForeignError as error:
        raise MalformedCall(f"{problem} ({error}); {expected}") from error


def _object(value: object, expected: str = EXPECTED) -> dict[str, Any]:
    """Arguments; some models write them as a JSON string."""
    if isinstance(value, str):
        value = _read(value, "the arguments cannot be parsed", expected)
    if not isinstance(value, dict):
        raise MalformedCall(f"the arguments are not a JSON object; {expected}")
    return value


def _harmony_call(written: tuple[str, str]) -> list[ToolCall]:
    address, body = written
    prefix, _, name = address.partition(".")
    expected = "expected to=functions.NAME and a JSON object after <|message|>"
    if prefix != "functions" or not name:
        raise MalformedCall(f"the message is addressed to {address[:60]!r}; {expected}")
    arguments = _read(body, "the arguments are not valid JSON", expected)
    return [ToolCall(name, _object(arguments, expected))]


_GEMMA_QUOTE = '<|"|>'
_BARE_KEY = re.compile(r"(?<=[{,])(\s*)([^\W\d][\w.-]*)(?=\s*:)")


_GEMMA_HEAD = re.compile(r"\s*call:[^\s{]+\s*(?=\{)")
_GEMMA_PART = re.compile(r'<\|"\|>.*?<\|"\|>|"(?:\\.|[^"\\])*"|[{}]|<tool_call\|>', re.DOTALL)


def _gemma_end(text: str, start: int) -> int:
    """The offset after the braces of the arguments; braces inside strings do not count."""
    head = _GEMMA_HEAD.match(text, start)
    depth = 0
    for part in _GEMMA_PART.finditer(text, head.end()) if head else ():
        depth += {"{": 1, "}": -1}.get(part[0], 0)
        if depth == 0:
            return part.end()
        if part[0] == "<tool_call|>":
            break
    return -1


def _gemma_call(body: str) -> list[ToolCall]:
    """JSON with bare keys, and <|"|> around strings, which have no escapes."""
    found = re.fullmatch(r"\s*call:([^\s{]+)\s*(\{.*\})\s*", body, re.DOTALL)
    expected = f"expected call:NAME{{key:value}}, texts between {_GEMMA_QUOTE}"
    if found is None:
        raise MalformedCall(f"no name and arguments; {expected}")
    parts = found[2].split(_GEMMA_QUOTE)
    # texts have odd indices; the parts between them are the structure
    parts[::2] = [_BARE_KEY.sub(r'\1"\2"', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return [ToolCall(found[1], _object("".join(parts), expected))]


# tag formats, whose values have no types


class _Tags(NamedTuple):
    """`around` are the markers of a call. `call` matches name and arguments between them, `opening`
    the key of an argument, whose value ends at `closing` and must not contain a match of
    `reserved`."""

    around: tuple[str, str]
    call: re.Pattern[str]
    opening: re.Pattern[str]
    closing: str
    reserved: re.Pattern[str]
    expected: str


_QWEN_XML = _Tags(
    (CALL_OPEN, CALL_CLOSE),
    re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL),
    re.compile(r"<parameter=([^>\n]+)>\n?"),
    "</parameter>",
    re.compile(r"<tool_call>|<function=|<parameter="),
    "expected <function=NAME>, <parameter=KEY>VALUE</parameter> for each argument, </function>",
)
_GLM = _Tags(
    (CALL_OPEN, CALL_CLOSE),
    re.compile(r"([^\s<]+)(.*)", re.DOTALL),
    re.compile(r"<arg_key>([^<]+)</arg_key>\s*<arg_value>"),
    "</arg_value>",
    re.compile(r"<tool_call>|<arg_key>|<arg_value>"),
    "expected NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each argument",
)
_ATEM = _Tags(
    ("<atem:invoke", "</atem:invoke>"),
    re.compile(r'name="([^"\n]+)">(.*)', re.DOTALL),
    re.compile(r'<atem:parameter name="([^"\n]+)">'),
    "</atem:parameter>",
    re.compile(r"<atem:|<\|start\|>"),
    'expected name="NAME"> and <atem:parameter name="KEY">VALUE</atem:parameter> for each argument',
)


def _atem_calls(text: str, tools: Tools) -> list[FoundCalls]:
    """The <atem:invoke> of the messages of a turn; a message to=self is a thought."""
    found: list[FoundCalls] = []
    place = 0
    for part in text.split("<|start|>"):
        header, _, body = part.partition(MESSAGE)
        if "<atem:invoke" in header or not body:
            header, body = "", part
        if not _TO_SELF.search(header):
            start = place + len(part) - len(body)
            for calls, begin, end in _tagged_calls(body, tools, tags=_ATEM, thought=None):
                found.append(FoundCalls(calls, start + begin, start + end))
        place += len(part) + len("<|start|>")
    return found


def _tagged_calls(
    text: str,
    tools: Tools,
    *,
    tags: _Tags,
    thought: tuple[str, str] | None = (THOUGHT_OPEN, THOUGHT_CLOSE),
) -> list[FoundCalls]:
    opening, closing = tags.around

    def value_end(text: str, start: int) -> int:
        following = text.find(opening, start)
        end = text.find(closing, start, len(text) if following < 0 else following)
        try:
            _tagged_call(text[start : max(start, end)].strip(), tags, ())
        except MalformedCall:
            return -1
        return end

    written = blocks(text, Markers(opening, closing, value_end, thought))
    return _each(written, lambda body: _tagged_call(body, tags, tools))


def _tagged_call(body: str, tags: _Tags, tools: Tools) -> list[ToolCall]:
    found = tags.call.fullmatch(body)
    if found is None:
        raise MalformedCall(f"no name; {tags.expected}")
    name, rest = found[1].strip(), found[2]
    schemas = next((properties_of(tool) for tool in tools if tool["name"] == name), {})
    pairs, end = [], 0
    while opened := tags.opening.search(rest, end):
        left = rest[end : opened.start()].strip()
        close = rest.find(tags.closing, opened.end())
        if left or close < 0:
            break
        key, value = opened[1].strip(), rest[opened.end() : close]
        value = value.removesuffix("\n") if tags is _QWEN_XML else value
        if within := tags.reserved.search(value):
            raise MalformedCall(f"the argument {key[:60]!r} holds {within[0]!r}; {tags.expected}")
        pairs.append((key, typed(value, schemas.get(key, {}))))
        end = close + len(tags.closing)
    left = rest[end:].strip()
    if left:
        raise MalformedCall(f"{left[:60]!r} is not an argument; {tags.expected}")
    return [ToolCall(name, _unique(pairs))]


def properties_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of each parameter, with references resolved."""
    schema = tool["parameters"]
    found, definitions = schema.get("properties", {}), schema.get("$defs")
    found = inlined(found, definitions, ()) if definitions else found
    return found if isinstance(found, dict) else {}


SAMPLES = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
TEXT = "1"  # the sample of a text

Draw = Callable[[str, list[Any]], Any]


def sample_call(tool: Mapping[str, Any], draw: Draw = lambda _, known: known[0]) -> ToolCall:
    """A call with a value for each parameter. `draw` chooses it, from the name of the parameter and
    its fitting values: all those of an enumeration, else one."""
    arguments = {}
    for name, schema in properties_of(tool).items():
        types = schema_types(schema)
        is_text = "string" in types or not types
        chosen = schema.get("enum") if isinstance(schema, dict) else None
        arguments[name] = draw(name, chosen or [TEXT if is_text else SAMPLES.get(min(types), TEXT)])
    return ToolCall(str(tool["name"]), arguments)


# calls in Python's notation


LFM_CLOSE = "<|tool_call_end|>"
_PYTHON_PART = re.compile(
    r"""(\"{3}|'{3})(?:\\.|(?!\1).)*\1|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|"""
    + re.escape(LFM_CLOSE),
    re.DOTALL,
)


def _python_end(text: str, start: int) -> int:
    """The end of the calls at `start`: the first closing marker outside of a string."""
    for part in _PYTHON_PART.finditer(text, start):
        if part[0] == LFM_CLOSE:
            try:
                _python_calls(text[start : part.start()])
            except MalformedCall:
                return -1
            return part.start()
    return -1


def _python_calls(block: str) -> list[ToolCall]:
    expected = "expected a list of calls such as [NAME(key='value')]"
    try:
        with warnings.catch_warnings(action="ignore"):  # about unknown escapes
            parsed = ast.parse(block.strip(), mode="eval").body
        written = parsed.elts if isinstance(parsed, ast.List) else [parsed]
        calls = []
        for one in written:
            if not isinstance(one, ast.Call) or one.args:
                raise MalformedCall(expected)
            pairs = [(keyword.arg, _literal(keyword.value)) for keyword in one.keywords]
            calls.append(ToolCall(ast.unparse(one.func), _unique(pairs)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = str(error).partition(" (<unknown>")[0]
        raise MalformedCall(f"the calls cannot be parsed ({reason}); {expected}") from error
    return calls


_HUGE = 1e300  # not every JSON reader accepts larger numbers, or infinity
_JSON_NAMES = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    """A literal of Python or JSON. Raises ValueError for everything else."""
    match node:
        case ast.Constant(str(text)):
            text.encode()  # half of a surrogate pair cannot be encoded
            return text
        case ast.Constant(None | int() | float() as value) if abs(value or 0) < _HUGE:
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)) if value < _HUGE:
            return -value
        case ast.Name(name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elements) | ast.Tuple(elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys, values):
            named = [_literal(key) if key is not None else None for key in keys]
            if all(isinstance(key, str) for key in named):
                return dict(zip(named, map(_literal, values), strict=True))
    raise ValueError("an argument is not a literal")


# shared by the formats


def _each(written: Iterable[Written], read: Callable[[Any], list[ToolCall]]) -> list[FoundCalls]:
    """The calls, each of `written` parsed independently. A call without a name is malformed."""
    found: list[FoundCalls] = []
    for one, start, end in written:
        try:
            if isinstance(one, MalformedCall):
                raise one
            calls = tuple(read(one.strip() if isinstance(one, str) else one))
            if not all(call.name.strip() for call in calls):
                raise MalformedCall("the name of a call is empty")
        except MalformedCall as error:
            calls = (malformed(str(error)),)
        found.append(FoundCalls(calls, start, end))
    return found


def _unique(pairs: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        if key is None or key in arguments:
            raise MalformedCall(f"the argument {str(key)[:60]!r} is given twice")
        arguments[key] = value
    return arguments


def malformed(problem: str) -> ToolCall:
    """An invalid call; its result tells the policy the problem."""
    return ToolCall(MALFORMED_CALL, {"problem": problem})


def _block_calls(
    text: str, tools: Tools, *, markers: Markers, read: Callable[[str], list[ToolCall]]
) -> list[FoundCalls]:
    """The calls between markers outside the thoughts of a turn."""
    return _each(blocks(text, markers), read)


def _parsed(text: str, tools: Tools, *, find: Finder) -> tuple[ToolCall, ...]:
    return tuple(call for one in find(text, tools) for call in one.calls)


_HERMES = Markers(CALL_OPEN, CALL_CLOSE, json_end)
_LFM = Markers("<|tool_call_start|>", LFM_CLOSE, _python_end)
_GEMMA = Markers("<|tool_call>", "<tool_call|>", _gemma_end, ("<|channel>", "<channel|>"))
FINDERS: dict[str, Finder] = {
    "hermes": partial(_block_calls, markers=_HERMES, read=_json_call),
    "llama": _llama_calls,
    "qwen_xml": partial(_tagged_calls, tags=_QWEN_XML),
    "glm": partial(_tagged_calls, tags=_GLM),
    "atem": _atem_calls,
    "lfm": partial(_block_calls, markers=_LFM, read=_python_calls),
    "harmony": _harmony_calls,
    "gemma": partial(_block_calls, markers=_GEMMA, read=_gemma_call),
}
# what the formats write around names and values; an unfinished one is the beginning of a tag
CALL_TEXTS = {
    *_THOUGHT, *_CHANNEL, PYTHON_TAG, MESSAGE, _GEMMA_QUOTE, *CALL_MARKS.values(),
    "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|eom|>", "<atem:parameter", "<function=",
    "</function>", "<parameter=", "<arg_key>", "</arg_key>", "<arg_value>",
}  # fmt: skip
CALL_TEXTS |= {text for one in (_HERMES, _LFM, _GEMMA) for text in one[:2]}
CALL_TEXTS |= {text for one in (_QWEN_XML, _GLM, _ATEM) for text in (*one.around, one.closing)}
PARSERS: dict[str, Parser] = {name: partial(_parsed, find=one) for name, one in FINDERS.items()}
