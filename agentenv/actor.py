"""The actor: rolls out tasks with one engine, renderer and environment type.

It serves any number of concurrent rollouts, each of which grows one tree (`rollout.py`) with
`RolloutHooks`. Evaluation (`ask`, `evaluate`) is the same rollout with the plan `Independent` and a
list instead of a queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from agentenv.branch import Branch, OpenEnvs
from agentenv.deadline import WaitKind, waiting
from agentenv.engine import Engine
from agentenv.env import Env, StepResult
from agentenv.failures import Failures
from agentenv.frames import Recorded
from agentenv.journal import TreeRecord
from agentenv.metrics import PrefixHits, ProbeWaits
from agentenv.plan import Independent, RolloutPlan
from agentenv.recovery import OtherPromptError
from agentenv.renderer import Renderer
from agentenv.rollout import Rollout
from agentenv.tree import TrajectoryTree
from agentenv.types import Info, Limit, Limits, Message, SamplingParams, Task


class RolloutHooks:
    """Hooks of a rollout; the base class changes nothing.

    One object per rollout. A subclass overrides some of the calls, in the order of a trajectory:

        prefix     the prompt was rendered
        sampling   a turn will be sampled
        step       the policy acted; the hook returns the env's answer
        redirect   the env answered, and the episode continues
        finish     a limit ended the episode; the hook returns the grade
        end        the branch ended for any reason, including cancellation

    Its constructor may reject the rollout with a ConfigError.
    """

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout

    def prefix(self, branch: Branch, prompt_ids: list[int]) -> list[int]:
        """Token ids with which the first turn of every root begins; called once per tree. They are
        context, not sampled, and excluded from the loss mask; they count as response, not as
        prompt.
        """
        return []

    def sampling(self, branch: Branch) -> SamplingParams:
        """Sampling parameters of the branch's next turn."""
        return self.rollout.actor.sampling

    async def step(self, branch: Branch, action: Message) -> StepResult:
        """The env's answer to the action."""
        assert branch.env is not None
        return await self.rollout.actor.envs.step(branch.env, action)

    async def redirect(self, branch: Branch, observation_ids: Sequence[int]) -> bool:
        """Whether the hook moved the branch elsewhere, by `Branch.take_back` or `Branch.restart`,
        instead of letting it continue after this observation.
        """
        return False

    async def finish(
        self, branch: Branch, limit: Limit, action: Message | None
    ) -> tuple[float, Info]:
        """Reward and info of an episode that a limit ends; `action` was not stepped."""
        assert branch.env is not None
        return await self.rollout.actor.envs.finish(branch.env, limit, action)

    async def end(self, branch: Branch) -> None:
        """Free the resources of the branch."""


logger = logging.getLogger(__name__)


class Awaited(NamedTuple):
    """A branch's current wait for `what`, since `since` (loop time, seconds); `branch` is "" for a
    wait of the tree itself."""

    task_id: str
    tree: int
    branch: str
    what: str
    since: float


def awaited_by(rollout: Rollout) -> Iterator[Awaited]:
    """The wait of each live branch, or of the tree when all have ended; none for a branch that is
    just starting.
    """
    task, index = rollout.tree.task.id, rollout.tree.index
    clocks = [(branch.name, branch.clock) for branch in rollout.branches] or [("", rollout.clock)]
    for name, clock in clocks:
        if clock.doing:
            yield Awaited(task, index, name, clock.doing, clock.since)


@dataclass(eq=False)
class Actor:
    """Rolls out tasks. One actor serves any number of concurrent rollouts.

    `sampling` gives temperature, truncation, penalty and stop strings in addition to the
    renderer's; max_tokens and seed are set per turn. `make_hooks` gives each rollout its hooks. All
    randomness is keyed by (seed, index, task, branch, turn).
    """

    engine: Engine
    renderer: Renderer
    make_env: Callable[[Task], Env]
    limits: Limits
    sampling: SamplingParams
    seed: int | str
    make_hooks: Callable[[Rollout], RolloutHooks] = RolloutHooks

    def __post_init__(self) -> None:
        limits = self.limits
        self.envs = OpenEnvs(limits.env_timeout_s)
        self.prefixes = PrefixHits()
        self.probes = ProbeWaits()
        self.rollouts: set[Rollout] = set()  # running ones
        self._unpaused = asyncio.Event()  # cleared while turns are paused
        self._unpaused.set()
        self.failures = Failures(limits.max_failed_share, strict=limits.strict)
        self._draws = Random()  # one for all turns, since creating it costs as much as a draw

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
        record: TreeRecord | None = None,
        recorded: Recorded | None = None,
        cancelled: str = "",
    ) -> TrajectoryTree:
        """Grow one tree. `index` is its place in start order.

        Its events are written to `record`, and the tree is returned once they are on disk.
        `recorded` is the tree of an earlier process, which this call resumes; it restarts the tree
        if the prompt of its task changed, or if the actor has hooks. A reason in `cancelled` ends
        the tree at once: its live branches fail as cancelled, no environment is made, and no turn
        is sampled.

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
        make = partial(
            Rollout,
            self,
            plan=plan,
            limits=limits,
            session=session or str(index),
            record=record,
            again=again,
        )
        if recorded is not None and self.make_hooks is RolloutHooks:
            try:
                return await self._resume_recorded(make, recorded, record, cancelled)
            except* OtherPromptError:
                logger.warning(
                    "task %s: its prompt differs from the recorded one; its tree restarts", task.id
                )
        tree = TrajectoryTree(task, index=index, policy_version=self.engine.policy_version)
        tree.add(None)
        if record is not None:
            record.began(tree)
        await make(tree).run(first_root, cancelled=cancelled)
        return tree

    def seed_of(self, key: str) -> int:
        """The seed of a turn, 63 bits of its key."""
        self._draws.seed(key)
        return self._draws.getrandbits(63)

    def awaited(self) -> list[Awaited]:
        """The current waits of all branches of all rollouts."""
        return [one for rollout in self.rollouts for one in awaited_by(rollout)]

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

    async def _resume_recorded(
        self,
        make: Callable[[TrajectoryTree], Rollout],
        recorded: Recorded,
        record: TreeRecord | None,
        cancelled: str,
    ) -> TrajectoryTree:
        tree = recorded.tree
        if record is not None:
            record.resumes(recorded)
        names = [node.branch for node in tree.nodes] + [one.name for one in recorded.branches]
        roots = [int(name) for name in names if name.isdecimal()]
        await make(tree).run(max(roots, default=-1) + 1, recorded, cancelled)
        return tree


class Question(NamedTuple):
    """A request for one trajectory: sample number `sample` of a task, by an actor."""

    actor: Actor
    task: Task
    sample: int


class Answer(NamedTuple):
    """The result of a question: a tree with one leaf, the number of retries after failures, and the
    seconds of the last attempt.
    """

    question: Question
    tree: TrajectoryTree
    num_retries: int
    seconds: float


async def run_questions(
    questions: Iterable[Question],
    on_answer: Callable[[Answer], Awaitable[None] | None],
    on_retry: Callable[[Answer], None] = lambda answer: None,
    *,
    concurrency: int,
) -> None:
    """Run all questions, `concurrency` at a time and in order; `on_answer` gets each answer
    immediately and is awaited if it returns an awaitable.

    Samples depend on the actor's seed, the task and the sample number, never on order, concurrency
    or the number of samples. A failed trajectory is retried with the same seeds, up to
    `max_failures` of the limits; `on_retry` gets each failed attempt before its retry. Raises what
    Actor.rollout and the two functions raise.
    """
    waiting = iter(questions)

    async def work() -> None:
        for question in waiting:
            handled = on_answer(await _answer(question, on_retry))
            if handled is not None:
                await handled

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())


async def evaluate(
    actor: Actor, tasks: Sequence[Task], *, num_samples: int = 1, concurrency: int = 256
) -> list[TrajectoryTree]:
    """Roll out every task `num_samples` times, at most `concurrency` trajectories at a time unless
    one task has more; one tree per task, in the order of the tasks. Seeds are those of `ask`.
    """
    places = asyncio.Semaphore(max(1, concurrency // num_samples))

    async def grow(number: int, task: Task) -> TrajectoryTree:
        async with places:
            tree = await actor.rollout(task, Independent(num_samples), session=task.id)
        tree.index = number
        return tree

    async with asyncio.TaskGroup() as group:
        growing = [group.create_task(grow(*one)) for one in enumerate(tasks)]
    return [one.result() for one in growing]


async def _answer(question: Question, on_retry: Callable[[Answer], None]) -> Answer:
    actor, task, sample = question
    loop = asyncio.get_running_loop()
    num_retries = 0
    while True:
        begin = loop.time()
        again = num_retries < actor.limits.max_failures
        tree = await actor.rollout(
            task, Independent(1), session=task.id, first_root=sample, max_failures=0, again=again
        )
        answer = Answer(question, tree, num_retries, loop.time() - begin)
        if not (again and tree.failures()):
            return answer
        on_retry(answer)
        num_retries += 1
