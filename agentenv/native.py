"""Native tool calls: messages by the model's own chat template, rendered append-only.

The template is asked once for what it writes between the turns, with stand-ins for their texts;
from then on only those frames are used. What was sampled is never rendered again, so a template
that drops earlier thoughts does no harm: the policy keeps seeing its own. A template that changes
what it wrote before when messages are added is refused.

Calls are read from the text of a turn behind its thoughts:

    Hermes, Qwen   <tool_call>{"name": "search", "arguments": {"query": "Lima"}}</tool_call>, any
                   number of them
    Llama 3.1      {"name": "search", "parameters": {"query": "Lima"}} and nothing else, or code
                   behind <|python_tag|>

A call that cannot be read is a call too, to MALFORMED_CALL: the policy reads what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal

import jinja2
import msgspec
from msgspec import Meta, Struct

from agentenv.errors import ConfigError, DataError, EnvError
from agentenv.prompt import PromptConfig
from agentenv.renderer import TextCodec, ToolSchemas
from agentenv.types import MALFORMED_CALL, Completion, Message, ToolCall

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
EXPECTED = 'expected {"name": "...", "arguments": {...}}'

_HERMES = re.compile(rf"{CALL_OPEN}(.*?)({CALL_CLOSE}|\Z)", re.DOTALL)

Parser = Callable[[str, Sequence[dict[str, Any]]], tuple[ToolCall, ...]]


def hermes_calls(text: str, tools: Sequence[dict[str, Any]]) -> tuple[ToolCall, ...]:
    """The calls in the <tool_call> tags behind the thoughts of a turn."""
    calls = []
    for body, closing in _HERMES.findall(after_thoughts(text)):
        if closing:
            calls.append(_call(body.strip()))
        else:
            calls.append(_malformed(f"{CALL_OPEN} is not closed by {CALL_CLOSE}"))
    return tuple(calls)


def llama_calls(text: str, tools: Sequence[dict[str, Any]]) -> tuple[ToolCall, ...]:
    """The one call that a turn is behind its thoughts, or none."""
    body = after_thoughts(text).strip()
    tagged = body.startswith(PYTHON_TAG)
    body = body.removeprefix(PYTHON_TAG).strip()
    if body.startswith("{") and (tagged or '"name"' in body[:200]):
        return (_call(body),)
    if not tagged:
        return ()
    for tool in tools:
        if tool["name"] == "python":
            argument = next(iter(tool["parameters"]["properties"]))
            return (ToolCall("python", {argument: body}),)
    return (_malformed(f"there is no tool that runs code; {EXPECTED}"),)


def after_thoughts(text: str) -> str:
    """What follows the last thought; nothing while a thought is still open."""
    after = text.rpartition("</think>")[2]
    return "" if "<think>" in after else after


def _call(body: str) -> ToolCall:
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        return _malformed(f"not valid JSON ({error}); {EXPECTED}")
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        return _malformed(f"no name; {EXPECTED}")
    arguments = raw.get("arguments", raw.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as a text of JSON
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return _malformed(f"the arguments are not an object; {EXPECTED}")
    if not isinstance(arguments, dict):
        return _malformed(f"the arguments are not an object; {EXPECTED}")
    return ToolCall(raw["name"], arguments)


def _malformed(problem: str) -> ToolCall:
    return ToolCall(MALFORMED_CALL, {"problem": problem})


Style = Literal["auto", "hermes", "llama"]
Kinds = tuple[tuple[str, str | None], ...]  # (role, name) of each message of an observation

_PARSERS: dict[str, Parser] = {"hermes": hermes_calls, "llama": llama_calls}
_SIGNS = {"hermes": ("<tool_call>",), "llama": ("<|python_tag|>", "ipython")}
_STAND_IN = "qZ{}Zq"  # short, and changed by no template
_SAMPLE_TOOL = {
    "name": "sample_tool",
    "description": "A sample.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
}


class NativeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="native",
                   tag_field="name"):  # fmt: skip
    """Tool calls in the form that the model's chat template knows."""

    style: Annotated[
        Style,
        Meta(description="form of the calls: Hermes and Qwen, or Llama 3.1; auto: by the template"),
    ] = "auto"


class NativeRenderer(TextCodec):
    """Renders by the chat template. A ConfigError says why a template cannot be used.

    `eos_ids` are all tokens that end a turn. Earlier thoughts stay, also where the template itself
    would leave them out.
    """

    own_tags = ("tool_call", "tool_response", "tools")

    def __init__(
        self,
        tokenizer: Any,
        config: NativeConfig | None = None,
        prompt: PromptConfig | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        super().__init__(tokenizer, eos_ids)
        self.config = config or NativeConfig()
        self.prompt_config = prompt or PromptConfig()
        if not self.prompt_config.apply_chat_template:
            raise ConfigError(
                "renderer.name = 'native' speaks through the chat template; with "
                "prompt.apply_chat_template = false use renderer.name = 'tags'"
            )
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError("renderer.name = 'native': the tokenizer has no chat template")
        self._parser = _PARSERS[self._style()]
        self._frames: dict[Kinds, tuple[list[str], bool]] = {}
        self._check_appends()
        self._frames_of((("tool", "sample_tool"),))

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """The prompt of the first turn, with the schemas of the tools where the template has
        them."""
        chat = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._render(chat, tools, generation=True)
        except jinja2.TemplateError as error:
            raise DataError(
                f"the chat template refuses a prompt of {[turn['role'] for turn in chat]}: {error}"
            ) from error
        return self.single_bos(self.encode(text))

    def stop(self, tools: ToolSchemas) -> tuple[str, ...]:
        """No strings: a turn ends with an end-of-sequence token."""
        return ()

    def parse(
        self, completion: Completion, tools: ToolSchemas, prefix_ids: Sequence[int] = ()
    ) -> Message:
        """The action as a message; a turn cut off by a limit has no calls."""
        text = self.written(completion, prefix_ids)
        calls = self._parser(text, tools) if completion.finish_reason == "stop" else ()
        return Message("assistant", text, calls)

    def observation(
        self, messages: Sequence[Message], tools: ToolSchemas, max_tokens: int
    ) -> list[int]:
        """What the template writes after the end of the turn, up to where the next one begins;
        each text keeps its head and tail within max_tokens."""
        frames, quoted = self._frames_of(tuple((m.role, m.name) for m in messages))
        ids = self.encode(frames[0])
        for message, frame in zip(messages, frames[1:], strict=True):
            text = message.content
            text = json.dumps(text, ensure_ascii=False)[1:-1] if quoted else text
            ids += self.encode_foreign(text, tools, max_tokens) + self.encode(frame)
        return ids

    # inner workings

    def _style(self) -> str:
        if self.config.style != "auto":
            return self.config.style
        template = str(self.tokenizer.chat_template)
        for style, signs in _SIGNS.items():
            if any(sign in template for sign in signs):
                return style
        raise ConfigError(
            "renderer.style: the chat template shows neither Hermes' <tool_call> nor Llama's "
            "ipython role; name the style, 'hermes' or 'llama', or use renderer.name = 'tags'"
        )

    def _render(self, chat: list[dict[str, Any]], tools: ToolSchemas, *, generation: bool) -> str:
        functions = [{"type": "function", "function": dict(tool)} for tool in tools]
        text = self.tokenizer.apply_chat_template(
            chat,
            tools=functions or None,
            add_generation_prompt=generation,
            tokenize=False,
            **self.prompt_config.chat_template_kwargs,
        )
        return str(text)

    def _try(self, chat: list[dict[str, Any]], *, generation: bool = False) -> str:
        try:
            return self._render(chat, [_SAMPLE_TOOL], generation=generation)
        except jinja2.TemplateError as error:
            roles = [turn["role"] for turn in chat]
            raise ConfigError(
                f"renderer.name = 'native': the chat template refuses {roles}: {error}; use "
                "renderer.name = 'tags'"
            ) from error

    def _check_appends(self) -> None:
        """What was written must stay when messages are added, and tools must have a place."""
        chat = [{"role": "user", "content": "qQuestionq"}]
        if self._try(chat) == self._render(chat, [], generation=False):
            raise ConfigError(
                "renderer.name = 'native': the chat template has no place for tools; use "
                "renderer.name = 'tags'"
            )
        self._must_start(self._try(chat, generation=True), self._try(chat), "the answer's header")
        shorter = self._try(chat)
        for number in (1, 2):
            chat.append({"role": "assistant", "content": f"qTurn{number}q"})
            chat.append({"role": "tool", "name": "sample_tool", "content": f"qResult{number}q"})
            longer = self._try(chat)
            self._must_start(longer, shorter, f"turn {number} and its tool result")
            shorter = longer

    def _must_start(self, longer: str, shorter: str, what: str) -> None:
        if longer.startswith(shorter):
            return
        place = next(
            (i for i, (a, b) in enumerate(zip(longer, shorter, strict=False)) if a != b),
            len(longer),
        )
        raise ConfigError(
            f"renderer.name = 'native': the chat template cannot append: with {what} added it "
            f"writes {longer[place : place + 40]!r} where {shorter[place : place + 40]!r} stood; "
            "use renderer.name = 'tags'"
        )

    def _frames_of(self, kinds: Kinds) -> tuple[list[str], bool]:
        """The texts around the messages of an observation, and whether theirs is quoted JSON."""
        if kinds not in self._frames:
            self._frames[kinds] = self._find_frames(kinds)
        return self._frames[kinds]

    def _find_frames(self, kinds: Kinds) -> tuple[list[str], bool]:
        head: list[dict[str, Any]] = [{"role": "user", "content": "qQuestionq"}]
        chat = [*head, {"role": "assistant", "content": "qTurnq"}]
        plain = []
        for number, (role, name) in enumerate(kinds):
            if role not in ("tool", "user"):
                raise EnvError(f"an observation holds tool results or user messages, not {role!r}")
            plain.append(_STAND_IN.format(number) + '"')
            turn = {"role": role, "content": plain[-1]}
            chat.append(turn if name is None else {**turn, "name": name})
        text = self._try(chat, generation=True)
        self._must_start(text, self._try(head), f"an observation of {[role for role, _ in kinds]}")
        rest = self._after_end(text.rpartition("qTurnq")[2])
        quoted = bool(plain) and plain[0] not in rest
        frames = []
        for stand_in in plain:
            before, found, rest = rest.partition(
                stand_in.replace('"', r"\"") if quoted else stand_in
            )
            if not found:
                raise ConfigError(
                    "renderer.name = 'native': the chat template leaves out or changes the text "
                    "of tool results; use renderer.name = 'tags'"
                )
            frames.append(before)
        return [*frames, rest], quoted

    def _after_end(self, rest: str) -> str:
        """What follows the token that ends a turn, which was sampled."""
        ends = {self.decode([token]) for token in self.eos_ids}
        for end in sorted(ends, key=len, reverse=True):
            if end and rest.startswith(end):
                return rest[len(end) :]
        raise ConfigError(
            f"renderer.name = 'native': behind a turn the chat template writes {rest[:30]!r}, "
            f"which starts with none of the end tokens {sorted(ends)}; check eos_token_id in "
            "generation_config.json"
        )
