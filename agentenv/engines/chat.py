"""Chat messages instead of token ids, for endpoints without token access.

Actor, env, tools and limits are unchanged: they handle lists of ids, and use only the length.
Here the first id of a piece of text identifies the piece, and the others pad it to its length in
tokens: exact for sampled tokens if the endpoint reports its usage, else estimated at four bytes per
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.base.errors import CrashError, EngineError, ForeignError
from agentenv.base.types import MALFORMED_CALL, Completion, Message, SamplingParams, ToolCall
from agentenv.base.untrusted import decode, shortened
from agentenv.contract.env import check_observation
from agentenv.contract.http_client import MalformedReplyError
from agentenv.engines.openai import EndpointEngine, OpenAIConfig, unmeasured
from agentenv.text import renderer
from agentenv.text.chat_model import CHAT_PATH, ChatChoice, ChatReply, ChatUsage, read_chat
from agentenv.text.control_tokens import KNOWN
from agentenv.text.endpoint import Json
from agentenv.text.prompt import count_tagged_call, for_native_calls
from agentenv.text.tags import Shown, check_tags, tag_calls, with_tools

FILL = 0
OURS = "agentenv"  # owner of the models of `agentenv serve`
BYTES_PER_TOKEN = 4


class ChatPiece(Struct, frozen=True, kw_only=True):
    """A text of the conversation: the prompt, a turn of the policy, or results.

    `messages` are those of the prompt or the results, `calls` the native tool calls of a turn as
    the endpoint sent them, `content` its text without thoughts and calls, `thoughts` the thoughts
    that are sent back. `num_prompt_tokens` is the endpoint's count before the turn, 0 if it did not
    report one.
    """

    text: str
    messages: tuple[Message, ...] = ()
    calls: tuple[dict[str, Any], ...] = ()
    content: str = ""
    thoughts: str = ""
    is_turn: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    num_prompt_tokens: int = 0


class Pieces:
    """All pieces of a process by their identifying ids."""

    def __init__(self) -> None:
        self._pieces: list[ChatPiece] = []

    def add(self, piece: ChatPiece, num_tokens: int) -> list[int]:
        """The ids of a piece: one per token, and at least one."""
        self._pieces.append(piece)
        return [len(self._pieces)] + [FILL] * (num_tokens - 1)

    def read(self, ids: Sequence[int]) -> list[ChatPiece]:
        """The pieces of these ids, in order."""
        return [self._pieces[i - 1] for i in ids if i != FILL]


class _Unknown:
    """The tokenizer of an endpoint, as far as TextCodec needs one to break strings."""

    eos_token_id = None
    all_special_tokens = ()


class ChatRenderer:
    """A renderer over pieces. `native`: tools and calls in the endpoint's fields; else the tag
    protocol, whose calls end with a stop string. `break_control_tokens`: in texts of tools and
    users, those of all families, since those of the served model are unknown."""

    tokenizer = None
    control = KNOWN

    def __init__(
        self,
        pieces: Pieces,
        *,
        native: bool,
        tools_in_prompt: Shown = "several",
        break_control_tokens: bool = True,
    ) -> None:
        self.pieces = pieces
        self.native = native
        self.tools_in_prompt: Shown = "none" if native else tools_in_prompt
        self._codec = renderer.TextCodec(
            _Unknown(), control=KNOWN if break_control_tokens else None
        )

    def prompt(self, messages: Sequence[Message], tools: renderer.ToolSchemas) -> list[int]:
        tools = self._codec.shown(tools)
        if self.native:
            messages = for_native_calls(messages, tools)
        messages = with_tools(messages, tools, self.tools_in_prompt)
        text = "\n\n".join(f"{message.role}: {message.content}" for message in messages)
        piece = ChatPiece(text=text, messages=tuple(messages), tools=tuple(map(dict, tools)))
        return self.pieces.add(piece, estimated_tokens(text))

    def check_tools(self, tools: renderer.ToolSchemas) -> None:
        """Raises ConfigError for a tool that the tag protocol cannot call."""
        if not self.native:
            check_tags(tools)

    def stop(self, tools: renderer.ToolSchemas) -> tuple[str, ...]:
        return () if self.native else tuple(f"</{tool['name']}>" for tool in tools)

    def parse(
        self, completion: Completion, tools: renderer.ToolSchemas, prefix_ids: Sequence[int] = ()
    ) -> Message:
        """The action as a message; a truncated turn has no calls."""
        (piece,) = self.pieces.read(completion.token_ids)
        if completion.finish_reason != "stop":
            return Message("assistant", piece.text)
        if self.native:
            calls = tuple(map(native_call, piece.calls))
            return count_tagged_call(Message("assistant", piece.text, calls), tools)
        calls = tag_calls(piece.text, tools, completion.stop or "")
        return Message("assistant", piece.text, calls)

    async def prepare(
        self, messages: Sequence[Message], tools: renderer.ToolSchemas, max_tokens: int
    ) -> None:
        """Do nothing: there is no tokenization."""

    def observation(
        self,
        messages: Sequence[Message],
        tools: renderer.ToolSchemas,
        max_tokens: int,
        turn_ids: Sequence[int] = (),
    ) -> list[int]:
        """The ids of the results; a longer text keeps its head and tail within about
        `max_tokens`."""
        check_observation(messages)
        self._check_answered(messages, turn_ids)
        most = max_tokens * renderer.MAX_CHARS_A_TOKEN
        texts = (shortened(one.content, most, renderer.CUT_MARKER) for one in messages)
        kept = tuple(
            msgspec.structs.replace(one, content=_cut(self.neutralise(text, tools), max_tokens))
            for one, text in zip(messages, texts, strict=True)
        )
        text = _results(kept) + "".join(f"\n\nuser: {one}\n\n" for one in _texts_of_user(kept))
        return self.pieces.add(ChatPiece(text=text, messages=kept), estimated_tokens(text))

    def _check_answered(self, messages: Sequence[Message], turn_ids: Sequence[int]) -> None:
        """Raises CrashError for a call without a result, which the endpoint would reject."""
        num_calls = sum(len(piece.calls) for piece in self.pieces.read(turn_ids))
        num_results = sum(message.role == "tool" for message in messages)
        if self.native and turn_ids and num_results != num_calls:
            raise CrashError(
                f"the environment returned {num_results} results for {num_calls} calls"
            )

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(piece.text for piece in self.pieces.read(token_ids))

    def encode(self, text: str) -> list[int]:
        return self.pieces.add(ChatPiece(text=text), estimated_tokens(text))

    def neutralise(self, text: str, tools: renderer.ToolSchemas) -> str:
        """Break tags and control tokens."""
        return self._codec.neutralise(text, tools)

    def num_prompt_tokens(self, action_ids: Sequence[int]) -> int:
        """The endpoint's count of tokens before a turn, 0 if it did not report one."""
        pieces = self.pieces.read(action_ids)
        return pieces[0].num_prompt_tokens if pieces else 0


def _results(messages: Sequence[Message]) -> str:
    """The tool results in the tag protocol."""
    results = (one.content for one in messages if one.role == "tool")
    return "".join(renderer.RESULT_OPEN + text + renderer.RESULT_CLOSE for text in results)


def _shown_results(piece: ChatPiece) -> str:
    """A piece without its user messages."""
    return _results(piece.messages) if piece.messages else piece.text


def _texts_of_user(messages: Sequence[Message]) -> list[str]:
    """The texts of user messages."""
    return [one.content for one in messages if one.role == "user"]


def native_call(raw: dict[str, Any]) -> ToolCall:
    """A call in the endpoint's form; an invalid one becomes MALFORMED_CALL with the problem."""
    function = raw.get("function") or {}
    name, text = function.get("name"), function.get("arguments")
    try:
        arguments = decode(text) if isinstance(text, str) and text else text or {}
    except ForeignError as error:
        return ToolCall(MALFORMED_CALL, {"problem": f"the arguments are not valid JSON ({error})"})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(MALFORMED_CALL, {"problem": "expected a name and an object of arguments"})
    return ToolCall(name, arguments)


def estimated_tokens(text: str) -> int:
    """A quarter of the bytes, at least 1."""
    return max(1, len(text.encode(errors="replace")) // BYTES_PER_TOKEN)


def _cut(text: str, max_tokens: int) -> str:
    data, room = text.encode(errors="replace"), max_tokens * BYTES_PER_TOKEN
    if len(data) <= room:
        return text
    half = max(0, room - len(renderer.CUT_MARKER)) // 2
    head, tail = data[:half], data[len(data) - half :]
    return head.decode(errors="ignore") + renderer.CUT_MARKER + tail.decode(errors="ignore")


ENDS = {"stop", "length", "tool_calls", "function_call"}
# non-standard sampling parameters, sent only when they have an effect
EXTRA = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
KEEP_STOP = {"vllm": "include_stop_str_in_output", "sglang": "no_stop_trim"}


class ChatEngine(EndpointEngine):
    """An engine whose ids are those of `pieces`. The length of a turn is the endpoint's count of
    sampled tokens; log-probs and entropies are NaN.

    A refusal in the text is a normal turn; one by a content filter is an EngineError, since the
    model did not answer.
    """

    def __init__(self, config: OpenAIConfig, pieces: Pieces, *, native: bool) -> None:
        super().__init__(config)
        self.pieces = pieces
        self.native = native

    async def start(self) -> None:
        """Connect. Raises ConfigError. `agentenv serve` parses and renders calls itself."""
        await super().start()
        self.native = self.native or self.is_ours

    @property
    def is_ours(self) -> bool:
        """Whether the endpoint is `agentenv serve`, which accepts 64-bit seeds and returns turns as
        they were sampled; they are sent back unchanged."""
        return self.endpoint.owner == OURS

    async def _turn(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        body = self._body(self.pieces.read(prompt_ids), sampling)
        if self.is_ours:
            body |= {"raw": True, "seed": sampling.seed, "prompt_cache_key": session}
        reply = await self.endpoint.send(CHAT_PATH, body, _ended, f"{sampling.seed}/{session}")
        return self._completion(reply, sampling)

    # requests

    def _body(self, pieces: Sequence[ChatPiece], sampling: SamplingParams) -> Json:
        config = self.config
        body: Json = {
            "model": self.endpoint.model,
            "messages": self._messages(pieces),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            config.max_tokens_key: sampling.max_tokens,
        }
        body |= {k: getattr(sampling, k) for k, off in EXTRA.items() if getattr(sampling, k) != off}
        if sampling.seed is not None:
            body["seed"] = sampling.seed % 2**31
        if sampling.stop:
            body["stop"] = list(sampling.stop)
            if self.endpoint.known:
                body[KEEP_STOP[self.endpoint.owner]] = True
        if self.native:
            tools = [{"type": "function", "function": tool} for tool in pieces[0].tools]
            body |= {"tools": tools} if tools else {}
        elif body["messages"][-1]["role"] == "assistant" and self.way() == "continue":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body | config.extra_body

    def way(self) -> str:
        """Continuation of the tag protocol after a result."""
        chosen = self.config.continuation
        if chosen != "auto":
            return chosen
        return "continue" if self.endpoint.known else "turns"

    def _messages(self, pieces: Sequence[ChatPiece]) -> list[Json]:
        """The conversation in the API's form."""
        chat: list[Json] = [{"role": m.role, "content": m.content} for m in pieces[0].messages]
        rest = pieces[1:]
        if self.native:
            return chat + _native_messages(rest)
        if self.way() == "turns":
            for piece in rest:
                if piece.is_turn:
                    chat.append({"role": "assistant", "content": piece.text.strip()})
                else:
                    texts = [_shown_results(piece).strip(), *_texts_of_user(piece.messages)]
                    chat.append({"role": "user", "content": "\n\n".join(filter(None, texts))})
            return chat
        more = {"prefix": True} if self.way() == "prefix" else {}
        text = ""  # of the policy's turns and results since the last user message
        for piece in rest:
            text += _shown_results(piece)
            if texts := _texts_of_user(piece.messages):
                chat.append({"role": "assistant", "content": text})
                chat += ({"role": "user", "content": one} for one in texts)
                text = ""
        return [*chat, {"role": "assistant", "content": text, **more}] if text else chat

    # replies

    def _completion(self, reply: ChatReply, sampling: SamplingParams) -> Completion:
        """The reply as a turn. Raises EngineError for an unknown finish reason."""
        choice, usage = reply.choices[0], reply.usage or ChatUsage()
        message, reason = choice.message, choice.finish_reason
        if reason not in ENDS:
            ended = EngineError(f"{self.endpoint.api.name} ended a turn with {reason!r}")
            ended.is_final = True
            raise ended
        calls: tuple[Json, ...] = tuple(map(msgspec.to_builtins, message.tool_calls or ()))
        for number, call in enumerate(calls):
            call.update(id=call["id"] or f"call_{number}", type="function")
        content = message.content or message.refusal or ""
        stop = self._stop(choice, content, sampling) if reason == "stop" else None
        if stop is not None and not content.endswith(stop):
            content += stop
        thoughts = message.reasoning_content or message.reasoning or ""
        text = f"<think>\n{thoughts}\n</think>\n{content}" if thoughts else content
        text += "".join(_shown(call) for call in calls)
        text = text if message.raw is None else message.raw
        num_tokens = usage.completion_tokens or estimated_tokens(text)
        num_prompt = usage.prompt_tokens or 0
        self.endpoint.counts["sampled_tokens"] += num_tokens
        self.endpoint.counts["prompt_tokens"] += num_prompt
        piece = ChatPiece(
            text=text,
            content=content,
            thoughts=thoughts if self.is_ours else "",
            calls=calls,
            is_turn=True,
            num_prompt_tokens=num_prompt,
        )
        ids = self.pieces.add(piece, max(1, num_tokens))
        return unmeasured(ids, "length" if reason == "length" else "stop", stop)

    def _stop(self, choice: ChatChoice, content: str, sampling: SamplingParams) -> str | None:
        """The stop string that ended the turn. If the endpoint neither reports it nor includes it
        in the text, it is the closing tag of an unclosed tag."""
        for reason in (choice.stop_reason, choice.matched_stop):
            if isinstance(reason, str) and reason in sampling.stop:
                return reason
        for stop in sampling.stop:
            if content.endswith(stop):
                return stop
        if self.endpoint.known:
            return None
        opened = {stop: content.rfind(stop.replace("</", "<")) for stop in sampling.stop}
        last = max(opened, key=opened.__getitem__, default="")
        if not last or opened[last] < 0 or last in content[opened[last] :]:
            return None
        return last


def _ended(reply: Any) -> ChatReply:
    """The reply, after checking its finish reason. Raises MalformedReplyError."""
    found = read_chat(reply)
    if found.choices[0].finish_reason is None:
        raise MalformedReplyError("not a chat completion: finish_reason is missing")
    return found


def _native_messages(pieces: Sequence[ChatPiece]) -> list[Json]:
    """Turns with their calls, results and user messages."""
    chat: list[Json] = []
    calls: tuple[Json, ...] = ()
    for piece in pieces:
        if piece.is_turn:
            calls = piece.calls
            content = piece.content or (None if calls else "")
            more: Json = {"tool_calls": list(calls)} if calls else {}
            more |= {"reasoning_content": piece.thoughts} if piece.thoughts else {}
            chat.append({"role": "assistant", "content": content, **more})
            continue
        for call, result in zip(calls, piece.messages, strict=False):
            chat.append({"role": "tool", "tool_call_id": call["id"], "content": result.content})
        chat += ({"role": "user", "content": one} for one in _texts_of_user(piece.messages))
    return chat


def _shown(call: Json) -> str:
    function = call.get("function") or {}
    return f"\n<tool_call>\n{function.get('name')} {function.get('arguments')}\n</tool_call>"
