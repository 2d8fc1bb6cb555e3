"""Refusals to train on the trees of a step: failures that are not the policy's, and a custom
algorithm whose credit is not finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentenv.base.crashes import place_of
from agentenv.base.errors import AgentEnvError, ConfigError, EnvError
from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.credit import TreeCredit
from agentenv.rollout.failures import faults_of
from agentenv.training.loop.alarms import MANY_CALLS, calls_of


class RefusedStepError(EnvError):
    """The run ends instead of training on these trees (by index). A resumed run rolls them out
    again, and the in-flight trees too, which the same cause may affect."""

    def __init__(self, text: str, trees: Sequence[TrajectoryTree]) -> None:
        super().__init__(text)
        self.trees = [tree.index for tree in trees]


def refuse_broken_tool(trees: list[TrajectoryTree], working: Sequence[str]) -> None:
    """Raises RefusedStepError if every call of a tool that worked in an earlier step fails with the
    same text: most likely its service is down, and the policy would unlearn to use it."""
    for tool, found in faults_of(calls_of(trees)).items():
        if tool in working and found.is_total and found.num_calls >= MANY_CALLS:
            raise RefusedStepError(
                f"{found.named(tool)}; most of them succeeded in an earlier step, so this step is "
                "not trained: fix the tool (if its service fails, it should raise InfraError, "
                "which is retried, or ConfigError) and continue with --resume, or set "
                "limits.max_failed_share = 1 if these calls are the policy's fault",
                trees,
            )


def refuse_total_failure(trees: list[TrajectoryTree]) -> None:
    """Raises RefusedStepError if every trajectory of a step failed, which is no coincidence. Trees
    that a user cancelled do not count."""
    failures = [leaf for tree in trees if not tree.is_cancelled for leaf in tree.failures()]
    if failures and not any(True for tree in trees for _ in tree.trajectories()):
        raise RefusedStepError(
            f"all {len(failures)} trajectories of a step failed; the first: {failures[0].error}",
            [tree for tree in trees if not tree.is_cancelled],
        )


def credit_of(algorithm: Algorithm, tree: TrajectoryTree) -> TreeCredit | None:
    """The tree's credit. Raises ConfigError if a custom algorithm raises or its credit is not
    finite."""
    kind = type(algorithm)
    name = f"{kind.__module__}:{kind.__qualname__}.credit"
    try:
        found = algorithm.credit(tree)
    except AgentEnvError:
        raise
    except Exception as error:
        if not (place := place_of(error)):
            raise  # a bug of agentenv, with its traceback
        raise ConfigError(f"{name} raised {type(error).__name__}: {error}{place}") from error
    for key in ("adv_pos", "adv_neg", "weight") if found is not None else ():
        if not np.isfinite(getattr(found, key)).all():
            raise ConfigError(f"{name} returned {key} that is not finite, for tree {tree.index}")
    return found
