"""DeepSpeed behind the few calls that a trainer needs."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from agentenv.errors import ConfigError
from learners.batch import MicroBatch
from learners.learner import LearnerConfig, OptimizerConfig
from learners.optimizer import build_optimizer, scale_learning_rates
from learners.policy import Policy, tensors

DISTRIBUTED_DEFAULTS = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def prepare_process() -> None:
    """Before DeepSpeed loads: all five variables set (else it looks for MPI) and no JIT compile.

    A single rank meets nobody, so it needs no port.
    """
    for name, value in DISTRIBUTED_DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if not torch.cuda.is_available():
        # Else DeepSpeed compiles its shared-memory collectives at the first start, for a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized() and os.environ["WORLD_SIZE"] == "1":
        name = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(name, store=HashStore(), rank=0, world_size=1)


class DeepSpeedBackend:
    """A DeepSpeed engine around the policy; see `learners.trainer.Backend`.

    The caller owns the step (managed_gradient_accumulation off), so any number of micro-batches
    may precede it. At stage 0 the gradient norm is ours, since DeepSpeed 0.19 does not report it.
    """

    def __init__(self, model: Any, config: LearnerConfig) -> None:
        if config.optimizer == "muon_adamw" and config.zero_stage != 0:
            raise ConfigError(
                "learner.zero_stage: muon_adamw needs whole matrices, which ZeRO "
                f"{config.zero_stage} does not give it; use stage 0, or optimizer = adamw"
            )
        prepare_process()
        self.config = config
        self.device = _device()
        self.policy = Policy(model.to(self.device), config.temperature)
        self._start(config)

    def _start(self, optimizer: OptimizerConfig) -> None:
        import deepspeed

        self.grad_clip = optimizer.grad_clip
        stage = self.config.zero_stage
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": self.grad_clip if stage else 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 2**31,
        }
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.policy,
            optimizer=build_optimizer(self.policy.model, optimizer),
            config=settings,
        )

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Replace the optimizer by a new one without state."""
        if optimizer.optimizer == "muon_adamw" and self.config.zero_stage != 0:
            raise ConfigError("muon_adamw needs learner.zero_stage = 0")
        self.engine.destroy()
        self._start(optimizer)

    def forward(
        self, batch: MicroBatch, *, entropies: bool = False, matches: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = tensors(batch, self.device)
        outputs: tuple[Tensor, Tensor, Tensor] = self.engine(*inputs, entropies, matches)
        return outputs

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self, lr_scale: float) -> float:
        scale_learning_rates(self.optimizer, lr_scale)
        if self.config.zero_stage:
            self.engine.step()
            return float(self.engine.get_global_grad_norm() or math.nan)
        params = [param for param in self.policy.parameters() if param.grad is not None]
        bound = self.grad_clip or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(params, bound))
        if math.isfinite(norm):
            self.engine.step()
        else:
            self.skip()
        return norm

    def skip(self) -> None:
        self.engine.optimizer.zero_grad()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
