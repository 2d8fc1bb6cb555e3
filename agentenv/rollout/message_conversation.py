"""The conversation with an environment that answers each turn with messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from typing import Self

from msgspec.structs import replace

from agentenv.base.tree import Node, Prefix, packed_ids
from agentenv.base.types import Completion, Info, Message, SamplingParams
from agentenv.contract.env import StepResult
from agentenv.rollout.conversation import Context
from agentenv.text.renderer import Renderer, ToolSchemas


class MessageConversation:
    """See `Conversation`. `most`: tokens of an observation."""

    def __init__(self, renderer: Renderer, most: int) -> None:
        self.prompt: list[Message] = []
        self.tools: ToolSchemas = ()
        self.replayable = self.continues = True
        self._renderer, self._most = renderer, most
        self._actions: list[Message] = []  # that the environment received

    @property
    def max_tokens(self) -> int:
        return 0

    @property
    def opens_contexts(self) -> bool:
        return False

    def begin(self, messages: list[Message], info: Info) -> None:
        self.prompt, self.tools = messages, info.get("tools", ())

    def fork(self) -> Self:
        other = copy(self)
        other._actions = [*self._actions]
        return other

    def open(self) -> list[int]:
        return list(self._renderer.prompt(self.prompt, self.tools))

    def limited(self, sampling: SamplingParams, room: int) -> SamplingParams:
        return replace(sampling, stop=(*self._renderer.stop(self.tools), *sampling.stop))

    def read(self, completion: Completion, prefix: Prefix) -> Message:
        return self._renderer.parse(completion, self.tools, prefix)

    async def observe(
        self, action: Message, node: Node, prefix: Prefix, messages: list[Message]
    ) -> Sequence[int] | Context:
        self._actions.append(action)
        return await self._answer(node, messages)

    async def _answer(self, node: Node, messages: list[Message]) -> Sequence[int]:
        await self._renderer.prepare(messages, self.tools, self._most)
        return self._renderer.observation(messages, self.tools, self._most, node.action_ids)

    def recall(self, node: Node, stop: str | None, prefix: Prefix) -> Message:
        action = self.read(Completion(list(node.action_ids), [], [], "stop", [], stop), prefix)
        self._actions.append(action)
        return action

    async def replay(
        self, path: Sequence[Node], step: Callable[[Message], Awaitable[StepResult]]
    ) -> bool:
        is_equal = True
        for node, action in zip(path, self._actions, strict=True):
            messages, _, terminated, truncated, info = await step(action)
            ids = await self._answer_again(node, messages, info)
            same = ids is not None and packed_ids(ids) == node.observation_ids
            is_equal = is_equal and same and not terminated and not truncated
        return is_equal

    async def _answer_again(
        self, node: Node, messages: list[Message], info: Info
    ) -> Sequence[int] | None:
        """The answer in a replay; None if the next turn is in another context."""
        return await self._answer(node, messages)
