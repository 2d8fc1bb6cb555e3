"""The conversation with an agent program: its calls are turns, which may begin in any context."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Self

from msgspec.structs import replace

from agentenv.base.errors import ConfigError, CrashError, DataError, EnvError, reported_as
from agentenv.base.tree import GUIDED, Ids, Node, Prefix, packed_ids
from agentenv.base.types import Completion, Info, Message, NextTurn, SamplingParams, Turn
from agentenv.base.untrusted import convert
from agentenv.rollout.conversation import Context, Conversation
from agentenv.text.contexts import context_ids
from agentenv.text.guides import guide_of, single_ends
from agentenv.text.renderer import ContextRenderer
from agentenv.text.spoken import spoken


class ProgramConversation(Conversation):
    """The environment describes each next turn in its info (`NextTurn`). `is_raw`: malformed calls
    are calls too. `is_cut`: the turn that was read last has no end token."""

    opens_contexts = True
    is_raw = False
    answering = ("user", "system")

    def __init__(self, renderer: ContextRenderer, most: int) -> None:
        super().__init__(renderer, most)
        self._writer = renderer
        self._next = NextTurn()
        self._stops: tuple[str, ...] = ()  # the texts that end the turn without an end token
        self._turns: list[Node] = []
        self._tips: dict[int, tuple[Node, Prefix]] = {}  # unanswered turns, and tokens up to them
        self._cut: set[int] = set()  # turns without an end token
        self.is_cut = self._is_guided = False  # the turn that was read last

    def begin(self, messages: list[Message], info: Info) -> None:
        super().begin(messages, info)
        self._expect(info)

    def fork(self) -> Self:
        other = super().fork()
        other._turns, other._tips, other._cut = [*self._turns], {**self._tips}, {*self._cut}
        return other

    def open(self) -> list[int]:
        with _of_program():
            return context_ids(self._writer, self.prompt, self.tools, self._most).tolist()

    def limited(self, sampling: SamplingParams, prefix: Sequence[int], room: int) -> SamplingParams:
        then = self._next
        most = min(sampling.max_tokens, then.max_tokens or sampling.max_tokens, room)
        stop = (*self._writer.stop(self.tools), *sampling.stop, *self._stops)
        guide = guide_of(then, self._writer, self.tools, prefix)
        self._is_guided = bool(guide)
        return replace(sampling, max_tokens=most, stop=stop, guide=guide)

    def read(self, completion: Completion, prefix: Sequence[int]) -> Message:
        """With the facts of the sampling, which the environment passes to the program."""
        action = super().read(completion, prefix)
        stop = completion.stop if completion.stop in self._next.stop else None
        is_long = completion.finish_reason == "length"
        reason: Literal["stop", "length"] = "length" if is_long else "stop"
        self.is_cut = is_long or completion.stop in self._stops
        single, raw = self._next.single, self.is_raw
        own = spoken(action, self._writer.style, self.tools, stop, raw=raw, single=single)
        sizes = len(prefix), len(completion.token_ids)
        turn = Turn(own.thoughts, own.text, reason, *sizes, stop, own.kept)
        return replace(action, tool_calls=own.calls, turn=turn)

    async def observe(
        self, action: Message, node: Node, prefix: Prefix, messages: list[Message]
    ) -> Sequence[int] | Context:
        self._record(node)
        if self.is_cut:
            self._cut.add(node.index)
        self.continues = True
        if self._next.prompt:
            self.replayable = False
            return self._context(node, prefix)
        return await super().observe(action, node, prefix, messages)

    def end(self, node: Node) -> None:
        self._record(node)
        node.info |= self._discards()

    def _record(self, node: Node) -> None:
        if self._is_guided:
            node.info[GUIDED] = True
        self._expect(node.info)
        self._turns.append(node)

    async def _answer(self, node: Node, messages: list[Message]) -> Sequence[int]:
        with _of_program():
            messages = [*self._writer.placed(messages, after_turn=True)]
            if node.index not in self._cut:
                return await super()._answer(node, messages)
            end = [self._writer.end_id]  # it comes first
            await self._writer.prepare(messages, self.tools, self._most)
            return end + list(self._writer.observation(messages, self.tools, self._most, end))

    def recall(self, node: Node, stop: str | None, prefix: Prefix) -> Message:
        self._turns.append(node)
        return super().recall(node, stop, prefix)

    async def _answer_again(
        self, node: Node, messages: list[Message], info: Info
    ) -> Sequence[int] | None:
        self._expect(info)
        return None if self._next.prompt else await self._answer(node, messages)

    def _expect(self, info: Info) -> None:
        """Take the description of the next turn, if any, out of the info of a step or reset."""
        given = info.pop("turn", None)
        if given is not None:
            then = self._next = convert(given, NextTurn)
            self._stops = (*then.stop, *single_ends(self._writer.style, then))
            self.max_tokens = self._next.max_tokens
            if self._next.tools is not None:
                self.tools = self._next.tools

    def _context(self, node: Node, prefix: Prefix) -> Context:
        """The next turn's place: after the turn whose tokens its prompt extends, else in a new
        context."""
        then = self._next
        self._tips[node.index] = node, prefix
        sampled = [self._ids_of(one) if isinstance(one, int) else one for one in then.prompt]
        with _of_program():
            ids = context_ids(self._writer, sampled, self.tools, self._most)
        info: Info = {"context": then.kind or "resumed", **self._discards()}
        info |= {"cause": then.cause} if then.cause else {}
        for index in sorted(self._tips, reverse=True):
            after, before = self._tips[index]
            if len(before) < len(ids) and before.joined() == ids[: len(before)]:
                del self._tips[index]
                return Context(ids[len(before) :], info, after, before)
        own = any(isinstance(one, int) or one.role == "assistant" for one in then.prompt)
        self.continues = (own or then.cause == "user") and then.kind != "retry"
        return Context(ids, info)

    def _discards(self) -> Info:
        """The nodes of the turns whose answers were lost."""
        found = [self._turns[turn].index for turn in self._next.discards]
        return {"discards": found} if found else {}

    def _ids_of(self, turn: int) -> Ids:
        """The tokens of one of the turns, end token included."""
        node = self._turns[turn]
        end = [self._writer.end_id] if node.index in self._cut else []
        return node.action_ids + packed_ids(end)


def _of_program() -> AbstractContextManager[None]:
    """Within the block, convert errors of rendering into EnvError, since a program's invalid
    request may fail only its own trajectory."""
    problems = ConfigError, CrashError, DataError
    return reported_as(EnvError, "cannot render a call of the program", *problems)
