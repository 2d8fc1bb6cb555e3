"""Answers from the policy outside of a run: renders, samples and streams calls.

An assistant message that the client returns as served stands for its sampled tokens, so that a
conversation continues with the exact tokens of a rollout; other messages are rendered turn by turn,
as in a rollout.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from agentenv.base.errors import (
    ConfigError,
    CrashError,
    DataError,
    EngineDeadError,
    EngineError,
    EnvError,
)
from agentenv.base.types import Chunk, Completion, Constraints, Message, SamplingParams
from agentenv.contract.engine import MIN_TEMPERATURE, Engine
from agentenv.contract.stop_strings import PARTIAL
from agentenv.endpoint.messages import (
    KEYS,
    ApiError,
    Given,
    HandedTurn,
    Request,
    ServedTurn,
    TokenLogprob,
    as_message,
    served,
    turn_of,
)
from agentenv.endpoint.server import Delta, Handler
from agentenv.rollout.program_conversation import ProgramConversation
from agentenv.text.call_syntax import call_marks, split_thoughts
from agentenv.text.contexts import context_ids
from agentenv.text.encoder import fast_tokenizer, token_texts
from agentenv.text.renderer import ContextRenderer

STREAM_INTERVAL = 4  # tokens
MAX_HELD = 4096  # cached conversations and turns

Key = tuple[bytes, tuple[Given, ...]]  # tools and messages of a conversation


class Prompt(NamedTuple):
    """A request as tokens, and the conversation that ends with it."""

    ids: array[int]
    conversation: ProgramConversation
    key: Key


class PolicyHandler(Handler):
    """Answers with one engine. `sampling` and `max_tokens` are defaults for requests; `names` are
    the model's names, the proper one first; `prefix` begins the ids of replies and calls;
    `constraints`: the engine forces calls, or also the form of replies."""

    def __init__(
        self,
        engine: Engine,
        renderer: ContextRenderer,
        sampling: SamplingParams,
        max_model_len: int,
        names: Sequence[str],
        max_tokens: int,
        prefix: str = "",
        constraints: Constraints = "none",
    ) -> None:
        self._constraints = constraints
        self.engine, self.renderer = engine, renderer
        self.sampling = replace(sampling, max_tokens=max_tokens)
        self.max_model_len, self.names = max_model_len, names
        self._prefix, self._ids = prefix, count(1)
        self.handed: OrderedDict[str, HandedTurn] = OrderedDict()
        self._conversations: OrderedDict[Key, array[int]] = OrderedDict()
        self._turns: OrderedDict[Given, array[int]] = OrderedDict()
        tokenizer = fast_tokenizer(renderer.tokenizer)
        self._texts: Callable[[Sequence[int]], list[str]] = (
            (lambda ids: [renderer.decode([token]) for token in ids])
            if tokenizer is None
            else token_texts(tokenizer)
        )

    def new_id(self) -> str:
        return f"{self._prefix}{next(self._ids):x}"

    async def count(self, request: Request) -> int:
        """The number of prompt tokens."""
        return len(self._prompt(request).ids)

    async def answer(self, request: Request, delta: Delta | None) -> Sequence[ServedTurn]:
        """Sample `n` turns concurrently."""
        if request.model not in self.names:
            what = f"unknown model {request.model!r:.200}; this endpoint serves {self.names[0]!r}"
            raise ApiError("no_model", what, "model")
        if unserved := request.own_sampling & KEYS["chat"].unserved:
            what = f"{min(unserved)}: no engine of a policy applies it; omit it"
            raise ApiError("unsupported", what, min(unserved))
        if request.forced and self._constraints == "none":
            what = "this engine cannot force a call; use auto, or serve with vLLM or SGLang"
            raise ApiError("unsupported", what, "tool_choice")
        prompt = self._prompt(request)
        sampling = self._sampling(request, prompt)
        try:
            async with asyncio.TaskGroup() as group:
                pending = [
                    group.create_task(self._turn(request, prompt, sampling, index, delta))
                    for index in range(request.n)
                ]
        except* EngineError as errors:
            error = errors.exceptions[0]
            name = "engine_dead" if isinstance(error, EngineDeadError) else "engine"
            raise ApiError(name, str(error)) from error
        turns = [one.result() for one in pending]
        context = (*request.messages, turns[0].message)
        held = HandedTurn(replace(request, body={}), replace(turns[0], logprobs=None), context)
        self._keep(self.handed, request.id, held)
        return turns

    def _prompt(self, request: Request) -> Prompt:
        """The prompt's tokens, which extend those of the longest cached conversation."""
        given, tools = request.messages, request.tools
        shown = msgspec.json.encode(tools)
        held, start = array("i"), 0
        for number in range(len(given) - 1, 0, -1):
            key = (shown, given[:number])
            if given[number - 1].role == "assistant" and key in self._conversations:
                self._conversations.move_to_end(key)
                held, start = self._conversations[key], number
                break
        context: list[Message | Sequence[int]] = []
        for number in range(start, len(given)):
            sampled = self._turns.get(given[number])
            context.append(
                as_message(given[number], given[:number]) if sampled is None else sampled
            )
        renderer = self.renderer
        try:
            renderer.check_tools(tools)
            ids = context_ids(renderer, context, tools, self.max_model_len, held)
        except (DataError, CrashError, ConfigError, EnvError) as error:
            raise ApiError("unsupported", str(error), "messages") from error
        conversation = ProgramConversation(renderer, self.max_model_len)
        conversation.begin([], {"tools": tools, "turn": turn_of(request, self._constraints)})
        conversation.is_raw = request.raw
        return Prompt(ids, conversation, (shown, given))

    def _sampling(self, request: Request, prompt: Prompt) -> SamplingParams:
        room = self.max_model_len - len(prompt.ids)
        if room < 1:
            what = (
                f"{len(prompt.ids)} prompt tokens leave no room for an answer in a context of "
                f"{self.max_model_len}"
            )
            raise ApiError("too_long", what, "messages")
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
        given = {key: value for key in names if (value := getattr(request, key)) is not None}
        if 0 < given.get("temperature", 0) < MIN_TEMPERATURE:
            given["temperature"] = MIN_TEMPERATURE
        if given.get("top_k") == 0:
            given["top_k"] = -1
        most = request.max_tokens or self.sampling.max_tokens
        sampling = replace(self.sampling, **given, max_tokens=most)
        try:
            return prompt.conversation.limited(sampling, prompt.ids, room)
        except EnvError as error:
            raise ApiError("unsupported", str(error), "tool_choice") from error

    async def _turn(
        self,
        request: Request,
        prompt: Prompt,
        sampling: SamplingParams,
        index: int,
        delta: Delta | None,
    ) -> ServedTurn:
        if index and sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + index)
        stream = None if delta is None else TurnStream(self, request, prompt, index, delta)
        done = await self.engine.generate(
            prompt.ids,
            sampling,
            session=request.session or request.model,
            on_tokens=stream,
            stream_interval=STREAM_INTERVAL,
        )
        return self._served(request, prompt, done)

    def _served(self, request: Request, prompt: Prompt, done: Completion) -> ServedTurn:
        """The served turn; its tokens are cached for the rest of the conversation."""
        action = prompt.conversation.read(done, prompt.ids)
        assert action.turn is not None
        found = served(action.turn, action.tool_calls, self.new_id(), request)
        sampled = array("i", done.token_ids)
        if prompt.conversation.is_cut:
            sampled.append(self.renderer.end_id)  # the next tokens come after the end of the turn
        self._keep(self._turns, found.message, sampled)
        shown, given = prompt.key
        self._keep(self._conversations, (shown, (*given, found.message)), prompt.ids + sampled)
        found.num_cached_tokens = done.num_cached_tokens
        found.raw = action.content if request.raw else None
        if request.logprobs:
            texts = self._texts(done.token_ids)
            found.logprobs = list(map(TokenLogprob, texts, done.logprobs))
        return found

    def _keep(self, held: OrderedDict[Any, Any], key: Any, value: Any) -> None:
        held[key] = value
        held.move_to_end(key)
        if len(held) > MAX_HELD:
            held.popitem(last=False)


class TurnStream:
    """Streams the text of a turn. It holds back text that may belong to a call, a stop string, an
    incomplete character, or trailing blanks."""

    def __init__(
        self, handler: PolicyHandler, request: Request, prompt: Prompt, index: int, delta: Delta
    ) -> None:
        self._renderer, self._index, self._delta = handler.renderer, index, delta
        self._prompt, self._tools = prompt.ids, prompt.conversation.tools
        self._marks = call_marks(self._renderer.style, self._tools) if self._tools else ()
        self._held = (*self._marks, *request.stop, "</think>", "<think>")
        self._ids: list[int] = []
        self._reported = ["", ""]

    def __call__(self, chunk: Chunk) -> None:
        self._ids += chunk.token_ids
        so_far = Completion(self._ids, [], [], "length", [])
        text = self._renderer.parse(so_far, self._tools, self._prompt).content
        parts = split_thoughts(self._without_held(text), self._renderer.style, self._marks)
        for place, (kind, whole) in enumerate(zip(("thoughts", "text"), parts, strict=True)):
            whole, before = whole.strip(), self._reported[place]
            if len(whole) > len(before) and whole.startswith(before):
                self._reported[place] = whole
                self._delta(self._index, kind, whole[len(before) :])

    def _without_held(self, text: str) -> str:
        text = text.rstrip(PARTIAL)
        most = max(map(len, self._held))
        for size in range(min(most, len(text)), 0, -1):
            tail = text[-size:]
            if any(mark.startswith(tail) for mark in self._held):
                return text[:-size]
        return text
