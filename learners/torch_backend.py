"""Plain torch behind the calls of a trainer: for debugging, and as the oracle of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learners.backend import OptimizerState, RankBackend
from learners.learner import LearnerConfig, OptimizerConfig
from learners.optimizer import build_optimizer, scale_learning_rates
from learners.policy import Policy


class TorchBackend(RankBackend):
    """Every rank holds the whole model; gradients are summed one parameter at a time."""

    def __init__(self, policy: Policy, config: LearnerConfig, dropouts: tuple[object, ...] = ()):
        super().__init__(policy, config, dropouts)
        self.module = policy.to(self.device)
        self.reset_optimizer(config)

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Replace the optimizer by a new one without state."""
        self.grad_clip = optimizer.grad_clip
        self.base_optimizer = build_optimizer(self.policy.model, optimizer)

    @property
    def optimizers(self) -> Sequence[Any]:
        return [self.base_optimizer]

    @property
    def optimizer_state(self) -> OptimizerState:
        return self.base_optimizer.state

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, lr_scale: float) -> float:
        params = [param for param in self.policy.parameters() if param.requires_grad]
        if self.num_ranks > 1:
            for param in params:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                dist.all_reduce(param.grad)
        bound = self.grad_clip or math.inf
        used = [param for param in params if param.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(used, bound))
        if math.isfinite(norm):
            scale_learning_rates(self.base_optimizer, lr_scale)
            self.base_optimizer.step()
        self.skip()
        return norm

    def skip(self) -> None:
        self.base_optimizer.zero_grad()

    abandon = skip  # what a failed command left behind
