"""The actor: grows the trajectory tree of a task, one coroutine a branch.

    branch   generate a turn -> add a node -> env.step -> render the observation -> again
    fork     the first k tokens after a tool result have streamed in -> the plan is asked ->
             siblings start from the node that holds the result; the branch itself goes on,
             and steps its env only after every sibling holds its own copy
    end      terminated (by the env), truncated (by which limit), or failed (infrastructure);
             then the plan may start fresh roots, and a failed branch is replaced by one

Each env and each fork is closed exactly once, by the coroutine that opened it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from agentenv.engine import Engine
from agentenv.env import Env
from agentenv.growth import Growth
from agentenv.limits import Limits
from agentenv.open_envs import OpenEnvs
from agentenv.plan import RolloutPlan
from agentenv.renderer import Renderer
from agentenv.tree import TrajectoryTree
from agentenv.types import SamplingParams, Task


class Actor:
    """Rolls out tasks. One actor serves any number of concurrent rollouts.

    `sampling` gives temperature, truncation, penalty and stop strings beside those of the renderer;
    max_tokens and seed are set turn by turn.
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
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.make_env = make_env
        self.limits = limits
        self.sampling = sampling
        self.seed = seed
        self.envs = OpenEnvs(limits.env_timeout_s)

    @property
    def num_open_envs(self) -> int:
        return self.envs.count

    async def rollout(
        self,
        task: Task,
        plan: RolloutPlan,
        *,
        index: int = 0,
        session: str = "",
        first_root: int = 0,
        max_failures: int | None = None,
    ) -> TrajectoryTree:
        """Grow one tree. `index` is its place in start order.

        For trees that hold parts of one group: `session` names those whose prompts are alike (by
        default `index` does), and the first from-scratch branch gets the name `first_root`.
        `max_failures` takes the place of that of the limits.

        Raises EngineDeadError when no engine is left and DataError for a prompt that is too
        long; every other failure is a failed leaf.
        """
        tree = TrajectoryTree(task, index=index, policy_version=self.engine.policy_version)
        tree.add(None)
        async with asyncio.TaskGroup() as group:
            growth = self._growth(tree, plan, group, session or str(index))
            growth.num_root_names = first_root
            if max_failures is not None:
                growth.limits = replace(self.limits, max_failures=max_failures)
            growth.start_roots(plan.on_start(tree))
        return tree

    def _growth(
        self, tree: TrajectoryTree, plan: RolloutPlan, group: asyncio.TaskGroup, session: str
    ) -> Growth:
        return Growth(self, tree, plan, group, session)
