"""Errors of disks, explained to users: the reason and the remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentenv.base.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
WEIGHTS_PREFIX = "agentenv-weights-"  # of a folder for the transfer of new weights
WEIGHTS_KEY = "resources.weights_dir"
DIR_KEY = "run.dir"  # the key of a run's location


def written(error: OSError) -> Any:
    """The file that could not be written: the second one of a copy, its target."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (is_full and error.filename2) or error.filename


def explain(error: OSError, key: str = "") -> str:
    """The reason and the remedy, for users. `key` is the configuration key of the file's location;
    the folder of new weights is recognized by its name."""
    name = written(error)
    path = Path(os.fsdecode(name)) if isinstance(name, str | bytes) else None
    if path is not None and any(part.startswith(WEIGHTS_PREFIX) for part in path.parts):
        key = WEIGHTS_KEY
    elsewhere = (
        f"choose another location with {key}=DIR" if key else "choose another location for it"
    )
    if key.startswith("--"):
        elsewhere = f"choose another {key}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        full = "no space left on the device"
        if path is not None and SHARED_MEMORY in path.parents:
            elsewhere = f"make {SHARED_MEMORY} larger (docker run --shm-size), or {elsewhere}"
        if error.errno == errno.EDQUOT:
            full = "disk quota exceeded"
        again = "repeat the command, with --resume if the run had started"
        return f"{full}; free some space and {again}, or {elsewhere}"
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"no permission ({error.strerror}); {elsewhere}"
    return error.strerror or str(error)


@contextmanager
def writing(place: Path, key: str = DIR_KEY) -> Iterator[None]:
    """Inside, an OSError becomes a ConfigError: `place` cannot be written; see `explain`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{place} cannot be written: {explain(error, key)}") from error
