"""Who writes in the directory of an evaluation: one command at a time."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import BinaryIO

from agentenv.errors import ConfigError
from launchers.rundir import explain

LOCK_FILE = ".lock"


def lock(folder: Path) -> BinaryIO:
    """The lock of the directory, held until it is closed, as by a `with`. Raises ConfigError if
    another command has it."""
    try:
        held = (folder / LOCK_FILE).open("wb")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {explain(error)}") from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        raise ConfigError(f"{folder}: another command is writing this evaluation") from None
    return held
