"""The keys of the self-critic loop, a table of a training run: [self_critic]."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from learners.optimizer_config import OptimizerConfig


class SelfCriticConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every so many updates the policy answers training questions several times; answers that the
    reward finds right are preferred to the others (launchers/rl/self_critic.py)."""

    every: Annotated[int, Meta(ge=1, description="updates between two rounds")] = 20
    num_questions: Annotated[
        int, Meta(ge=1, description="training questions of a round, drawn at random")
    ] = 32
    num_samples: Annotated[int, Meta(ge=2, description="answers a question")] = 8
    threshold: Annotated[
        float, Meta(description="answers with at least this reward are chosen, others rejected")
    ] = 1.0
    pairs_per_question: Annotated[
        int, Meta(ge=1, description="random pairs of a chosen and a rejected answer, at most")
    ] = 4
    beta: Annotated[
        float, Meta(gt=0, description="weight of staying near the policy before the round")
    ] = 0.1
    batch_size: Annotated[int, Meta(ge=1, description="pairs an optimizer step")] = 16
    num_epochs: Annotated[int, Meta(ge=1, description="passes over the pairs of a round")] = 1
    optimizer: Annotated[
        OptimizerConfig,
        Meta(description="optimizer of a round, new for each; that of the updates keeps its state"),
    ] = OptimizerConfig(optimizer="adamw", learning_rate=5e-6, weight_decay=0.0)
