"""The keys of supervised fine-tuning and of preference training."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr, replace

from agentenv.config import ESSENTIAL, PATH
from agentenv.errors import ConfigError
from agentenv.learners.learner import (
    LearnerConfig,
    LearningRate,
    Optimizer,
    Schedule,
    WarmupRatio,
    WeightDecay,
)
from agentenv.learners.lora import LoRAConfig
from agentenv.native import NativeConfig
from agentenv.pipelines.config.rl import ModelConfig, RunConfig
from agentenv.pipelines.monitors.monitors import MonitorConfig
from agentenv.pipelines.run.saver import SavingConfig
from agentenv.renderer import PromptConfig, TagsConfig

Format = Literal["auto", "sharegpt", "messages", "alpaca", "turns"]


class ChatColumns(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a row keeps its dialogue. The names are those of LLaMA-Factory's dataset_info.json."""

    messages: Annotated[
        str, Meta(description="list of messages; empty: conversations, messages or prompt")
    ] = ""
    system: Annotated[str, Meta(description="system prompt, if the row has it")] = "system"
    tools: Annotated[
        str, Meta(description="schemas of the tools, as JSON or as a list, if the row has it")
    ] = "tools"
    chosen: Annotated[str, Meta(description="the better answer of a preference")] = "chosen"
    rejected: Annotated[str, Meta(description="the worse answer of a preference")] = "rejected"
    prompt: Annotated[str, Meta(description="alpaca: the instruction")] = "instruction"
    query: Annotated[str, Meta(description="alpaca: what is added to the instruction")] = "input"
    response: Annotated[str, Meta(description="alpaca: the answer")] = "output"
    history: Annotated[str, Meta(description="alpaca: pairs of earlier turns")] = "history"


MaxLength = Annotated[
    int, Meta(ge=2, description="cut-off length of a sequence, or of prompt and answer, in tokens")
]


class ChatDataConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files that are learned from, and those that only measure."""

    train: Annotated[
        str | list[str],
        Meta(
            description="rows to learn from: a JSONL, JSON, CSV, parquet or Arrow file, a folder, "
            "a pattern, or a list of them; with data.dataset_info names of datasets in it",
            extra=PATH | ESSENTIAL,
        ),
    ]
    eval: Annotated[
        str | list[str],
        Meta(description="rows that measure, given as data.train is", extra=PATH | ESSENTIAL),
    ] = ""
    eval_split: Annotated[
        float,
        Meta(
            ge=0,
            description="hold out this part of data.train, drawn by run.seed; from 1 on: so many "
            "rows",
        ),
    ] = 0.0
    dataset_info: Annotated[
        str,
        Meta(
            description="LLaMA-Factory's dataset_info.json; files are sought beside it", extra=PATH
        ),
    ] = ""
    format: Annotated[
        Format,
        Meta(
            description="sharegpt: from and value; messages: role and content; alpaca: "
            "instruction, input, output; turns: question and turns; auto: by the keys of each row"
        ),
    ] = "auto"
    columns: ChatColumns = ChatColumns()
    max_samples: Annotated[int, Meta(ge=0, description="first n rows of data.train; 0: all")] = 0
    skip_bad_rows: Annotated[
        bool, Meta(description="leave out bad rows and list them, instead of refusing the file")
    ] = False
    max_length: MaxLength = 15_000
    overlong: Annotated[
        Literal["cut", "skip", "error"],
        Meta(description="a longer sequence loses its end, is left out, or is refused"),
    ] = "cut"
    compat: Annotated[
        Literal["", "reference"],
        Meta(
            description="'reference' trains tool results that stand within an answer, as the "
            "released recipes do, and keeps the backspace byte in \\boxed; empty: masks them"
        ),
    ] = ""


ONLY_RL = ("groups_per_minibatch", "num_epochs_per_batch", "proximal")
WARMUP_RATIO = 0.1


class SupervisedLearnerConfig(LearnerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The learner with the rates of the published cold start: AdamW, cosine, warm-up of a tenth."""

    optimizer: Optimizer = "adamw"
    learning_rate: LearningRate = 7e-6
    weight_decay: WeightDecay = 0.0
    schedule: Schedule = "cosine"
    warmup_ratio: WarmupRatio = WARMUP_RATIO

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
        int,
        Meta(
            ge=1,
            description="rows of a batch, over all ranks: sequences, pairs, or see packing",
            extra=ESSENTIAL,
        ),
    ] = 8
    gradient_accumulation: Annotated[
        int, Meta(ge=1, description="batches of an optimizer step; the mean is over all of them")
    ] = 2
    num_steps: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="steps")] = None
    num_epochs: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="passes over the rows, in place of num_steps; 3 if neither is given",
            extra=ESSENTIAL,
        ),
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


class KeepingConfig(SavingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints of a supervised run."""

    keep_best: Annotated[
        bool, Meta(description="keep the one with the lowest loss on data.eval as well")
    ] = False


class SupervisedRunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `agentenv sft` and `agentenv dpo` both read."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: ChatDataConfig
    prompt: PromptConfig = PromptConfig()
    renderer: TagsConfig | NativeConfig = TagsConfig()
    learner: SupervisedLearnerConfig = SupervisedLearnerConfig()
    checkpoint: KeepingConfig = KeepingConfig()
    monitor: MonitorConfig = MonitorConfig()

    def __post_init__(self) -> None:
        if self.data.eval and self.data.eval_split:
            raise ConfigError("data.eval and data.eval_split: give one of them")
        if self.checkpoint.keep_best and not (self.data.eval or self.data.eval_split):
            raise ConfigError(
                "checkpoint.keep_best: needs rows that measure: data.eval or eval_split"
            )

    @property
    def loop(self) -> LoopConfig:
        """Steps, batches and cadence."""
        raise NotImplementedError


class SFTRunConfig(SupervisedRunConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `agentenv sft` reads."""

    sft: SFTLoopConfig = SFTLoopConfig()

    @property
    def loop(self) -> LoopConfig:
        return self.sft


Beta = Annotated[float, Meta(gt=0, description="weight of staying near the reference policy")]


class PairDataConfig(ChatDataConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files of preferences."""

    max_length: MaxLength = 8192


class DPOLoopConfig(LoopConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Direct preference optimization (learners/dpo.py)."""

    beta: Beta = 0.1
    tuning: Annotated[
        Literal["lora", "full"],
        Meta(description="train adapters (learner.lora, r = 8 unless given), or all weights"),
    ] = "lora"


class DPOLearnerConfig(
    SupervisedLearnerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The learner with the rates of the published self-critic stage."""

    learning_rate: LearningRate = 5e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.router_loss:
            raise ConfigError("learner.router_loss: preferences are trained without it; expected 0")


class DPORunConfig(SupervisedRunConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `agentenv dpo` reads."""

    data: PairDataConfig
    dpo: DPOLoopConfig = DPOLoopConfig()
    learner: DPOLearnerConfig = DPOLearnerConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dpo.tuning == "full":
            if self.learner.lora is not None:
                raise ConfigError("dpo.tuning = full and learner.lora: give one of them")
        elif self.learner.lora is None:
            lora = LoRAConfig(r=8, alpha=16)
            force_setattr(self, "learner", replace(self.learner, lora=lora))

    @property
    def loop(self) -> LoopConfig:
        return self.dpo
