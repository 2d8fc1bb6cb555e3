"""The configuration of a run, composed of the parts' own structs. `{run}` in a path stands for
the run's directory."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from agentenv.data_config import MixPart, RowsConfig
from agentenv.engines.embedded_config import EmbeddedConfig
from agentenv.engines.launch_config import RoleConfig
from agentenv.engines.remote_config import SGLangConfig, VLLMConfig
from agentenv.engines.scripted import ScriptedConfig
from agentenv.errors import ConfigError
from agentenv.limits import Limits
from agentenv.native import NativeConfig
from agentenv.prompt import PromptConfig
from agentenv.renderer import TagsConfig
from agentenv.types import SamplingParams
from launchers.env_config import EnvConfig, GraderTable, PythonTable, SearchTable
from launchers.evaluation.config import EvalConfig
from launchers.monitor.config import RolloutMonitorConfig
from launchers.rl.cold_start_config import SFTConfig
from launchers.rl.self_critic_config import SelfCriticConfig
from launchers.serving.resources import ResourcesConfig
from learners.algorithms import AnyAlgorithm
from learners.learner import LearnerConfig


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the run writes, and the seed of everything random in it."""

    dir: Annotated[str, Meta(description="folder that holds the runs")] = "runs"
    name: Annotated[
        str, Meta(description="folder of this run; empty: name of the configuration file")
    ] = ""
    seed: Annotated[int, Meta(ge=0, description="seed of data, model, sampling and forks")] = 0
    setup: Annotated[
        str,
        Meta(
            description="'module:function', called with (run directory, seed) before all else to "
            "make model and data; a text it returns is shown; empty: they exist already"
        ),
    ] = ""


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy to start from."""

    path: Annotated[str, Meta(description="Hugging Face directory with model and tokenizer")]


class DataConfig(RowsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The training questions: `train`, or a weighted `mix`."""

    train: Annotated[
        str | list[str],
        Meta(
            description="training rows (question, answer, ...): a JSONL, JSON, CSV or parquet "
            "file, a folder, a pattern, or a list of them, shuffled together"
        ),
    ] = ""
    mix: Annotated[
        list[MixPart],
        Meta(description="files that take turns by weight, [[data.mix]], in place of data.train"),
    ] = field(default_factory=list)
    max_samples: Annotated[int, Meta(ge=0, description="first n rows of data.train; 0: all")] = 0

    def __post_init__(self) -> None:
        if bool(self.train) == bool(self.mix):
            raise ConfigError("data: give exactly one of data.train and [[data.mix]]")
        if self.mix and self.max_samples:
            raise ConfigError("data.max_samples: belongs to data.train; give it to the mix's parts")


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are sampled."""

    temperature: Annotated[float, Meta(ge=0, description="0 is greedy")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="1 is off")] = 1.0
    top_k: Annotated[int, Meta(ge=-1, description="-1 is off")] = -1
    min_p: Annotated[
        float,
        Meta(ge=0, le=1, description="least share of the likeliest token's probability; 0 is off"),
    ] = 0.0
    repetition_penalty: Annotated[
        float, Meta(gt=0, description="on tokens of prompt and output; 1 is off")
    ] = 1.0
    stop: Annotated[
        list[str],
        Meta(description="strings that end a turn, beside those of the renderer; they stay in it"),
    ] = field(default_factory=list)
    seed: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="seed of every token that is sampled; none: the seed of the run"),
    ] = None

    def __post_init__(self) -> None:
        if self.top_k == 0:
            raise ConfigError("sampling: top_k is -1 (off) or at least 1")
        if not all(self.stop):
            raise ConfigError("sampling: a string of stop is empty")

    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=1,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=tuple(self.stop),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )


# What makes the distribution that is sampled from another one than that of the policy.
OFF = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class SamplingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling of training and of evaluation, kept apart."""

    train: Sampling = Sampling()
    eval: Sampling = Sampling()

    def __post_init__(self) -> None:
        """The engines tell log-probs of the distribution that they sampled from, but the learner
        computes those of the whole policy: with any of these, the ratio of the two would be off
        from the start, and for a token outside a truncation there would be none."""
        for name, off in OFF.items():
            value = getattr(self.train, name)
            if value != off:
                raise ConfigError(
                    f"sampling.train: training samples from the policy itself; {name} = {value} "
                    f"samples from another distribution than the one whose log-probabilities the "
                    f"learner computes, and nothing corrects for that: leave it at {off}, or set "
                    f"sampling.eval.{name}"
                )


class QueueConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Between actors and learner."""

    groups_per_step: Annotated[
        int, Meta(ge=1, description="prompts (trees) that one update consumes")
    ] = 16
    max_staleness: Annotated[
        int,
        Meta(ge=0, description="bound on policy versions between starting and training a tree"),
    ] = 1
    refill: Annotated[
        bool,
        Meta(description="replace trees whose returns are all equal by later ones (DAPO)"),
    ] = False


class TrainingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long to train: `num_steps` or `num_epochs`, one of them."""

    num_steps: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="updates")] = None
    num_epochs: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="passes over the training questions")
    ] = None

    max_logprob_gap: Annotated[
        float,
        Meta(gt=0, description="warn when engine and learner differ more, nats at the worst token"),
    ] = 0.01

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.num_epochs is None):
            raise ConfigError("train: give exactly one of train.num_steps and train.num_epochs")


class CheckpointConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints, in Hugging Face format with the learner's state beside."""

    every: Annotated[int, Meta(ge=0, description="steps between checkpoints; 0: only the end")] = 0
    keep_last: Annotated[int, Meta(ge=1, description="newest ones to keep")] = 2
    best_metric: Annotated[
        str,
        Meta(description="evaluation metric SET/success or SET/reward whose best one is kept"),
    ] = ""


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is written beside the metrics."""

    trajectories: Annotated[
        bool, Meta(description="write every trajectory of each training step as JSONL")
    ] = True
    max_trajectory_mb: Annotated[
        float, Meta(gt=0, description="stop writing trajectories beyond this size, with a notice")
    ] = 500.0


class TrainConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `launchers/train.py` reads."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    env: EnvConfig
    python: PythonTable = None
    search: SearchTable = None
    grader: GraderTable = None
    data: DataConfig
    prompt: PromptConfig = PromptConfig()
    renderer: TagsConfig | NativeConfig = TagsConfig()
    limits: Limits = Limits()
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AnyAlgorithm
    queue: QueueConfig = QueueConfig()
    learner: LearnerConfig = LearnerConfig()
    resources: ResourcesConfig = ResourcesConfig()
    engine: EmbeddedConfig | ScriptedConfig | VLLMConfig | SGLangConfig = EmbeddedConfig()
    roles: Annotated[
        dict[str, RoleConfig],
        Meta(description="models beside the policy by name, [roles.judge]"),
    ] = field(default_factory=dict)
    sft: SFTConfig | None = None
    self_critic: Annotated[
        SelfCriticConfig | None, Meta(description="DPO on own answers between updates")
    ] = None
    train: TrainingConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    monitor: RolloutMonitorConfig = RolloutMonitorConfig()

    def __post_init__(self) -> None:
        for key, part in (("sft", self.sft), ("self_critic", self.self_critic)):
            if part is not None:
                self.learner.check_optimizer(part.optimizer, f"{key}.optimizer.optimizer")

    @property
    def algorithm_name(self) -> str:
        return str(self.algorithm.__struct_config__.tag)
