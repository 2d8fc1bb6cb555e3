"""The parts that all rollouts of an actor share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from agentenv.base.deadline import WaitKind, waiting
from agentenv.base.types import Limits, SamplingParams, Task
from agentenv.contract.engine import Engine
from agentenv.contract.env import Env
from agentenv.rollout.failures import Failures
from agentenv.rollout.metrics import PrefixHits, ProbeWaits
from agentenv.rollout.open_envs import OpenEnvs
from agentenv.text.renderer import Renderer


@dataclass(eq=False)
class ActorParts:
    """Engine, renderer and environments, open ones and counts; the pause of all turns; the seeds.

    `sampling` gives temperature, truncation, penalty and stop strings in addition to the
    renderer's; max_tokens and seed are set per turn.
    """

    engine: Engine
    renderer: Renderer
    make_env: Callable[[Task], Env]
    limits: Limits
    sampling: SamplingParams
    seed: int | str

    def __post_init__(self) -> None:
        limits = self.limits
        self.envs = OpenEnvs(limits.env_timeout_s)
        self.prefixes = PrefixHits()
        self.probes = ProbeWaits()
        self._unpaused = asyncio.Event()  # cleared while turns are paused
        self._unpaused.set()
        self.failures = Failures(limits.max_failed_share, strict=limits.strict)
        self._draws = Random()  # one for all turns, since creating it costs as much as a draw

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
