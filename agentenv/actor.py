"""The actor: rolls out tasks with one engine, renderer and kind of environment.

It serves any number of rollouts at a time, each of which grows one tree (`rollout.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from agentenv.branch import OpenEnvs
from agentenv.deadline import waiting
from agentenv.engine import Engine
from agentenv.env import Env
from agentenv.failures import Failures
from agentenv.hooks import RolloutHooks
from agentenv.journal import TreeRecord
from agentenv.metrics import PrefixHits, ProbeWaits
from agentenv.plan import RolloutPlan
from agentenv.recorded import Recorded
from agentenv.recovery import OtherPromptError
from agentenv.renderer import Renderer
from agentenv.rollout import Rollout
from agentenv.tree import TrajectoryTree
from agentenv.types import Limits, SamplingParams, Task

logger = logging.getLogger(__name__)

PAUSED = "the run, which is paused, to go on"


class Awaited(NamedTuple):
    """A wait of a branch, since `since` (time of the loop, seconds); `branch` is "" for a wait of
    the tree itself."""

    task_id: str
    tree: int
    branch: str
    what: str
    since: float


def awaited_by(rollout: Rollout) -> Iterator[Awaited]:
    """The wait of each live branch, or of the tree when all have ended; none of a branch that is
    only starting."""
    task, index = rollout.tree.task.id, rollout.tree.index
    clocks = [(branch.name, branch.clock) for branch in rollout.branches] or [("", rollout.clock)]
    for name, clock in clocks:
        if clock.doing:
            yield Awaited(task, index, name, clock.doing, clock.since)


class Actor:
    """Rolls out tasks. One actor serves any number of concurrent rollouts.

    `sampling` gives temperature, truncation, penalty and stop strings beside those of the renderer;
    max_tokens and seed are set turn by turn. `make_hooks` gives each rollout its hooks.
    All randomness is keyed by (seed, index, task, branch, turn).
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        make_env: Callable[[Task], Env],
        limits: Limits,
        sampling: SamplingParams,
        seed: int | str,
        make_hooks: Callable[[Rollout], RolloutHooks] = RolloutHooks,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.make_env = make_env
        self.limits = limits
        self.sampling = sampling
        self.seed = seed
        self.make_hooks = make_hooks
        self.envs = OpenEnvs(limits.env_timeout_s)
        self.prefixes = PrefixHits()
        self.probes = ProbeWaits()
        self.rollouts: set[Rollout] = set()  # that go on
        self._goes_on = asyncio.Event()  # unless turns are paused
        self._goes_on.set()
        self.failures = Failures(limits.max_failed_share, strict=limits.strict)
        self._draws = Random()  # one for all turns, since making it costs as much as its draw

    async def rollout(
        self,
        task: Task,
        plan: RolloutPlan,
        *,
        index: int = 0,
        session: str = "",
        first_root: int = 0,
        max_failures: int | None = None,
        record: TreeRecord | None = None,
        recorded: Recorded | None = None,
        cancelled: str = "",
    ) -> TrajectoryTree:
        """Grow one tree. `index` is its place in start order.

        Its events are written to `record`, and the tree is returned once that is on the
        disk. `recorded` is the tree as an earlier process left it, which goes on from there; it
        begins again if its task has another prompt by now, or if hooks took part in it. With a
        reason in `cancelled` the tree ends at once: its live branches fail as cancelled, and no
        environment is made and no turn is sampled.

        For trees that hold parts of one group: `session` names those whose prompts are alike (by
        default `index` does), and the first from-scratch branch gets the name `first_root`.
        `max_failures` takes the place of that of the limits.

        Raises EngineDeadError when no engine is left, DataError for a prompt that is too long,
        ConfigError for what no retry mends, and TooManyFailuresError as `limits` say; every other
        failure is a failed leaf.
        """
        limits = self.limits
        if max_failures is not None:
            limits = replace(limits, max_failures=max_failures)
        make = partial(
            Rollout, self, plan=plan, limits=limits, session=session or str(index), record=record
        )
        if recorded is not None and self.make_hooks is RolloutHooks:
            try:
                return await self._go_on(make, recorded, record, cancelled)
            except* OtherPromptError:
                logger.warning("task %s has another prompt than its tree: it begins again", task.id)
        tree = TrajectoryTree(task, index=index, policy_version=self.engine.policy_version)
        tree.add(None)
        if record is not None:
            record.began(tree)
        await make(tree).run(first_root, cancelled=cancelled)
        return tree

    def seed_of(self, key: str) -> int:
        """The seed of a turn, 63 bits of its key."""
        self._draws.seed(key)  # what earlier versions sampled, they would sample again
        return self._draws.getrandbits(63)

    def awaited(self) -> list[Awaited]:
        """The waits of all branches of all rollouts."""
        return [one for rollout in self.rollouts for one in awaited_by(rollout)]

    def longest(self) -> dict[str, float]:
        """Each wait, and the start of its longest one (time of the loop)."""
        found: dict[str, float] = {}
        for rollout in self.rollouts:
            for clock in rollout.clocks():
                if clock.doing and clock.since < found.get(clock.doing, inf):
                    found[clock.doing] = clock.since
        return found

    def growing(self, index: int) -> Rollout | None:
        """The rollout of the tree with this index, while it goes on."""
        return next((one for one in self.rollouts if one.tree.index == index), None)

    @property
    def is_paused(self) -> bool:
        return not self._goes_on.is_set()

    def pause(self) -> None:
        """Begin no turn until `resume`; those under way end."""
        self._goes_on.clear()

    def resume(self) -> None:
        """End a pause."""
        self._goes_on.set()

    async def until_resumed(self) -> None:
        """Wait while turns are paused; the clock of the rollout stands meanwhile."""
        with waiting(PAUSED):
            while self.is_paused:
                await self._goes_on.wait()

    async def _go_on(
        self,
        make: Callable[[TrajectoryTree], Rollout],
        recorded: Recorded,
        record: TreeRecord | None,
        cancelled: str,
    ) -> TrajectoryTree:
        tree = recorded.tree
        if record is not None:
            record.goes_on(recorded)
        names = [node.branch for node in tree.nodes] + [one.name for one in recorded.branches]
        roots = [int(name) for name in names if name.isdecimal()]
        await make(tree).run(max(roots, default=-1) + 1, recorded, cancelled)
        return tree
