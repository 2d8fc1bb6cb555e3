"""The backend of ZeRO, bfloat16 and offload: a DeepSpeed engine."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from agentenv.learners.deepspeed_settings import deepspeed_settings
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.optimizer import OptimizerConfig
from agentenv.learners.ranks import backend
from agentenv.learners.trees.policy import Policy


class _Arriving(nn.Module):
    """A wrapper of a policy for `deepspeed.zero.Init`, which partitions parameters one by one."""

    def __init__(self, policy: Policy, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.policy, self.device, self.dtype = policy, device, dtype

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return backend.moved_weights(self.policy, self.device, self.dtype, copy=True)


def prepare_deepspeed() -> None:
    """Prepare the start of DeepSpeed: use the existing process group, and compile nothing."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if not torch.cuda.is_available():
        # Otherwise DeepSpeed compiles its shared-memory collectives at the first start: a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class DeepSpeedBackend(backend.RankBackend):
    """A DeepSpeed engine around the policy, at stages 1 to 3.

    Ranks have different numbers of micro-batches, since trees differ. DeepSpeed 0.19 handles this
    differently at each stage, and several of its calls are silently wrong or hang:

        stage 1   coalesce_grad_reduction: summed once; every rank needs at least one backward pass
        stage 2   each backward pass sums and partitions gradients, so ranks run equally many
        stage 3   each forward pass also gathers weights, so ranks run equally many of both

    The loss is a sum over tokens divided by the total of all ranks. DeepSpeed averages over ranks,
    so it is multiplied by their number.

    DeepSpeed skips a step on all ranks if any rank has non-finite gradients.
    """

    def __init__(self, policy: Policy, config: LearnerConfig, dropouts: Sequence[Any] = ()) -> None:
        prepare_deepspeed()
        self._block: contextlib.ExitStack | None = None  # of coalesce_grad_reduction
        self._sums: dict[torch.nn.Parameter, Tensor] = {}  # float32 gradients at stage 1
        super().__init__(policy, config, dropouts)

    def _start(self, config: OptimizerConfig) -> None:
        import deepspeed

        self.stage = int(self.config.zero_stage)
        fused = self.config.offload != "none"
        optimizer = backend.build_optimizer(self.policy.model, config, fused=fused)
        settings = deepspeed_settings(self.config)
        dtype = getattr(torch, self.config.dtype)
        if self.stage == 3:  # before a device has the whole model
            arriving = _Arriving(self.policy, self.device, dtype)
            deepspeed.zero.Init(module=arriving, config_dict_or_path=settings)
        else:
            for _ in backend.moved_weights(self.policy, self.device, dtype):
                pass
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.policy, optimizer=optimizer, config=settings
        )
        self.module = self.engine
        self.base_optimizer = self.optimizer.optimizer
        self.optimizer.check_grad_overflow = True

    def reset_optimizer(self, config: OptimizerConfig) -> None:
        self.config.check_optimizer(config, "optimizer")
        self.optimizer.clip_grad = config.grad_clip
        self.base_optimizer.state.clear()
        for group in self.base_optimizer.param_groups:
            group.update(backend.rates(config, group["kind"]))

    def backward(self, loss: Tensor) -> None:
        if self.stage == 1 and self._block is None:
            self._block = contextlib.ExitStack()
            self._block.enter_context(self.engine.coalesce_grad_reduction())
        self.engine.backward(loss * self.num_ranks)
        if self.stage == 1 and self.config.dtype == "bfloat16":
            self._add_up()

    def _add_up(self) -> None:
        """Sum gradients of micro-batches in float32, as at the other stages."""
        for param in self.policy.parameters():
            if param.grad is None:
                continue
            if param in self._sums:
                self._sums[param].add_(param.grad)
            else:
                self._sums[param] = param.grad.float()
            param.grad = None

    def step(self, lr_scale: float) -> float:
        backend.scale_learning_rates(self.base_optimizer, lr_scale)
        self._reduce()
        self.engine.step()
        return math.nan if self.optimizer.overflow else float(self.engine.get_global_grad_norm())

    def _reduce(self) -> None:
        """Sum the gradients over ranks, if the backward passes did not."""
        for param, total in self._sums.items():
            param.grad = total.to(param.dtype)
        self._sums.clear()
        block, self._block = self._block, None
        if block is not None:
            block.close()

    def skip(self) -> None:
        # DeepSpeed keeps parts of gradients in several places, and clears all of them after a
        # non-finite one; so one is set.
        with torch.enable_grad():
            logprobs, _, _ = self.forward(backend.empty_batch())
            self.backward(math.nan * logprobs.sum())
        self._reduce()
        self.engine.step()

    def abandon(self) -> None:
        # With several ranks, none can continue alone.
        if self.num_ranks == 1:
            self._sums.clear()
            self.skip()

    def _num_passes(self, count: int, train: bool) -> int:
        count = super()._num_passes(count, train)
        as_many = self.stage == 3 or (self.stage == 2 and train)
        return max(self.gather(count)) if as_many else count
