"""What all backends of a rank have in common, their optimizer, and the plain torch backend.

`RankBackend` runs the forward pass and meets the other ranks; `learners.deepspeed` has the other
backend.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentenv.errors import ConfigError, LearnerError
from learners.batch import MicroBatch, encode_sequence, pack
from learners.learner import LearnerConfig, OptimizerConfig
from learners.policy import Policy, tensors

T = TypeVar("T")
OptimizerState = dict[Tensor, dict[str, Any]]  # by what the optimizer steps


class RankBackend:
    """See `learners.trainer.Backend`; subclasses add backward, step and skip.

    `module` is what computes the policy; `dropouts` are modules that drop in training passes only.
    """

    module: nn.Module
    stage = 0  # of ZeRO

    def __init__(self, policy: Policy, config: LearnerConfig, dropouts: Sequence[Any] = ()) -> None:
        self.policy = policy
        self.config = config
        self.dropouts = dropouts
        self.device = device_of_rank()
        self.num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._aside: OptimizerState | None = None

    def forward(
        self, batch: MicroBatch, *, entropies: bool = False, matches: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        for dropout in self.dropouts:
            dropout.training = torch.is_grad_enabled()
        inputs = tensors(batch, self.device)
        outputs: tuple[Tensor, Tensor, Tensor] = self.module(*inputs, entropies, matches)
        return outputs

    def backward(self, loss: Tensor) -> None:
        raise NotImplementedError

    @property
    def optimizers(self) -> Sequence[Any]:
        """All objects that hold tensors between two steps."""
        raise NotImplementedError

    @property
    def optimizer_state(self) -> OptimizerState:
        """Of the torch optimizer."""
        raise NotImplementedError

    def set_state_aside(self) -> None:
        """Keep the optimizer's state in main memory while another one is in use."""
        self._aside = {
            owner: {
                # Beside each tensor its device, which need not be the owner's.
                kind: (value.to("cpu"), value.device) if isinstance(value, Tensor) else value
                for kind, value in state.items()
            }
            for owner, state in self.optimizer_state.items()
        }

    def take_state_back(self) -> None:
        """Go on with what was set aside. Raises LearnerError if nothing was."""
        if self._aside is None:
            raise LearnerError("no optimizer state was set aside")
        for owner, state in self._aside.items():
            self.optimizer_state[owner] = {
                kind: value[0].to(value[1]) if isinstance(value, tuple) else value
                for kind, value in state.items()
            }
        self._aside = None

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank; all of them must call it."""
        if self.num_ranks == 1:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values

    def passes(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """The batches, followed by passes over nothing where ranks must run equally many.

        Inside torch.no_grad() they run forward only.
        """
        train = torch.is_grad_enabled()
        count = self._num_passes(len(batches), train)
        yield from batches
        for _ in range(count - len(batches)):
            logprobs, _, _ = self.forward(empty_batch())
            if train:
                self.backward(0.0 * logprobs.sum())

    def _num_passes(self, count: int, train: bool) -> int:
        """How many passes this rank runs; at least `count`."""
        return count


@cache
def empty_batch() -> MicroBatch:
    """A micro-batch of one predicted token that counts for nothing."""
    return pack([encode_sequence([0, 0], [False, True])], 2)[0]


def device_of_rank() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


class MuonAdamW(torch.optim.Optimizer):
    """torch.optim.Muon and torch.optim.AdamW behind one optimizer, equal to both step for step.

    Muon (Jordan 2024) orthogonalises the momentum of 2-D matrices; embeddings, head, norms and
    biases go to AdamW. DeepSpeed wants one client optimizer whose `param_groups` and `state` it
    may replace, so both parts are pointed at ours before each step.
    """

    def __init__(
        self, muon_groups: list[dict[str, Any]], adamw_groups: list[dict[str, Any]]
    ) -> None:
        self._parts: list[torch.optim.Optimizer] = []
        if muon_groups:
            self._parts.append(torch.optim.Muon(muon_groups))
        if adamw_groups:
            self._parts.append(torch.optim.AdamW(adamw_groups))
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
            part.step()


def build_optimizer(
    model: Any, config: OptimizerConfig, *, fused: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of `config` over the parameters that need gradients.

    Weight decay acts on matrices that are no embeddings. Each group keeps its rate in "base_lr",
    which `scale_learning_rates` reads. `fused` makes AdamW fast in main memory. Raises ConfigError
    if Muon would have no matrix.
    """
    embeddings = {
        id(param)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for param in module.parameters()
    }
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    ends = embeddings | ({id(param) for param in head.parameters()} if head is not None else set())
    params = [param for param in model.parameters() if param.requires_grad]
    use_muon = config.optimizer == "muon_adamw"
    hidden = [p for p in params if use_muon and p.ndim == 2 and id(p) not in ends]
    taken = {id(param) for param in hidden}
    rest = [param for param in params if id(param) not in taken]
    if use_muon and not hidden:
        raise ConfigError("learner.optimizer = muon_adamw: the model has no hidden 2-D matrix")

    decayed = [p for p in rest if p.ndim >= 2 and id(p) not in embeddings]
    taken |= {id(param) for param in decayed}
    kinds = {
        "muon": hidden,
        "adamw": decayed,
        "adamw_no_decay": [p for p in rest if id(p) not in taken],
    }
    groups = [
        {"params": chosen, "kind": kind, **_rates(config, kind)}
        for kind, chosen in kinds.items()
        if chosen
    ]
    if not use_muon:
        return torch.optim.AdamW(groups, fused=fused or None)
    return MuonAdamW(groups[:1], groups[1:])


def _rates(config: OptimizerConfig, kind: str) -> dict[str, Any]:
    if kind == "muon":
        rate = config.muon_learning_rate
        return {"lr": rate, "base_lr": rate, "weight_decay": config.muon_weight_decay}
    rate, decay = config.learning_rate, config.weight_decay if kind == "adamw" else 0.0
    return {"lr": rate, "base_lr": rate, "weight_decay": decay, "betas": config.betas}


def set_hyperparameters(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Give the groups of `build_optimizer` the rates and decays of another configuration.

    Raises ConfigError if that one has another kind of optimizer.
    """
    has_muon = any(group["kind"] == "muon" for group in optimizer.param_groups)
    if has_muon != (config.optimizer == "muon_adamw"):
        raise ConfigError(
            f"optimizer = {config.optimizer}: the optimizer at learner.zero_stage >= 1 can be "
            "given other rates, but not become one of another kind"
        )
    for group in optimizer.param_groups:
        group.update(_rates(config, group["kind"]))


def scale_learning_rates(optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Set each group's rate to `scale` times its configured one; schedules live elsewhere."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * scale


class TorchBackend(RankBackend):
    """Plain torch behind the calls of a trainer, for debugging and as the oracle of DeepSpeed's.

    Every rank holds the whole model; gradients are summed one parameter at a time.
    """

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
