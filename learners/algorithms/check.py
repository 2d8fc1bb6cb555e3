"""Before a run: each method of an algorithm, and of its plan, is called on small examples."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np

from agentenv.base.crashes import called, name_of
from agentenv.base.errors import ConfigError, reported_as
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Task, VersionSpan
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.credit import advantages_of, credit_of

SIZE = 4  # tokens of a turn
TURN: dict[str, Any] = {
    "action_ids": [1] * SIZE,
    "logprobs": [-1.0] * SIZE,
    "entropies": [0.5] * SIZE,
    "version_spans": [VersionSpan(0, 0, SIZE)],
}


def check_algorithm(algorithm: Algorithm) -> None:
    """Groups of two turns a trajectory, of unequal and of equal rewards. Raises ConfigError for a
    method that raises or returns something else than its contract says."""
    plan = called(algorithm.plan, 2)
    size = algorithm.group_size
    for rewards in np.array([[0.0, 1.0] * size, [1.0, 1.0] * size])[:, :size]:
        advantages_of(algorithm.advantages, rewards)
        tree = TrajectoryTree(Task("trial", "trial", "?", ("1",)))
        root = tree.add(None, observation_ids=[1])
        tree.num_started = tree.num_roots = tree.num_live = _number(plan.on_start, tree)
        for branch, reward in enumerate(map(float, rewards)):
            turn = tree.add(root, branch=str(branch), observation_ids=[2], **TURN)
            if plan.fork_window:
                first = [0.5] * plan.fork_window
                turn.num_forks = _number(plan.on_fork_point, tree, turn, first, Random(0))
            leaf = tree.add(turn, branch=str(branch), reward=reward, end="terminated", **TURN)
            tree.num_live = max(0, tree.num_live - 1)
            _number(plan.on_leaf_end, tree, leaf)
        called(algorithm.over_update, [tree], [credit_of(algorithm, tree)])
        state: dict[str, Any] = {}
        learned = state, called(algorithm.learn, state, [tree])
        kept = "; a checkpoint keeps numbers, texts, and lists and dicts of them"
        with reported_as(ConfigError, name_of(algorithm.learn), TypeError, end=kept):
            msgspec.json.encode(learned)


def _number(method: Callable[..., Any], *given: Any) -> int:
    """The number of trajectories that a plan starts."""
    found = called(method, *given)
    numbers = [number for _, number in found] if isinstance(found, list | tuple) else [found]
    if not all(isinstance(one, int) and one >= 0 for one in numbers):
        raise ConfigError(f"{name_of(method)} must return a number of trajectories, not {found!r}")
    return sum(numbers)


def check_loss(algorithm: Algorithm) -> None:
    """As `check_algorithm`, of the loss. Loads torch."""
    import torch

    from agentenv.learners.algorithms.losses import LossBatch

    ones, one = torch.ones(SIZE), torch.tensor(1.0)
    given = (-ones, -ones, ones, ones, -ones, 2 * ones, 2.0 * SIZE, one, one, ones, 2.0 * SIZE)
    reference = -ones if algorithm.needs_reference else None
    terms = (ones, ones) if algorithm.clips_sequences else ()
    logprobs, entropies = (-ones).requires_grad_(), ones.clone().requires_grad_()
    batch = LossBatch(*given, reference, *terms)
    found: Any = called(algorithm.loss, batch, logprobs, entropies)
    match found:
        case (torch.Tensor(ndim=0, requires_grad=True), dict()):
            return
    raise ConfigError(
        f"{name_of(algorithm.loss)} must return a scalar with gradient and metrics, not {found!r}"
    )
