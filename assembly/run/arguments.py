"""The place of every command, the keys that all runs have, and exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from msgspec import Meta, Struct

from agentenv.base.config import ESSENTIAL
from agentenv.base.disk import undecodable
from agentenv.base.errors import ConfigError

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
EXIT_MISSING = 3  # of a dry run: no error, but something is missing
LATEST = "latest"  # of --resume: the last checkpoint

PLACES = ("HOME", "TMPDIR", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")


def check_places() -> None:
    """Raises ConfigError if the path of the working directory, or of a folder in an environment
    variable (PLACES), is not UTF-8."""
    paths = {"the working directory": os.getcwd()}
    paths |= {f"the environment variable {name}": os.environ.get(name, "") for name in PLACES}
    for name, text in paths.items():
        if shown := undecodable(text):
            raise ConfigError(
                f"{name}: {shown!r} is not valid UTF-8; rename the folder, or choose another"
            )


def import_from_working_directory() -> None:
    """Import the user's modules from the working directory, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


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
