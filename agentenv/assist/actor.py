"""The actor with Tool-Star's inference-time tools."""

from __future__ import annotations

import asyncio
from typing import Any

from agentenv.actor import Actor
from agentenv.assist.debugger import debugged
from agentenv.assist.growth import AssistedGrowth
from agentenv.assist.helpers import Assist
from agentenv.env import Env
from agentenv.errors import ConfigError
from agentenv.growth import Growth
from agentenv.plan import Independent, RolloutPlan
from agentenv.tool_env import ToolEnv
from agentenv.tree import TrajectoryTree
from agentenv.types import Task


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
