"""The conversation of a branch: between the messages of its environment and the tokens of its tree.

    open      the tokens of the prompt
    limited   the requirements of the next turn, added to the sampling parameters
    read      a sampled turn as a message for the environment
    observe   the environment's answer: tokens after the turn, or another context
    recall    a recorded turn, for a later replay
    replay    the actions so far, in a fresh environment

`message_conversation.py` is that of an environment which answers each turn, and
`program_conversation.py` that of an agent program, whose calls may begin anywhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, Self

from agentenv.base.tree import Node, Prefix
from agentenv.base.types import Completion, Info, Message, SamplingParams
from agentenv.contract.env import StepResult
from agentenv.text.renderer import ToolSchemas


class Context(NamedTuple):
    """The place of a next turn that does not simply follow the answer to the last one: `ids` after
    the turn `after`, up to which the tokens are `prefix`, or (None) as a new context. `info`
    describes it. `num_used`: tokens that count as response there, if not as many as now."""

    ids: Sequence[int]
    info: Info
    after: Node | None = None
    prefix: Prefix = Prefix()
    num_used: int | None = None


class Conversation(Protocol):
    """`prompt` and `tools` are those of the environment, `max_tokens` is the conversation's own
    limit of the next turn (0: none). `replayable`: the environment's state follows from the actions
    of the conversation. `opens_contexts`: roots with another prompt than the first are contexts of
    their own. `continues`: the next turn continues the episode, so that forks may begin there."""

    prompt: list[Message]
    tools: ToolSchemas
    replayable: bool
    continues: bool

    @property
    def max_tokens(self) -> int: ...
    @property
    def opens_contexts(self) -> bool: ...
    def begin(self, messages: list[Message], info: Info) -> None:
        """A fresh environment was reset, with this result."""
        ...

    def fork(self) -> Self:
        """An independent copy."""
        ...

    def open(self) -> list[int]: ...
    def limited(self, sampling: SamplingParams, room: int) -> SamplingParams:
        """`room`: tokens that are left for the whole context."""
        ...

    def read(self, completion: Completion, prefix: Prefix) -> Message:
        """`prefix`: the tokens before the turn."""
        ...

    async def observe(
        self, action: Message, node: Node, prefix: Prefix, messages: list[Message]
    ) -> Sequence[int] | Context:
        """The answer to the action of the node, whose info is that of the step. `prefix` ends with
        the action."""
        ...

    def recall(self, node: Node, stop: str | None, prefix: Prefix) -> Message:
        """The action of a recorded node, which the environment has to receive in a replay. `stop`:
        the stop string that ended it."""
        ...

    async def replay(
        self, path: Sequence[Node], step: Callable[[Message], Awaitable[StepResult]]
    ) -> bool:
        """Take all steps again; returns whether the answers are those of the path."""
        ...
