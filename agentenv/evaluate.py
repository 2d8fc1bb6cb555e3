"""Evaluation is the training rollout with the plan `Independent`, and a list for a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from agentenv.actor import Actor
from agentenv.plan import Independent
from agentenv.tree import TrajectoryTree
from agentenv.types import Task


class Question(NamedTuple):
    """One trajectory to ask for: sample number `sample` of a task, by an actor."""

    actor: Actor
    task: Task
    sample: int


class Answer(NamedTuple):
    """What came of a question: a tree with one leaf, how often it was tried again after a
    failure, and the seconds that the last attempt took."""

    question: Question
    tree: TrajectoryTree
    num_retries: int
    seconds: float


async def ask(
    questions: Iterable[Question],
    on_answer: Callable[[Answer], Awaitable[None] | None],
    *,
    concurrency: int,
) -> None:
    """Ask all questions, `concurrency` at a time and in order; `on_answer` gets each answer as
    soon as it is there, and is awaited if it wants that.

    What is sampled depends on the actor's seed, the task and the number of the sample, never on
    order, concurrency, or how many samples are asked. A failed trajectory is tried again with
    the same seeds, up to `max_failures` of the limits. Raises what Actor.rollout raises.
    """
    waiting = iter(questions)

    async def work() -> None:
        for question in waiting:
            heard = on_answer(await _answer(question))
            if heard is not None:
                await heard

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())


async def evaluate(
    actor: Actor,
    tasks: Sequence[Task],
    *,
    num_samples: int = 1,
    concurrency: int = 256,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> list[TrajectoryTree]:
    """Roll out every task `num_samples` times, `concurrency` trajectories at a time; a tree a
    task, in the order of the tasks. `on_answer` sees each trajectory as it ends."""
    questions = [Question(actor, task, number) for task in tasks for number in range(num_samples)]
    found: dict[int, TrajectoryTree] = {}

    def keep(answer: Answer) -> None:
        found[id(answer.question)] = answer.tree
        on_answer(answer)

    await ask(questions, keep, concurrency=min(concurrency, len(questions)))
    trees = [found[id(question)] for question in questions]
    firsts = range(0, len(trees), num_samples)
    return [_joined(i, trees[first : first + num_samples]) for i, first in enumerate(firsts)]


async def _answer(question: Question) -> Answer:
    actor, task, sample = question
    loop = asyncio.get_running_loop()
    num_retries = 0
    while True:
        begin = loop.time()
        tree = await actor.rollout(
            task, Independent(1), session=task.id, first_root=sample, max_failures=0
        )
        if not tree.failures() or num_retries == actor.limits.max_failures:
            return Answer(question, tree, num_retries, loop.time() - begin)
        num_retries += 1


def _joined(index: int, parts: Sequence[TrajectoryTree]) -> TrajectoryTree:
    """The trajectories of `parts`, which have the prompt in common, as one tree."""
    whole = parts[0]
    whole.index = index
    for part in parts[1:]:
        whole.root.observation_ids = whole.root.observation_ids or part.root.observation_ids
        whole.policy_version = min(whole.policy_version, part.policy_version)
        shift = len(whole.nodes) - 1
        for node in part.nodes[1:]:
            node.index += shift
            if node.continues is not None:
                node.continues += shift
            elif node.parent:
                node.parent += shift
            whole.nodes.append(node)
        whole.num_started += part.num_started
        whole.num_roots += part.num_roots
    return whole
