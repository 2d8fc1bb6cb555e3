"""The seam between the controller and whatever trains: trees in, metrics and weights out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct

from agentenv.tree import TrajectoryTree
from learners.encoding import EncodedTree

Metrics = dict[str, float]


class OptimizerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer; schedules are the controller's, as a factor on both rates."""

    optimizer: Annotated[
        Literal["muon_adamw", "adamw"],
        Meta(description="Muon on hidden matrices and AdamW on the rest, or AdamW on all"),
    ] = "muon_adamw"
    learning_rate: Annotated[float, Meta(ge=0, description="rate of AdamW")] = 1e-3
    muon_learning_rate: Annotated[float, Meta(ge=0, description="rate of Muon")] = 4e-3
    weight_decay: Annotated[
        float, Meta(ge=0, description="decoupled decay of AdamW's matrices; norms have none")
    ] = 0.01
    muon_weight_decay: Annotated[
        float, Meta(ge=0, description="decoupled decay of Muon's matrices")
    ] = 0.01
    betas: Annotated[
        tuple[float, float], Meta(description="AdamW's decay rates of both moments")
    ] = (0.9, 0.999)
    grad_clip: Annotated[
        float, Meta(ge=0, description="bound on the gradient's global norm; 0 switches it off")
    ] = 1.0


class LearnerConfig(OptimizerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the learner's ranks run and how an update is cut into optimizer steps."""

    zero_stage: Annotated[
        Literal[0, 1, 2], Meta(description="DeepSpeed ZeRO stage; Muon and checkpoints need 0")
    ] = 0
    dtype: Annotated[
        Literal["float32"], Meta(description="of weights, gradients and optimizer state")
    ] = "float32"
    temperature: Annotated[
        float, Meta(gt=0, description="log-probs are of logits / temperature, as in the rollout")
    ] = 1.0
    proximal: Annotated[
        Literal["stale", "always"],
        Meta(
            description="when to compute proximal log-probs: for trees with tokens of an older "
            "policy, or for all (an engine whose log-probs are not the learner's)"
        ),
    ] = "stale"
    groups_per_minibatch: Annotated[
        int, Meta(ge=1, description="questions an optimizer step; fewer when groups are filtered")
    ] = 8
    num_epochs_per_batch: Annotated[
        int, Meta(ge=1, description="passes over the trees of an update")
    ] = 1
    max_tokens_per_microbatch: Annotated[
        int, Meta(ge=1, description="padded tokens computed at once on a rank; bounds memory")
    ] = 2048
    num_threads: Annotated[int, Meta(ge=1, description="torch threads of a rank")] = 1
    start_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds a rank may take to load its model")
    ] = 300.0
    command_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds a rank may take for one command")
    ] = 3600.0


class Score(Struct, frozen=True):
    """Teacher-forced figures of one sequence, an entry per predicted token.

    logprobs and entropies in nats (after temperature); matches: the token is the likeliest one.
    """

    logprobs: list[float]
    entropies: list[float]
    matches: list[bool]


class Learner(Protocol):
    """All methods raise LearnerError when a rank fails, dies, or misses its deadline."""

    @property
    def policy_version(self) -> int:
        """Number of updates published; the version of the weights published last."""
        ...

    async def update(self, trees: Sequence[TrajectoryTree], lr_scale: float = 1.0) -> Metrics:
        """Train on whole groups: one optimizer step per mini-batch."""
        ...

    async def imitate(self, sequences: Sequence[EncodedTree], lr_scale: float = 1.0) -> Metrics:
        """One optimizer step on the mean negative log-likelihood of the predicted tokens."""
        ...

    async def score(self, sequences: Sequence[EncodedTree]) -> list[Score]:
        """Log-probs of given sequences under the current weights; trains nothing."""
        ...

    async def reset_optimizer(self, config: OptimizerConfig) -> None:
        """Start over with an optimizer without state, as between SFT and RL."""
        ...

    async def publish(self, directory: Path) -> Path:
        """Write the weights as a Hugging Face directory and count one policy version up."""
        ...

    async def export(self, directory: Path) -> Path:
        """Write the same directory without counting."""
        ...

    async def save(self, directory: Path) -> None:
        """Write everything a bit-exact resume needs; atomic."""
        ...

    async def load(self, directory: Path) -> None:
        """Go on from what `save` wrote, its policy version included."""
        ...

    async def close(self) -> None:
        """Stop the ranks; idempotent."""
        ...
