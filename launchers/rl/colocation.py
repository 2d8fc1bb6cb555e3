"""GPUs that engine and learner have in turn.

    all serve --> sleep --> all train --> wake --> all serve
                            publish -----^  with the new weights

Rollouts that are under way wait with their tokens while the learner trains, and their deadlines
with them; so do those that start meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal

from agentenv.engine import Engine, SleepingEngine
from agentenv.engines.pool import EnginePool
from agentenv.errors import ConfigError, LearnerError
from learners.deepspeed_learner import DeepSpeedLearner


class Colocation:
    """Who has the GPUs. Every command to the learner takes them for itself; `turn` keeps them for
    several. `settle` is awaited before the engine sleeps: what only it can still do."""

    def __init__(
        self,
        engine: SleepingEngine,
        learner: DeepSpeedLearner,
        settle: Callable[[], Awaitable[None]],
    ) -> None:
        self.owner: Literal["engine", "learner"] = "engine"
        self._engine, self._learner, self._settle = engine, learner, settle
        self._depth = 0
        self._moving = asyncio.Lock()
        learner.turn = self.turn

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The learner has the GPUs inside, whether or not it had them already."""
        self._depth += 1
        gone = False
        try:
            await self._to_learner()
            yield
        except LearnerError:
            gone = True  # there may be nobody left to sleep, and the reason must not be hidden
            raise
        finally:
            self._depth -= 1
            if not (self._depth or gone):
                await self._to_engine()

    async def release(self) -> None:
        """Within a turn: the learner sleeps from now on, the engine is about to be woken up by
        `load_weights`."""
        async with self._moving:
            await self._learner.sleep()
            self.owner = "engine"

    async def _to_learner(self) -> None:
        async with self._moving:
            if self.owner == "engine":
                await self._settle()
                await self._engine.sleep()
                await self._learner.wake()
                self.owner = "learner"

    async def _to_engine(self) -> None:
        async with self._moving:
            if self.owner == "learner":
                await self._learner.sleep()
                await self._engine.wake()
                self.owner = "engine"


def sleeping_engine(engine: Engine) -> SleepingEngine:
    """The engine as one that can sleep. Raises ConfigError if it, or one of its servers, cannot."""
    if not isinstance(engine, SleepingEngine):
        raise ConfigError(
            "resources.colocated: this engine cannot sleep; choose engine.name = 'embedded', "
            "'vllm' or 'sglang'"
        )
    if isinstance(engine, EnginePool):
        engine.check_sleep()
    return engine
