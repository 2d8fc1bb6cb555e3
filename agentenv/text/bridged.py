"""Tool calls by the package `renderers`, for families whose chat template `native` refuses.

Its renderer of a family writes the messages instead of the chat template, and reads the calls of
the sampled tokens. As with `native`, sampled tokens stay as they are, and texts of tools and users
cannot forge control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any

from msgspec import Meta

from agentenv.base.errors import ConfigError, ForeignError, reported_as
from agentenv.base.installation import needed
from agentenv.base.types import Message, ToolCall
from agentenv.base.untrusted import decode
from agentenv.text import native
from agentenv.text.call_syntax import malformed, split_thoughts
from agentenv.text.contexts import num_common
from agentenv.text.prompt import PromptConfig
from agentenv.text.renderer import RendererPart, TagsConfig, TextCodec, ToolSchemas, functions

NUM_HEADER_IDS = 256  # of a prompt; they have the header of the turn
READ = ("ok", "unknown_tool")  # the status of calls that have a name and arguments
# a foreign package raises any of these for what it cannot render or read
ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError,
          TypeError, ValueError)  # fmt: skip

_CALL_ID = re.compile(r"[\w.:-]{1,100}")


class BridgedConfig(RendererPart, frozen=True, kw_only=True, tag="renderers"):
    """Tool calls by the package `renderers`, which has families that `native` lacks."""

    family: Annotated[str, Meta(description="such as 'kimi-k2.5', 'deepseek-v4' or 'glm-5'")]


AnyRenderer = TagsConfig | native.NativeConfig | BridgedConfig


class BridgedRenderer(native.NativeRenderer):
    """Renders by the package's renderer of `family`. Raises ConfigError for one that cannot be used
    with this tokenizer, rewrites earlier text, or does not read the calls that it writes.

    Programs and servers are refused: the package gives no places of thoughts and calls in a text.
    """

    turn = None  # type: ignore[assignment]
    own_tags: tuple[str, ...] = (*native.NativeRenderer.own_tags, "response", "minimax:tool_call")

    def __init__(
        self, tokenizer: Any, family: str, prompt: PromptConfig, eos_ids: Collection[int] = ()
    ) -> None:
        self._family, self.prompt_config = family, prompt
        if not self.prompt_config.apply_chat_template:
            raise self._refusal("needs prompt.apply_chat_template = true")
        self._theirs = self._made(tokenizer)
        self._parsers = {family: lambda text, tools: self._calls("", self.encode(text), tools)}
        stops = frozenset(map(int, self._theirs.get_stop_token_ids()))
        called = self._turn_of([ToolCall("sample_tool", {"text": "qTextq"})], as_text=False)
        result = {"role": "tool", "name": "sample_tool", "tool_call_id": self._call_id(0, "f")}
        called |= {"reasoning_content": "qThoughtq"}
        found = {**result, "content": "qResultq"}
        sample = [native.QUESTION, called, found, native.QUESTION]
        try:
            written_ids = self._chat_ids(sample, [native.SAMPLE_TOOL])
            header = self._chat_ids([native.QUESTION], [native.SAMPLE_TOOL])
        except ValueError as error:
            raise self._refusal(f"rejects a dialogue with tools: {error}") from error
        self._header = header[-NUM_HEADER_IDS:]
        ends = frozenset(eos_ids) or stops
        TextCodec.__init__(self, tokenizer, ends.union(written_ids))  # which control the format
        self.eos_ids = ends
        if not stops & ends:
            texts = [self.decode([one]) for one in sorted(stops)]
            raise self._refusal(f"needs one of {texts} in eos_token_id (generation_config.json)")
        after = written_ids[num_common(written_ids, header) :]
        self.end_id = next(one for one in (*after, *ends) if one in stops & ends)
        self._learn()

    def _made(self, tokenizer: Any) -> Any:
        package = needed("renderers", "renderers", "renderer.name = 'renderers'")
        if self._family not in (known := sorted({*package.base.MODEL_RENDERER_MAP.values()})):
            raise ConfigError(f"renderer.family: {self._family!r}; expected one of {known}")
        try:
            kind = type(package.configs.config_from_name(self._family))
            keys = {"thinking_retention": "all", **self.prompt_config.chat_template_kwargs}
            config = kind.model_validate(keys)
            return package.create_renderer(tokenizer, config)
        except ERRORS as error:
            cause = " ".join(str(error).split())
            raise self._refusal(f"cannot be made with this tokenizer: {cause}") from error

    def _chat_ids(
        self, chat: list[dict[str, Any]], tools: ToolSchemas = (), *, generation: bool = True
    ) -> list[int]:
        """The ids of messages. Raises ValueError if the renderer rejects them."""
        keys = {"tools": functions(tools), "add_generation_prompt": generation}
        try:
            return list(self._theirs.render_ids(chat, **keys))
        except ERRORS as error:
            raise ValueError(str(error)) from error

    def _chat(
        self, chat: list[dict[str, Any]], tools: ToolSchemas = (), *, generation: bool = True
    ) -> str:
        return self.decode(self._chat_ids(chat, tools, generation=generation))

    def demonstrated(self, message: Message, tools: ToolSchemas) -> list[int]:
        """As the package writes it after the header of a turn, and reads it back."""
        thoughts, text = map(str.strip, split_thoughts(message.content, "", ()))
        turn = self._turn_of(message.tool_calls, as_text=False) | {"content": text}
        turn |= {"reasoning_content": thoughts} if thoughts else {}
        with reported_as(ConfigError, f"renderer.family = {self._family!r} rejects it", *ERRORS):
            header = self._chat_ids([native.QUESTION], tools)
            ids = self._chat_ids([native.QUESTION, turn], tools, generation=False)
            start = num_common(ids, header)
            ids = ids[start:]
            place = next((n for n, one in enumerate(ids) if one in self.eos_ids), len(ids))
            ids = [*ids[:place], self._ends[bool(message.tool_calls)]]
            is_after = start == len(header) or not thoughts
            for lead in ([], self.encode(thoughts)) if is_after else ():  # Kimi K2.5 drops them
                read = self._response([*lead, *ids], tools, header)
                found = (read.reasoning_content or "").strip(), read.content.strip()
                if found == (thoughts, text):
                    return [*lead, *ids]
        raise self._refusal(
            f"cannot write a turn with the thoughts {thoughts[:40]!r} after its header, "
            f"{self.decode(header[-8:])!r}: keep or omit thoughts, or open them by "
            "prompt.chat_template_kwargs"
        )

    def _calls(
        self, text: str, ids: Sequence[int], tools: ToolSchemas, prefix_ids: Sequence[int] = ()
    ) -> tuple[ToolCall, ...]:
        return tuple(map(_call, self._attempts(ids, tools, prefix_ids)))

    def _attempts(
        self, ids: Sequence[int], tools: ToolSchemas, prefix_ids: Sequence[int] = ()
    ) -> list[Any]:
        """The calls of a turn as the package reads them, or the error if it cannot."""
        try:
            return list(self._response(ids, tools, prefix_ids).tool_calls)
        except ERRORS as error:  # such as a nesting that is too deep
            return [error]

    def _response(self, ids: Sequence[int], tools: ToolSchemas, prefix_ids: Sequence[int]) -> Any:
        header = prefix_ids[-NUM_HEADER_IDS:] if len(prefix_ids) else self._header
        return self._theirs.parse_response([*ids], tools=functions(tools), prompt_ids=[*header])

    def _frames_around(
        self, messages: Sequence[Message], tools: ToolSchemas, turn_ids: Sequence[int] = ()
    ) -> native.TurnFrames:
        """A result has the id that was sampled for its call, which Kimi's format writes."""
        attempts = self._attempts(turn_ids, tools) if len(turn_ids) else []
        ids = (str(getattr(one, "id", None) or "") for one in attempts)
        safe = tuple(one if _CALL_ID.fullmatch(one) else "" for one in ids)
        return self._frames_of(native.senders_of(messages, tools), safe)

    def _call_id(self, number: int, name: str) -> str:
        return f"functions.{name}:{number}"  # as Kimi's; the others write none

    def _refusal(self, problem: str) -> ConfigError:
        return ConfigError(f"renderer.name = 'renderers': the family {self._family!r} {problem}")


def _call(attempt: Any) -> ToolCall:
    """A call as the package has read it; its arguments are foreign."""
    problem = str(getattr(attempt, "status", attempt))
    if problem in READ and isinstance(attempt.arguments, dict) and attempt.name:
        try:
            return ToolCall(str(attempt.name), decode(json.dumps(attempt.arguments)))
        except (ForeignError, TypeError, ValueError, RecursionError) as error:
            problem = str(error)
    return malformed(f"{problem.replace('_', ' ')}: {getattr(attempt, 'raw', '')[:200]!r}")
