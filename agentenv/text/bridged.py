"""Tool calls by the package `renderers`, for families whose chat template `native` refuses.

Its renderer of a family writes the prompt and reads the calls of sampled tokens. The texts between
two turns are those of its bridge, found once with placeholders for the messages: sampled tokens
stay as they are, also where it would render the conversation again (after an unclosed thought), and
texts of tools and users cannot forge control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Annotated, Any

from msgspec import Meta, Struct

from agentenv.base.errors import ConfigError, ForeignError
from agentenv.base.installation import needed
from agentenv.base.types import Message, Role, ToolCall
from agentenv.base.untrusted import decode
from agentenv.text.call_syntax import THOUGHT_CLOSE, THOUGHT_OPEN, malformed
from agentenv.text.contexts import num_common
from agentenv.text.native import (
    QUESTION,
    SAMPLE_CALLS,
    SAMPLE_TOOL,
    CallRenderer,
    Frames,
    Senders,
    mark_of,
    padded,
    senders_of,
    turn_of,
)
from agentenv.text.prompt import PromptConfig
from agentenv.text.renderer import ToolSchemas

NUM_KNOWN_FRAMES = 1024
NUM_HEADER_IDS = 256  # of a prompt; they have the header of the turn
READ = ("ok", "unknown_tool")  # the status of calls that have a name and arguments
# a foreign package raises any of these for what it cannot render or read
ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError,
          TypeError, ValueError)  # fmt: skip

_CALL_ID = re.compile(r"[\w.:-]{1,100}")
_BODIES = ("qTurnq", f"{THOUGHT_CLOSE}qTurnq")  # the other where the prompt opens a thought


class BridgedConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="renderers",
                    tag_field="name"):  # fmt: skip
    """Tool calls by the package `renderers`, which has families that `native` lacks."""

    family: Annotated[
        str,
        Meta(
            description="a renderer of the package, such as 'kimi-k2.5', 'deepseek-v4', "
            "'minimax-m2' or 'glm-5'"
        ),
    ]


class BridgedRenderer(CallRenderer):
    """Renders by the package's renderer of `family`. Raises ConfigError for one that cannot be used
    with this tokenizer, alters sampled tokens, or does not read the calls that it writes.

    It has no `turn`: the conversations of programs have turns that were not sampled.
    """

    key = "renderers"
    own_tags = ("tool_call", "tool_response", "tools", "response", "minimax:tool_call")

    def __init__(
        self,
        tokenizer: Any,
        family: str,
        prompt: PromptConfig | None = None,
        eos_ids: Collection[int] = (),
    ) -> None:
        self._family, self.prompt_config = family, prompt or PromptConfig()
        if not self.prompt_config.apply_chat_template:
            raise self._refusal("needs prompt.apply_chat_template = true")
        self._theirs = self._made(tokenizer)
        stops = frozenset(map(int, self._theirs.get_stop_token_ids()))
        sample = [QUESTION, self._called("qSaidq", SAMPLE_CALLS[:1], "qThoughtq"),
                  *_answers((("tool", "sample_tool"),)), QUESTION]  # fmt: skip
        try:
            self._header = self._chat_ids([QUESTION], [SAMPLE_TOOL])
            written_ids = self._chat_ids(sample, [SAMPLE_TOOL])
        except ValueError as error:
            raise self._refusal(f"rejects a dialogue with tools: {error}") from error
        super().__init__(tokenizer, eos_ids or stops, written_ids=written_ids)
        if not stops & self.eos_ids:
            raise self._refusal(
                f"ends a turn with {[self.decode([one]) for one in sorted(stops)]}, at which "
                "generation does not stop; add it to eos_token_id in generation_config.json"
            )
        self.end_id = min(stops & self.eos_ids)
        self._frames_of = lru_cache(NUM_KNOWN_FRAMES)(self._find_frames)
        for end in self.eos_ids:
            for sender in (("tool", "sample_tool"), ("user", None)):
                self._frames_of(end, (sender,), ())
        for call in SAMPLE_CALLS:
            text = self.calling("", [call])
            ids = [*self.encode(text), self.end_id]
            found = self._calls(text, ids, [SAMPLE_TOOL], self._header)
            if found != (call,):
                raise self._refusal(f"writes a call as {text!r}, which it reads as {list(found)}")

    @property
    def style(self) -> str:
        """The family."""
        return self._family

    def calling(self, text: str, calls: Sequence[ToolCall], tools: ToolSchemas = ()) -> str:
        """The text of a turn with `text` (thoughts included) and these calls, up to its end token.
        Raises ConfigError if the renderer rejects them."""
        thought, _, said = text.rpartition(THOUGHT_CLOSE)
        turn = self._called(said.strip(), calls, thought.replace(THOUGHT_OPEN, "").strip())
        given = tools or [SAMPLE_TOOL]
        try:
            header = self._chat_ids([QUESTION], given)
            ids = self._chat_ids([QUESTION, turn], given, generation=False)
        except ValueError as error:
            raise self._refusal(f"rejects a turn: {error}") from error
        ids = ids[num_common(ids, header) :]
        ends = (place for place, one in enumerate(ids) if one in self.eos_ids)
        text = self.decode(ids[: next(ends, len(ids))])
        is_open = self.opens_thought(header) and THOUGHT_CLOSE not in text
        return THOUGHT_CLOSE + text if is_open else text

    # inner workings

    def _made(self, tokenizer: Any) -> Any:
        package = needed("renderers", "renderers", "renderer.name = 'renderers'")
        if self._family not in (known := sorted({*package.base.MODEL_RENDERER_MAP.values()})):
            raise ConfigError(f"renderer.family: {self._family!r}; expected one of {known}")
        keys = {**self.prompt_config.chat_template_kwargs, "thinking_retention": "all"}
        try:
            kind = type(package.configs.config_from_name(self._family))
            return package.create_renderer(tokenizer, kind.model_validate(keys))
        except ERRORS as error:
            cause = " ".join(str(error).split())
            raise self._refusal(f"cannot be made with this tokenizer: {cause}") from error

    def _chat_ids(
        self, chat: list[dict[str, Any]], tools: ToolSchemas = (), *, generation: bool = True
    ) -> list[int]:
        """The ids of messages. Raises ValueError if the renderer rejects them."""
        keys = {"tools": _functions(tools), "add_generation_prompt": generation}
        try:
            return list(self._theirs.render_ids(chat, **keys))
        except ERRORS as error:
            raise ValueError(str(error)) from error

    def _chat(
        self, chat: list[dict[str, Any]], tools: ToolSchemas = (), *, generation: bool = True
    ) -> str:
        return self.decode(self._chat_ids(chat, tools, generation=generation))

    def _called(self, text: str, calls: Sequence[ToolCall], thought: str) -> dict[str, Any]:
        """A chat message of the policy."""
        turn = turn_of(calls, as_text=False)
        for place, call in enumerate(turn["tool_calls"]):
            call["id"] = _call_id(place, call["function"]["name"])
        return {**turn, "content": text, "reasoning_content": thought}

    def _attempts(self, ids: Sequence[int], tools: ToolSchemas, header: Sequence[int]) -> list[Any]:
        """The calls of a turn as the package reads them, or the error if it cannot."""
        keys = {"tools": _functions(tools), "prompt_ids": [*header[-NUM_HEADER_IDS:]]}
        try:
            return list(self._theirs.parse_response([*ids], **keys).tool_calls)
        except ERRORS as error:  # such as a nesting that is too deep
            return [error]

    def _calls(
        self, text: str, ids: Sequence[int], tools: ToolSchemas, prefix_ids: Sequence[int]
    ) -> tuple[ToolCall, ...]:
        return tuple(map(_read, self._attempts(ids, tools, prefix_ids)))

    def _frames_around(
        self, messages: Sequence[Message], tools: ToolSchemas, turn_ids: Sequence[int] = ()
    ) -> Frames:
        end = turn_ids[-1] if self.is_ended(turn_ids) else self.end_id
        senders = senders_of(messages, tools)
        attempts = self._attempts(turn_ids, tools, self._header) if len(turn_ids) else []
        ids = tuple(str(getattr(one, "id", None) or "") for one in attempts)
        return self._frames_of(end, senders, ids)

    def _around(self, roles: Sequence[Role]) -> object:
        return self._frames_of(self.end_id, tuple((role, None) for role in roles), ())

    def _find_frames(self, end: int, senders: Senders, call_ids: tuple[str, ...]) -> Frames:
        """The texts around messages after a turn with this end and these calls."""
        answers = _answers(senders, call_ids)
        return self._cut(lambda blanks: self._between(end, padded(answers, blanks)), len(answers))

    def _between(self, end: int, answers: list[dict[str, Any]]) -> str:
        """The text from this end of a turn to the beginning of the next one."""
        for body in _BODIES:
            turn = [*self.encode(body), end]
            given = self._header, turn, answers
            try:
                found = self._theirs.bridge_to_next_turn(*given, tools=_functions([SAMPLE_TOOL]))
            except ERRORS as error:
                raise self._refusal(f"cannot continue a turn: {error}") from error
            if found is None:  # it would render the conversation again
                continue
            before, ids = [*self._header, *turn], list(found.token_ids)
            if ids[: len(before)] != before:
                raise self._refusal("alters sampled tokens")
            return self.decode(ids[len(before) :])
        roles = [answer["role"] for answer in answers]
        raise self._refusal(f"cannot append {roles} to a turn that ends with {end}")

    def _refusal(self, problem: str) -> ConfigError:
        return ConfigError(f"renderer.name = 'renderers': the family {self._family!r} {problem}")


def _functions(tools: ToolSchemas) -> list[dict[str, Any]] | None:
    return [{"type": "function", "function": dict(tool)} for tool in tools] or None


def _call_id(number: int, name: str | None) -> str:
    return f"functions.{name}:{number}"  # the form of Kimi; the others write none


def _answers(senders: Senders, call_ids: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Placeholders for messages. A result has the id that was sampled for its call."""
    answers: list[dict[str, Any]] = []
    for number, (role, name) in enumerate(senders):
        answer = {"role": role, "content": mark_of(number)}
        if role == "tool":
            own = call_ids[number] if number < len(call_ids) else ""
            answer["tool_call_id"] = own if _CALL_ID.fullmatch(own) else _call_id(number, name)
            answer["name"] = name or "tool"
        answers.append(answer)
    return answers


def _read(attempt: Any) -> ToolCall:
    """A call as the package has read it; its arguments are foreign."""
    problem = str(getattr(attempt, "status", attempt))
    if problem in READ and isinstance(attempt.arguments, dict) and attempt.name:
        try:
            return ToolCall(str(attempt.name), decode(json.dumps(attempt.arguments)))
        except (ForeignError, TypeError, ValueError, RecursionError) as error:
            problem = str(error)
    return malformed(f"{problem.replace('_', ' ')}: {getattr(attempt, 'raw', '')[:200]!r}")
