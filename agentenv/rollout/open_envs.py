"""The open environments of an actor's branches."""

from __future__ import annotations

import logging

from agentenv.base.crashes import guarded
from agentenv.base.deadline import Deadline, uncancelled
from agentenv.base.errors import AgentEnvError, EnvError, InfraError
from agentenv.base.types import Info, Limit, Message
from agentenv.contract.env import Env, StepResult, check_finish, check_reset, check_step

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
        result = await guarded(env.step(action), "the environment's step")
        return check_step(result)

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
