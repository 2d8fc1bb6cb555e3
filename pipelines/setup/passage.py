"""Where new weights lie on their way from the learner to the engine, and whether they have room.

The engine still reads those of one update when the learner writes those of the next: two copies.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

from agentenv.disk import DIR_KEY, SHARED_MEMORY, WEIGHTS_KEY, existing, explain, free_bytes
from agentenv.engine import EngineConfig
from agentenv.errors import ConfigError, DataError
from agentenv.learners.learner import LearnerConfig
from agentenv.pipelines.setup.memory import ModelShape, bytes_of, find_shape

COPIES = 2


class Passage(NamedTuple):
    """The folder in which a folder for new weights is made; `message` is a line for people where it
    is not the usual one, else empty."""

    folder: Path
    message: str = ""


def passing_bytes(
    shape: ModelShape | None, learner: LearnerConfig, engine: EngineConfig | None
) -> float:
    """Bytes that pass through files at a time, at most; 0: none do, or nobody knows. The dtype of
    `learner` is resolved."""
    if shape is None or engine is None:
        return 0.0
    if engine.new_weights == "directory":
        return float(COPIES * bytes_of(learner.dtype) * shape.num_params)
    if engine.new_weights == "adapter" and learner.lora is not None:
        return float(COPIES * bytes_of("float32") * shape.adapter_params(learner.lora.r))
    return 0.0


def stored_bytes(model: Path, learner: LearnerConfig, engine: EngineConfig) -> float:
    """`passing_bytes` of a model that is here; of one whose config.json does not say its sizes, by
    its files."""
    try:
        shape = find_shape(model)
    except DataError:
        shape = None
    if shape is None and engine.new_weights == "directory":
        return float(COPIES * sum(one.stat().st_size for one in model.glob("*.safetensors")))
    return passing_bytes(shape, learner, engine)


def find_passage(
    run: Path, needed: float, *, chosen: Path | None, is_wide: bool, memory: Path = SHARED_MEMORY
) -> Passage:
    """The place for `needed` bytes: `chosen` by its key, or what all machines of a wide run see,
    the run's folder; else shared memory, or the run's folder where that has no room.

    Raises ConfigError where they have none.
    """
    if chosen is not None:
        if problem := lack(chosen, needed):
            raise ConfigError(
                f"{WEIGHTS_KEY} = {chosen}: {problem}; choose another place, or leave it out for "
                f"{memory} or the run's folder"
            )
        return Passage(chosen)
    message = ""
    if not is_wide:
        found = lack(memory, needed)
        if not found:
            return Passage(memory)
        message = (
            f"new weights pass through {run}, since {memory} {found}; to pass through memory give "
            f"it more room{_docker(needed)}, or name another place with {WEIGHTS_KEY}=DIR"
        )
    if problem := lack(run, needed):
        also = f", and {memory} {found}" if message else ""
        raise ConfigError(
            f"new weights find no room: {run} {problem}{also}; choose another place with "
            f"{DIR_KEY}=DIR or {WEIGHTS_KEY}=DIR"
            + (f", or give {memory} more" if message else "")
            + (_docker(needed) if message else "")
        )
    return Passage(run, message)


def lack(place: Path, needed: float) -> str:
    """Why `needed` bytes cannot be written there, as what is said of the place; empty: they can."""
    if place == SHARED_MEMORY and not place.is_dir():
        return "is not there"
    try:
        folder = existing(place)
        if os.statvfs(folder).f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK | os.X_OK):
            return "cannot be written"
        free = free_bytes(folder)
    except OSError as error:
        return f"cannot be used: {explain(error, WEIGHTS_KEY)}"
    if free < needed:
        return f"has {size(free)} free of the {size(needed)} that {COPIES} copies of them take"
    return ""


def size(number: float) -> str:
    """Bytes for people."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number / 2**10:.0f} KiB"


def _docker(needed: float) -> str:
    return f" (docker run --shm-size={math.ceil(1.1 * needed / 2**30)}g)" if needed else ""
