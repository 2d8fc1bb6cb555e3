"""The keys of a training run: the tables that belong to `agentenv train` itself.

They follow the order of the diagram in the README: data, environment, actors, engine, algorithm,
queue, learner; then the phases of a run, and its records.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr, replace

from agentenv.assembly.keys import cluster as clusters
from agentenv.assembly.keys.run import ModelConfig, RunConfig
from agentenv.assembly.keys.supervised import SelfCriticConfig, SFTConfig
from agentenv.assembly.reports.monitors import RolloutMonitorConfig
from agentenv.assembly.run.checkpoints import CheckpointConfig
from agentenv.base.config import ESSENTIAL, ROWS, about
from agentenv.base.errors import ConfigError
from agentenv.base.registry import Registry
from agentenv.base.types import SAMPLING, Limits, SamplingParams
from agentenv.contract.engine import MIN_TEMPERATURE, EngineConfig
from agentenv.contract.server_config import RoleConfig
from agentenv.contract.tool_config import ToolConfig
from agentenv.data.rows import CurriculumConfig, MixPart, RowsConfig
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.envs.grading.keys import GraderConfig
from agentenv.envs.sandbox.keys import PythonConfig
from agentenv.envs.search.keys import SearchConfig
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.keys import LearnerConfig
from agentenv.rollout.frames import ArchiveConfig, JournalConfig
from agentenv.text.bridged import AnyRenderer
from agentenv.text.prompt import PromptConfig
from agentenv.text.renderer import TagsConfig

# Parts that configurations choose by name: register built-in ones here.
ALGORITHMS = Registry(
    "algorithm",
    "agentenv.algorithms",
    Algorithm,
    {
        "grpo": "agentenv.learners.algorithms.baselines:GRPO",
        "dr_grpo": "agentenv.learners.algorithms.baselines:DrGRPO",
        "dapo": "agentenv.learners.algorithms.baselines:DAPO",
        "rloo": "agentenv.learners.algorithms.baselines:RLOO",
        "reinforce_pp": "agentenv.learners.algorithms.baselines:ReinforcePP",
        "gspo": "agentenv.learners.algorithms.baselines:GSPO",
        "cispo": "agentenv.learners.algorithms.baselines:CISPO",
        "arpo": "agentenv.learners.algorithms.arpo:ARPO",
        "tree_grpo": "agentenv.learners.algorithms.tree_grpo:TreeGRPO",
        "gigpo": "agentenv.learners.algorithms.gigpo:GiGPO",
        "aepo": "agentenv.learners.algorithms.aepo:AEPO",
        "distill": "agentenv.learners.algorithms.distill:Distill",
    },
)
ENGINES = Registry(
    "engine",
    "agentenv.engines",
    EngineConfig,
    {
        "embedded": "agentenv.engines.embedded.embedded_config:EmbeddedConfig",
        "scripted": "agentenv.engines.scripted:ScriptedConfig",
        "vllm": "agentenv.engines.vllm:VLLMConfig",
        "sglang": "agentenv.engines.sglang:SGLangConfig",
    },
)

if TYPE_CHECKING:
    AnyAlgorithm = Algorithm
    AnyEngine = EngineConfig
else:
    AnyAlgorithm = ALGORITHMS.key
    AnyEngine = ENGINES.key


# The configuration of a run. `{run}` in a path is the run's directory.


class DataConfig(RowsConfig, frozen=True, kw_only=True):
    """The training questions: `train`, or a weighted `mix`."""

    train: Annotated[
        str | list[str],
        about(
            "training rows (question, answer, ...): a JSONL, JSON, CSV or parquet "
            "file, a folder, a pattern, or a list of them, shuffled together",
            ESSENTIAL,
            ROWS,
        ),
    ] = ""
    mix: Annotated[
        list[MixPart], about("files mixed by weight, [[data.mix]], instead of data.train")
    ] = field(default_factory=list)
    max_samples: Annotated[int, about("first n rows of data.train; 0: all", ge=0)] = 0
    curriculum: Annotated[
        CurriculumConfig | None, about("draw questions by their success rate instead of in epochs")
    ] = None

    def __post_init__(self) -> None:
        if bool(self.train) == bool(self.mix):
            raise ConfigError("data: set exactly one of data.train and [[data.mix]]")
        if self.mix and self.max_samples:
            raise ConfigError(
                "data.max_samples: applies to data.train; set it in the parts of data.mix"
            )


# Environments, optionally per row, with their interpreter, search and grader.

# tables of a run and of a variant, passed to environments that take such a keyword
PythonTable = Annotated[PythonConfig | None, about("the Python interpreter")]
SearchTable = Annotated[SearchConfig | None, about("search and web pages")]
GraderTable = Annotated[GraderConfig | None, about("grading of answers")]
TABLES = ("python", "search", "grader")


class EnvChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An environment, its keywords and tools."""

    id: Annotated[str, about("registered environment id", ESSENTIAL)]
    kwargs: Annotated[dict[str, Any], about("keyword arguments of the environment class")] = {}
    tools: Annotated[
        list[ToolConfig],
        about("tools of an episode, [[env.tools]]; empty: those of the environment"),
    ] = []


class EnvVariant(EnvChoice, frozen=True, kw_only=True):
    """An environment with a name that rows can select. Its tables override those of the run."""

    python: PythonTable = None
    search: SearchTable = None
    grader: GraderTable = None


class EnvConfig(EnvChoice, frozen=True, kw_only=True):
    """The environment of rows that select none. `kwargs` and `tools` apply only to it; a row with
    another id gets that environment as registered."""

    module: Annotated[
        str, about("module to import first, which registers custom environments", ESSENTIAL)
    ] = "agentenv.envs"
    variants: Annotated[
        dict[str, EnvVariant],
        about("[env.variants.NAME]: a NAME for rows' env_id, data.env_by, data.mix"),
    ] = {}
    trial: Annotated[
        bool, Meta(description="dry run, doctor and training with forks try custom environments")
    ] = True


# Sampling of the policy, and the queue between actors and learner.


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling of tokens."""

    temperature: Annotated[float, about("0: greedy, not in training", ge=0)] = 1.0
    top_p: Annotated[float, about("1 is off", gt=0, le=1)] = 1.0
    top_k: Annotated[int, about("-1 is off", ge=-1)] = -1
    min_p: Annotated[
        float, about("minimum probability relative to the likeliest token; 0: off", ge=0, le=1)
    ] = 0.0
    repetition_penalty: Annotated[
        float, about("applies to tokens of prompt and output; 1: off", gt=0)
    ] = 1.0
    stop: Annotated[
        list[str],
        about(
            "strings that end a turn, in addition to those of the renderer; they stay in the text"
        ),
    ] = []
    seed: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        about("seed of token sampling; none: the seed of the run"),
    ] = None
    structured_output: Annotated[
        Literal["prompt", "engine"] | None,
        about(
            "where a program's response_format has its effect: in the prompt alone, or "
            "as a grammar of the engine too, which needs vLLM or SGLang; none: prompt in training, "
            "engine in evaluation where it can"
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.top_k == 0:
            raise ConfigError("sampling: top_k must be -1 (off) or at least 1")
        if not all(self.stop):
            raise ConfigError("sampling: stop contains an empty string")

    def params(self) -> SamplingParams:
        values = {name: getattr(self, name) for name in SAMPLING}
        return SamplingParams(max_tokens=1, stop=tuple(self.stop), **values)


MAX_KEPT = 1024  # ids of a sampled token that a turn stores, 4 bytes each


class SamplingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling of training, and of evaluation."""

    train: Sampling = Sampling()
    eval: Sampling = Sampling()
    schedule: Annotated[
        list[tuple[Annotated[int, Meta(ge=0)], float]],
        about(
            "sampling.train.temperature by policy version (published updates, a cold start is "
            "one), as pairs: [[0, 1.2], [200, 0.8]] is linear in between, constant before and "
            "after; a tree has that of its start"
        ),
    ] = []

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that the learner does not follow. Engines report
        log-probs of the distribution that they sample from, the learner computes those at the
        turn's temperature, among the ids that truncation kept: under a penalty, importance ratios
        would be wrong."""
        if self.schedule and self.train.temperature != 1:
            raise ConfigError(
                "sampling.schedule replaces sampling.train.temperature; remove one of them"
            )
        versions = [version for version, _ in self.points]
        if versions != sorted({*versions}):
            raise ConfigError("sampling.schedule: policy versions must increase from pair to pair")
        for _, one in self.points:
            if not MIN_TEMPERATURE <= one < inf:
                key = "sampling.schedule" if self.schedule else "sampling.train.temperature"
                raise ConfigError(
                    f"{key}: training needs temperatures of at least {MIN_TEMPERATURE}, found {one}"
                )
        if self.train.repetition_penalty != 1:
            raise ConfigError(
                f"sampling.train: repetition_penalty = {self.train.repetition_penalty} samples "
                "from another distribution than the one whose log-probabilities the learner "
                "computes: leave it at 1, or set sampling.eval.repetition_penalty"
            )

    @property
    def is_truncated(self) -> bool:
        """Whether training samples from a part of the vocabulary."""
        train = self.train
        return train.top_k != -1 or train.top_p < 1 or train.min_p > 0

    @property
    def points(self) -> list[tuple[int, float]]:
        """Policy versions and temperatures of training."""
        return self.schedule or [(0, self.train.temperature)]

    def at(self, version: int) -> SamplingParams:
        """The parameters of training trees that begin at this policy version."""
        versions, temperatures = zip(*self.points, strict=True)
        temperature = float(np.interp(version, versions, temperatures))
        params = self.train.params()
        return replace(params, temperature=temperature, returns_kept=self.is_truncated)


class QueueConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The queue between actors and learner."""

    groups_per_step: Annotated[
        int, about("prompts (trees) that one update consumes", ESSENTIAL, ge=1)
    ] = 16
    max_staleness: Annotated[
        int,
        about(
            "maximum number of policy versions between starting and training a tree",
            ESSENTIAL,
            ge=0,
        ),
    ] = 1
    equal_groups: Annotated[
        Literal["count", "drop"] | None,
        about(
            "zero-advantage groups (all returns equal): count them in the means over a "
            "mini-batch and in the number of optimizer steps, as the papers and verl do, or drop "
            "them; default count, with refill they are replaced"
        ),
    ] = None
    refill: Annotated[bool, about("replace zero-advantage trees by later ones (DAPO)")] = False
    max_rollouts: Annotated[
        int,
        about(
            "trees in flight; 0: as many as max_staleness allows, which is "
            "groups_per_step x (max_staleness + 1)",
            ge=0,
        ),
    ] = 0


# The phases of a run: cold start, updates, the self-critic between them, evaluations.


class TrainingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Length of the training: either `num_steps` or `num_epochs`."""

    num_steps: Annotated[Annotated[int, Meta(ge=0)] | None, about("updates", ESSENTIAL)] = None
    num_epochs: Annotated[
        Annotated[float, Meta(gt=0)] | None, about("passes over the training questions", ESSENTIAL)
    ] = None
    stop_at: Annotated[
        float | None,
        about("end the run earlier, once checkpoint.best_metric has reached this value"),
    ] = None
    max_logprob_gap: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        about(
            "warn when the log-probs of engine (or one of its servers) and learner "
            "differ by more than this on average, nats; empty: three times their gap under version "
            "0, where both have the same weights, and at least 0.01; if that gap was not measured, "
            "0.01, and 0.1 in bfloat16"
        ),
    ] = None
    stop_logprob_gap: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        about(
            "end the run when they differ by more than this on average, nats: one of "
            "them then computes a different model; a larger max_logprob_gap raises it; empty: 0.1, "
            "and 0.3 in bfloat16, or six times the gap under version 0 if that is larger"
        ),
    ] = None
    max_untrained_steps: Annotated[
        int,
        about(
            "end the run after this many consecutive steps in which no tree had a signal, since "
            "all failed, were masked or had equal returns (also counted ones); 0: never",
            ge=0,
        ),
    ] = 10

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.num_epochs is None):
            hint = "; train.num_epochs=none on the command line removes the one of the file"
            raise ConfigError(
                "train: set exactly one of train.num_steps and train.num_epochs"
                f"{'' if self.num_steps is None else hint}"
            )

    def count_steps(self, num_tasks: int, groups_per_step: int) -> int:
        """Updates of a run; from `num_epochs`, the last incomplete one is dropped."""
        if self.num_steps is not None:
            return self.num_steps
        assert self.num_epochs is not None
        num_steps = int(self.num_epochs * num_tasks) // groups_per_step
        if num_steps < 1:
            raise ConfigError(
                f"train.num_epochs = {self.num_epochs} of {num_tasks} questions are less than one "
                f"step of queue.groups_per_step = {groups_per_step}"
            )
        return num_steps


class EvalSet(RowsConfig, frozen=True, kw_only=True):
    """One named evaluation set."""

    path: Annotated[
        str | list[str],
        about("file, folder or pattern of questions, or a list of them", ESSENTIAL, ROWS),
    ]
    every: Annotated[
        int,
        about("steps between evaluations; 0: only before and after the phases", ESSENTIAL, ge=0),
    ] = 0
    phases: Annotated[bool, about("evaluate before the cold start, after it, and at the end")] = (
        True
    )
    max_tasks: Annotated[int, about("first n questions; 0: all", ge=0)] = 0
    num_samples: Annotated[int, about("trajectories a question", ESSENTIAL, ge=1)] = 1


class EvalConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evaluation during the run."""

    sets: Annotated[
        dict[str, EvalSet],
        about("evaluation sets by name, [eval.sets.NAME]; the summary reports the first one"),
    ] = {}
    concurrency: Annotated[int, about("questions in flight", ge=1)] = 256
    timeout_s: Annotated[
        float, about("deadline of one evaluation; beyond it the curve has a gap", gt=0)
    ] = 7200.0

    def with_sources_of(self, data: DataConfig) -> EvalConfig:
        """A copy in which sets from packages of verifiers take interpreter and folder from those of
        the training rows (and arguments, if the packages are the same), unless the set's `source`
        has them."""
        trained, sets = _packages(data.train), dict(self.sets)
        for name, one in self.sets.items():
            if trained and (evaluated := _packages(one.path)):
                is_same = evaluated == trained
                keys = ("python", "folder", "args") if is_same else ("python", "folder")
                given = {key: data.source[key] for key in keys if key in data.source}
                sets[name] = replace(one, source={**given, **one.source})
        return replace(self, sets=sets)


def _packages(paths: str | list[str]) -> set[str]:
    """The paths that name packages of verifiers."""
    listed = [paths] if isinstance(paths, str) else paths
    return {path for path in listed if path.startswith("verifiers:")}


MAX_TRAJECTORY_BYTES = 500e6  # size limit of RUN/trajectories


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records besides the metrics."""

    trajectories: Annotated[
        bool, about("write every trajectory of each training step as JSONL")
    ] = True
    level: Annotated[
        Literal["debug", "info", "warning", "error"], about("minimum level of messages in run.log")
    ] = "warning"


class TrainConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All keys of `agentenv train`."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    env: EnvConfig
    python: PythonTable = None
    search: SearchTable = None
    grader: GraderTable = None
    prompt: PromptConfig = PromptConfig()
    renderer: Annotated[AnyRenderer, Meta(extra=ESSENTIAL)] = TagsConfig()
    limits: Limits = Limits()
    sampling: SamplingConfig = SamplingConfig()
    engine: Annotated[AnyEngine, Meta(extra=ESSENTIAL)] = EmbeddedConfig()
    roles: Annotated[dict[str, RoleConfig], about("other models by name, [roles.judge]")] = {}
    algorithm: Annotated[AnyAlgorithm, Meta(extra=ESSENTIAL)]
    queue: QueueConfig = QueueConfig()
    cluster: Annotated[
        clusters.ClusterConfig, about("where rollouts run, by kind (docs/clusters.md)")
    ] = clusters.LocalCluster()
    learner: LearnerConfig = LearnerConfig()
    resources: clusters.ResourcesConfig = clusters.ResourcesConfig()
    sft: SFTConfig | None = None
    train: TrainingConfig
    self_critic: Annotated[
        SelfCriticConfig | None, about("DPO on the policy's own answers between updates")
    ] = None
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    journal: JournalConfig = JournalConfig()
    archive: ArchiveConfig = ArchiveConfig()
    log: LogConfig = LogConfig()
    monitor: RolloutMonitorConfig = RolloutMonitorConfig()

    def __post_init__(self) -> None:
        if getattr(self.algorithm, "compat", "none") == "reference":
            from agentenv.reference.algorithms import released

            force_setattr(self, "algorithm", released(self.algorithm))
        force_setattr(self, "eval", self.eval.with_sources_of(self.data))
        clusters.check_reachable(self.cluster, self.engine, self.roles)
        is_tempered = any(one != 1 for _, one in self.sampling.points)
        if is_tempered and not self.engine.capabilities.has_temperature:
            raise ConfigError(
                f"engine.name = {self.engine.kind!r} does not report log-probs at a temperature "
                "(EngineCapabilities.has_temperature): train at sampling.train.temperature = 1, or "
                "with engine.name = 'embedded', 'vllm' or 'sglang'"
            )
        if self.sampling.is_truncated and not self.engine.capabilities.has_kept:
            raise ConfigError(
                f"engine.name = {self.engine.kind!r} does not return the ids that top_k, top_p and "
                "min_p keep (EngineCapabilities.has_kept), which the learner needs: remove them "
                "from sampling.train, or train with engine.name = 'embedded' or 'sglang'"
            )
        if self.sampling.is_truncated and not 0 < self.sampling.train.top_k <= MAX_KEPT:
            raise ConfigError(
                "sampling.train: turns store the ids that top_k, top_p and min_p keep for each "
                f"token, so that training with one of them needs top_k, from 1 to {MAX_KEPT}"
            )
        if self.refills and self.queue.equal_groups == "count":
            key = "queue.refill" if self.queue.refill else f"algorithm.name = {self.algorithm_name}"
            raise ConfigError(
                f'queue.equal_groups = "count": {key} replaces groups of equal returns by later '
                "ones, so that none is left to count; remove one of the two"
            )
        given = (("sft", self.sft), ("self_critic", self.self_critic))
        parts = {key: part.optimizer for key, part in given if part is not None}
        muon = any(one.optimizer == "muon_adamw" for one in parts.values())
        if muon and self.learner.zero_stage == "auto":
            force_setattr(self, "learner", replace(self.learner, zero_stage=0))
        for key, optimizer in parts.items():
            self.learner.check_optimizer(optimizer, f"{key}.optimizer.optimizer")

    @property
    def algorithm_name(self) -> str:
        return str(self.algorithm.__struct_config__.tag)

    @property
    def refills(self) -> bool:
        """Whether groups with equal returns are replaced by later ones."""
        return self.queue.refill or self.algorithm.refills

    @property
    def counts_equal_groups(self) -> bool:
        """Whether groups with equal returns count in the means over a mini-batch."""
        return not self.refills and self.queue.equal_groups != "drop"

    @property
    def adapter_rank(self) -> int:
        """Rank of the LoRA adapters that are published to the engine; 0: whole models are."""
        lora = self.learner.lora if self.engine.new_weights == "adapter" else None
        return 0 if lora is None else lora.r

    @property
    def size_of_update(self) -> str:
        """Prompts, trajectories and optimizer steps of an update, as text."""
        groups, size = self.queue.groups_per_step, self.algorithm.group_size
        steps = groups // self.learner.groups_per_minibatch * self.learner.num_epochs_per_batch
        at_most = "" if self.refills or self.counts_equal_groups else "up to "
        return (
            f"{groups} prompts x {size} = {groups * size} trajectories in {at_most}{steps} "
            "optimizer steps"
        )

    @property
    def dropped_terms(self) -> str:
        """A warning if terms of the loss exclude groups with equal returns; else empty."""
        terms = {
            "algorithm.kl_loss": self.algorithm.kl_loss,
            "algorithm.kl_reward": self.algorithm.kl_reward,
            "algorithm.entropy_bonus": self.algorithm.entropy_bonus,
            "algorithm.entropy_advantage": getattr(self.algorithm, "entropy_advantage", 0),
        }
        names = [name for name, value in terms.items() if value]
        if self.refills or self.counts_equal_groups or not names:
            return ""
        return (
            f'queue.equal_groups = "drop" excludes groups of equal returns from '
            f'{" and ".join(names)} too, unlike the papers; "count" does not'
        )
