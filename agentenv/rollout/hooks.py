"""Hooks: changes of a rollout by an extension."""

from __future__ import annotations

from collections.abc import Sequence

from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Info, Limit, Message, SamplingParams
from agentenv.contract.env import StepResult
from agentenv.contract.plan import RolloutPlan
from agentenv.rollout.actor_parts import ActorParts
from agentenv.rollout.branch import Branch, Continuation


class RolloutHooks:
    """Hooks of a rollout; the base class changes nothing.

    One object per rollout. A subclass overrides some of the calls, in the order of a trajectory:

        prefix     the prompt was rendered
        sampling   a turn will be sampled
        step       the policy acted; the hook returns the env's answer
        redirect   the env answered, and the episode continues; the hook returns where
        finish     a limit ended the episode; the hook returns the grade
        end        the branch ended for any reason, including cancellation

    Its constructor may reject the rollout with a ConfigError.
    """

    def __init__(self, actor: ActorParts, tree: TrajectoryTree, plan: RolloutPlan) -> None:
        self.actor = actor
        self.tree = tree

    def prefix(self, branch: Branch, prompt_ids: list[int]) -> list[int]:
        """Token ids with which the first turn of every root begins; called once per tree. They are
        context, not sampled, and excluded from the loss mask; they count as response, not as
        prompt.
        """
        return []

    def sampling(self, branch: Branch) -> SamplingParams:
        """Sampling parameters of the branch's next turn."""
        return self.actor.sampling

    async def step(self, branch: Branch, action: Message) -> StepResult:
        """The env's answer to the action."""
        assert branch.env is not None
        return await self.actor.envs.step(branch.env, action)

    async def redirect(self, branch: Branch, observation_ids: Sequence[int]) -> Continuation:
        """The continuation of the branch: after this observation, or elsewhere."""
        return observation_ids

    async def finish(
        self, branch: Branch, limit: Limit, action: Message | None
    ) -> tuple[float, Info]:
        """Reward and info of an episode that a limit ends; `action` was not stepped."""
        assert branch.env is not None
        return await self.actor.envs.finish(branch.env, limit, action)

    async def end(self, branch: Branch) -> None:
        """Free the resources of the branch."""
