"""DeepSpeed behind the few calls that a trainer needs, and its memory given back for a while.

Ranks have different numbers of micro-batches, as trees give them. What DeepSpeed 0.19 does with
that depends on the stage, and several of its calls are silently wrong or hang:

    stage 0   gradients stay on the rank; summed here, once, before the step
    stage 1   coalesce_grad_reduction: summed once; every rank needs at least one backward pass
    stage 2   each backward pass sums and cuts gradients, so ranks run equally many
    stage 3   each forward pass gathers weights too, so ranks run equally many of both

The loss is a sum over tokens divided by the total of all ranks. DeepSpeed averages over ranks, so
it is multiplied by their number.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from learners.backend import (
    OptimizerState,
    RankBackend,
    build_optimizer,
    empty_batch,
    scale_learning_rates,
    set_hyperparameters,
)
from learners.deepspeed_settings import deepspeed_settings
from learners.learner import LearnerConfig, OptimizerConfig
from learners.policy import Policy

REDUCE_ELEMENTS = 500_000_000  # of one bucket, as in DeepSpeed's default


def prepare_deepspeed() -> None:
    """Before DeepSpeed starts: the process group exists already, and nothing is compiled."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if not torch.cuda.is_available():
        # Else DeepSpeed compiles its shared-memory collectives at the first start, for a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class DeepSpeedBackend(RankBackend):
    """A DeepSpeed engine around the policy; see `learners.trainer.Backend`.

    At stage 0 the gradient norm is ours, since DeepSpeed 0.19 does not report it. At stages above
    0 a step whose gradients are not finite on any rank is skipped by DeepSpeed on all of them.
    """

    def __init__(
        self, policy: Policy, config: LearnerConfig, dropouts: tuple[object, ...] = ()
    ) -> None:
        prepare_deepspeed()
        super().__init__(policy, config, dropouts)
        self.stage = int(config.zero_stage)
        self._block: contextlib.ExitStack | None = None  # of coalesce_grad_reduction
        self._sums: dict[torch.nn.Parameter, Tensor] = {}  # float32 gradients at stage 1
        if self.stage < 3:
            policy.to(self.device)  # at stage 3 DeepSpeed moves what it keeps
        self._start(config)

    def _start(self, config: OptimizerConfig) -> None:
        import deepspeed

        self.grad_clip = config.grad_clip
        fused = self.config.offload != "none"
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=self.policy,
            optimizer=build_optimizer(self.policy.model, config, fused=fused),
            config=deepspeed_settings(self.config),
        )
        self.module = self.engine
        if self.stage == 0:
            self.engine.enable_backward_allreduce = False
        else:
            self.optimizer.check_grad_overflow = True

    @property
    def base_optimizer(self) -> Any:
        """The torch optimizer that holds the state."""
        return self.optimizer.optimizer if self.stage else self.optimizer

    @property
    def optimizers(self) -> Sequence[Any]:
        return [self.optimizer, self.base_optimizer]

    @property
    def optimizer_state(self) -> OptimizerState:
        state: OptimizerState = self.base_optimizer.state
        return state

    def reset_optimizer(self, config: OptimizerConfig) -> None:
        """Replace the optimizer by a new one without state."""
        if self.stage:
            self.optimizer.clip_grad = config.grad_clip
            self.base_optimizer.state.clear()
            set_hyperparameters(self.base_optimizer, config)
        else:
            self.engine.destroy()
            self._start(config)

    def backward(self, loss: Tensor) -> None:
        if self.stage == 1 and self._block is None:
            self._block = contextlib.ExitStack()
            self._block.enter_context(self.engine.coalesce_grad_reduction())
        self.engine.backward(loss * self.num_ranks)
        if self.stage == 1 and self.config.dtype == "bfloat16":
            self._add_up()

    def _add_up(self) -> None:
        """Sum gradients of micro-batches in float32, as the other stages do."""
        for param in self.policy.parameters():
            if param.grad is None:
                continue
            if param in self._sums:
                self._sums[param].add_(param.grad)
            else:
                self._sums[param] = param.grad.float()
            param.grad = None

    def step(self, lr_scale: float) -> float:
        scale_learning_rates(self.base_optimizer, lr_scale)
        if self.stage == 0:
            return self._step_whole()
        self._reduce()
        self.engine.step()
        if self.optimizer.overflow:
            return math.nan
        return float(self.engine.get_global_grad_norm())

    def _step_whole(self) -> float:
        if self.num_ranks > 1:
            self.engine.buffered_allreduce_fallback(elements_per_buffer=REDUCE_ELEMENTS)
        params = [param for param in self.policy.parameters() if param.grad is not None]
        bound = self.grad_clip or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(params, bound))
        if math.isfinite(norm):
            self.engine.step()
        else:
            self.skip()
        return norm

    def _reduce(self) -> None:
        """Sum the gradients over ranks, where the backward passes did not."""
        for param, total in self._sums.items():
            param.grad = total.to(param.dtype)
        self._sums.clear()
        block, self._block = self._block, None
        if block is not None:
            block.close()

    def skip(self) -> None:
        if self.stage == 0:
            self.optimizer.zero_grad()
            return
        # DeepSpeed keeps parts of gradients in several places and clears all of them when it
        # finds one that is not finite; so it gets one.
        with torch.enable_grad():
            logprobs, _, _ = self.forward(empty_batch())
            self.backward(math.nan * logprobs.sum())
        self._reduce()
        self.engine.step()

    def abandon(self) -> None:
        """Clear what a failed command left behind. Of several ranks none can go on alone."""
        if self.num_ranks == 1:
            self._sums.clear()
            self.skip()

    def _num_passes(self, count: int, train: bool) -> int:
        if self.num_ranks == 1:
            return count
        if self.stage == 3 or (self.stage == 2 and train):
            return max(self.gather(count))
        return max(count, 1) if self.stage == 1 and train else count


PARTITIONS = ("ds_tensor", "ds_secondary_tensor")  # of a parameter at ZeRO stage 3


class Aside:
    """The memory of a rank's device, given back for a while to engines that share the device.

    What model, optimizer and reference hold is copied to main memory, and its storage on the device
    is freed; `take_back` fills the same storages again. Whatever is a view of them, as parameters
    are of the flat buffers of ZeRO, stays one, so that this works alike at all stages, stage 0 and
    plain torch included, which DeepSpeed's own `offload_states` leaves out. What DeepSpeed keeps in
    main memory by itself (learner.offload) and storages that cannot be freed, as weights on the CPU
    that are mapped from a file, stay as they are.
    """

    def __init__(self, backend: Any, *others: Any) -> None:
        """Give back what the backend holds on its device, and tensors in `others`."""
        self._kept: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in held_tensors(backend, *others):
            storage = tensor.untyped_storage()
            if tensor.device == backend.device and storage.size() and storage.resizable():
                found[storage.data_ptr()] = storage
        for storage in found.values():
            copy = storage.cpu().clone()  # type: ignore[no-untyped-call]
            self._kept.append((storage, copy))
            storage.resize_(0)
        if backend.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def take_back(self) -> None:
        """Put everything where it was."""
        while self._kept:
            storage, copy = self._kept.pop()
            storage.resize_(copy.nbytes())
            storage.copy_(copy)


def held_tensors(backend: Any, *others: Any) -> Iterator[Tensor]:
    """All that the backend keeps between two commands, some more than once."""
    for param in backend.policy.parameters():
        yield from (param, *(t for n in PARTITIONS if (t := getattr(param, n, None)) is not None))
        if param.grad is not None:
            yield param.grad
    yield from backend.policy.buffers()
    for optimizer in {id(o): o for o in backend.optimizers}.values():
        yield from _tensors(vars(optimizer))
    for other in others:
        yield from _tensors(other)


def _tensors(value: Any) -> Iterator[Tensor]:
    """In a tensor, or in lists, tuples, sets and mappings of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _tensors(pair)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _tensors(each)
