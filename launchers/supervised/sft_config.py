"""The configuration of supervised fine-tuning, and what preference training shares with it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from agentenv.errors import ConfigError
from agentenv.native import NativeConfig
from agentenv.prompt import PromptConfig
from agentenv.renderer import TagsConfig
from launchers.config import ModelConfig, RunConfig
from launchers.monitor.config import MonitorConfig
from launchers.supervised.chat_config import ChatDataConfig
from learners.learner import LearnerConfig

ONLY_RL = ("groups_per_minibatch", "num_epochs_per_batch", "proximal")
WARMUP_RATIO = 0.1


class SupervisedLearnerConfig(LearnerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The learner with the rates of the published cold start: AdamW, cosine, warm-up of a tenth."""

    optimizer: Annotated[
        Literal["muon_adamw", "adamw"],
        Meta(description="Muon on hidden matrices and AdamW on the rest, or AdamW on all"),
    ] = "adamw"
    learning_rate: Annotated[float, Meta(ge=0, description="rate of AdamW")] = 7e-6
    weight_decay: Annotated[
        float, Meta(ge=0, description="decoupled decay of AdamW's matrices")
    ] = 0.0
    schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        Meta(description="how the learning rates go on after the warm-up"),
    ] = "cosine"
    warmup_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="part of all steps over which the rates rise, if not steps"),
    ] = WARMUP_RATIO

    def __post_init__(self) -> None:
        if self.warmup_steps and self.warmup_ratio == WARMUP_RATIO:
            force_setattr(self, "warmup_ratio", 0.0)  # the default gives way
        super().__post_init__()
        plain = LearnerConfig()
        for name in ONLY_RL:
            if getattr(self, name) != getattr(plain, name):
                raise ConfigError(f"learner.{name}: only reinforcement learning reads it")


class LoopConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps, batches and cadence."""

    batch_size: Annotated[
        int, Meta(ge=1, description="rows of a batch, over all ranks; see also packing")
    ] = 8
    gradient_accumulation: Annotated[
        int, Meta(ge=1, description="batches of an optimizer step; the mean is over all of them")
    ] = 2
    num_steps: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="steps")] = None
    num_epochs: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="passes over the rows, in place of num_steps; 3 if neither is given"),
    ] = None
    eval_every: Annotated[
        int, Meta(ge=0, description="steps between evaluations; 0: only at start and end")
    ] = 0

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_epochs is not None:
            raise ConfigError("num_steps and num_epochs: give one of them")

    def count_steps(self, num_rows: int) -> int:
        """Optimizer steps of the run; the last one of an epoch may hold fewer rows."""
        if self.num_steps is not None:
            return self.num_steps
        epochs = 3.0 if self.num_epochs is None else self.num_epochs
        return max(1, round(epochs * self.steps_per_epoch(num_rows)))

    def steps_per_epoch(self, num_rows: int) -> int:
        return -(-num_rows // self.rows_per_step)

    @property
    def rows_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation


class SFTLoopConfig(LoopConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised fine-tuning."""

    packing: Annotated[
        bool,
        Meta(
            description="a row of a batch is filled with sequences up to data.max_length, which do "
            "not see each other; false: a row is one sequence (neither way is padded)"
        ),
    ] = False


class SavingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints, in Hugging Face format with the learner's state beside."""

    every: Annotated[int, Meta(ge=0, description="steps between checkpoints; 0: only the end")] = 0
    keep_last: Annotated[int, Meta(ge=1, description="newest ones to keep")] = 2
    keep_best: Annotated[
        bool, Meta(description="keep the one with the lowest loss on data.eval as well")
    ] = False


class SFTRunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `launchers/sft.py` reads."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: ChatDataConfig
    prompt: PromptConfig = PromptConfig()
    renderer: TagsConfig | NativeConfig = TagsConfig()
    sft: SFTLoopConfig = SFTLoopConfig()
    learner: SupervisedLearnerConfig = SupervisedLearnerConfig()
    checkpoint: SavingConfig = SavingConfig()
    monitor: MonitorConfig = MonitorConfig()

    def __post_init__(self) -> None:
        check_measured(self.data, self.checkpoint)


def check_measured(data: ChatDataConfig, saving: SavingConfig) -> None:
    """Refuse what needs held-out rows where there are none."""
    if data.eval and data.eval_split:
        raise ConfigError("data.eval and data.eval_split: give one of them")
    if saving.keep_best and not (data.eval or data.eval_split):
        raise ConfigError("checkpoint.keep_best: needs rows that measure: data.eval or eval_split")
