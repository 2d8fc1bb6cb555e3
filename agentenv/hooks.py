"""Hooks: what takes part in a rollout beside its plan and its envs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentenv.branch import Branch
from agentenv.env import StepResult
from agentenv.types import Info, Limit, Message, SamplingParams

if TYPE_CHECKING:
    from agentenv.rollout import Rollout


class RolloutHooks:
    """Hooks of a rollout; these change nothing.

    One object a rollout. A subclass overrides the calls that it changes, in the order of a
    trajectory:

        prefix     the prompt was rendered
        sampling   a turn will be sampled
        step       the policy has acted and the env is to answer
        redirect   the env has answered, and the episode goes on
        finish     a limit ends the episode: the env is to grade
        end        the branch is over in any way, cancelled too

    Its constructor may refuse the rollout with a ConfigError.
    """

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout

    def prefix(self, branch: Branch, prompt_ids: list[int]) -> list[int]:
        """Token ids that the first turn of every root begins with; asked once a tree.

        They are context and not sampled, so that no loss mask covers them, and they count as
        response, not as prompt.
        """
        return []

    def sampling(self, branch: Branch) -> SamplingParams:
        """How the next turn of the branch is sampled."""
        return self.rollout.actor.sampling

    async def step(self, branch: Branch, action: Message) -> StepResult:
        """The env's answer to the action."""
        assert branch.env is not None
        return await self.rollout.actor.envs.step(branch.env, action)

    async def redirect(self, branch: Branch, observation_ids: Sequence[int]) -> bool:
        """Whether the branch goes on from another place than after this observation.

        If so, the branch stands there already: `Branch.take_back` and `Branch.restart` move it.
        """
        return False

    async def finish(
        self, branch: Branch, limit: Limit, action: Message | None
    ) -> tuple[float, Info]:
        """The reward of an episode that a limit ends, and facts; `action` was not stepped."""
        assert branch.env is not None
        return await self.rollout.actor.envs.finish(branch.env, limit, action)

    async def end(self, branch: Branch) -> None:
        """Free what belongs to the branch."""
