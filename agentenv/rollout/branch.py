"""A branch: one growing trajectory of a tree."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from agentenv.base.deadline import WorkClock
from agentenv.base.tree import End, Node, Prefix, TrajectoryTree, packed_ids
from agentenv.base.types import Completion, Limit, Limits, Message
from agentenv.contract.env import Env
from agentenv.rollout.conversation import Context, Conversation


class BranchNow(Struct, array_like=True, frozen=True):
    """State of a live branch of a tree (the tree itself: ""): its current wait and the duration in
    seconds, its counts so far, and its working seconds."""

    task_id: str
    tree: int
    branch: str
    what: str
    for_s: float
    num_turns: int = 0
    num_response_tokens: int = 0
    num_tool_calls: int = 0
    worked_s: float = 0.0


class TurnState:
    """The forks of one turn. `may_fork`: it follows a tool result, where no fork begins yet;
    `was_planned`: the plan has decided; `holding`: an event per sibling of the turn, set with its
    environment; `num_replayed`: calls that were replayed to reach the turn; `temperature`: that of
    its sampling."""

    temperature = 1.0

    def __init__(self, may_fork: bool = False) -> None:
        self.may_fork, self.was_planned, self.num_replayed = may_fork, False, 0
        self.holding: list[asyncio.Event] = []

    async def held(self) -> None:
        """Wait until each sibling that starts in the turn has its environment, or has failed."""
        for event in self.holding:
            await event.wait()


class Retake(NamedTuple):
    """The pending turn is sampled again, as `name` and therefore with another seed; its node, with
    `num_tool_calls` calls, stays on the tree."""

    name: str
    num_tool_calls: int


Continuation = Sequence[int] | Context | Retake  # ids: the answer to the turn


class Branch:
    """State of a trajectory: its tokens so far, its counts, its env.

    `cursor` is the last node with an observation; `pending` is an action below it that has no
    observation yet, finally the leaf. `clock` counts the working seconds of the trajectory.
    `conversation` is set with the environment.
    """

    conversation: Conversation

    def __init__(self, name: str, cursor: Node, clock: WorkClock) -> None:
        self.name = name
        self.cursor = cursor
        self.pending: Node | None = None
        self.clock = clock
        self.env: Env | None = None
        self.action: Message | None = None  # the policy's last one
        self.prefix_ids = Prefix()
        self.num_prompt_tokens = 0
        self.num_turns = 0
        self.num_tool_calls = 0
        self.turn = TurnState()

    def sibling(self, name: str, clock: WorkClock) -> Branch:
        """A branch at the same place: same prefix and counts, no env yet."""
        other = Branch(name, self.cursor, clock)
        other.conversation, other.action = self.conversation.fork(), self.action
        other.prefix_ids, other.num_prompt_tokens = self.prefix_ids, self.num_prompt_tokens
        other.num_turns, other.num_tool_calls = self.num_turns, self.num_tool_calls
        return other

    @property
    def num_response_tokens(self) -> int:
        """Tokens after the prompt, sampled and observed; max_response_tokens limits them."""
        return len(self.prefix_ids) - self.num_prompt_tokens

    def act(
        self, tree: TrajectoryTree, completion: Completion, action: Message, limits: Limits
    ) -> Limit | None:
        """Add a node with the action, which has no observation yet, and count its tool calls.
        Returns the limit that it reached, or None."""
        limit = self._limit_of_action(completion, action, limits)
        self.action = action
        self.pending = tree.add(
            self.cursor,
            branch=self.name,
            action_ids=completion.token_ids,
            logprobs=completion.logprobs,
            entropies=completion.entropies,
            temperature=self.turn.temperature,
            num_kept=completion.num_kept,
            kept_ids=completion.kept_ids,
            version_spans=completion.version_spans,
        )
        self.prefix_ids = self.prefix_ids.plus(self.pending.action_ids)
        self.num_turns += 1
        return limit

    def _limit_of_action(
        self, completion: Completion, action: Message, limits: Limits
    ) -> Limit | None:
        own, size = self.conversation.max_tokens, len(completion.token_ids)
        is_own = own and size >= own < limits.max_turn_tokens
        if completion.finish_reason == "length" and not is_own:
            full = self.num_response_tokens + size >= limits.max_response_tokens
            return Limit.RESPONSE_TOKENS if full else Limit.TURN_TOKENS
        self.num_tool_calls += len(action.tool_calls)
        if limits.on_limit == "result":  # the env reports the limit to the policy
            return None
        return Limit.TOOL_CALLS if self.num_tool_calls > limits.max_tool_calls else None

    def observe(
        self, tree: TrajectoryTree, found: Continuation, limits: Limits
    ) -> tuple[list[Node], Limit | None]:
        """Continue after the env's answer. Returns the nodes that are complete now, and the limit
        that leaves no room for another turn, or None."""
        if not isinstance(found, Retake):
            here = self.pending, self.prefix_ids
            to = found if isinstance(found, Context) else Context(found, {}, *here)
            limit = self._limit_of(to, limits)
            if limit is not None and to is not found:
                return [], limit
            return self.move(tree, to), limit
        self.prefix_ids = Prefix(self.prefix_ids.parts[:-1])
        self.num_turns -= 1
        self.num_tool_calls -= found.num_tool_calls
        self.pending, self.name, self.conversation.replayable = None, found.name, False
        return [], None

    def _num_used(self, to: Context) -> int:
        """Response tokens after a move."""
        if to.after is self.pending and to.after is not None:
            return self.num_response_tokens + len(to.ids)
        return self.num_response_tokens if to.num_used is None else to.num_used

    def _limit_of(self, to: Context, limits: Limits) -> Limit | None:
        """The limit that leaves no room for a turn there."""
        room = limits.max_prompt_tokens + limits.max_response_tokens
        is_full = len(to.prefix) + len(to.ids) >= room
        if is_full or self._num_used(to) >= limits.max_response_tokens:
            return Limit.RESPONSE_TOKENS
        return Limit.TURNS if self.num_turns >= limits.max_turns else None

    def move(self, tree: TrajectoryTree, to: Context) -> list[Node]:
        """Continue at this place. Returns the nodes that are complete now."""
        left, used = self.pending, self._num_used(to)
        done = [] if left is None else [left]
        if left is not None and to.after is left:
            left.observation_ids = packed_ids(to.ids)
            node = left
        else:
            node = tree.add(to.after, branch=self.name, observation_ids=to.ids, info=to.info)
            if to.after is None:
                node.continues = (self.cursor if left is None else left).index
            done.append(node)
        self.cursor, self.pending = node, None
        self.prefix_ids = to.prefix.plus(node.observation_ids)
        self.num_prompt_tokens = len(self.prefix_ids) - used
        return done

    def leaf(self, tree: TrajectoryTree, end: End) -> Node:
        """The last node of the branch: the pending action, or an empty node."""
        if self.pending is None:
            self.pending = tree.add(self.cursor, branch=self.name)
        self.pending.end = end
        return self.pending
