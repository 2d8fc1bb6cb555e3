"""The actor: rolls out tasks with one engine, renderer and environment type.

It serves any number of concurrent rollouts, each of which grows one tree (`rollout.py`) with
`RolloutHooks`. `questions.py` has the rollouts of an evaluation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from msgspec.structs import replace

from agentenv.base.tree import PLAN, TrajectoryTree
from agentenv.base.types import Task
from agentenv.contract.plan import RolloutPlan
from agentenv.rollout.actor_parts import ActorParts, RolloutHooks
from agentenv.rollout.branch import BranchNow
from agentenv.rollout.frames import Recorded
from agentenv.rollout.journal import TreeRecord
from agentenv.rollout.recovery import OtherPromptError
from agentenv.rollout.rollout import Rollout

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Actor(ActorParts):
    """Rolls out tasks. One actor serves any number of concurrent rollouts.

    `make_hooks` gives each rollout its hooks. All randomness is keyed by (seed, index, task,
    branch, turn).
    """

    make_hooks: Callable[[ActorParts, TrajectoryTree, RolloutPlan], RolloutHooks] = RolloutHooks

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rollouts: set[Rollout] = set()  # running ones

    async def rollout(
        self,
        task: Task,
        plan: RolloutPlan,
        *,
        index: int = 0,
        session: str = "",
        first_root: int = 0,
        max_failures: int | None = None,
        again: bool = False,
        known: Any = None,
        record: TreeRecord | None = None,
        recorded: Recorded | None = None,
        cancelled: str = "",
    ) -> TrajectoryTree:
        """Grow one tree. `index` is its place in start order.

        `known`, what the plan has learned in the run, is stored in the root's `info`. The tree's
        events are written to `record`, and it is returned once they are on disk. `recorded` is the
        tree of an earlier process, which this call resumes; it restarts the tree if the prompt of
        its task changed, or if the actor has hooks. A reason in `cancelled` ends the tree at once:
        its live branches fail as cancelled, no environment is made, and no turn is sampled.

        For a group that is split over several trees: `session` identifies trees with equal prompts
        (default: `index`), and `first_root` is the name of the first from-scratch branch.
        `max_failures` overrides the limits' value. `again` means that the caller retries the tree
        if it fails.

        Raises EngineDeadError when no engine is left, DataError for a prompt that is too long,
        ConfigError for permanent errors, and TooManyFailuresError as `limits` say; every other
        failure is a failed leaf.
        """
        limits = self.limits
        if max_failures is not None:
            limits = replace(limits, max_failures=max_failures)

        def made(tree: TrajectoryTree) -> Rollout:
            hooks = self.make_hooks(self, tree, plan)
            return Rollout(
                self, tree, plan, limits, session or str(index), hooks, record=record, again=again
            )

        if recorded is not None and self.make_hooks is RolloutHooks:
            if record is not None:
                record.resumes(recorded)
            try:
                rollout = made(recorded.tree)
                await self._grow(rollout, _num_roots(recorded), recorded, cancelled)
                return recorded.tree
            except* OtherPromptError:
                logger.warning(
                    "task %s: its prompt differs from the recorded one; its tree restarts", task.id
                )
        tree = TrajectoryTree(task, index=index, policy_version=self.engine.policy_version)
        tree.add(None, info={} if known is None else {PLAN: known})
        if record is not None:
            record.began(tree)
        await self._grow(made(tree), first_root, None, cancelled)
        return tree

    async def _grow(
        self, rollout: Rollout, first_root: int, recorded: Recorded | None, cancelled: str
    ) -> None:
        self.rollouts.add(rollout)
        try:
            await rollout.run(first_root, recorded, cancelled)
        finally:
            self.rollouts.discard(rollout)

    def awaited(self) -> list[BranchNow]:
        """The current waits of all branches of all rollouts; none for a branch that is just
        starting."""
        return [one for rollout in self.rollouts for one in rollout.now() if one.what]

    def longest(self) -> dict[str, float]:
        """By kind of wait, the start of the longest current one (loop time, seconds)."""
        found: dict[str, float] = {}
        for rollout in self.rollouts:
            for clock in rollout.clocks():
                if clock.doing and clock.since < found.get(clock.doing, inf):
                    found[clock.doing] = clock.since
        return found

    def growing(self, index: int) -> Rollout | None:
        """The running rollout of the tree with this index."""
        return next((one for one in self.rollouts if one.tree.index == index), None)


def _num_roots(recorded: Recorded) -> int:
    """The name of the next root."""
    names = [node.branch for node in recorded.tree.nodes] + [one.name for one in recorded.branches]
    return max((int(name) for name in names if name.isdecimal()), default=-1) + 1
