"""The keys that all runs have."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from agentenv.base.config import ESSENTIAL, about


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Folder and seed of the run."""

    dir: Annotated[str, about("parent folder of the runs", ESSENTIAL)] = "runs"
    name: Annotated[
        str, about("folder of this run; empty: name of the configuration file", ESSENTIAL)
    ] = ""
    seed: Annotated[int, about("seed of data, model, sampling and forks", ESSENTIAL, ge=0)] = 0
    setup: Annotated[
        str,
        about(
            "'module:function', called with (run directory, seed) to create the model "
            "and data that other keys name as {run}/...; the text that it returns is printed; "
            "empty: everything exists already"
        ),
    ] = ""


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy to start from."""

    path: Annotated[str, about("Hugging Face directory with model and tokenizer", ESSENTIAL)]
