"""Conversion of conversations into token ids and masks, with the renderer of rollouts.

    prompt      the system and user messages before the first answer: the prompt of an episode
    answer      the policy's text, trained; then its end-of-turn token, unless a call of the
                tag protocol ends the turn
    tool result rendered as an environment's, never trained
    user again  rendered as a user's message from an environment, never trained

In the tag protocol, an answer of a dataset may contain the whole chain with <result>..</result>. It
is split there, so that the results count as the environment's and not the policy's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from agentenv.base.errors import ConfigError, CrashError, DataError, reported_as
from agentenv.base.model_files import GENERATION
from agentenv.base.types import SYSTEM_KEY, Completion, Message, Task
from agentenv.contract.instruction import Instruction
from agentenv.data.rows import repaired
from agentenv.learners.trees.encoded_tree import EncodedTree, encode_sequence
from agentenv.text.call_syntax import CALL_TEXTS, THOUGHT_OPEN
from agentenv.text.native import NativeRenderer
from agentenv.text.renderer import Renderer, TagRenderer
from agentenv.text.tags import tag_calls
from agentenv.training.supervised.dialogues import Dialogue

# An encoded dialogue: token ids, and the mask of trained ones.


class Example(NamedTuple):
    """Token ids and mask, each [tokens]; `mask` is True for trained tokens."""

    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]

    @classmethod
    def of(cls, token_ids: ArrayLike, mask: ArrayLike) -> Example:
        return cls(np.asarray(token_ids, np.int32), np.asarray(mask, np.bool_))

    def cut(self, max_length: int) -> Example:
        """The first `max_length` tokens."""
        return Example(self.token_ids[:max_length], self.mask[:max_length])

    def encoded(self) -> EncodedTree:
        """The sequence in the learner's format."""
        return encode_sequence(self.token_ids.tolist(), self.mask.tolist())

    def equals(self, other: Example) -> bool:
        return np.array_equal(self.token_ids, other.token_ids) and np.array_equal(
            self.mask, other.mask
        )


RESULT = re.compile(r"\s*<result>(.*?)</result>", re.DOTALL)
WHOLE = 10**9  # limit on tokens of a tool result: none; data.max_length limits the sequence
NUM_END_CHARS = 64  # of an answer, to search for a special token at its end

Part = tuple[list[int], bool]  # token ids, and whether they are the policy's


class ChatEncoder:
    """Encodes conversations for one model.

    `instruction`: the system prompt of rows without one. With `compat`, tool results within an
    answer are trained like the answer. Results are cut to `max_result_tokens`, as in rollouts.
    """

    max_result_tokens = WHOLE

    def __init__(
        self, renderer: Renderer, instruction: Instruction | None = None, *, compat: bool = False
    ) -> None:
        assert isinstance(renderer, TagRenderer | NativeRenderer), "an endpoint cannot be trained"
        self.renderer = renderer
        self.instruction = instruction or Instruction()
        self.compat = compat
        self.is_native = isinstance(renderer, NativeRenderer)

    def encode(self, conversation: Dialogue, first_trained: int = 0) -> Example:
        """Encode a conversation. Answers are trained from message number `first_trained` on,
        counted from 0 without the system prompt.

        Raises DataError for messages that the renderer cannot express.
        """
        prompt, turns = self._split(conversation)
        tools = conversation.tools
        ids = self.renderer.prompt(prompt, tools)
        self._opens_thought = self.renderer.opens_thought(ids)
        parts: list[Part] = [(ids, False)]
        number = sum(message.role != "system" for message in prompt)
        groups = [list(group) for _, group in groupby(turns, lambda turn: turn.role == "assistant")]
        for place, group in enumerate(groups):
            if group[0].role != "assistant":
                turn_ids = parts[-1][0]
                named = self._named(group, groups[place - 1][-1].content, tools)
                parts.append((self._between(named, tools, turn_ids), False))
            else:
                follower = groups[place + 1][0].role if place + 1 < len(groups) else ""
                is_trained = number >= first_trained
                for answer in group:
                    with reported_as(DataError, "an answer cannot be rendered", ConfigError):
                        written = [*self._answer(answer, tools, follower)]
                    parts += [(ids, is_policy and is_trained) for ids, is_policy in written]
            number += len(group)
        return _join(parts)

    def _split(self, conversation: Dialogue) -> tuple[list[Message], list[Message]]:
        """Messages of the prompt, with the effective system prompt, and the turns after it."""
        messages = [*conversation.messages]
        if not self.compat:
            messages = [replace(one, content=repaired(one.content)) for one in messages]
        size = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
        prompt = messages[:size]
        row = {SYSTEM_KEY: prompt[0].content} if prompt and prompt[0].role == "system" else {}
        question = next((m.content for m in reversed(prompt) if m.role == "user"), "")
        task = Task("", "", question, (), metadata=row)
        return self.instruction.apply(prompt, task), messages[size:]

    def _answer(
        self, answer: Message, tools: Sequence[dict[str, Any]], follower: str
    ) -> Iterator[Part]:
        """The parts of a turn, without a <think> that the prompt already contains."""
        text = answer.content
        if isinstance(self.renderer, NativeRenderer):
            done = replace(answer, content=self._without_end(text))
            ids = self.renderer.demonstrated(done, tools)
            found = self.renderer.parse(Completion(ids, [], [], "stop", []), tools).tool_calls
            if answer.tool_calls not in ((), found):
                name = answer.tool_calls[0].name
                raise DataError(f"the renderer does not read back the call {name} that it writes")
            yield ids, True
            return
        if self._opens_thought and text.lstrip().startswith(THOUGHT_OPEN):
            text = text.lstrip().removeprefix(THOUGHT_OPEN).lstrip("\n")
        text = self._without_end(text)
        if answer.tool_calls:
            text = self.renderer.calling(text, answer.tool_calls, tools)
        if self.compat:
            yield self.renderer.encode(text), True
        else:
            yield from self._chain(text, tools)
        calls = answer.tool_calls or tag_calls(text, tools)
        if not (follower == "tool" or (calls and follower)):
            yield [self.renderer.end_id], True

    def _without_end(self, text: str) -> str:
        """An answer without a control token at its end, which some datasets include, unless it is
        that of a call or thought. Raises DataError for one at which generation does not stop."""
        ids = self.renderer.encode(text[-NUM_END_CHARS:].rstrip())
        if not ids or ids[-1] not in self.renderer.special_ids:
            return text
        last, end = ids[-1], self.renderer.decode(ids[-1:])
        if last not in self.renderer.eos_ids:
            if end in CALL_TEXTS:
                return text
            known = [self.renderer.decode([token]) for token in sorted(self.renderer.eos_ids)]
            raise DataError(
                f"an answer ends with {end!r}, at which generation does not stop; it stops at "
                f"{', '.join(map(repr, known))}: remove {end!r} from the data, or add token {last} "
                f"to eos_token_id in {GENERATION}"
            )
        return text.rstrip().removesuffix(end)

    def _chain(self, text: str, tools: Sequence[dict[str, Any]]) -> Iterator[Part]:
        """The policy's texts and, between them, the results in the answer."""
        opened, closed = text.count("<result>"), text.count("</result>")
        found = list(RESULT.finditer(text))
        if not opened == closed == len(found) or any("<result>" in one[1] for one in found):
            raise DataError(
                f"an answer opens <result> {opened} times and closes it {closed} times, "
                f"{len(found)} of them in pairs; tool results in an answer are recognized by their "
                "tags"
            )
        start = 0
        for one in found:
            yield self.renderer.encode(text[start : one.start()]), True
            group = self._named([Message("tool", one[1].strip())], text[start : one.start()], tools)
            yield self._between(group, tools, ()), False
            start = one.end()
        yield self.renderer.encode(text[start:]), True

    def _named(
        self, group: Sequence[Message], text: str, tools: Sequence[dict[str, Any]]
    ) -> list[Message]:
        """The messages, of which the result of a call in tags has the name of its tool, by which
        results are counted."""
        names = [] if self.is_native else [call.name for call in tag_calls(text, tools)]
        if not names or group[0].role != "tool":
            return [*group]
        return [replace(group[0], name=group[0].name or names[0]), *group[1:]]

    def _between(
        self, group: list[Message], tools: Sequence[dict[str, Any]], turn_ids: Sequence[int]
    ) -> list[int]:
        """The token ids between two answers: tool results and user messages."""
        with reported_as(DataError, "", ConfigError, CrashError):
            return list(self.renderer.observation(group, tools, self.max_result_tokens, turn_ids))


def _join(parts: list[Part]) -> Example:
    sizes = [len(ids) for ids, _ in parts]
    mask = np.repeat(np.array([is_policy for _, is_policy in parts], np.bool_), sizes)
    return Example.of([token for ids, _ in parts for token in ids], mask)
