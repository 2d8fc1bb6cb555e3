"""Trees of an evaluation: one a task, samples that do not depend on their number, retries."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Limits, Task
from agentenv.rollout.questions import Answer, Question, evaluate, run_questions
from tests.support.toy import CountingEnv
from tests.support.virtual_clock import run_virtual
from tests.test_actor import make_actor

TASKS = [Task(f"t{n}", "toy", f"question {n}", ("1",)) for n in range(6)]


def texts(trees: list[TrajectoryTree]) -> dict[str, list[list[int]]]:
    """By task, the trajectories in the order of their branches."""
    return {
        tree.task.id: [
            path.token_ids for path in sorted(tree.trajectories(), key=lambda one: one.leaf.branch)
        ]
        for tree in trees
    }


def evaluated(tasks: list[Task], **keys: Any) -> list[TrajectoryTree]:
    return run_virtual(evaluate(make_actor(), tasks, **keys))


def test_each_task_has_one_tree_with_its_samples_in_order() -> None:
    trees = evaluated(TASKS, num_samples=3)
    assert [tree.task for tree in trees] == TASKS
    assert [tree.index for tree in trees] == list(range(6))
    for tree in trees:
        assert sorted(leaf.branch for leaf in tree.leaves()) == ["0", "1", "2"]
        assert (tree.num_started, tree.num_roots, tree.num_live) == (3, 3, 0)
        assert [node.index for node in tree.nodes] == list(range(len(tree.nodes)))
        for leaf in tree.leaves():
            path = tree.path(leaf)
            assert path[0] is tree.root
            assert {node.branch for node in path[1:]} == {leaf.branch}
            assert path[0].observation_ids


def test_samples_are_independent_of_order_number_and_concurrency() -> None:
    many = texts(evaluated(TASKS, num_samples=4))
    assert len({str(sample) for sample in many["t0"]}) > 1
    one = texts(evaluated(TASKS[::-1], num_samples=1, concurrency=1))
    few = texts(evaluated(TASKS[2:4], num_samples=2, concurrency=3))
    for found in (one, few):
        assert found == {name: many[name][: len(own)] for name, own in found.items()}


def test_a_failure_is_retried_with_the_same_seeds() -> None:
    limits = Limits(max_failed_share=1.0)
    actor, calm = make_actor(limits=limits), texts(evaluated(TASKS, num_samples=2))
    answers: list[Answer] = []

    def faulty(task: Task) -> CountingEnv:
        return CountingEnv(task, faults={"reset": 0.1}, rng=rng)

    rng = Random(1)
    actor.make_env = faulty
    questions = [Question(actor, task, number) for task in TASKS for number in range(2)]
    run_virtual(run_questions(questions, answers.append, concurrency=12))
    assert len(answers) == 12
    assert sum(answer.num_retries for answer in answers) > 0
    for answer in answers:
        (own,) = answer.tree.trajectories()
        assert own.token_ids == calm[answer.question.task.id][answer.question.sample]
    answers.clear()
    actor.make_env = lambda task: CountingEnv(task, faults={"reset": 1.0})
    run_virtual(run_questions(questions, answers.append, concurrency=12))
    assert sum(len(answer.tree.failures()) for answer in answers) == 12
    assert actor.envs.count == 0


def test_the_number_of_tasks_in_flight_is_bounded_by_concurrency() -> None:
    actor, seen = make_actor(), []
    generate = actor.engine.generate

    async def watch(*rest: Any, **keys: Any) -> Any:
        seen.append(actor.envs.count)
        await asyncio.sleep(1.0)
        return await generate(*rest, **keys)

    actor.engine.generate = watch  # type: ignore[method-assign]
    run_virtual(evaluate(actor, TASKS, num_samples=2, concurrency=5))
    assert max(seen) == 4  # two trees of two
    seen.clear()
    questions = [Question(actor, task, 0) for task in TASKS]
    run_virtual(run_questions(questions, lambda answer: None, concurrency=5))
    assert max(seen) == 5
