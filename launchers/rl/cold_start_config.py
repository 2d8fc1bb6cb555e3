"""What configures the cold start of a training run, the table [sft]."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from learners.optimizer_config import OptimizerConfig


class SFTStage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage of the cold start."""

    rows: Annotated[
        str, Meta(description="use the rows whose key 'stage' has this value; empty: all")
    ] = ""
    num_steps: Annotated[int, Meta(ge=1, description="optimizer steps, at most")]
    until_gate: Annotated[
        bool, Meta(description="end the stage as soon as every kind of question passes the gate")
    ] = False
    batch_size: Annotated[int, Meta(ge=1, description="demonstrations a step")] = 8
    lr_scale: Annotated[
        tuple[float, float], Meta(description="factor on both rates, from first to last step")
    ] = (1.0, 1.0)


class SFTConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cold start: imitate demonstrations, stage by stage."""

    data: Annotated[str, Meta(description="JSONL file of demonstrations")]
    gate: Annotated[
        str, Meta(description="JSONL file of clean demonstrations that measure the skill")
    ]
    stages: Annotated[list[SFTStage], Meta(description="stages in order, [[sft.stages]]")]
    gate_every: Annotated[int, Meta(ge=1, description="steps between two measurements")] = 25
    gate_threshold: Annotated[
        float,
        Meta(ge=0, le=1, description="teacher-forced exact match that every kind must reach"),
    ] = 0.9
    kind_boost: Annotated[
        float,
        Meta(ge=0, description="draw a kind without any skill 1 + kind_boost times as often"),
    ] = 2.0
    warmup_steps: Annotated[int, Meta(ge=0, description="steps of linear warm-up")] = 20
    optimizer: Annotated[OptimizerConfig, Meta(description="optimizer of the cold start")] = (
        OptimizerConfig()
    )
