"""Evaluation is the training rollout with the plan `Independent`, and a report for a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import fmean

from msgspec import Struct

from agentenv.actor import Actor
from agentenv.metrics import wilson_interval
from agentenv.plan import Independent
from agentenv.tree import Trajectory, TrajectoryTree
from agentenv.types import Task


class Score(Struct, frozen=True):
    """Figures of one group of questions. `success` is the share of trajectories whose answer is
    right, with its 95 % Wilson interval; failed trajectories are counted apart, never as wrong."""

    num_trajectories: int
    num_failed: int
    success: float
    interval: tuple[float, float]
    reward: float
    tool_calls: float
    action_tokens: float


class Report(Struct, frozen=True):
    """The result of one evaluation: over all questions and by their kind."""

    name: str
    policy_versions: tuple[int, int]
    overall: Score
    by_kind: dict[str, Score]


async def evaluate(
    actor: Actor, tasks: Sequence[Task], *, num_samples: int = 1, concurrency: int = 256
) -> list[TrajectoryTree]:
    """Roll out every task `num_samples` times; the trees come in the order of the tasks."""
    slots = asyncio.Semaphore(concurrency)
    plan = Independent(num_samples)

    async def one(index: int, task: Task) -> TrajectoryTree:
        async with slots:
            return await actor.rollout(task, plan, index=index)

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(index, task)) for index, task in enumerate(tasks)]
    return [task.result() for task in running]


def make_report(name: str, trees: Sequence[TrajectoryTree]) -> Report:
    """Figures of evaluated trees; `policy_versions` are the oldest and newest that were sampled."""
    kinds = sorted({tree.task.kind for tree in trees})
    versions = [
        span.version for tree in trees for node in tree.nodes for span in node.version_spans
    ]
    return Report(
        name=name,
        policy_versions=(min(versions, default=0), max(versions, default=0)),
        overall=_score(trees),
        by_kind={
            kind: _score([tree for tree in trees if tree.task.kind == kind]) for kind in kinds
        },
    )


def _score(trees: Sequence[TrajectoryTree]) -> Score:
    done: list[Trajectory] = [trajectory for tree in trees for trajectory in tree.trajectories()]
    num_right = sum(trajectory.success for trajectory in done)
    return Score(
        num_trajectories=len(done),
        num_failed=sum(len(tree.failures()) for tree in trees),
        success=num_right / len(done) if done else 0.0,
        interval=wilson_interval(num_right, len(done)),
        reward=fmean(trajectory.reward for trajectory in done) if done else 0.0,
        tool_calls=fmean(trajectory.num_tool_calls for trajectory in done) if done else 0.0,
        action_tokens=fmean(trajectory.num_action_tokens for trajectory in done) if done else 0.0,
    )
