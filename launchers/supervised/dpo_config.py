"""The configuration of preference training, from files and by the policy's own answers."""

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
from launchers.supervised.sft_config import (
    LoopConfig,
    SavingConfig,
    SupervisedLearnerConfig,
    check_measured,
)
from learners.lora import LoRAConfig

Beta = Annotated[float, Meta(gt=0, description="weight of staying near the reference policy")]


class PairDataConfig(ChatDataConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files of preferences."""

    max_length: Annotated[
        int, Meta(ge=2, description="cut-off length of prompt and answer, in tokens")
    ] = 8192


class DPOLoopConfig(LoopConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Direct preference optimization (learners/dpo.py)."""

    beta: Beta = 0.1
    tuning: Annotated[
        Literal["lora", "full"],
        Meta(description="train adapters (learner.lora, r = 8 unless given), or all weights"),
    ] = "lora"
    reference: Annotated[
        Literal["scored", "adapter_off"],
        Meta(
            description="log-probs of the reference policy: scored once before the first step and "
            "kept in the run, or by the model without its adapter, at each start"
        ),
    ] = "scored"
    batch_size: Annotated[int, Meta(ge=1, description="pairs of a batch, over all ranks")] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference == "adapter_off" and self.tuning != "lora":
            raise ConfigError("dpo.reference = adapter_off: needs dpo.tuning = lora")


class DPOLearnerConfig(
    SupervisedLearnerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The learner with the rates of the published self-critic stage."""

    learning_rate: Annotated[float, Meta(ge=0, description="rate of AdamW")] = 5e-6


class DPORunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `launchers/dpo.py` reads."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: PairDataConfig
    prompt: PromptConfig = PromptConfig()
    renderer: TagsConfig | NativeConfig = TagsConfig()
    dpo: DPOLoopConfig = DPOLoopConfig()
    learner: DPOLearnerConfig = DPOLearnerConfig()
    checkpoint: SavingConfig = SavingConfig()
    monitor: MonitorConfig = MonitorConfig()

    def __post_init__(self) -> None:
        check_measured(self.data, self.checkpoint)
        if self.dpo.tuning == "full":
            if self.learner.lora is not None:
                raise ConfigError("dpo.tuning = full and learner.lora: give one of them")
        elif self.learner.lora is None:
            learner = DPOLearnerConfig(
                **{name: getattr(self.learner, name) for name in self.learner.__struct_fields__}
                | {"lora": LoRAConfig(r=8, alpha=16)}
            )
            force_setattr(self, "learner", learner)
