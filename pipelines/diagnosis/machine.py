"""Checks of the machine: versions, memory, disk, descriptors, the rungs of the sandbox; and whether
a configuration fits it."""

from __future__ import annotations

import importlib.metadata
import resource
import shutil
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from agentenv.disk import existing
from agentenv.errors import DISTRIBUTION, AgentEnvError, ConfigError, install_hint
from agentenv.model_files import read_model_config
from agentenv.pipelines.diagnosis.escapes import RUNGS, attack_all, known_attacks
from agentenv.pipelines.planning.plan import make_plan, requirements_of
from agentenv.pipelines.rl.parts import TrainingAssembly
from agentenv.pipelines.run.terminal import MAX_FILES
from agentenv.pipelines.setup.checks import Skip
from agentenv.pipelines.setup.machine import GIB, find_machine
from agentenv.pipelines.setup.memory import checkpoint_bytes, shape_of

LEAST_MEMORY = 4 * GIB  # that README promises to be enough for the quick start
LEAST_DISK = 2 * GIB
LEAST_FILES = 4096
NEEDED = "train"  # the extra without which no command of training runs
MAX_SHOWN = 3
SPARE_FILES = 512  # of the command itself: logs, workers, learner, libraries
FILES_A_TRAJECTORY = 2  # its request, and a tool's
ATTACK_S = 1.0  # of a snippet that tries to escape


async def packages(folder: Path) -> str:
    """What the distribution asks for is installed, in the versions that it asks for."""
    try:
        asked = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        raise Skip("agentenv is not installed as a package, so it names no versions") from None
    problems, found = [], []
    for one in map(Requirement, asked):
        if one.marker is not None and not one.marker.evaluate({"extra": NEEDED}):
            continue
        try:
            version = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{one.name} is not installed ({one.specifier or 'any version'})")
            continue
        if not one.specifier.contains(version, prereleases=True):
            problems.append(f"{one.name} {version} is installed, {one.specifier} is asked for")
        elif one.name in ("torch", "transformers", "deepspeed"):
            found.append(f"{one.name} {version}")
    if problems:
        raise ConfigError(f"{', '.join(problems)}; {install_hint(NEEDED)}")
    return ", ".join(found)


async def memory(folder: Path) -> str:
    """Main memory that is free."""
    found = psutil.virtual_memory()
    message = f"{found.available / GIB:.1f} of {found.total / GIB:.1f} GiB are free"
    if found.available < LEAST_MEMORY / 2:
        raise ConfigError(
            f"{message}, {LEAST_MEMORY / 2 / GIB:g} are the least; end other processes"
        )
    return message


async def disk(folder: Path) -> str:
    """The disk of the runs' folder."""
    place = existing(folder)
    free = shutil.disk_usage(place).free
    message = f"{free / GIB:.1f} GiB are free at {place}"
    if free < LEAST_DISK:
        raise ConfigError(
            f"{message}, {LEAST_DISK / GIB:g} are the least; free some, or set another run.dir=DIR"
        )
    return message


async def descriptors(folder: Path) -> str:
    """Files and connections that a process may have open; commands raise their own limit to what
    is allowed."""
    allowed = allowed_files()
    if allowed < LEAST_FILES:
        raise ConfigError(
            f"a process may open {allowed} files and connections, {LEAST_FILES} are the least; "
            "raise the hard limit (ulimit -Hn, /etc/security/limits.conf, LimitNOFILE of systemd)"
        )
    return f"up to {allowed} files and connections"


def allowed_files() -> int:
    """How many a command gets."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)


async def sandbox(folder: Path) -> str:
    """A rung of the Python sandbox stops the escapes that are tried on it before each run."""
    return await _stopped({}, "every escape that is tried before a run")


async def escapes(folder: Path) -> str:
    """Each rung of the Python sandbox that this machine offers stops every known escape."""
    attacks = known_attacks()
    return await _stopped(attacks, f"all of {len(attacks)} escapes")


async def _stopped(attacks: dict[str, str], tried: str) -> str:
    offered, lacking = [], []
    for rung in RUNGS:
        try:
            outcomes = await attack_all(attacks, rung, ATTACK_S)
        except AgentEnvError as error:
            lacking.append(f"{rung}: {error}")
            continue
        through = {name: one.hole for name, one in outcomes.items() if one.hole}
        if through:
            shown = [f"{name}: {hole}" for name, hole in through.items()][:MAX_SHOWN]
            raise ConfigError(
                f"{len(through)} of {len(attacks)} escapes got through {rung} "
                f"({', '.join(shown)}); use python.remote_url, or no Python tool, on this machine, "
                "and report it"
            )
        offered.append(rung)
    if not offered:
        raise ConfigError(
            f"no rung of the sandbox stops every escape here ({' | '.join(lacking)}); install "
            "bubblewrap, or a kernel with Landlock; without one the Python tool is refused unless "
            "python.allow_unsafe = true"
        )
    return f"{', '.join(offered)}: {tried} stopped"


# What a configuration takes of the machine.


async def checkpoints(assembly: TrainingAssembly) -> str:
    """Checkpoints, trees and trajectories fit on the disk of the run's folder."""
    config, model = assembly.config, await assembly.model()
    try:
        shape = shape_of(read_model_config(model), model)
    except ConfigError as error:
        raise Skip(f"the size of a checkpoint is not known: {error}") from error
    required = requirements_of(config)
    one = checkpoint_bytes(shape, config.learner, has_reference=required.has_reference)
    needed = one * required.num_checkpoints
    bounds = sum(required.files.values())
    place = existing(Path(config.run.dir))
    free = shutil.disk_usage(place).free
    message = (
        f"{required.num_checkpoints} checkpoints take {needed / GIB:.2g} GiB, trees and samples "
        f"at most {bounds / GIB:.2g}; {free / GIB:.3g} are free at {place}"
    )
    if needed > free:
        raise ConfigError(
            f"{message}; free some, lower checkpoint.keep_last, or choose another place with "
            "run.dir=DIR"
        )
    if needed + bounds > free:
        message += ": lower archive.max_gb for a long run"
    return message


async def processes(assembly: TrainingAssembly) -> str:
    """Every process fits its GPU, and all of them the main memory, by the dry run's estimate."""
    plan = make_plan(requirements_of(assembly.config), find_machine(None, None), assembly.resolve)
    if plan.problems:
        raise ConfigError("; ".join(plan.problems))
    needed = sum(process.main_bytes for process in plan.processes)
    parts = [f"{needed / GIB:.2g} GiB of main memory"] if needed else []
    parts += [f"GPU {gpu}: {size / GIB:.1f} GiB" for gpu, size in plan.gpu_bytes.items()]
    return ", ".join(parts) or "not estimated for this model"


async def connections(assembly: TrainingAssembly) -> str:
    """All rollouts that may be under way can be connected."""
    config = assembly.config
    queue, size = config.queue, config.algorithm.group_size
    trees = queue.groups_per_step * (queue.max_staleness + 1)
    trees = min(trees, queue.max_rollouts or trees)
    needed = max(trees * size, config.eval.concurrency if config.eval.sets else 0)
    needed = needed * FILES_A_TRAJECTORY + SPARE_FILES
    allowed = allowed_files()
    message = f"about {needed} files and connections of {allowed}"
    if needed > allowed:
        raise ConfigError(
            f"{message}; raise the hard limit (ulimit -Hn), or lower queue.max_rollouts and "
            "eval.concurrency"
        )
    return message
