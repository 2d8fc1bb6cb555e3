"""A branch: one growing trajectory of a tree."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import Struct

from agentenv.conversation import Context, Conversation
from agentenv.deadline import WorkClock
from agentenv.env import Env
from agentenv.tree import End, Node, Prefix, TrajectoryTree, packed_ids
from agentenv.types import Completion, Limit, Limits, Message


class BranchNow(Struct, array_like=True, frozen=True):
    """State of a live branch of a tree (the tree itself: ""): its current wait and the duration in
    seconds, its counts so far, and its working seconds."""

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
    environment; `num_replayed`: calls that were replayed to reach the turn."""

    def __init__(self, may_fork: bool = False, num_replayed: int = 0) -> None:
        self.may_fork, self.num_replayed = may_fork, num_replayed
        self.was_planned = False
        self.holding: list[asyncio.Event] = []

    async def held(self) -> None:
        """Wait until each sibling that starts in this turn has its environment, or has failed."""
        for event in self.holding:
            await event.wait()


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

    def sibling(self, name: str, outer: WorkClock) -> Branch:
        """A branch at the same place: same prefix, counts and seconds, no env yet. `outer` is the
        parent of its clock."""
        other = Branch(name, self.cursor, WorkClock(self.clock(), outer))
        other.conversation, other.action = self.conversation.fork(), self.action
        other.prefix_ids, other.num_prompt_tokens = self.prefix_ids, self.num_prompt_tokens
        other.num_turns, other.num_tool_calls = self.num_turns, self.num_tool_calls
        return other

    @property
    def is_root(self) -> bool:
        """Whether the branch began from scratch; False for forks."""
        return "+" not in self.name

    @property
    def num_response_tokens(self) -> int:
        """Tokens after the prompt, sampled and observed; max_response_tokens limits them."""
        return len(self.prefix_ids) - self.num_prompt_tokens

    def now(self, now_s: float) -> BranchNow:
        """Its state at this loop time."""
        waited_s = now_s - self.clock.since if self.clock.doing else 0.0
        counts = self.num_turns, self.num_response_tokens, self.num_tool_calls
        return BranchNow(self.name, self.clock.doing, waited_s, *counts, self.clock())

    def add_action(self, tree: TrajectoryTree, completion: Completion, action: Message) -> Node:
        """Add a node with the action, which has no observation yet."""
        self.action = action
        self.pending = tree.add(
            self.cursor,
            branch=self.name,
            action_ids=completion.token_ids,
            logprobs=completion.logprobs,
            entropies=completion.entropies,
            version_spans=completion.version_spans,
        )
        self.prefix_ids = self.prefix_ids.plus(self.pending.action_ids)
        self.num_turns += 1
        return self.pending

    def add_observation(self, observation_ids: Sequence[int]) -> None:
        """Answer the pending action; the next turn starts after the observation."""
        assert self.pending is not None
        self.pending.observation_ids = packed_ids(observation_ids)
        self.prefix_ids = self.prefix_ids.plus(self.pending.observation_ids)
        self.cursor, self.pending = self.pending, None

    def move(self, tree: TrajectoryTree, to: Context) -> Node | None:
        """Continue at another place. Returns the pending turn if it remains unanswered."""
        left, used = self.pending, self.num_response_tokens
        if left is not None and to.after is left:
            self.add_observation(to.ids)
            return None
        last = self.cursor if left is None else left
        node = tree.add(
            to.after,
            branch=self.name,
            observation_ids=to.ids,
            continues=last.index if to.after is None else None,
            info=to.info,
        )
        self.cursor, self.pending = node, None
        self.prefix_ids = to.prefix.plus(node.observation_ids)
        self.num_prompt_tokens = len(self.prefix_ids) - used
        return left

    def leaf(self, tree: TrajectoryTree, end: End) -> Node:
        """The last node of the branch: the pending action, or an empty node."""
        if self.pending is None:
            self.pending = tree.add(self.cursor, branch=self.name)
        self.pending.end = end
        return self.pending

    def take_back(self, name: str, num_tool_calls: int) -> None:
        """Undo the pending action, which made `num_tool_calls` calls; its node stays on the tree.

        The turn is sampled again under `name`, and therefore with another seed.
        """
        assert self.pending is not None
        self.prefix_ids = Prefix(self.prefix_ids.parts[:-1])
        self.num_turns -= 1
        self.num_tool_calls -= num_tool_calls
        self.pending, self.name, self.conversation.replayable = None, name, False

    def restart(
        self, tree: TrajectoryTree, prompt_ids: list[int], num_response_tokens: int
    ) -> None:
        """Continue after another prompt instead of the present context, which stays on the tree.

        `num_response_tokens` of max_response_tokens count as used.
        """
        self.move(tree, Context(prompt_ids, {}))
        self.num_prompt_tokens = len(prompt_ids) - num_response_tokens
        self.conversation.replayable = False

    def limit_of_action(
        self, completion: Completion, action: Message, limits: Limits
    ) -> Limit | None:
        """The limit that the pending action reached, or None; counts the action's tool calls."""
        own = self.conversation.max_tokens
        is_own = own and len(completion.token_ids) >= own < limits.max_turn_tokens
        if completion.finish_reason == "length" and not is_own:
            full = self.num_response_tokens >= limits.max_response_tokens
            return Limit.RESPONSE_TOKENS if full else Limit.TURN_TOKENS
        self.num_tool_calls += len(action.tool_calls)
        if limits.on_limit == "result":  # the env reports the limit to the policy
            return None
        return Limit.TOOL_CALLS if self.num_tool_calls > limits.max_tool_calls else None

    def limit_of_observation(self, observation_ids: Sequence[int], limits: Limits) -> Limit | None:
        """The limit that leaves no room for a turn after this observation, or None."""
        if self.num_response_tokens + len(observation_ids) >= limits.max_response_tokens:
            return Limit.RESPONSE_TOKENS
        return Limit.TURNS if self.num_turns >= limits.max_turns else None

    def limit_of_context(self, limits: Limits) -> Limit | None:
        """The limit that leaves no room for a turn after a move, or None."""
        if len(self.prefix_ids) >= limits.max_prompt_tokens + limits.max_response_tokens:
            return Limit.RESPONSE_TOKENS
        return self.limit_of_observation((), limits)
