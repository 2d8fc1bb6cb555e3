"""The keys of supervised fine-tuning and of preference training, also as phases of a training run:
the cold start and the self-critic.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr, replace

from agentenv.assembly.keys.run import ModelConfig, RunConfig
from agentenv.assembly.reports.monitors import MonitorConfig
from agentenv.assembly.run.checkpoints import SavingConfig
from agentenv.base.config import ESSENTIAL, PATH, ROWS, about
from agentenv.base.errors import ConfigError
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.lora import LoRAConfig
from agentenv.learners.optimizer import (
    LearningRate,
    Optimizer,
    OptimizerConfig,
    Schedule,
    WarmupRatio,
    WeightDecay,
)
from agentenv.text.bridged import AnyRenderer
from agentenv.text.prompt import PromptConfig
from agentenv.text.renderer import TagsConfig

Format = Literal["auto", "sharegpt", "messages", "alpaca", "turns"]


class ChatColumns(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Columns of a dialogue in a row. The names are those of LLaMA-Factory's dataset_info.json."""

    messages: Annotated[
        str, about("column of the list of messages; empty: conversations, messages or prompt")
    ] = ""
    system: Annotated[str, about("column of the system prompt, if the row has one")] = "system"
    tools: Annotated[
        str, about("column of the tool schemas, as JSON or a list, if the row has one")
    ] = "tools"
    chosen: Annotated[str, about("the better answer of a preference")] = "chosen"
    rejected: Annotated[str, about("the worse answer of a preference")] = "rejected"
    prompt: Annotated[str, about("alpaca: the instruction")] = "instruction"
    query: Annotated[str, about("alpaca: the input of the instruction")] = "input"
    response: Annotated[str, about("alpaca: the answer")] = "output"
    history: Annotated[str, about("alpaca: pairs of earlier turns")] = "history"


MaxLength = Annotated[
    int, about("cut-off length of a sequence, or of prompt and answer, in tokens", ge=2)
]


class ChatDataConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The training rows and the held-out rows."""

    train: Annotated[
        str | list[str],
        about(
            "training rows: a JSONL, JSON, CSV, parquet or Arrow file, a folder, a "
            "pattern, or a list of them; with data.dataset_info, names of its datasets",
            PATH,
            ESSENTIAL,
        ),
    ]
    eval: Annotated[
        str | list[str], about("held-out rows, in the form of data.train", PATH, ESSENTIAL)
    ] = ""
    eval_split: Annotated[
        float,
        about(
            "hold out this fraction of data.train, drawn by run.seed; from 1 on: a number of rows",
            ge=0,
        ),
    ] = 0.0
    dataset_info: Annotated[
        str, about("LLaMA-Factory's dataset_info.json; its files are looked up next to it", PATH)
    ] = ""
    format: Annotated[
        Format,
        about(
            "sharegpt: from and value; messages: role and content; alpaca: "
            "instruction, input, output; turns: question and turns; auto: by the keys of each row"
        ),
    ] = "auto"
    columns: ChatColumns = ChatColumns()
    max_samples: Annotated[int, about("first n rows of data.train; 0: all", ge=0)] = 0
    skip_bad_rows: Annotated[
        bool, about("skip and list invalid rows instead of rejecting the file")
    ] = False
    max_length: MaxLength = 15_000
    compat: Annotated[
        Literal["", "reference"],
        about(
            "'reference' trains tool results within an answer, as the released recipes "
            "do, and keeps the backspace byte in \\boxed; empty: masks them"
        ),
    ] = ""


ONLY_RL = ("groups_per_minibatch", "num_epochs_per_batch", "proximal")
WARMUP_RATIO = 0.1


class SupervisedLearnerConfig(LearnerConfig, frozen=True, kw_only=True):
    """The learner with the defaults of the published cold start: AdamW, cosine, 10 % warm-up."""

    optimizer: Optimizer = "adamw"
    learning_rate: LearningRate = 7e-6
    weight_decay: WeightDecay = 0.0
    schedule: Schedule = "cosine"
    warmup_ratio: WarmupRatio = WARMUP_RATIO

    def __post_init__(self) -> None:
        if self.warmup_steps and self.warmup_ratio == WARMUP_RATIO:
            force_setattr(self, "warmup_ratio", 0.0)  # warmup_steps overrides the default
        super().__post_init__()
        plain = LearnerConfig()
        for name in ONLY_RL:
            if getattr(self, name) != getattr(plain, name):
                raise ConfigError(f"learner.{name}: only used by reinforcement learning")


class LoopConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Number of steps, batch sizes, and intervals."""

    batch_size: Annotated[
        int, about("rows of a batch, over all ranks: sequences or pairs", ESSENTIAL, ge=1)
    ] = 8
    gradient_accumulation: Annotated[
        int, about("batches per optimizer step; the loss is the mean over all of them", ge=1)
    ] = 2
    num_steps: Annotated[Annotated[int, Meta(ge=1)] | None, about("steps")] = None
    num_epochs: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        about("passes over the rows, instead of num_steps; 3 if neither is set", ESSENTIAL),
    ] = None
    eval_every: Annotated[
        int, about("steps between evaluations; 0: only at start and end", ge=0)
    ] = 0

    def __post_init__(self) -> None:
        if self.num_steps is not None and self.num_epochs is not None:
            raise ConfigError(
                "num_steps and num_epochs: set only one of them; KEY=none on the command line "
                "removes the one of the file"
            )

    def count_steps(self, num_rows: int) -> int:
        """Optimizer steps of the run; the last one of an epoch may have fewer rows."""
        if self.num_steps is not None:
            return self.num_steps
        epochs = 3.0 if self.num_epochs is None else self.num_epochs
        return max(1, round(epochs * self.steps_per_epoch(num_rows)))

    def steps_per_epoch(self, num_rows: int) -> int:
        return -(-num_rows // self.rows_per_step)

    @property
    def rows_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation


class KeepingConfig(SavingConfig, frozen=True, kw_only=True):
    """Checkpoints of a supervised run."""

    keep_best: Annotated[
        bool, about("also keep the checkpoint with the lowest loss on data.eval")
    ] = False


class SupervisedRunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The common keys of `agentenv sft` and `agentenv dpo`."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: ChatDataConfig
    prompt: PromptConfig = PromptConfig()
    renderer: AnyRenderer = TagsConfig()
    learner: SupervisedLearnerConfig = SupervisedLearnerConfig()
    checkpoint: KeepingConfig = KeepingConfig()
    monitor: MonitorConfig = MonitorConfig()

    def __post_init__(self) -> None:
        if self.data.eval and self.data.eval_split:
            raise ConfigError("data.eval and data.eval_split: set only one of them")
        if self.checkpoint.keep_best and not (self.data.eval or self.data.eval_split):
            raise ConfigError("checkpoint.keep_best: needs held-out rows: data.eval or eval_split")

    @property
    def loop(self) -> LoopConfig:
        """Steps, batches and cadence."""
        raise NotImplementedError


class SFTRunConfig(SupervisedRunConfig, frozen=True, kw_only=True):
    """All keys of `agentenv sft`."""

    sft: LoopConfig = LoopConfig()

    @property
    def loop(self) -> LoopConfig:
        return self.sft


Beta = Annotated[float, about("strength of the constraint to the reference policy", gt=0)]


class PairDataConfig(ChatDataConfig, frozen=True, kw_only=True):
    """The files of preferences."""

    max_length: MaxLength = 8192


class DPOLoopConfig(LoopConfig, frozen=True, kw_only=True):
    """Direct preference optimization (learners/ranks/dpo.py)."""

    beta: Beta = 0.1
    tuning: Annotated[
        Literal["lora", "full"],
        about("train adapters (learner.lora, r = 8 by default), or all weights"),
    ] = "lora"


class DPOLearnerConfig(SupervisedLearnerConfig, frozen=True, kw_only=True):
    """The learner with the defaults of the published self-critic stage."""

    learning_rate: LearningRate = 5e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.router_loss:
            raise ConfigError("learner.router_loss: not supported with preferences; expected 0")


class DPORunConfig(SupervisedRunConfig, frozen=True, kw_only=True):
    """All keys of `agentenv dpo`."""

    data: PairDataConfig
    dpo: DPOLoopConfig = DPOLoopConfig()
    learner: DPOLearnerConfig = DPOLearnerConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dpo.tuning == "full":
            if self.learner.lora is not None:
                raise ConfigError("dpo.tuning = full and learner.lora: set only one of them")
        elif self.learner.lora is None:
            lora = LoRAConfig(r=8, alpha=16)
            force_setattr(self, "learner", replace(self.learner, lora=lora))

    @property
    def loop(self) -> LoopConfig:
        return self.dpo


class SFTStage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage of the cold start."""

    rows: Annotated[str, about("use the rows whose key 'stage' has this value; empty: all")] = ""
    num_steps: Annotated[int, about("maximum number of optimizer steps", ge=1)]
    until_gate: Annotated[
        bool, about("end the stage as soon as every kind of question passes the gate")
    ] = False
    batch_size: Annotated[int, about("demonstrations per step", ge=1)] = 8
    lr_scale: Annotated[
        tuple[float, float], about("factor on both learning rates, from first to last step")
    ] = (1.0, 1.0)


class ColdStartOptimizer(OptimizerConfig, frozen=True, kw_only=True):
    """The optimizer of a cold start, with the rate of `agentenv sft`."""

    learning_rate: LearningRate = 7e-6
    weight_decay: WeightDecay = 0.0


class SFTConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cold start: imitate demonstrations, stage by stage."""

    data: Annotated[str, about("JSONL file of demonstrations", ESSENTIAL, ROWS)]
    gate: Annotated[
        str,
        about(
            "JSONL file of clean demonstrations that measure the skill, by kind of "
            "question; they are not trained",
            ROWS,
        ),
    ]
    stages: Annotated[list[SFTStage], about("stages in order, [[sft.stages]]")]
    gate_every: Annotated[int, about("steps between two measurements", ge=1)] = 25
    gate_threshold: Annotated[
        float, about("teacher-forced exact match that every kind must reach", ge=0, le=1)
    ] = 0.9
    missed_gate: Annotated[
        Literal["warn", "end"],
        about("a stage with until_gate that ends below the gate: warn, or end the run"),
    ] = "warn"
    warmup_steps: Annotated[int, about("steps of linear warm-up", ge=0)] = 20
    optimizer: Annotated[ColdStartOptimizer, about("optimizer of the cold start")] = (
        ColdStartOptimizer()
    )


class SelfCriticConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At intervals of updates, the policy answers training questions several times, and DPO prefers
    answers with a high reward to the others (training/supervised/self_critic.py). The reference of
    a round is the policy before it."""

    every: Annotated[int, about("updates between two rounds", ge=1)] = 20
    num_questions: Annotated[int, about("training questions per round, drawn at random", ge=1)] = 32
    num_samples: Annotated[int, about("answers per question", ge=2)] = 8
    pairs_per_question: Annotated[int, about("most pairs of a question, drawn", ge=1)] = 4
    threshold: Annotated[
        float, about("reward from which an answer is chosen; others are rejected")
    ] = 1.0
    beta: Beta = 0.1
    batch_size: Annotated[int, about("pairs per optimizer step", ge=1)] = 16
    num_epochs: Annotated[int, about("passes over the pairs of a round", ge=1)] = 1
    optimizer: Annotated[
        OptimizerConfig,
        about(
            "optimizer of a round, created anew for each; the optimizer of the updates "
            "keeps its state"
        ),
    ] = OptimizerConfig(optimizer="adamw", learning_rate=5e-6, weight_decay=0.0)
