"""Native tool calls: rendering by the model's chat template, append-only.

The template is rendered once with placeholder texts, to extract the text that it writes between
turns; afterwards only these frames are used. Sampled tokens are never rendered again, so the policy
keeps its earlier thoughts even if the template drops them. A template that changes earlier text
when messages are added is rejected.

A parser of `agentenv/text/call_syntax.py` reads the calls of a turn. It is detected by a round
trip: it must return the call that the template wrote.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from agentenv.base.errors import ConfigError
from agentenv.base.types import UNKNOWN_TOOL, Completion, Message, Role, ToolCall
from agentenv.contract.env import check_observation
from agentenv.text.call_syntax import (
    PARSERS,
    THOUGHT_CLOSE,
    THOUGHT_OPEN,
    THOUGHTS,
    Parser,
    split_thoughts,
)
from agentenv.text.contexts import num_common
from agentenv.text.prompt import PromptConfig, count_tagged_call, for_native_calls
from agentenv.text.renderer import ContextRenderer, RendererPart, ToolSchemas, template_errors

Senders = tuple[tuple[str, str | None], ...]  # (role, tool) of each message of an observation

ANSWERS: tuple[Role, ...] = ("user", "system")  # to a turn, after the tool results
WAY_OUT = "use renderer.name = 'tags'"

_CALLED_NAME = re.compile(r"[\w.:/-]+")
_PYTHON_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_STAND_IN = "qZ{}Zq"  # a placeholder that no template changes
_TEXT, _THOUGHTS = "qSaidq", "qThoughtsq"
_EMPTY_THOUGHT = re.compile(r"\A<think>\s*</think>\s*")
QUESTION = {"role": "user", "content": "qQuestionq"}
SAMPLE_TOOL = {
    "name": "sample_tool",
    "description": "A sample.",
    "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "exact": {"type": "boolean"},
            "items": {"type": "array", "items": {"type": "string"}},
            "options": {"type": "object"},
        },
        "required": ["text"],
    },
}
_SAMPLE_CALLS = (
    ToolCall(
        "sample_tool",
        {
            "text": 'say("it\'s", \'\\n\')\n\nif 1 < 2:\n    print("é")',
            "count": 3,
            "exact": True,
            "items": ["one, two", "three"],
            "options": {"depth": 2, "names": ["a"], "deep": False},
        },
    ),
    ToolCall("sample_tool", {"text": "two"}),
)


class NativeConfig(RendererPart, frozen=True, kw_only=True, tag="native"):
    """Tool calls in the format of the model's chat template."""


class TurnFrames(NamedTuple):
    """The texts around the messages that answer a turn, whether the template quotes these as JSON
    and trims them, and the token with which it ends the turn."""

    texts: list[str]
    quotes: bool
    trims: bool
    end: int


class _CallForm(NamedTuple):
    """The parser of calls, and the template's requirements: whether arguments are a JSON object or
    a JSON string, and whether a turn has at most one call."""

    style: str
    parse: Parser
    as_text: bool
    one_a_turn: bool


class NativeRenderer(ContextRenderer):
    """Renders by the chat template. Raises ConfigError for a template that cannot be used.

    `eos_ids` are all tokens that end a turn. Earlier thoughts remain, even if the template would
    drop them.
    """

    own_tags: tuple[str, ...] = ("tool_call", "tool_response", "tool_output", "tools")

    def __init__(
        self, tokenizer: Any, prompt: PromptConfig | None = None, eos_ids: Collection[int] = ()
    ) -> None:
        super().__init__(tokenizer, eos_ids)
        self._parsers: Mapping[str, Parser] = PARSERS
        self.prompt_config = prompt or PromptConfig()
        if not self.prompt_config.apply_chat_template:
            raise ConfigError(
                "renderer.name = 'native' uses the chat template; with prompt.apply_chat_template "
                "= false use renderer.name = 'tags'"
            )
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError("renderer.name = 'native': the tokenizer has no chat template")
        self._learn()

    def _learn(self) -> None:
        """Find what the template writes, and check it."""
        if self._try([QUESTION]) == self._try([QUESTION], tools=()):
            raise self._refusal("ignores the list of tools")
        self._form = self._find_form()
        self._frames_of = lru_cache(1024)(self._find_frames)
        self._written = lru_cache(4)(lambda *marks: self._sampled((), self._form.as_text, *marks))
        self._check_appends()
        said, called = self.end_id, self._frames_of((("tool", "sample_tool"),)).end
        with suppress(ConfigError):
            said = self._frames_of((("user", None),)).end
        # of a turn without calls, and with some; where they differ, they begin the answer
        self._ends = said, called
        self._is_open = self.opens_thought(self.encode(self._try([QUESTION], generation=True)))

    @property
    def style(self) -> str:
        """The format of calls that the template writes."""
        return self._form.style

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """The token ids of the prompt of the first turn, with the tools' schemas where the template
        puts them."""
        return self._prompt(for_native_calls(messages, tools), self.shown(tools))

    def check_tools(self, tools: ToolSchemas) -> None:
        """Raises ConfigError for a tool whose name this format cannot express."""
        for tool in tools:
            name = str(tool["name"])
            fits = _PYTHON_NAME if self.style == "lfm" else _CALLED_NAME
            if not fits.fullmatch(name):
                raise ConfigError(
                    f"the tool-call form {self.style!r} cannot express the tool name {name!r}; "
                    "rename it with letters, digits and underscores"
                )

    def stop(self, tools: ToolSchemas) -> tuple[str, ...]:
        """No stop strings: a turn ends with an end-of-sequence token."""
        return ()

    def parse(
        self, completion: Completion, tools: ToolSchemas, prefix_ids: Sequence[int] = ()
    ) -> Message:
        """The action as a message; a truncated turn has no calls."""
        text, ids = self.written(completion, prefix_ids), completion.token_ids
        is_whole = completion.finish_reason == "stop"
        calls = self._calls(text, ids, tools, prefix_ids) if is_whole else ()
        return count_tagged_call(Message("assistant", text, calls), tools)

    def observation(
        self,
        messages: Sequence[Message],
        tools: ToolSchemas,
        max_tokens: int,
        turn_ids: Sequence[int] = (),
    ) -> array[int]:
        """The token ids from the end of the turn to the beginning of the next one; a longer text
        keeps its head and tail within max_tokens."""
        texts = self.texts(messages, tools)
        frames, _, _, end = self._frames_around(messages, tools, turn_ids)
        is_open = len(turn_ids) and not self.is_ended(turn_ids)
        is_other = len({*self._ends}) > 1 and len(turn_ids) and turn_ids[-1] != end
        ids = array("i", [end] if is_open or is_other else [])
        ids.extend(self.encode(frames[0]))
        for message, text, frame in zip(messages, texts, frames[1:], strict=True):
            ids += self.encode_foreign(text, tools, max_tokens, message.name)
            ids.extend(self.encode(frame))
        return ids

    def texts(self, messages: Sequence[Message], tools: ToolSchemas) -> list[str]:
        """The texts of an observation, as the template quotes them."""
        check_observation(messages, ANSWERS)
        _, quotes, trims, _ = self._frames_around(messages, tools)
        texts = [one.content.strip() if trims else one.content for one in messages]
        return [json.dumps(text, ensure_ascii=False)[1:-1] for text in texts] if quotes else texts

    def _calls(
        self, text: str, ids: Sequence[int], tools: ToolSchemas, prefix_ids: Sequence[int]
    ) -> tuple[ToolCall, ...]:
        return self._form.parse(text, tools)

    def _frames_around(
        self, messages: Sequence[Message], tools: ToolSchemas, turn_ids: Sequence[int] = ()
    ) -> TurnFrames:
        return self._frames_of(senders_of(messages, tools))

    def _around(self, roles: Sequence[Role]) -> object:
        named = ((role, "sample_tool" if role == "tool" else None) for role in roles)
        return self._frames_of(tuple(named))

    def demonstrated(self, message: Message, tools: ToolSchemas) -> list[int]:
        """Token ids of a turn that was not sampled. Raises ConfigError."""
        text = self.calling(message.content, message.tool_calls)
        calls = message.tool_calls or self._form.parse(text, tools)
        return [*self.encode(text), self._ends[bool(calls)]]

    turn = demonstrated

    def calling(self, text: str, calls: Sequence[ToolCall], tools: ToolSchemas = ()) -> str:
        """The template's text of a turn with `text` (thoughts included) and these calls, up to its
        end token. Raises ConfigError if the template rejects them."""
        thoughts, said = split_thoughts(text, "", ())
        if thoughts:
            with suppress(ConfigError):  # it refuses them, or does not write them after its header
                written = self._around_text(calls, said.lstrip(), _THOUGHTS)
                if _THOUGHTS in written:
                    return written.replace(_THOUGHTS, thoughts).replace(_TEXT, said.lstrip())
            if self._is_open:
                text = text.lstrip().removeprefix(THOUGHT_OPEN).lstrip("\n")
        written = self._around_text(calls, text)
        before, text_mark, after = written.partition(_TEXT)
        if not text_mark:
            before, after = "", written
            if self.style == "llama":  # its calls cannot have other text
                text = "".join(text.rpartition(THOUGHT_CLOSE)[:2])
        if THOUGHT_CLOSE in text:  # the text has a thought
            before = THOUGHTS.sub("", before).rpartition(THOUGHT_CLOSE)[2].lstrip()
            after = _EMPTY_THOUGHT.sub("", after)
        return _EMPTY_THOUGHT.sub("", before + text + after)

    def _around_text(self, calls: Sequence[ToolCall], text: str, thoughts: str = "") -> str:
        marks = _TEXT if text else "", thoughts
        return self._sampled(calls, self._form.as_text, *marks) if calls else self._written(*marks)

    # inner workings

    def _try(
        self,
        chat: list[dict[str, Any]],
        *,
        generation: bool = False,
        tools: ToolSchemas = (SAMPLE_TOOL,),
    ) -> str:
        try:
            return self._chat(chat, tools, generation=generation)
        except template_errors() as error:
            roles = [turn["role"] for turn in chat]
            raise self._refusal(f"refuses {roles}: {error}") from error

    def _find_form(self) -> _CallForm:
        """The format whose parser returns a call that the template wrote."""
        problem = ConfigError()
        for as_text in (False, True):
            try:
                written = self._sampled(_SAMPLE_CALLS[:1], as_text)
            except ConfigError as error:
                problem = problem if problem.args else error
                continue
            for name, parse in self._parsers.items():
                if parse(written, [SAMPLE_TOOL]) == _SAMPLE_CALLS[:1]:
                    return _CallForm(name, parse, as_text, self._is_one_a_turn(parse, as_text))
            if "sample_tool" not in written:
                problem = self._refusal("omits the calls of earlier turns")
            elif not as_text or not problem.args:
                problem = self._refusal(
                    f"writes a call as {written[-600:]!r}, which none of the styles "
                    f"{sorted(self._parsers)} reads as that call"
                )
        raise problem

    def _is_one_a_turn(self, parse: Parser, as_text: bool) -> bool:
        """Whether the template rejects or omits a second call of a turn."""
        try:
            written = self._sampled(_SAMPLE_CALLS, as_text)
        except ConfigError:
            return True
        calls = parse(written, [SAMPLE_TOOL])
        if calls not in (_SAMPLE_CALLS, _SAMPLE_CALLS[:1]):
            raise self._refusal(
                f"writes two calls as {written[-300:]!r}, which are read as {list(calls)}"
            )
        return calls != _SAMPLE_CALLS

    def _sampled(
        self, calls: Sequence[ToolCall], as_text: bool, text: str = "", thoughts: str = ""
    ) -> str:
        """The text that the policy would sample for a turn with these calls."""
        turn = self._turn_of(calls, as_text) | {"content": text}
        if thoughts:
            turn |= {"reasoning_content": thoughts, "thinking": thoughts}
        results = [
            {"role": "tool", "name": call.name, "tool_call_id": own["id"], "content": _mark(n)}
            for n, (call, own) in enumerate(zip(calls, turn.get("tool_calls", ()), strict=True))
        ]
        return self._split_turn(turn, results, generation=bool(calls))[0]

    def _split_turn(
        self, turn: dict[str, Any], answers: list[dict[str, Any]], *, generation: bool = True
    ) -> tuple[str, int, str]:
        """A turn as the policy would sample it, its end token, and the template's text from there
        to the beginning of the next turn."""
        text = self._try([QUESTION, turn, *answers], generation=generation)
        roles = [answer["role"] for answer in answers]
        before = self._try([QUESTION])
        self._must_start(text, before, f"an answer and {roles}")
        prompt = self._try([QUESTION], generation=True)
        start = num_common(text, prompt)
        if start < len(prompt) and "thinking" in turn:
            raise self._refusal("writes thoughts before a turn")
        if start < len(prompt):  # not within a tag that both begin with
            start = max(len(before), *(text.rfind(mark, 0, start) + 1 for mark in "\n>"))
        text = text[start:]
        ends = {end: token for token in self.eos_ids if (end := self.decode([token]))}
        places = [(text.find(end), -len(end), end) for end in ends if end in text]
        place, size, end = min(places, default=(len(text), 0, ""))
        first = text.find(_STAND_IN.format(0))
        if 0 <= first < place or (generation and not places):
            between = text[:first] if first >= 0 else text
            raise self._refusal(
                f"writes {between[-60:]!r} between a turn and its answer, without any of the end "
                f"tokens {sorted(ends)}; check eos_token_id in generation_config.json"
            )
        return text[:place], ends.get(end, self.end_id), text[place - size :]

    def _check_appends(self) -> None:
        """Appending messages must not change earlier text."""
        chat: list[dict[str, Any]] = [QUESTION]
        self._must_start(self._try(chat, generation=True), self._try(chat), "the answer's header")
        shorter = self._try(chat)
        for number in (1, 2):
            call = ToolCall("sample_tool", {"text": f"qCall{number}q"})
            chat.append(self._turn_of([call], self._form.as_text))
            result = {"role": "tool", "name": "sample_tool", "content": f"qResult{number}q"}
            chat.append({**result, "tool_call_id": chat[-1]["tool_calls"][0]["id"]})
            longer = self._try(chat)
            self._must_start(longer, shorter, f"turn {number} and its tool result")
            shorter = longer

    def _must_start(self, longer: str, shorter: str, what: str) -> None:
        if longer.startswith(shorter):
            return
        place = num_common(longer, shorter)
        raise self._refusal(
            f"cannot append: with {what} added it writes {longer[place : place + 40]!r} where "
            f"{shorter[place : place + 40]!r} stood"
        )

    def _cut(self, written: Callable[[str], tuple[int, str]], number: int) -> TurnFrames:
        """The frames of a text between two turns; `written` returns it for `number` placeholders
        with these blanks around them, with the end token before it."""
        (end, rest), texts = written(""), list[str]()
        trims = written("\n")[1] == rest
        quotes = bool(number) and _mark(0) not in rest
        for place in range(number):
            mark = _mark(place)
            text, found, rest = rest.partition(mark.replace('"', r"\"") if quotes else mark)
            if not found:
                raise self._refusal("omits or changes the text of tool results")
            texts.append(text)
        return TurnFrames([*texts, rest], quotes, trims, end)

    def _find_frames(self, senders: Senders, call_ids: tuple[str, ...] = ()) -> TurnFrames:
        """The template's texts between these messages, which answer calls with these ids."""
        answers: list[dict[str, Any]] = []
        calls: list[ToolCall] = []
        for number, (role, name) in enumerate(senders):
            answer: dict[str, Any] = {"role": role, "content": _mark(number)}
            if name is not None:
                answer["name"] = name
            if role == "tool":
                number = len(calls)
                calls.append(ToolCall(name or "sample_tool", {"text": "qTurnq"}))
                own = call_ids[number] if number < len(call_ids) else ""
                answer["tool_call_id"] = own or self._call_id(number, calls[-1].name)
            answers.append(answer)
        turn: dict[str, Any] = {"role": "assistant", "content": "qTurnq"}
        if calls:
            turn = self._turn_of(calls[:1] if self._form.one_a_turn else calls, self._form.as_text)
        return self._cut(
            lambda blanks: self._split_turn(turn, _padded(answers, blanks))[1:], len(answers)
        )

    def _turn_of(self, calls: Sequence[ToolCall], as_text: bool) -> dict[str, Any]:
        """A chat message of the policy with these calls."""
        written: list[dict[str, Any]] = []
        for number, call in enumerate(calls):
            arguments = json.dumps(call.arguments) if as_text else call.arguments
            own = {"id": self._call_id(number, call.name), "type": "function"}
            written.append({**own, "function": {"name": call.name, "arguments": arguments}})
        called = {"tool_calls": written} if written else {}  # some refuse an empty list
        return {"role": "assistant", "content": "", **called}

    def _call_id(self, number: int, name: str) -> str:
        return f"call{number:05d}"  # nine letters and digits, as some templates require

    def _refusal(self, problem: str) -> ConfigError:
        model = getattr(self.tokenizer, "name_or_path", "")
        template = f"the chat template of {model}" if model else "the chat template"
        return ConfigError(f"renderer.name = 'native': {template} {problem}; {WAY_OUT}")


def senders_of(messages: Sequence[Message], tools: ToolSchemas) -> Senders:
    """Roles and tools; a tool that the policy invented is none of them."""
    known = {None, *(tool["name"] for tool in tools)}
    names = (m.name if m.name in known else UNKNOWN_TOOL for m in messages)
    return tuple((m.role, n) for m, n in zip(messages, names, strict=True))


def _padded(answers: Sequence[dict[str, Any]], blanks: str) -> list[dict[str, Any]]:
    return [{**one, "content": f"{blanks}{one['content']}{blanks}"} for one in answers]


def _mark(number: int) -> str:
    return _STAND_IN.format(number) + '"'
