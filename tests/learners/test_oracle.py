"""The real trainer against the oracle: the gradient of every step of two updates.

Random trees, mixed versions, two mini-batches, two epochs, all algorithms with their options.
Where a step would move the weights by its own rule, both are moved by the same noise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms import baselines
from agentenv.learners.algorithms.aepo import AEPO
from agentenv.learners.algorithms.algorithm import Algorithm, Band
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.credit import Taught
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.backend import RankBackend
from agentenv.learners.ranks.learner import encode_groups, in_order
from agentenv.learners.ranks.trainer import Trainer
from agentenv.learners.trees.encoded_tree import EncodedTree
from agentenv.learners.trees.policy import Policy
from tests.learners.oracle import VERSION, Oracle, dense_of, grow, taught_of
from tests.learners.trees import VOCABULARY, tiny_model

EPOCHS = 2
KINDS: dict[str, type[Algorithm]] = {
    "grpo": baselines.GRPO, "dr_grpo": baselines.DrGRPO, "dapo": baselines.DAPO,
    "rloo": baselines.RLOO, "reinforce_pp": baselines.ReinforcePP, "gspo": baselines.GSPO,
    "cispo": baselines.CISPO, "arpo": ARPO, "aepo": AEPO,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in KINDS),
    ("grpo", {"proximal": "always"}),
    ("grpo", {"aggregation": "seq-mean-token-mean", "proximal": "always"}),
    ("grpo", {"aggregation": "seq-mean-token-sum"}),
    ("grpo", {"dual_clip": 1.2, "normalize_by_std": False}),
    ("grpo", {"importance_cap": "none", "proximal": "always"}),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.3, "proximal": "always"}),
    ("arpo", {"sharing": "hard"}),
    ("arpo", {"sharing": "hard", "aggregation": "seq-mean-token-mean"}),
    ("arpo", {"token_mask": (0.3, 3.0), "sequence_mask": (0.2, 5.0), "importance_cap": 1.5}),
    ("aepo", {"entropy_advantage": 1.0}),
    ("aepo", {"dual_clip": float("inf"), "proximal": "always"}),
    ("aepo", {"sharing": "hard", "entropy_balanced_clipping": False}),
    *(("grpo", {"kl_loss": 0.3, "kl_kind": kind}) for kind in ("k1", "abs", "k2", "k3")),
    ("dr_grpo", {"kl_loss": 0.2}),
    ("rloo", {"kl_reward": 0.1}),
    ("gspo", {"kl_reward": 0.1, "clip_low": 0.3, "clip_high": 0.3}),
    ("arpo", {"entropy_bonus": 0.05}),
    *((kind, {"dense": True}) for kind in ("grpo", "reinforce_pp", "gspo", "cispo", "aepo")),
    ("arpo", {"dense": True, "sharing": "hard"}),
    ("grpo", {"dense": True, "aggregation": "seq-mean-token-mean", "sequence_mask": (0.2, 5.0)}),
    *((kind, {"taught": 0.7}) for kind in ("grpo", "arpo")),
    ("rloo", {"taught": 0.7, "dense": True}),
]
MASKS = ("token_mask", "sequence_mask")
FAMILIES = [("qwen3", 1 << 20), ("llama", 40)]  # whole, and cut into micro-batches of 40 tokens
FEW = (0, 7, 8, 15, 18, 27)  # of every kind of machinery one, where the rest would take long


def name_of(value: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(
    ("kind", "settings", "family", "max_tokens"),
    [
        pytest.param(*case, *family)
        for number, case in enumerate(CASES)
        for is_cut, family in enumerate(FAMILIES)
        if number in FEW or is_cut == number % 2
    ],
    ids=name_of,
)
def test_every_step_of_an_update_has_the_gradient_of_the_flat_trajectories(
    kind: str, settings: dict[str, Any], family: str, max_tokens: int
) -> None:
    trees = [grow(1, index, VOCABULARY) for index in range(7)]
    compare(kind, settings, family, max_tokens, [trees[:3], trees[3:]])


def compare(
    kind: str,
    settings: dict[str, Any],
    family: str,
    max_tokens: int,
    minibatches: list[list[TrajectoryTree]],
) -> list[dict[str, float]]:
    """The gradient and the loss of every step of two updates on two mini-batches, within 1e-10 of
    the oracle's; the metrics of the updates."""
    settings = dict(settings)
    model = exact(tiny_model(family, torch.float64))
    oracle = Oracle(copy.deepcopy(model), kind, EPOCHS, **settings)
    proximal = settings.pop("proximal", "stale")
    drops = settings.pop("equal_groups", "count") == "drop"
    more: Callable[[TrajectoryTree], dict[str, Any]] = partial(
        added, dense=settings.pop("dense", False), taught=bool(settings.get("taught"))
    )
    settings["teach"] = settings.pop("taught", 0.0)
    bands = {
        name: Band(**dict(zip(("low", "high"), settings.pop(name), strict=True)))
        for name in MASKS
        if name in settings
    }
    algorithm = KINDS[kind](group_size=2, **settings, **bands)
    trainer = recording(model, algorithm, proximal, max_tokens)
    metrics: list[dict[str, float]] = []
    norms: list[float] = []
    for number in range(2):
        found = trainer.update(encoded(minibatches, algorithm, trainer.config, drops, more), 1.0)
        expected = oracle.update(minibatches)
        metrics.append(found)
        losses = []
        for step, ours in enumerate(trainer.backend.steps):
            theirs, loss = next(expected)
            losses.append(loss)
            # |policy - reference| at 0: its derivative is that of the rounding
            if settings.get("kl_kind") != "abs" or number or step:
                bound = 1e-10 * max(float(theirs.norm()), 1e-3)
                assert float((ours - theirs).norm()) < bound, (number, step)
            norms.append(float(theirs.norm()))
            move(oracle.model, number * 10 + step)
        assert next(expected, None) is None, "as many steps"
        assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-9, abs=1e-12)
        trainer.moved = False  # as after a publish
    assert max(norms) > 0
    return metrics


def added(tree: TrajectoryTree, *, dense: bool, taught: bool) -> dict[str, Any]:
    """The parts of a credit that concern single tokens."""
    known = taught_of(tree, VOCABULARY) if taught else {}
    return {
        "dense": dense_of(tree) if dense else {},
        "taught": {index: Taught(*one) for index, one in known.items()},
    }


def exact(model: Any) -> Any:
    """The model with norms in float64, which transformers computes in float32."""

    def norm(self: Any, hidden: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden * scale

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(norm, module)
    return model


def encoded(
    minibatches: list[list[TrajectoryTree]],
    algorithm: Algorithm,
    config: LearnerConfig,
    drops: bool,
    more: Callable[[TrajectoryTree], dict[str, Any]],
) -> list[list[EncodedTree]]:
    """As the learner gets them."""
    trees = [tree for batch in minibatches for tree in batch]
    own = [algorithm.credit(tree) for tree in trees]
    is_taken = [one is not None and (one.has_signal or not drops) for one in own]
    given = [one if is_one else None for one, is_one in zip(own, is_taken, strict=True)]
    credits = iter(zip(algorithm.over_update(trees, given), is_taken, strict=True))
    taken = [
        [
            (tree, replace(credit, **more(tree)))
            for tree in batch
            for credit, is_one in [next(credits)]
            if is_one
        ]
        for batch in minibatches
    ]
    return [encode_groups(in_order(one), VERSION, config, algorithm) for one in taken]


def recording(model: Any, algorithm: Algorithm, proximal: str, max_tokens: int) -> Any:
    """A real trainer whose steps keep the gradient in `backend.steps` and move by noise."""
    config = LearnerConfig(
        zero_stage=0,
        optimizer="adamw",
        learning_rate=1e-3,
        proximal=proximal,
        num_epochs_per_batch=EPOCHS,
        max_tokens_per_microbatch=max_tokens,
    )

    class Recording(RankBackend):
        steps: list[Tensor]
        num_steps = 0

        def step(self, lr_scale: float) -> float:
            parameters = list(self.policy.model.parameters())
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            self.steps.append(torch.cat([grad.flatten() for grad in grads]))
            per_update = 2 * EPOCHS
            update, step = divmod(self.num_steps, per_update)
            move(self.policy.model, update * 10 + step)
            self.num_steps += 1
            self.skip()
            return 1.0

    class Recorded(Trainer):
        def update(self, *args: Any) -> Any:
            self.backend.steps = []
            return super().update(*args)

    return Recorded(Recording(Policy(model), config), algorithm, config)


@torch.no_grad()
def move(model: Any, number: int) -> None:
    """The same step for both."""
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
