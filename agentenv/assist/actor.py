"""The actor with Tool-Star's inference-time tools."""

from __future__ import annotations

import asyncio
from typing import Any

from agentenv.actor import Actor
from agentenv.assist.config import AssistConfig
from agentenv.assist.debugger import debugged
from agentenv.assist.growth import AssistedGrowth
from agentenv.assist.model import HelperModel
from agentenv.env import Env
from agentenv.errors import ConfigError
from agentenv.growth import Growth
from agentenv.plan import Independent, RolloutPlan
from agentenv.tool_env import ToolEnv
from agentenv.tree import TrajectoryTree
from agentenv.types import Task


class Assist:
    """The helpers of a process: their configuration and their models."""

    def __init__(self, config: AssistConfig) -> None:
        self.config = config
        self.debugger, self.refiner = (
            None if one is None else HelperModel(name, one)
            for name, one in (("debugger", config.debugger), ("refiner", config.refiner))
        )

    async def start(self) -> None:
        """Find the models. Raises ConfigError for a server that is not there."""
        for model in (self.debugger, self.refiner):
            if model is not None:
                await model.start()

    def fits(self, env: Env) -> bool:
        """Whether the env has the tool that the debugger is for."""
        config = self.config.debugger
        return config is not None and isinstance(env, ToolEnv) and config.tool in env.tools

    async def close(self) -> None:
        """Idempotent."""
        for model in (self.debugger, self.refiner):
            if model is not None:
                await model.close()


class AssistedActor(Actor):
    """An actor whose rollouts have the helpers of `assist`. For evaluation: what a trajectory was
    sampled from is not what training would need, so other plans than Independent are refused."""

    def __init__(self, *rest: Any, assist: Assist, **keys: Any) -> None:
        super().__init__(*rest, **keys)
        self.assist = assist
        plain = self.make_env

        def make_env(task: Task) -> Env:
            env = plain(task)
            if assist.fits(env):
                assert isinstance(env, ToolEnv)
                assert assist.config.debugger is not None
                assert assist.debugger is not None
                debugged(env, assist.config.debugger, assist.debugger)
            return env

        self.make_env = make_env

    def _growth(
        self, tree: TrajectoryTree, plan: RolloutPlan, group: asyncio.TaskGroup, session: str
    ) -> Growth:
        if not isinstance(plan, Independent):
            raise ConfigError(
                f"assist: helpers are for evaluation, not for {type(plan).__name__}: training "
                "needs a context that is only appended to"
            )
        return AssistedGrowth(self, tree, plan, group, session, assist=self.assist)
