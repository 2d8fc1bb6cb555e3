"""The keys that all runs have."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from agentenv.base.config import ESSENTIAL


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Folder and seed of the run."""

    dir: Annotated[str, Meta(description="parent folder of the runs", extra=ESSENTIAL)] = "runs"
    name: Annotated[
        str,
        Meta(
            description="folder of this run; empty: name of the configuration file", extra=ESSENTIAL
        ),
    ] = ""
    seed: Annotated[
        int, Meta(ge=0, description="seed of data, model, sampling and forks", extra=ESSENTIAL)
    ] = 0
    setup: Annotated[
        str,
        Meta(
            description="'module:function', called with (run directory, seed) to create the model "
            "and data that other keys name as {run}/...; the text that it returns is printed; "
            "empty: everything exists already"
        ),
    ] = ""


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy to start from."""

    path: Annotated[
        str, Meta(description="Hugging Face directory with model and tokenizer", extra=ESSENTIAL)
    ]
