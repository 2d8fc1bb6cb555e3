"""The conversation of a branch: between the messages of its environment and the tokens of its tree.

    open      the tokens of the prompt
    limited   the requirements of the next turn, added to the sampling parameters
    read      a sampled turn as a message for the environment
    observe   the environment's answer: tokens after the turn, or another context
    recall    a recorded turn, for a later replay
    replay    the actions so far, in a fresh environment

`program_conversation.py` has that of an agent program, whose calls may begin anywhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from typing import NamedTuple, Self

from msgspec.structs import replace

from agentenv.base.tree import Node, Prefix, packed_ids
from agentenv.base.types import Completion, Info, Message, Role, SamplingParams
from agentenv.contract.env import StepResult, check_observation
from agentenv.text.renderer import Renderer, ToolSchemas


class Context(NamedTuple):
    """The place of a next turn that does not simply follow the answer to the last one: `ids` after
    the turn `after`, up to which the tokens are `prefix`, or (None) as a new context. `info`
    describes it. `num_used`: tokens that count as response there, if not as many as now."""

    ids: Sequence[int]
    info: Info
    after: Node | None = None
    prefix: Prefix = Prefix()
    num_used: int | None = None


class Conversation:
    """With an environment that answers each turn with messages; `most`: tokens of an answer.

    `prompt` and `tools` are those of the environment, `max_tokens` is the conversation's own limit
    of the next turn (0: none). `replayable`: the environment's state follows from the actions of
    the conversation. `opens_contexts`: roots with another prompt than the first are contexts of
    their own. `continues`: the next turn continues the episode, so that forks may begin there.
    """

    max_tokens = 0
    opens_contexts = False
    answering: Sequence[Role] = ("user",)  # beside tool results

    def __init__(self, renderer: Renderer, most: int) -> None:
        self.prompt: list[Message] = []
        self.tools: ToolSchemas = ()
        self.replayable = self.continues = True
        self._renderer, self._most = renderer, most
        self._actions: list[Message] = []  # that the environment received

    def begin(self, messages: list[Message], info: Info) -> None:
        """A fresh environment was reset, with this result."""
        self.prompt, self.tools = messages, info.get("tools", ())

    def fork(self) -> Self:
        """An independent copy."""
        other = copy(self)
        other._actions = [*self._actions]
        return other

    def open(self) -> list[int]:
        return list(self._renderer.prompt(self.prompt, self.tools))

    def limited(self, sampling: SamplingParams, prefix: Sequence[int], room: int) -> SamplingParams:
        """The sampling of a turn after `prefix`. `room`: tokens that are left for the context."""
        return replace(sampling, stop=(*self._renderer.stop(self.tools), *sampling.stop))

    def read(self, completion: Completion, prefix: Sequence[int]) -> Message:
        """`prefix`: the tokens before the turn."""
        return self._renderer.parse(completion, self.tools, prefix)

    async def observe(
        self, action: Message, node: Node, prefix: Prefix, messages: list[Message]
    ) -> Sequence[int] | Context:
        """The answer to the action of the node, whose info is that of the step. `prefix` ends with
        the action."""
        self._actions.append(action)
        return await self._answer(node, messages)

    def end(self, node: Node) -> None:
        """The episode ended with this node, whose info is that of the environment's last step, or
        of its grade."""

    async def _answer(self, node: Node, messages: list[Message]) -> Sequence[int]:
        check_observation(messages, self.answering)
        await self._renderer.prepare(messages, self.tools, self._most)
        return self._renderer.observation(messages, self.tools, self._most, node.action_ids)

    def recall(self, node: Node, stop: str | None, prefix: Prefix) -> Message:
        """The action of a recorded node, which the environment has to receive in a replay. `stop`:
        the stop string that ended it."""
        action = self.read(Completion(list(node.action_ids), [], [], "stop", [], stop), prefix)
        self._actions.append(action)
        return action

    async def replay(
        self, path: Sequence[Node], step: Callable[[Message], Awaitable[StepResult]]
    ) -> bool:
        """Take all steps again; returns whether the answers are those of the path."""
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
