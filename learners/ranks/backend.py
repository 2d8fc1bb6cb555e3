"""A rank's policy, optimizer and gradients in plain torch; see `deepspeed_backend` for ZeRO."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentenv.base.errors import ConfigError, LearnerError
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.optimizer import OptimizerConfig
from agentenv.learners.trees.context import join_context_group
from agentenv.learners.trees.encoded_tree import encode_sequence
from agentenv.learners.trees.partition import MicroBatch, pack
from agentenv.learners.trees.policy import Policy, tensors

T = TypeVar("T")
OptimizerState = dict[Tensor, dict[str, Any]]  # by the optimizer's tensor


class RankBackend:
    """Plain torch, and the base of `DeepSpeedBackend`: every rank holds the whole model, and
    gradients are summed one parameter at a time. `dropouts` are modules that are active in training
    passes only."""

    module: nn.Module  # computes the policy
    optimizer: Any  # DeepSpeed's, or the torch optimizer itself
    base_optimizer: Any  # the torch optimizer, which holds the state
    stage = 0  # of ZeRO

    def __init__(self, policy: Policy, config: LearnerConfig, dropouts: Sequence[Any] = ()) -> None:
        self.policy = policy
        self.dropouts = dropouts
        self.device = device_of_rank()
        self.config = config.resolved(on_gpu=self.device.type == "cuda")
        self.num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.context_group = join_context_group(config.context_parallel, config.command_timeout_s)
        self._aside: OptimizerState | None = None
        self._start(config)

    def _start(self, config: OptimizerConfig) -> None:
        """Move the weights to the device, and build the optimizer."""
        self.module = self.policy
        dtype = torch.promote_types(next(self.policy.parameters()).dtype, torch.float32)
        for _ in moved_weights(self.policy, self.device, dtype):
            pass
        self.reset_optimizer(config)

    def forward(
        self, batch: MicroBatch, other: nn.Module | None = None, others: Tensor | int | None = None
    ) -> tuple[Tensor, ...]:
        """See `Policy.forward`; with `other`, of that policy."""
        for dropout in self.dropouts:
            dropout.training = torch.is_grad_enabled()
        keys = {} if others is None else {"others": others}
        outputs: tuple[Tensor, ...] = (other or self.module)(
            *tensors(batch, self.device, self.context_group), **keys
        )
        return outputs

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, lr_scale: float) -> float:
        """Clip the gradients, step, and clear them. Returns the norm before clipping; if it is not
        finite, the step was skipped."""
        params = [param for param in self.policy.parameters() if param.requires_grad]
        if self.num_ranks > 1:
            for param in params:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                dist.all_reduce(param.grad)
        bound = self.grad_clip or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(params, bound))
        if math.isfinite(norm):
            scale_learning_rates(self.base_optimizer, lr_scale)
            self.base_optimizer.step()
        self.skip()
        return norm

    def skip(self) -> None:
        """Clear the gradients without a step."""
        self.base_optimizer.zero_grad()

    def abandon(self) -> None:
        """Clear the gradients of a failed command."""
        self.skip()

    def reset_optimizer(self, config: OptimizerConfig) -> None:
        """Replace the optimizer by a new one without state."""
        self.grad_clip = config.grad_clip
        self.optimizer = self.base_optimizer = build_optimizer(self.policy.model, config)

    def save_state(self) -> None:
        """Move the optimizer's state to main memory while another optimizer is in use."""
        self._aside = {
            owner: {
                # With each tensor its device, which may differ from the owner's.
                kind: (value.to("cpu"), value.device) if isinstance(value, Tensor) else value
                for kind, value in state.items()
            }
            for owner, state in self.base_optimizer.state.items()
        }

    def restore_state(self) -> None:
        """Restore the saved state. Raises LearnerError without one."""
        if self._aside is None:
            raise LearnerError("no optimizer state was saved")
        for owner, state in self._aside.items():
            self.base_optimizer.state[owner] = {
                kind: value[0].to(value[1]) if isinstance(value, tuple) else value
                for kind, value in state.items()
            }
        self._aside = None

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank; collective over all ranks."""
        if self.num_ranks == 1:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values

    def gather_replicas(self, value: T) -> list[T]:
        """The values of all replicas, whose ranks have equal values; collective over all ranks."""
        return self.gather(value)[:: self.config.context_parallel]

    def passes(
        self, batches: Sequence[MicroBatch], num_others: int = 0, **used: bool
    ) -> Iterator[MicroBatch]:
        """The batches, followed by empty ones: where all ranks must run equally many passes, and
        one for training without a batch, so that a step has gradients of 0 instead of none. Ranks
        must agree on the outputs with a gradient: log-probs of `num_others` ids, `entropies`, and
        the loss of the `router`.

        Inside torch.no_grad() only forward passes are counted.
        """
        train = torch.is_grad_enabled()
        count = self._num_passes(len(batches), train)
        yield from batches
        for _ in range(count - len(batches)):
            others = torch.zeros((1, num_others), dtype=torch.int64, device=self.device)
            outputs = self.forward(empty_batch(), others=others if num_others else None)
            if train:
                found = [*outputs[: 1 + used.get("entropies", False)], *outputs[3:4]]
                if used.get("router") and self.policy.router_loss is not None:
                    found.append(self.policy.router_loss)
                self.backward(0.0 * torch.cat([one.flatten() for one in found]).sum())

    def _num_passes(self, count: int, train: bool) -> int:
        """The number of passes of this rank: at least `count`, and at least one if it trains."""
        return max(count, 1) if train else count


@cache
def empty_batch() -> MicroBatch:
    """A micro-batch of one predicted token with weight 0."""
    return pack([encode_sequence([0, 0], [False, True])], 2)[0]


def device_of_rank() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


class InFloat32(TorchFunctionMode):
    """On the CPU, casts to bfloat16 give float32.

    Muon multiplies in bfloat16, which is fast on GPUs. Most CPUs do not support this arithmetic and
    take ten times as long as for float32, which is also more exact.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.bfloat16 and args[0].device.type == "cpu":
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))


class MuonAdamW(torch.optim.Optimizer):
    """torch.optim.Muon and torch.optim.AdamW as one optimizer, with equal steps except for
    `InFloat32`.

    Muon (Jordan 2024) orthogonalizes the momentum of 2-D matrices; AdamW updates embeddings, head,
    norms and biases. A checkpoint replaces `param_groups` and `state`, so both parts are set to
    this optimizer's before each step.
    """

    def __init__(
        self, muon_groups: list[dict[str, Any]], adamw_groups: list[dict[str, Any]]
    ) -> None:
        self._parts = torch.optim.Muon(muon_groups), torch.optim.AdamW(adamw_groups)
        for number, part in enumerate(self._parts):
            for group in part.param_groups:
                group["part"] = number
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of both; `closure` is not used."""
        for number, part in enumerate(self._parts):
            part.param_groups = [g for g in self.param_groups if g["part"] == number]
            part.state = self.state
            with InFloat32():
                part.step()


def build_optimizer(
    model: Any, config: OptimizerConfig, *, fused: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of `config` over the parameters that need gradients.

    Weight decay applies to matrices except embeddings. Each group has its rate in "base_lr", which
    `scale_learning_rates` uses. `fused` makes AdamW fast in main memory. Raises ConfigError if Muon
    would have no matrix.
    """
    embeddings = {
        id(param)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for param in module.parameters()
    }
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    ends = embeddings | ({id(param) for param in head.parameters()} if head is not None else set())
    use_muon = config.optimizer == "muon_adamw"
    kinds: dict[str, list[Any]] = {"muon": [], "adamw": [], "adamw_no_decay": []}
    for param in (param for param in model.parameters() if param.requires_grad):
        is_decayed = param.ndim >= 2 and id(param) not in embeddings
        kind = "adamw" if is_decayed else "adamw_no_decay"
        kinds["muon" if use_muon and param.ndim == 2 and id(param) not in ends else kind].append(
            param
        )
    if use_muon and not kinds["muon"]:
        raise ConfigError("learner.optimizer = muon_adamw: the model has no hidden 2-D matrix")
    groups = [
        {"params": chosen, "kind": kind, **rates(config, kind)}
        for kind, chosen in kinds.items()
        if chosen
    ]
    if not use_muon:
        return torch.optim.AdamW(groups, fused=fused or None)
    return MuonAdamW(groups[:1], groups[1:])


def rates(config: OptimizerConfig, kind: str) -> dict[str, Any]:
    if kind == "muon":
        rate = config.muon_learning_rate
        return {"lr": rate, "base_lr": rate, "weight_decay": config.muon_weight_decay}
    rate, decay = config.learning_rate, config.weight_decay if kind == "adamw" else 0.0
    return {"lr": rate, "base_lr": rate, "weight_decay": decay, "betas": config.betas}


def scale_learning_rates(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Set each group's rate to `scale` times its configured one; the caller has the schedule."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * scale


def moved_weights(
    policy: Policy, device: torch.device, dtype: torch.dtype, *, copy: bool = False
) -> Iterator[nn.Parameter]:
    """Iterate over the parameters and move each from its mapped file to the device, in dtype;
    buffers first. Main memory has at most one additional weight, and so has the device if the
    caller keeps only a part of each. With `copy`, the mapped pages stay shared even if the device
    is main memory and the weight is changed."""
    kept = _kept_in_float32(policy.model)
    for prefix, module in policy.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            to = buffer.dtype
            is_a_weight = name not in module._non_persistent_buffers_set
            if is_a_weight and buffer.is_floating_point() and not kept & {*prefix.split("."), name}:
                to = dtype
            module._buffers[name] = buffer.to(device, to)
    for param in policy.parameters():
        param.data = param.data.to(device, dtype, copy=copy)
        yield param


def _kept_in_float32(model: Any) -> set[str]:
    """Parts of names of the parameters that transformers always loads in float32."""
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return {part for name in names for part in getattr(model, name, None) or ()}
