"""Whether a configuration fits this machine and itself: disk, memory, descriptors."""

from __future__ import annotations

import shutil
from pathlib import Path

from agentenv.disk import existing
from agentenv.errors import ConfigError
from agentenv.model_files import read_model_config
from agentenv.pipelines.diagnosis.context import Patient
from agentenv.pipelines.diagnosis.machine import GIB, allowed_files
from agentenv.pipelines.diagnosis.results import Probe, Skip
from agentenv.pipelines.planning.plan import make_plan, wanted_by
from agentenv.pipelines.setup.machine import find_machine
from agentenv.pipelines.setup.memory import checkpoint_bytes, shape_of

SPARE_FILES = 512  # of the command itself: logs, workers, learner, libraries
FILES_A_TRAJECTORY = 2  # its request, and a tool's


async def disk(patient: Patient) -> str:
    """Checkpoints, trees and trajectories fit on the disk of the run's folder."""
    config, model = patient.config, await patient.assembly.model()
    try:
        shape = shape_of(read_model_config(model), model)
    except ConfigError as error:
        raise Skip(f"the size of a checkpoint is not known: {error}") from error
    wanted = wanted_by(config)
    one = checkpoint_bytes(shape, config.learner, has_reference=wanted.has_reference)
    needed = one * wanted.num_checkpoints
    bounds = sum(wanted.files.values())
    place = existing(Path(config.run.dir))
    free = shutil.disk_usage(place).free
    told = (
        f"{wanted.num_checkpoints} checkpoints take {needed / GIB:.2g} GiB, trees and trajectories "
        f"at most {bounds / GIB:.2g}; {free / GIB:.3g} are free at {place}"
    )
    if needed > free:
        raise ConfigError(
            f"{told}; free some, lower checkpoint.keep_last, or choose another place with "
            "run.dir=DIR"
        )
    if needed + bounds > free:
        told += ": lower archive.max_gb for a long run"
    return told


async def memory(patient: Patient) -> str:
    """Every process fits its GPU, and all of them the main memory, by the dry run's estimate."""
    plan = make_plan(wanted_by(patient.config), find_machine(None, None), patient.assembly.resolve)
    if plan.problems:
        raise ConfigError("; ".join(plan.problems))
    needed = sum(process.main_bytes for process in plan.processes)
    parts = [f"{needed / GIB:.2g} GiB of main memory"] if needed else []
    parts += [f"GPU {gpu}: {size / GIB:.1f} GiB" for gpu, size in plan.gpu_bytes.items()]
    return ", ".join(parts) or "not estimated for this model"


async def descriptors(patient: Patient) -> str:
    """All rollouts that may be under way can be connected."""
    config = patient.config
    queue, size = config.queue, config.algorithm.group_size
    trees = queue.groups_per_step * (queue.max_staleness + 1)
    trees = min(trees, queue.max_rollouts or trees)
    needed = max(trees * size, config.eval.concurrency if config.eval.sets else 0)
    needed = needed * FILES_A_TRAJECTORY + SPARE_FILES
    allowed = allowed_files()
    told = f"about {needed} files and connections of {allowed}"
    if needed > allowed:
        raise ConfigError(
            f"{told}; raise the hard limit (ulimit -Hn), or lower queue.max_rollouts and "
            "eval.concurrency"
        )
    return told


BUDGET = (
    Probe("room for rollouts", descriptors),
    Probe("room on the disk", disk),
    Probe("room in memory", memory),
)
