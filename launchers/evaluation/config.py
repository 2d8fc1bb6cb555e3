"""What configures evaluation during a training run, the table [eval]."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from agentenv.data_config import RowsConfig
from agentenv.engines.embedded_config import EmbeddedConfig
from agentenv.engines.remote_config import SGLangConfig, VLLMConfig
from agentenv.engines.scripted import ScriptedConfig


class EvalSet(RowsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One named evaluation set."""

    path: Annotated[
        str | list[str], Meta(description="file, folder or pattern of questions, or a list of them")
    ]
    every: Annotated[
        int, Meta(ge=0, description="steps between evaluations; 0: only around the phases")
    ] = 0
    phases: Annotated[
        bool, Meta(description="evaluate before the cold start, after it, and at the end")
    ] = True
    max_tasks: Annotated[int, Meta(ge=0, description="first n questions; 0: all")] = 0
    num_samples: Annotated[int, Meta(ge=1, description="trajectories a question")] = 1


class EvalConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Evaluation during the run."""

    sets: Annotated[
        dict[str, EvalSet], Meta(description="evaluation sets by name, [eval.sets.NAME]")
    ] = field(default_factory=dict)
    report: Annotated[
        str, Meta(description="the set that the summary reports; empty: the first")
    ] = ""
    concurrency: Annotated[int, Meta(ge=1, description="questions in flight")] = 256
    engine: Annotated[
        EmbeddedConfig | ScriptedConfig | VLLMConfig | SGLangConfig | None,
        Meta(
            description="an engine of its own, on which evaluations of single steps overlap the "
            "training; none: the policy's engine, and updates wait for them"
        ),
    ] = None
