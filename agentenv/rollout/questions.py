"""Questions of an evaluation: each is one trajectory of a task, by the plan `Independent`, from a
list instead of a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Task
from agentenv.contract.plan import Independent
from agentenv.rollout.actor import Actor


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
    one task has more; one tree per task, in the order of the tasks. Seeds are those of
    `run_questions`.
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
