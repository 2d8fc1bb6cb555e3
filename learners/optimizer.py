"""One optimizer for the whole model: Muon on hidden matrices, AdamW on the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from agentenv.errors import ConfigError
from learners.learner import OptimizerConfig


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
