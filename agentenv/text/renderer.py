"""Renderers convert messages to tokens: their interface, and the renderer of the tag protocol.

The policy writes   <think>..</think><search>query</search>
the env answers      <result>\\n..\\n</result>
and so on until      <think>..</think><answer>..</answer> and an end-of-sequence token.

A user message that answers a turn is rendered by the chat template; the next turn begins with the
header of an answer.

A renderer only appends: the prompt is rendered once by the model's chat template, sampled tokens
are never tokenized again, and texts of tools and users are tokenized separately, so that they
cannot forge tags or special tokens. `agentenv/text/native.py` is the renderer of native tool calls.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache, cached_property, lru_cache
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Struct

from agentenv.base.config import about
from agentenv.base.errors import ConfigError, DataError, reported_as
from agentenv.base.model_files import template_end
from agentenv.base.types import Completion, Message, Role, ToolCall
from agentenv.base.untrusted import decode, shortened
from agentenv.contract.env import check_observation, tally
from agentenv.text.call_syntax import THOUGHT_OPEN
from agentenv.text.control_tokens import BROKEN, broken, control_tokens, pattern_of
from agentenv.text.encoder import Encoder, EncoderLostError, decoder, fast_tokenizer
from agentenv.text.prompt import PromptConfig
from agentenv.text.tags import TAGS, Shown, check_tags, tag_calls, with_tools, written_arguments

RESULT_OPEN = " <result>\n"
RESULT_CLOSE = "\n</result>"
CUT_MARKER = " ... "
MAX_CHARS_A_TOKEN = 16  # upper bound of the average, in head and tail of a text
NUM_KNOWN_TAILS = 1024  # cached tails of prefixes: most turns begin after the same few tokens
NUM_KNOWN_ROLES = 1024  # cached answers whether the chat template writes messages of these roles
NUM_TAIL_IDS = 8  # of a prefix; enough for <think> and blanks in any vocabulary

FEW_CHARS = 200  # a shorter text is encoded on the loop, which is faster than sending it
MAX_KNOWN_CHARS = 4_000_000  # of cached texts, since branches of a tree read equal texts

SYSTEM_MARK = "[system message]"
SYSTEM_MOVED = (
    "the chat template rejects or omits a system message where it stands; it becomes a message of "
    f"the user that begins with {SYSTEM_MARK}"
)
NO_USER = "the chat template cannot write a user's message after an"

ToolSchemas = Sequence[dict[str, Any]]
Known = tuple[str, tuple[str, ...], int]  # a text, the names of tools, and the tokens it may have


class RendererPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="name"):
    """The keys of a renderer."""


class TagsConfig(RendererPart, frozen=True, kw_only=True, tag="tags"):
    """The tag protocol of ARPO: <think> <search> <python> <result> <answer>."""

    tools_in_prompt: Annotated[
        Shown,
        about(
            "whether the prompt describes the tools whose tags it does not show yet, and their "
            "call format: 'several', if one of them has several parameters, or if the model is a "
            "chat endpoint, which was not trained on the tags; 'all', always; 'none', never"
        ),
    ] = "several"


class Renderer(Protocol):
    """Turns messages into token ids and sampled tokens into a message."""

    tokenizer: Any

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]: ...
    def stop(self, tools: ToolSchemas) -> tuple[str, ...]: ...
    def parse(
        self, completion: Completion, tools: ToolSchemas, prefix_ids: Sequence[int] = ()
    ) -> Message:
        """The action as a message. If the prompt in `prefix_ids` ends with an open <think>, the
        content starts with it, so that a format check sees it."""

    def observation(
        self,
        messages: Sequence[Message],
        tools: ToolSchemas,
        max_tokens: int,
        turn_ids: Sequence[int] = (),
    ) -> Sequence[int]:
        """The token ids between two turns: tool results and user messages. `turn_ids` are those of
        the turn that they answer; if its end-of-sequence token is missing but required, it comes
        first. Raises CrashError for messages of other roles."""

    async def prepare(
        self, messages: Sequence[Message], tools: ToolSchemas, max_tokens: int
    ) -> None:
        """Do the slow part of `observation` with the same arguments off the event loop."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def check_tools(self, tools: ToolSchemas) -> None:
        """Raises ConfigError, with the remedy, for a tool that the policy could not call."""

    def neutralise(self, text: str, tools: ToolSchemas) -> str:
        """Untrusted text, changed so that it cannot forge the protocol's tags and tokens."""


class TextCodec:
    """Text to ids and back, the base of the renderers. In untrusted text it breaks special tokens
    and the tags of tools, of the protocol, and of `own_tags`."""

    own_tags: tuple[str, ...] = ()
    prompt_config = PromptConfig()

    def __init__(self, tokenizer: Any, eos_ids: Collection[int] = (), control: Any = None) -> None:
        """`control`: a pattern of control tokens, for a tokenizer that is unknown."""
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids) or frozenset({tokenizer.eos_token_id})
        self.control_tokens = control_tokens(tokenizer, self.eos_ids)
        self.special_ids = frozenset(
            (*self.control_tokens, *getattr(tokenizer, "all_special_ids", ()))
        )
        texts = {*self.control_tokens.values(), *map(str, tokenizer.all_special_tokens)} - {""}
        self.control = control or pattern_of(texts)
        self.is_probe = False  # whether the texts are those of a check, and not counted
        fast = fast_tokenizer(tokenizer)  # without the overhead of transformers
        is_bare = fast is not None and fast.truncation is None and fast.padding is None
        self._fast = fast if is_bare else None
        self.encoder: Encoder | None = None  # encodes long texts off the event loop
        self.num_results = Counter[str]()  # by tool; equal ones count once while cached
        self._is_written = lru_cache(NUM_KNOWN_ROLES)(self._writes)
        self._known: OrderedDict[Known, array[int]] = OrderedDict()  # least recently used first
        self._num_known_chars = 0
        self._opens = lru_cache(NUM_KNOWN_TAILS)(self._opens_thought)

    @cached_property
    def num_words(self) -> float:
        """The first id beyond the tokenizer's; a model with a padded vocabulary has more."""
        return 1 + max(getattr(self.tokenizer, "get_vocab", dict)().values(), default=math.inf)

    def encode(self, text: str) -> list[int]:
        """Token ids of trusted text, special tokens included."""
        if self._fast is not None:
            # `encode` also computes the offset of each token, which doubles its time
            ids: list[int] = self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def encode_foreign(
        self, text: str, tools: ToolSchemas, max_tokens: int, source: str | None = None
    ) -> array[int]:
        """Token ids of untrusted text, int32: neutralised, without control tokens, and at most
        max_tokens, with head and tail kept; `source` is the tool. The array is shared: do not
        modify it."""
        key = _key(text, tools, max_tokens)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        ids = array("i", self.encode(self.neutralise(key[0], tools)))
        return self._fitted(key, ids, source)

    async def prepare(
        self, messages: Sequence[Message], tools: ToolSchemas, max_tokens: int
    ) -> None:
        """Encode the texts of an observation in the process of `encoder`, if there is one."""
        if self.encoder is None:
            return
        for message, text in zip(messages, self.texts(messages, tools), strict=True):
            key = _key(text, tools, max_tokens)
            if len(text) < FEW_CHARS or key in self._known or self.encoder.rests:
                continue
            with suppress(EncoderLostError):  # then the loop encodes it
                ids = await self.encoder.encode(self.neutralise(key[0], tools))
                self._fitted(key, ids, message.name)

    def is_ended(self, turn_ids: Sequence[int]) -> bool:
        """Whether a turn has its end-of-sequence token."""
        return bool(len(turn_ids)) and turn_ids[-1] in self.eos_ids

    def texts(self, messages: Sequence[Message], tools: ToolSchemas) -> list[str]:
        """The texts that `observation` passes to `encode_foreign`."""
        return [message.content for message in messages]

    def _fitted(self, key: Known, ids: array[int], source: str | None) -> array[int]:
        """The truncated ids of a text without control tokens, which are cached."""
        text, max_tokens = key[0], key[2]
        if forged := self.special_ids.intersection(ids):  # the tokenizer normalizes look-alikes
            problem = "a look-alike is left out of the text of a tool or user"
            shown = f"{problem}: of {self.decode([*forged])!r}"
            tally(BROKEN).add(int(not self.is_probe), shown)
            ids = array("i", [token for token in ids if token not in forged])
        is_cut = len(ids) > max_tokens or len(text) > max_tokens * MAX_CHARS_A_TOKEN
        tool = source or "the environment"
        self.num_results[tool] += not self.is_probe
        limit = f"limits.max_tool_result_tokens = {max_tokens}"
        shown = f"a result of {tool} exceeds {limit}: raise it, or return less"
        tally(f"num_results_cut/{tool}").add(is_cut and not self.is_probe, shown)
        if len(ids) > max_tokens:
            marker = array("i", self.encode(CUT_MARKER))
            room = max(0, max_tokens - len(marker))
            ids = ids[: room - room // 2] + marker + ids[len(ids) - room // 2 :]
        self._known[key] = ids
        self._num_known_chars += len(text)
        while self._num_known_chars > MAX_KNOWN_CHARS and len(self._known) > 1:
            self._num_known_chars -= len(self._known.popitem(last=False)[0][0])
        return ids

    def neutralise(self, text: str, tools: ToolSchemas) -> str:
        """Insert a space into the strings of tags and of control tokens."""
        if "<" in text:
            tags = (*TAGS, *self.own_tags, *(str(tool["name"]) for tool in tools))
            text = re.sub(rf"<(?=/?(?:{'|'.join(map(re.escape, tags))})>)", "< ", text)
        return broken(self.control, text, counted=not self.is_probe)

    def shown(self, tools: ToolSchemas) -> ToolSchemas:
        """Tools, or calls, as a prompt shows them: a server may have written control tokens into
        descriptions and arguments."""
        text = msgspec.json.encode(tools).decode()
        found = broken(self.control, text, counted=True)
        return tools if found == text else decode(found)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return self._read(token_ids)

    @cached_property
    def _read(self) -> Callable[[Sequence[int]], str]:
        return decoder(self.tokenizer)

    def written(self, completion: Completion, prefix_ids: Sequence[int]) -> str:
        """The text of a turn: without its end-of-sequence token, with the <think> that the prompt
        may have opened.
        """
        ids = completion.token_ids
        if ids and completion.stop is None and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        return (THOUGHT_OPEN + "\n" if self.opens_thought(prefix_ids) else "") + self.decode(ids)

    def opens_thought(self, prefix_ids: Sequence[int]) -> bool:
        """Whether the turn after these ids begins within a thought."""
        return bool(prefix_ids) and self._opens(tuple(prefix_ids[-NUM_TAIL_IDS:]))

    @property
    def style(self) -> str:
        """The format of its calls (agentenv/text/call_syntax.py)."""
        return "tags"

    @cached_property
    def end_id(self) -> int:
        """The token with which the chat template, or else the tokenizer, ends a policy turn, if
        generation stops there, else one at which it stops."""
        found: int | None = None
        if self.prompt_config.apply_chat_template:
            kwargs = self.prompt_config.chat_template_kwargs
            found = template_end(self.tokenizer, self.eos_ids, kwargs)
        found = self.tokenizer.eos_token_id if found is None else found
        return found if found in self.eos_ids else min(self.eos_ids)

    def _opens_thought(self, tail_ids: tuple[int, ...]) -> bool:
        return self.decode(tail_ids).rstrip().endswith(THOUGHT_OPEN)

    def placed(self, messages: Sequence[Message], *, after_turn: bool) -> Sequence[Message]:
        """A system message becomes a marked one of the user, and messages of one role in turn are
        joined, if the chat template rejects or omits them where they stand. Tool results come
        first."""
        if after_turn and len(messages) > 1:
            messages = sorted(messages, key=lambda message: message.role != "tool")
        if self._is_written(tuple([message.role for message in messages]), after_turn):
            return messages
        users = _as_users(messages, from_place=int(not after_turn))
        for found in (users, _joined(users), _joined(_as_users(messages))):
            if self._is_written(tuple([message.role for message in found]), after_turn):
                number = _num_system(messages) - _num_system(found)
                tally("program/system_as_user").add(number, SYSTEM_MOVED)
                return found
        return messages

    def _writes(self, roles: Sequence[Role], after_turn: bool) -> bool:
        """Whether the template writes the texts of messages of these roles, in their order."""
        if after_turn:
            try:
                self._around(roles)
            except ConfigError:
                return False
            return True
        texts = [f"qZ{place}{role}Zq" for place, role in enumerate(roles)]
        chat = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        try:
            rest = self._chat(chat)
        except template_errors():
            return False
        for text in texts:
            _, found, rest = rest.partition(text)
            if not found:
                return False
        return True

    def _around(self, roles: Sequence[Role]) -> object:
        """The texts around messages that answer a turn. Raises ConfigError."""
        raise NotImplementedError

    def _chat(
        self, chat: list[dict[str, Any]], tools: ToolSchemas = (), *, generation: bool = True
    ) -> str:
        """The text of messages, up to the next turn if `generation`. Raises template_errors()."""
        config = self.prompt_config
        if not config.apply_chat_template:
            return "\n\n".join(message["content"] for message in chat)
        keys = {"tools": functions(tools), "add_generation_prompt": generation, "tokenize": False}
        return str(self.tokenizer.apply_chat_template(chat, **keys, **config.chat_template_kwargs))

    def _prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> list[int]:
        """The ids of a prompt. Raises DataError for messages that the template rejects wherever
        they stand."""
        messages = self.placed(messages, after_turn=False)
        chat = [{"role": message.role, "content": message.content} for message in messages]
        problem = f"the chat template rejects a prompt of {[turn['role'] for turn in chat]}"
        with reported_as(DataError, problem, *template_errors()):
            return self._chat_ids(chat, tools)

    def _chat_ids(self, chat: list[dict[str, Any]], tools: ToolSchemas = ()) -> list[int]:
        """The ids of messages without a duplicate leading begin-of-sequence token, which a template
        may add."""
        ids = self.encode(self._chat(chat, tools))
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


class ContextRenderer(TextCodec, Renderer):
    """A renderer that can write whole contexts, including turns that were not sampled."""

    def turn(self, message: Message, tools: ToolSchemas) -> list[int]:
        """Token ids of a turn of the policy. Raises ConfigError."""
        raise NotImplementedError


class TagRenderer(ContextRenderer):
    """The tag protocol of ARPO and Tool-Star.

    `tools` are the JSON schemas of an env's `info["tools"]`: a tool named `search` has the tags
    <search> and </search>, and the text between them is its first parameter or a JSON object
    (`agentenv/text/tags.py`).
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: PromptConfig | None = None,
        eos_ids: Collection[int] = (),
        tools_in_prompt: Shown = "several",
    ) -> None:
        super().__init__(tokenizer, eos_ids)
        self.prompt_config = prompt or PromptConfig()
        self.tools_in_prompt = tools_in_prompt
        self._frame: tuple[array[int], array[int]] | None = None  # around results, encoded once
        self._frames_of = cache(self._find_frames)
        if (
            self.prompt_config.apply_chat_template
            and getattr(tokenizer, "chat_template", "") is None
        ):
            raise ConfigError(
                "prompt.apply_chat_template: the tokenizer has no chat template; set it to false "
                "to train a base model on plain text"
            )

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """The prompt of the first turn, by the model's chat template or as plain text."""
        messages = with_tools(messages, self.shown(tools), self.tools_in_prompt)
        if not self.prompt_config.apply_chat_template:
            text = "\n\n".join(message.content for message in messages) + "\n"
            return list(self.tokenizer.encode(text, add_special_tokens=True))
        return self._prompt(messages)

    def calling(self, text: str, calls: Sequence[ToolCall], tools: ToolSchemas = ()) -> str:
        """A turn with `text` and the call. Raises ConfigError for several calls."""
        if len(calls) > 1:
            raise ConfigError("the tag protocol allows one call per turn; a message has several")
        for call in calls:
            tool = next((one for one in tools if one.get("name") == call.name), None)
            text += f"<{call.name}>{written_arguments(call.arguments, tool)}</{call.name}>"
        return text

    def turn(self, message: Message, tools: ToolSchemas) -> list[int]:
        """Ids of a turn that was not sampled here. Raises ConfigError."""
        ids = self.encode(self.calling(message.content, message.tool_calls, tools))
        return ids if message.tool_calls else [*ids, self.end_id]

    def check_tools(self, tools: ToolSchemas) -> None:
        """Raises ConfigError for a tool whose name is not a valid, unused tag."""
        check_tags(tools)

    def stop(self, tools: ToolSchemas) -> tuple[str, ...]:
        """The strings that end a turn: the closing tag of each tool."""
        return tuple(f"</{tool['name']}>" for tool in tools)

    def parse(
        self, completion: Completion, tools: ToolSchemas, prefix_ids: Sequence[int] = ()
    ) -> Message:
        """The action as a message. A turn that does not end with a complete call has no calls."""
        text = self.written(completion, prefix_ids)
        return Message("assistant", text, tag_calls(text, tools, completion.stop or ""))

    def observation(
        self,
        messages: Sequence[Message],
        tools: ToolSchemas,
        max_tokens: int,
        turn_ids: Sequence[int] = (),
    ) -> array[int]:
        """Results continue the calling turn; user messages end it. A longer text keeps its head and
        tail within max_tokens."""
        if self._frame is None:
            opened, closed = self.encode(RESULT_OPEN), self.encode(RESULT_CLOSE)
            self._frame = array("i", opened), array("i", closed)
        ids = array("i")
        check_observation(messages, ("user", "system"))
        results = [message for message in messages if message.role == "tool"]
        for message in results:
            ids += self._frame[0]
            ids += self.encode_foreign(message.content, tools, max_tokens, message.name)
            ids += self._frame[1]
        users = messages[len(results) :]
        if users:
            if results or (turn_ids and not self.is_ended(turn_ids)):
                ids.append(self.end_id)
            first, *frames = self._frames_of(tuple([message.role for message in users]))
            ids.extend(first)
            for message, frame in zip(users, frames, strict=True):
                ids += self.encode_foreign(message.content, tools, max_tokens)
                ids.extend(frame)
        return ids

    def _find_frames(self, roles: tuple[Role, ...]) -> list[list[int]]:
        """The token ids around messages of these roles: before the first, between them and after
        the last."""
        return [self.encode(text) for text in self._texts_around(roles)]

    def _around(self, roles: Sequence[Role]) -> object:
        return self._frames_of(tuple([role for role in roles if role != "tool"]))

    def _texts_around(self, roles: Sequence[Role]) -> list[str]:
        if not self.prompt_config.apply_chat_template:
            return ["\n\n"] * len(roles) + ["\n"]
        marks = [f"qZ{place}userZq" for place in range(len(roles))]
        turns = [("user", "qQ"), ("assistant", "qTurnq"), *zip(roles, marks, strict=True)]
        end = self.decode([self.end_id])
        problem = f"{NO_USER} answer: it rejects {', '.join(roles)}"
        with reported_as(ConfigError, problem, *template_errors()):
            text = self._chat([{"role": role, "content": content} for role, content in turns])
        rest = text.rpartition("qTurnq")[2]
        texts = re.split("|".join(marks), rest) if marks else [rest]
        if len(texts) != len(roles) + 1 or not texts[0].startswith(end):
            raise ConfigError(f"{NO_USER} answer that ends with {end!r}; it writes {rest[:40]!r}")
        return [texts[0].removeprefix(end), *texts[1:]]


def _num_system(messages: Sequence[Message]) -> int:
    return sum(message.role == "system" for message in messages)


def _as_users(messages: Sequence[Message], from_place: int = 0) -> list[Message]:
    """The messages, with marked ones of the user for the system's, from a place on."""
    return [
        Message("user", f"{SYSTEM_MARK}\n{message.content}")
        if message.role == "system" and place >= from_place
        else message
        for place, message in enumerate(messages)
    ]


def _joined(messages: Sequence[Message]) -> list[Message]:
    """The messages, with one for those of the user, or of the system, in turn."""
    found: list[Message] = []
    for message in messages:
        if found and message.role == found[-1].role != "tool":
            text = f"{found[-1].content}\n\n{message.content}"
            found[-1] = Message(message.role, text)
        else:
            found.append(message)
    return found


def functions(tools: ToolSchemas) -> list[dict[str, Any]] | None:
    """The tools as chat templates take them; None for none."""
    return [{"type": "function", "function": dict(tool)} for tool in tools] or None


def template_errors() -> tuple[type[Exception], ...]:
    """The errors of a chat template that rejects its messages."""
    from jinja2 import TemplateError  # slow to load

    return (TemplateError, TypeError, ValueError, LookupError, AttributeError)


def _key(text: str, tools: ToolSchemas, max_tokens: int) -> Known:
    """Far longer texts are shortened, so that their processing on the loop takes a bounded time."""
    text = shortened(text, max_tokens * MAX_CHARS_A_TOKEN, CUT_MARKER)
    return text, tuple([str(tool["name"]) for tool in tools]), max_tokens
