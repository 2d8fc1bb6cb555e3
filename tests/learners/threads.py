"""Ranks of plain torch as threads of this process, for tests that need many of them cheaply."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from msgspec.structs import replace
from transformers import PreTrainedModel

from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.backend import RankBackend, scale_learning_rates
from agentenv.learners.ranks.trainer import Trainer
from agentenv.learners.trees.context import ContextGroup
from agentenv.learners.trees.minibatch import Gather
from agentenv.learners.trees.policy import Policy

T = TypeVar("T")


class Meeting:
    """Gathers the values of all ranks. A rank that fails releases the others."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._values: list[Any] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks)
        self._store = dist.HashStore()

    def gather_of(self, rank: int) -> Gather:
        def gather(value: T) -> list[T]:
            self._values[rank] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return gather

    def team_of(self, rank: int, size: int) -> ContextGroup | None:
        """With real sockets of gloo; every rank of the team must call it."""
        if size == 1:
            return None
        first, place = rank - rank % size, rank % size
        store = dist.PrefixStore(str(first), self._store)
        group = dist.ProcessGroup(store, place, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        gloo = dist.ProcessGroupGloo(store, place, size, timedelta(seconds=60))
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, gloo)
        return ContextGroup(place, size, group)

    def run(self, work: Callable[[int], T]) -> list[T]:
        """`work` of every rank at the same time."""

        def guarded(rank: int) -> T:
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.num_ranks) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.num_ranks)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


class ThreadBackend(RankBackend):
    """Meets the others in this process."""

    def __init__(self, policy: Policy, config: LearnerConfig, rank: int, meeting: Meeting) -> None:
        super().__init__(policy, replace(config, context_parallel=1))
        self.config = config
        self.rank, self.num_ranks = rank, meeting.num_ranks
        self.context_group = meeting.team_of(rank, config.context_parallel)
        self.gather = meeting.gather_of(rank)  # type: ignore[method-assign]

    def step(self, lr_scale: float) -> float:
        params = [param for param in self.policy.parameters() if param.requires_grad]
        own = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params]
        for param, *parts in zip(params, *self.gather(own), strict=True):
            param.grad = torch.stack(parts).sum(0)
        norm = float(torch.nn.utils.clip_grad_norm_(params, self.grad_clip or math.inf))
        if math.isfinite(norm):
            scale_learning_rates(self.base_optimizer, lr_scale)
            self.base_optimizer.step()
        self.skip()
        return norm


def trainers(
    model: PreTrainedModel, algorithm: Algorithm, config: LearnerConfig, meeting: Meeting
) -> Sequence[Trainer]:
    """One for each rank, with a copy of the model."""
    policies = [Policy(deepcopy(model)) for _ in range(meeting.num_ranks)]
    backends = meeting.run(lambda rank: ThreadBackend(policies[rank], config, rank, meeting))
    return [Trainer(backend, algorithm, config) for backend in backends]
