"""Messages outside, tokens inside: the renderer of the tag protocol.

The policy writes   <think>..</think><search>query</search>
the env answers      <result>\\n..\\n</result>
and so on until      <think>..</think><answer>..</answer> and an end-of-sequence token.

A renderer only appends: the prompt is rendered once by the model's chat template, sampled tokens
are never tokenized again, and tool text is tokenized by itself, so it can neither forge a tag nor
a special token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from agentenv.errors import EnvError
from agentenv.types import Completion, Message, ToolCall

RESULT_OPEN = " <result>\n"
RESULT_CLOSE = "\n</result>"
TAGS = ("think", "result", "answer")

ToolSchemas = Sequence[dict[str, Any]]


class Renderer(Protocol):
    """Turns messages into token ids and sampled tokens into a message."""

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]: ...
    def stop(self, tools: ToolSchemas) -> tuple[str, ...]: ...
    def parse(self, completion: Completion, tools: ToolSchemas) -> Message: ...
    def observation(
        self, messages: Sequence[Message], tools: ToolSchemas, max_tokens: int
    ) -> list[int]: ...


class TagRenderer:
    """The tag protocol of ARPO and Tool-Star.

    `tools` are the JSON schemas that an env gives in `info["tools"]`: a tool called `search`
    owns the tags <search> and </search>, and the text between them becomes its first parameter.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._eos_ids = {tokenizer.eos_token_id}
        specials = [re.escape(token) for token in tokenizer.all_special_tokens]
        self._special = re.compile("|".join(specials)) if specials else None

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """The prompt of the first turn, by the model's chat template."""
        chat = [{"role": message.role, "content": message.content} for message in messages]
        encoded = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return list(encoded["input_ids"])

    def stop(self, tools: ToolSchemas) -> tuple[str, ...]:
        """The strings that end a turn: the closing tag of each tool."""
        return tuple(f"</{tool['name']}>" for tool in tools)

    def parse(self, completion: Completion, tools: ToolSchemas) -> Message:
        """The action as a message. A turn that did not end in a complete call has no calls."""
        ids = completion.token_ids
        if ids and completion.stop is None and ids[-1] in self._eos_ids:
            ids = ids[:-1]
        text = self.decode(ids)
        calls: tuple[ToolCall, ...] = ()
        if completion.stop is not None:
            for tool in tools:
                if completion.stop == f"</{tool['name']}>":
                    calls = self._call(text, tool)
        return Message("assistant", text, calls)

    def observation(
        self, messages: Sequence[Message], tools: ToolSchemas, max_tokens: int
    ) -> list[int]:
        """Token ids of the tool results; each result keeps its head and tail within max_tokens."""
        ids: list[int] = []
        for message in messages:
            if message.role != "tool":
                raise EnvError(
                    f"the tag protocol renders tool results only, the env sent {message.role!r}"
                )
            text = self.encode(self.neutralise(message.content, tools))
            if len(text) > max_tokens:
                marker = self.encode(" ... ")
                room = max(0, max_tokens - len(marker))
                text = text[: room - room // 2] + marker + text[len(text) - room // 2 :]
            ids += self.encode(RESULT_OPEN) + text + self.encode(RESULT_CLOSE)
        return ids

    def neutralise(self, text: str, tools: ToolSchemas) -> str:
        """Break tag strings and special-token strings of tool text with a space."""
        names = [*TAGS, *(str(tool["name"]) for tool in tools)]
        text = re.sub(rf"<(?=/?(?:{'|'.join(map(re.escape, names))})>)", "< ", text)
        if self._special is not None:
            text = self._special.sub(lambda match: match[0][:1] + " " + match[0][1:], text)
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _call(self, text: str, tool: dict[str, Any]) -> tuple[ToolCall, ...]:
        name = tool["name"]
        body, opened = text[: text.rfind(f"</{name}>")], f"<{name}>"
        if opened not in body:
            return ()
        argument = next(iter(tool["parameters"]["properties"]))
        return (ToolCall(name, {argument: body.rpartition(opened)[2].strip()}),)
