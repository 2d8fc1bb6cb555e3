"""The helpers of a process, which all rollouts of an actor share."""

from __future__ import annotations

from agentenv.assist.config import AssistConfig
from agentenv.assist.model import HelperModel
from agentenv.env import Env
from agentenv.tool_env import ToolEnv


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
