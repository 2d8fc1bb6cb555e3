"""Chat messages in place of token ids, for endpoints that give no tokens.

Actor, env, tools and limits stay as they are: they see lists of ids, whose length counts. Here the
first id of a piece of text names the piece and the others only fill its length in tokens: exact
for what was sampled, where the endpoint tells its usage, else estimated at four bytes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.renderer import RESULT_CLOSE, RESULT_OPEN, TextCodec, ToolSchemas, tagged_call
from agentenv.types import MALFORMED_CALL, Completion, Message, ToolCall

FILL = 0
BYTES_PER_TOKEN = 4
CUT_MARKER = " ... "
# what looks like structure to most models, since nobody says what does to this one
MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|start_header_id|>",
           "<|end_header_id|>", "<tool_call>", "</tool_call>")  # fmt: skip


class Piece(Struct, frozen=True, kw_only=True):
    """A text of the conversation: the prompt, a turn of the policy, or results.

    `messages` are those of the prompt or the results, `calls` the native tool calls of a turn as
    the endpoint sent them, `content` its text without thoughts and calls. `num_prompt_tokens` is
    what the endpoint counted before the turn, 0 if it did not say.
    """

    text: str
    messages: tuple[Message, ...] = ()
    calls: tuple[dict[str, Any], ...] = ()
    content: str = ""
    is_turn: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    num_prompt_tokens: int = 0


class Pieces:
    """All pieces of a process by the id that names them."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def add(self, piece: Piece, num_tokens: int) -> list[int]:
        """The ids of a piece, as many as it has tokens and one at least."""
        self._pieces.append(piece)
        return [len(self._pieces)] + [FILL] * (num_tokens - 1)

    def read(self, ids: Sequence[int]) -> list[Piece]:
        """The pieces that ids name, in order."""
        return [self._pieces[i - 1] for i in ids if i != FILL]


class _Markers:
    """What TextCodec needs of a tokenizer to break strings that could forge."""

    eos_token_id = None
    all_special_tokens = MARKERS


class ChatRenderer:
    """Renderer over pieces. `native`: tools and calls by the endpoint's own fields; else the tag
    protocol, whose calls end at a stop string."""

    tokenizer = None

    def __init__(self, pieces: Pieces, *, native: bool) -> None:
        self.pieces = pieces
        self.native = native
        self._codec = TextCodec(_Markers())

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]:
        text = "\n\n".join(f"{message.role}: {message.content}" for message in messages)
        piece = Piece(text=text, messages=tuple(messages), tools=tuple(map(dict, tools)))
        return self.pieces.add(piece, estimated_tokens(text))

    def stop(self, tools: ToolSchemas) -> tuple[str, ...]:
        return () if self.native else tuple(f"</{tool['name']}>" for tool in tools)

    def parse(
        self, completion: Completion, tools: ToolSchemas, prefix_ids: Sequence[int] = ()
    ) -> Message:
        """The action as a message; a turn that was cut off has no calls."""
        (piece,) = self.pieces.read(completion.token_ids)
        if completion.finish_reason != "stop":
            return Message("assistant", piece.text)
        if self.native:
            return Message("assistant", piece.text, tuple(map(native_call, piece.calls)))
        for tool in tools:
            if completion.stop == f"</{tool['name']}>":
                return Message("assistant", piece.text, tagged_call(piece.text, tool))
        return Message("assistant", piece.text)

    def observation(
        self, messages: Sequence[Message], tools: ToolSchemas, max_tokens: int
    ) -> list[int]:
        """Each text keeps its head and tail within about `max_tokens`."""
        kept = tuple(
            msgspec.structs.replace(
                one, content=_cut(self.neutralise(one.content, tools), max_tokens)
            )
            for one in messages
        )
        text = "".join(RESULT_OPEN + one.content + RESULT_CLOSE for one in kept)
        return self.pieces.add(Piece(text=text, messages=kept), estimated_tokens(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(piece.text for piece in self.pieces.read(token_ids))

    def encode(self, text: str) -> list[int]:
        return self.pieces.add(Piece(text=text), estimated_tokens(text))

    def neutralise(self, text: str, tools: ToolSchemas) -> str:
        """Break tags, and what is structure to most models."""
        return self._codec.neutralise(text, [str(tool["name"]) for tool in tools])

    def num_prompt_tokens(self, action_ids: Sequence[int]) -> int:
        """Tokens before a turn as the endpoint counted them, 0 if it did not."""
        pieces = self.pieces.read(action_ids)
        return pieces[0].num_prompt_tokens if pieces else 0


def native_call(raw: dict[str, Any]) -> ToolCall:
    """A call as an endpoint writes it; one that cannot be read says what is wrong."""
    function = raw.get("function") or {}
    name, text = function.get("name"), function.get("arguments")
    try:
        arguments = msgspec.json.decode(text) if isinstance(text, str) and text else text or {}
    except msgspec.DecodeError as error:
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
    half = max(0, room - len(CUT_MARKER)) // 2
    head, tail = data[:half], data[len(data) - half :]
    return head.decode(errors="ignore") + CUT_MARKER + tail.decode(errors="ignore")
