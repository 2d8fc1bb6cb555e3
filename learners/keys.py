"""The keys of a learner and of its ranks, and the metadata of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from agentenv.base.config import ESSENTIAL, PATH, about
from agentenv.base.disk import finished_folder
from agentenv.base.errors import ConfigError
from agentenv.base.model_files import read_as
from agentenv.learners.lora import LoRAConfig
from agentenv.learners.optimizer import OptimizerConfig, ScheduleConfig

Metrics = dict[str, float]


# Agreement of an engine's values of fresh tokens with the learner's: up to rounding; measured to be
# close (log-probs; entropies may be bounds); or unknown.
Agreement = Literal["exact", "close", "unknown"]


class LearnerConfig(ScheduleConfig, frozen=True, kw_only=True):
    """Keys of the learner's ranks and of the optimizer steps of an update."""

    num_ranks: Annotated[int, about("processes that train together", ESSENTIAL, ge=1)] = 1
    launch: Annotated[
        Literal["local", "external"],
        about(
            "start the ranks on this machine, or wait for ranks started by torchrun, "
            "the DeepSpeed launcher or Slurm (docs/learner.md)"
        ),
    ] = "local"
    address: Annotated[
        str, about("host:port at which external ranks reach the controller, such as 0.0.0.0:29400")
    ] = ""
    context_parallel: Annotated[
        int,
        about(
            "neighboring ranks on one machine that share each micro-batch, which then "
            "has this many times max_tokens_per_microbatch: for paths too long for one rank; must "
            "divide num_ranks and the model's attention heads",
            ge=1,
        ),
    ] = 1
    zero_stage: Annotated[
        Literal["auto", 0, 1, 2, 3],
        about(
            "0 is plain torch; DeepSpeed ZeRO: 1 shards optimizer state over ranks, 2 "
            "also gradients, 3 also weights; auto: the lowest that dtype, offload and "
            "deepspeed_config allow; muon_adamw needs 0",
            ESSENTIAL,
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        about(
            "dtype of weights and activations; bfloat16 also keeps float32 weights, "
            "gradient sums and optimizer state, and needs zero_stage >= 1; auto: bfloat16 on GPUs, "
            "float32 on CPUs and with stage 0",
            ESSENTIAL,
        ),
    ] = "auto"
    offload: Annotated[
        Literal["none", "optimizer", "params"],
        about(
            "keep optimizer state (zero_stage >= 1), or also weights (zero_stage 3), in main memory"
        ),
    ] = "none"
    activation_checkpointing: Annotated[
        bool, about("recompute activations of each layer in the backward pass", ESSENTIAL)
    ] = False
    fused: Annotated[
        Literal["none", "liger"],
        about(
            "norms, rotary positions and feed-forward parts with liger-kernel, on "
            "GPUs; the head, with entropies and their gradient, is unchanged"
        ),
    ] = "none"
    layout: Annotated[
        Literal["auto", "tree"],
        about(
            "attention of micro-batches, with the same gradients: over trees; auto: on "
            "a CPU by segments where paths are short"
        ),
    ] = "auto"
    deepspeed_config: Annotated[
        str,
        about(
            "JSON file with further DeepSpeed settings (buckets, overlap, offload "
            "buffers), for zero_stage >= 1; settings that contradict these keys are rejected",
            PATH,
        ),
    ] = ""
    lora: Annotated[LoRAConfig | None, about("train low-rank adapters; empty: all weights")] = None
    proximal: Annotated[
        Literal["stale", "always"],
        about(
            "when to compute proximal log-probs: for trees with tokens of an older "
            "policy, and for all while engine and learner may disagree (separate processes, and a "
            "parity gap above 0.01 nats at some token); or always"
        ),
    ] = "stale"
    groups_per_minibatch: Annotated[
        int,
        about(
            "questions per optimizer step; fewer if groups failed or are dropped", ESSENTIAL, ge=1
        ),
    ] = 8
    num_epochs_per_batch: Annotated[int, about("passes over the trees of an update", ge=1)] = 1
    max_tokens_per_microbatch: Annotated[
        int,
        about(
            "tokens per micro-batch of a rank, whole trees unless one is larger; bounds memory",
            ESSENTIAL,
            ge=1,
        ),
    ] = 2048
    router_loss: Annotated[
        float,
        about(
            "weight of the load-balancing loss of a model with experts, 0.001 in "
            "Qwen3-MoE's configuration: prevents routers from dropping experts in long runs",
            ge=0,
        ),
    ] = 0.0
    num_threads: Annotated[int, about("torch threads of a rank", ge=1)] = 1
    start_timeout_s: ClassVar[float] = 300.0  # for a rank to load its model
    command_timeout_s: Annotated[
        float, about("deadline of a rank for one command, seconds", gt=0)
    ] = 3600.0

    def __post_init__(self) -> None:
        for wrong, text in (
            (self.dtype == "bfloat16" and self.zero_stage == 0, BF16_NEEDS_1),
            (self.offload != "none" and self.zero_stage == 0, OFFLOAD_NEEDS_1),
            (self.deepspeed_config and self.zero_stage == 0, JSON_NEEDS_1),
            (self.offload == "params" and self.zero_stage in (0, 1, 2), OFFLOAD_PARAMS_NEEDS_3),
            ((self.launch == "external") != bool(self.address), EXTERNAL_NEEDS_ADDRESS),
            (self.num_ranks % self.context_parallel, REPLICAS_NEED_RANKS),
        ):
            if wrong:
                raise ConfigError(text.format(self))
        if self.optimizer == "muon_adamw":  # on any device
            found = self.resolved(on_gpu=False)
            force_setattr(self, "zero_stage", found.zero_stage)
            force_setattr(self, "dtype", found.dtype)
        self.check_optimizer(self, "learner.optimizer")
        self.check_schedule("learner")

    def resolved(self, *, on_gpu: bool) -> Self:
        """The configuration with "auto" resolved for the device: ZeRO stage and dtype."""
        dtype, stage = self.dtype, self.zero_stage
        if dtype == "auto":
            dtype = "bfloat16" if on_gpu and stage != 0 else "float32"
        if stage == "auto":
            needs_1 = dtype == "bfloat16" or self.offload == "optimizer" or self.deepspeed_config
            stage = 3 if self.offload == "params" else 1 if needs_1 else 0
        if (dtype, stage) == (self.dtype, self.zero_stage):
            return self
        return replace(self, dtype=dtype, zero_stage=stage)

    def check_optimizer(self, other: OptimizerConfig, key: str) -> None:
        """Raises ConfigError if this learner does not support the optimizer `other` of `key`."""
        if other.optimizer == "muon_adamw":
            if self.lora is not None:
                raise ConfigError(LORA_NEEDS_ADAMW.format(key=key))
            if self.zero_stage != 0:
                raise ConfigError(MUON_NEEDS_0.format(key=key, stage=self.zero_stage))

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas: context groups, each with its own trees."""
        return self.num_ranks // self.context_parallel

    @property
    def replica_tokens(self) -> int:
        """Token budget of a replica's micro-batch, except for a longer path."""
        return self.context_parallel * self.max_tokens_per_microbatch


MUON_NEEDS_0 = (
    "{key} = muon_adamw requires whole matrices, which learner.zero_stage = {stage} "
    'splits into flat parts; set {key} = "adamw", or learner.zero_stage = 0'
)
LORA_NEEDS_ADAMW = (
    "{key} = muon_adamw would make the matrices of each adapter of learner.lora orthogonal; set "
    '{key} = "adamw"'
)
BF16_NEEDS_1 = (
    "learner.dtype = bfloat16 needs learner.zero_stage >= 1 (1 is free on one rank): stage 0 is "
    "plain torch in float32"
)
JSON_NEEDS_1 = "learner.deepspeed_config needs learner.zero_stage >= 1: stage 0 is plain torch"
OFFLOAD_NEEDS_1 = (
    "learner.offload needs learner.zero_stage >= 1: stage 0 keeps everything on the device"
)
OFFLOAD_PARAMS_NEEDS_3 = (
    "learner.offload = params needs learner.zero_stage = 3, which shards weights"
)
EXTERNAL_NEEDS_ADDRESS = (
    "learner.address: set the host:port to listen on with learner.launch = external, and only then"
)


REPLICAS_NEED_RANKS = (
    "learner.context_parallel = {0.context_parallel} does not divide learner.num_ranks = "
    "{0.num_ranks}: this many ranks share a micro-batch; change one of them"
)


def check_heads(num_heads: int, size: int) -> None:
    """Raises ConfigError if the attention heads cannot be divided by this context-group size."""
    if num_heads % size:
        raise ConfigError(
            f"learner.context_parallel = {size} does not divide the model's {num_heads} attention "
            "heads, which are split over the ranks that share a path; choose a divisor"
        )


class Score(Struct, frozen=True):
    """Teacher-forced values of one sequence, an entry per predicted token.

    logprobs and entropies in nats; matches: the token is the likeliest one. If requested,
    the likeliest ids in its place and their log-probs, [top_k, tokens].
    """

    logprobs: list[float]
    entropies: list[float]
    matches: list[bool]
    top_logprobs: list[list[float]] = []
    top_ids: list[list[int]] = []


# Metadata of a checkpoint, also for readers that do not load it.

SAVED_FILE = "learner.json"


class SavedLearner(Struct, kw_only=True):
    """Metadata of a checkpoint. `base_model`: directory of the frozen weights, with `lora`.
    `reference_updates`: see `agentenv.learners.ranks.saved_checkpoint`."""

    num_ranks: int
    zero_stage: int
    dtype: str
    optimizer: str
    policy_version: int
    optimizer_step: int
    moved: bool
    base_model: str
    reference_updates: int = 0
    lora: LoRAConfig | None = None


def read_saved(directory: Path) -> SavedLearner:
    """The metadata of a checkpoint, even while ranks rewrite it. Raises DataError for an incomplete
    one."""
    return read_as(finished_folder(directory) / SAVED_FILE, "learner checkpoint", SavedLearner)


def frozen_model(checkpoint: Path | None) -> Path | None:
    """The directory of the frozen weights of a checkpoint with adapters; None without adapters."""
    folder = None if checkpoint is None else checkpoint / "trainer"
    if folder is None or not finished_folder(folder).is_dir():
        return None
    saved = read_saved(folder)
    return Path(saved.base_model) if saved.lora else None
