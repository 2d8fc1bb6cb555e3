"""The parts that all rollouts of an actor share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from agentenv.base.crashes import guarded
from agentenv.base.deadline import Deadline, WaitKind, uncancelled, waiting
from agentenv.base.errors import AgentEnvError, EnvError, InfraError
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Info, Limit, Limits, Message, SamplingParams, Task
from agentenv.contract.engine import Engine
from agentenv.contract.env import Env, StepResult, check_finish, check_reset, check_step
from agentenv.contract.plan import RolloutPlan
from agentenv.rollout.branch import Branch, Continuation
from agentenv.rollout.failures import Failures
from agentenv.rollout.metrics import PrefixHits, ProbeWaits
from agentenv.text.renderer import Renderer

# Hooks: changes of a rollout by an extension.


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
        return self.actor.sampling_at(self.tree.policy_version)

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


# The open environments of an actor's branches.

logger = logging.getLogger(__name__)


class OpenEnvs:
    """The open envs of an actor: each is closed once, and every call has a deadline.

    All methods except `close` raise CrashError for a bug of the env. After `timeout_s` seconds,
    not counting waits of the rollout, `reset` and `fork` raise EnvError, and `finish` raises
    InfraError: it changes nothing and may be retried.
    """

    def __init__(self, timeout_s: float) -> None:
        self.count = 0
        self.timeout_s = timeout_s

    async def reset(self, env: Env, seed: int) -> tuple[list[Message], Info]:
        """Begin the episode of a new env. The env is open from now on, even if this fails."""
        self.count += 1
        with self._deadline("reset"):
            return check_reset(await guarded(env.reset(seed=seed), "the environment's reset"))

    async def fork(self, env: Env) -> Env:
        """An open copy of the env."""
        with self._deadline("fork"):
            copy = await guarded(env.fork(), "the environment's fork")
        self.count += 1
        return copy

    async def finish(self, env: Env, limit: Limit, action: Message | None) -> tuple[float, Info]:
        """Reward and info of an episode that a limit ended."""
        with self._deadline("finish", InfraError):
            found = await guarded(env.finish(limit, action), "the environment's finish")
            return check_finish(found)

    async def step(self, env: Env, action: Message) -> StepResult:
        """The env's answer. Tools have their own deadlines."""
        return check_step(await guarded(env.step(action), "the environment's step"))

    async def close(self, env: Env, task_id: str) -> None:
        """Close the env, even while being cancelled. A failure is only logged."""
        close_now = getattr(env, "close_now", None)  # closes without waiting, where it can
        if close_now is not None and close_now():
            self.count -= 1
            return
        await uncancelled(self._close(env, task_id))

    async def _close(self, env: Env, task_id: str) -> None:
        try:
            with self._deadline("close"):
                await guarded(env.close(), "the environment's close")
        except (AgentEnvError, TimeoutError) as error:
            logger.warning("task %s: closing an env failed: %r", task_id, error)
        finally:
            self.count -= 1

    def _deadline(self, call: str, error: type[AgentEnvError] = EnvError) -> Deadline:
        return Deadline.after(self.timeout_s, f"env.{call}", error)


@dataclass(eq=False)
class ActorParts:
    """Engine, renderer and environments, open ones and counts; the pause of all turns; the seeds.

    `sampling` gives temperature, truncation, penalty and stop strings in addition to the
    renderer's; max_tokens and seed are set per turn. `schedule` replaces it by the policy version
    at the start of a tree, whose turns all have the same, so that their entropies compare.
    """

    engine: Engine
    renderer: Renderer
    make_env: Callable[[Task], Env]
    limits: Limits
    sampling: SamplingParams
    seed: int | str
    schedule: Callable[[int], SamplingParams] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        limits = self.limits
        self.envs = OpenEnvs(limits.env_timeout_s)
        self.prefixes = PrefixHits()
        self.probes = ProbeWaits()
        self._unpaused = asyncio.Event()  # cleared while turns are paused
        self._unpaused.set()
        self.failures = Failures(limits.max_failed_share, strict=limits.strict)
        self._draws = Random()  # one for all turns, since creating it costs as much as a draw

    def sampling_at(self, version: int) -> SamplingParams:
        """The sampling of trees that begin at this policy version."""
        return self.sampling if self.schedule is None else self.schedule(version)

    def seed_of(self, key: str) -> int:
        """The seed of a turn, 63 bits of its key."""
        self._draws.seed(key)
        return self._draws.getrandbits(63)

    @property
    def is_paused(self) -> bool:
        return not self._unpaused.is_set()

    def pause(self) -> None:
        """Start no turn until `resume`; running turns finish."""
        self._unpaused.clear()

    def resume(self) -> None:
        """End a pause."""
        self._unpaused.set()

    async def until_resumed(self) -> None:
        """Wait while turns are paused; the rollout's clock stops meanwhile."""
        with waiting(WaitKind.PAUSED):
            while self.is_paused:
                await self._unpaused.wait()
