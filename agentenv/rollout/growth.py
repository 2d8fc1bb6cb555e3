"""The growth of a branch: turn after turn, until its environment or a limit ends it.

    sample -> read -> add the action -> step -> observe the answer -> again

The tree around it belongs to the rollout, which starts forks and keeps the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from agentenv.base.deadline import waiting
from agentenv.base.tree import LED, Node, TrajectoryTree
from agentenv.base.types import Chunk, Completion, Limit, Limits, Message, SamplingParams
from agentenv.contract.plan import RolloutPlan
from agentenv.rollout.actor_parts import ActorParts, RolloutHooks
from agentenv.rollout.branch import Branch, TurnState
from agentenv.rollout.conversation import Context
from agentenv.rollout.recovery import Recovery


@dataclass(eq=False)
class Growth:
    """Takes the turns of a tree's branches; the base of `Rollout`."""

    actor: ActorParts
    tree: TrajectoryTree
    plan: RolloutPlan
    limits: Limits
    session: str
    hooks: RolloutHooks

    def __post_init__(self) -> None:
        self._recovery = Recovery(self.actor, self.tree, self.limits)

    def _fork(self, branch: Branch, seconds: float, entropies: list[float]) -> None:
        """Called once per turn that may fork, with the seconds of the branch before the turn and
        the entropies of the first tokens."""

    def _complete(self, branch: Branch, nodes: Sequence[Node], stop: str | None = None) -> None:
        """Called with nodes that are final, and the stop string of the first one's turn."""

    async def take_turns(self, branch: Branch) -> tuple[Limit, Message | None] | None:
        """Take turns until the env ends the episode, or return the limit that ends it, with an
        action that the env has not seen."""
        while True:
            num_replayed, may_fork = branch.turn.num_replayed, self._may_fork(branch)
            branch.turn = TurnState(may_fork)
            completion = await self._recovery.sample(branch, self._generate)
            action = branch.conversation.read(completion, branch.prefix_ids)
            limit = branch.act(self.tree, completion, action, self.limits)
            node = branch.pending
            assert node is not None
            if num_replayed:
                node.info[LED] = num_replayed
            if branch.turn.holding:
                with waiting("the copies of its environment for its forks"):
                    await branch.turn.held()
            if limit is not None:
                return limit, action
            result = await self._recovery.step(branch, partial(self.hooks.step, branch, action))
            branch.clock.now("its observation to be tokenized")
            messages, node.reward, terminated, truncated, info = result
            node.info.update(info)
            if terminated or truncated:
                node.end = "terminated" if terminated else "truncated"
                node.limit = None if terminated else Limit.ENV
                branch.conversation.end(node)
                return None
            if num_users := sum(message.role == "user" for message in messages):
                node.info["user_messages"] = num_users
            found = await branch.conversation.observe(action, node, branch.prefix_ids, messages)
            where = (
                found if isinstance(found, Context) else await self.hooks.redirect(branch, found)
            )
            done, limit = branch.observe(self.tree, where, self.limits)
            self._complete(branch, done, completion.stop)
            if limit is not None:
                return limit, None

    def _may_fork(self, branch: Branch) -> bool:
        """Whether the next turn follows a tool result at which no fork was decided, and there is
        room for a fork."""
        if not branch.num_turns or branch.cursor.num_forks is not None:
            return False
        assert branch.env is not None
        has_room = self.tree.num_started < self.plan.group_size
        return has_room and branch.conversation.continues and branch.env.fork_mode != "none"

    async def _generate(self, branch: Branch) -> Completion:
        """Sample the next turn. If the branch may fork, call `_fork` as soon as the entropies of
        the first `fork_window` tokens are known, or at the end of a shorter turn."""
        actor, window = self.actor, self.plan.fork_window
        turn, seconds = branch.turn, branch.clock()
        plans_fork = turn.may_fork and window > 0 and not turn.was_planned
        # The first entropies of the first turn, and of a probe, are the baseline of comparisons.
        full = self.tree.num_started >= self.plan.group_size
        is_first = not branch.num_turns
        reads = window > 0 and (plans_fork or is_first or not full)
        first: list[float] = []
        sampling = self._sampling(branch)
        turn.temperature = sampling.temperature

        def on_tokens(chunk: Chunk) -> None:
            first.extend(chunk.entropies)
            if plans_fork and not turn.was_planned and len(first) >= window:
                self._fork(branch, seconds, first[:window])

        completion = await actor.engine.generate(
            branch.prefix_ids,
            sampling,
            session=self.session,
            on_tokens=on_tokens if reads else None,
            stream_interval=max(1, window),
            order=(int(is_first), self.tree.index),
        )
        if plans_fork and not turn.was_planned:
            self._fork(branch, seconds, completion.entropies[:window])
        if branch.num_turns:
            actor.prefixes.add(branch.name, branch.cursor, len(branch.prefix_ids), completion)
        return completion

    def _sampling(self, branch: Branch) -> SamplingParams:
        limits = self.limits
        sampling = replace(
            self.hooks.sampling(branch),
            max_tokens=min(
                limits.max_turn_tokens, limits.max_response_tokens - branch.num_response_tokens
            ),
            seed=self.actor.seed_of(self._recovery.key(branch, "turn")),
        )
        room = limits.max_prompt_tokens + limits.max_response_tokens - len(branch.prefix_ids)
        return branch.conversation.limited(sampling, branch.prefix_ids, room)
