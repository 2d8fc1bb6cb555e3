"""The doctor: runs all checks of this machine (versions, memory, disk, descriptors, sandbox) and of
a configuration.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from rich.markup import escape

from agentenv.assembly.checks import checks
from agentenv.assembly.keys.help import refuse_verl_keys
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.keys.run import RunConfig
from agentenv.assembly.run.exits import allowed_files
from agentenv.assembly.run.terminal import View
from agentenv.assembly.serving.gpus import GIB, find_machine
from agentenv.base.config import Reporter, Tree, load_config
from agentenv.base.disk import existing
from agentenv.base.errors import AgentEnvError, ConfigError
from agentenv.base.installation import DISTRIBUTION, install_hint
from agentenv.envs.sandbox.launch import LOST_BELOW, Rung
from agentenv.envs.sandbox.sandbox import Sandbox
from agentenv.lab.diagnosis.contract import CONTRACT, parity
from agentenv.lab.diagnosis.plan import files_of, make_plan, rollouts_of
from agentenv.training.supervised.assembly import TrainingAssembly

CHECK_S = 600.0  # deadline of a check
MARKS = {"passed": "[green]pass[/]", "failed": "[bold red]FAIL[/]", "skipped": "[dim]skip[/]"}


async def examine(
    path: Path | None,
    overrides: Sequence[str],
    *,
    is_offline: bool,
    is_quick: bool,
    report: Reporter,
    on_begin: Callable[[str], None] = lambda name: None,
) -> AsyncIterator[checks.CheckResult]:
    """The result of every check, in sequence; `on_begin` takes the name of a check that starts. The
    set-up of a run uses a temporary folder. Raises ConfigError for overrides without a
    configuration."""
    if path is None and overrides:
        raise ConfigError(f"{overrides[0]!r}: keys require --config CONFIG")
    runner, config = checks.CheckRunner(CHECK_S, catches=True), None
    result = checks.CheckResult("configuration", "passed")
    if path is not None:
        try:
            config = load_config(
                TrainConfig, path, overrides, report=report, explain=_refuse_others
            )
        except AgentEnvError as error:
            result = runner.failure("configuration", error)
    folder = Path((RunConfig() if config is None else config.run).dir)
    for check in [one for one in CHECKS if one.stage == "machine"]:
        on_begin(check.name)
        yield await runner.run(check, folder)
    if path is not None:
        yield result
    if config is None:
        return
    with tempfile.TemporaryDirectory(prefix="agentenv-doctor-") as place:
        async with AsyncExitStack() as stack:
            assembly = TrainingAssembly(config, Path(place), stack, report)
            assembly.tries_all = True
            for check in checks.select(CHECKS, config, "configuration", "measured"):
                if check.remote and is_offline:
                    yield checks.CheckResult(check.name, "skipped", "--offline sends no requests")
                elif check.slow and is_quick:
                    why = "--quick starts neither learner nor engine"
                    yield checks.CheckResult(check.name, "skipped", why)
                else:
                    on_begin(check.name)
                    yield await runner.run(check, assembly)


def _refuse_others(raw: Tree, source: str) -> None:
    """Raises ConfigError for a configuration of another command, with the way to check it."""
    if "sets" in raw and not {"algorithm", "train"} & raw.keys():
        raise ConfigError(
            f"{source} is a configuration of agentenv evaluate, which does not name its subject; "
            f"agentenv evaluate SUBJECT --config {source} --dry-run checks that all its parts "
            "exist, and agentenv doctor without --config checks the machine"
        )
    refuse_verl_keys(raw, source)


def show(result: checks.CheckResult, view: View) -> None:
    """Print a result, with its remedy if it failed."""
    message = escape(result.message)
    if result.state == "skipped":
        message = f"[dim]{message}[/]"
    lines = [f"{MARKS[result.state]} {escape(result.name):32} {message}"]
    if result.remedy:
        lines.append(f"{' ' * 38}[bold]remedy:[/] {escape(result.remedy)}")
    view.console.print("\n".join(lines), soft_wrap=True)  # paths and commands stay whole


# The machine.

LEAST_MEMORY = 4 * GIB  # enough for the quick start, according to the README
LEAST_DISK = 2 * GIB
LEAST_FILES = 4096
NEEDED = "train"  # the extra that training commands require
SPARE_FILES = 512  # for the command itself: logs, workers, learner, libraries
FILES_PER_TRAJECTORY = 2  # its request, and a tool's
RUNGS: tuple[Rung, ...] = ("namespaces", "landlock")  # levels of the sandbox


async def packages(folder: Path) -> str:
    """The requirements of the distribution are installed in matching versions."""
    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        raise checks.Skip(
            "agentenv is not installed as a package, so required versions are unknown"
        ) from None
    problems, found, extra = [], [], NEEDED
    if find_spec("torch") is None:
        extra = ""
        found = [
            "environments, view and evaluation of endpoints alone; for training and models: "
            + install_hint(NEEDED)
        ]
    for one in map(Requirement, required):
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            continue
        try:
            version = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{one.name} is not installed ({one.specifier or 'any version'})")
            continue
        if not one.specifier.contains(version, prereleases=True):
            problems.append(f"{one.name} {version} is installed, {one.specifier} is required")
        elif one.name in ("torch", "transformers", "deepspeed"):
            found.append(f"{one.name} {version}")
    if problems:
        raise ConfigError(f"{', '.join(problems)}; {install_hint(NEEDED)}")
    return ", ".join(found)


async def memory(folder: Path) -> str:
    """There is enough free main memory."""
    found = psutil.virtual_memory()
    message = f"{found.available / GIB:.1f} of {found.total / GIB:.1f} GiB are free"
    if found.available < LEAST_MEMORY / 2:
        raise ConfigError(
            f"{message}, at least {LEAST_MEMORY / 2 / GIB:g} are needed; end other processes"
        )
    return message


async def disk(folder: Path) -> str:
    """The disk of the runs' folder has enough free space."""
    place = existing(folder)
    free = shutil.disk_usage(place).free
    message = f"{free / GIB:.1f} GiB are free at {place}"
    if free < LEAST_DISK:
        raise ConfigError(
            f"{message}, at least {LEAST_DISK / GIB:g} are needed; free some space, or set another "
            "run.dir=DIR"
        )
    return message


async def descriptors(folder: Path) -> str:
    """A process may open enough files and connections; commands raise their soft limit to the hard
    one."""
    allowed = allowed_files()
    if allowed < LEAST_FILES:
        raise ConfigError(
            f"a process may open {allowed} files and connections, at least {LEAST_FILES} are "
            "needed; raise the hard limit (ulimit -Hn, /etc/security/limits.conf, LimitNOFILE of "
            "systemd)"
        )
    return f"up to {allowed} files and connections"


async def sandbox(folder: Path) -> str:
    """A level of the Python sandbox stops the escapes that each run tests."""
    offered, lacking = [], []
    for rung in RUNGS:
        one = Sandbox(rungs=(rung,))
        try:
            await one.start()
            offered.append(rung)
        except AgentEnvError as error:
            lacking += one.lacking or [f"{rung}: {error}"]
        finally:
            await one.close()
    if not offered:
        raise ConfigError(
            f"no level of the sandbox stops every escape on this machine ({' | '.join(lacking)}); "
            "install bubblewrap, or a kernel with Landlock; without one the Python tool is "
            "rejected unless python.allow_unsafe = true"
        )
    found = f"{', '.join(offered)}: every tested escape was stopped"
    if offered[0] == RUNGS[0]:
        return found
    return f"{found}; a lower level, since {' | '.join(lacking)}; {LOST_BELOW}"


# The resources that a configuration needs.


async def checkpoints(assembly: TrainingAssembly) -> str:
    """Checkpoints, trees and trajectories fit on the disk of the run's folder."""
    await assembly.model()  # of the set-up
    plan = make_plan(assembly.config, find_machine(None, None), assembly.resolve)
    if not plan.checkpoint_bytes:
        raise checks.Skip("the size of a checkpoint is unknown")
    number, files = files_of(assembly.config)
    needed, bounds = number * plan.checkpoint_bytes, sum(files.values())
    place = existing(Path(assembly.config.run.dir))
    free = shutil.disk_usage(place).free
    message = (
        f"{number} checkpoints take {needed / GIB:.2g} GiB, trees and samples at most "
        f"{bounds / GIB:.2g}; {free / GIB:.3g} are free at {place}"
    )
    if needed > free:
        raise ConfigError(
            f"{message}; free some space, lower checkpoint.keep_last, or choose another location "
            "with run.dir=DIR"
        )
    if needed + bounds > free:
        message += ": lower archive.max_gb for a long run"
    return message


async def processes(assembly: TrainingAssembly) -> str:
    """By the dry run's estimate, every process fits its GPU, and all fit into main memory."""
    plan = make_plan(assembly.config, find_machine(None, None), assembly.resolve)
    if plan.problems:
        raise ConfigError("; ".join(plan.problems))
    needed = sum(process.main_bytes for process in plan.processes)
    parts = [f"{needed / GIB:.2g} GiB of main memory"] if needed else []
    parts += [f"GPU {gpu}: {size / GIB:.1f} GiB" for gpu, size in plan.gpu_bytes.items()]
    return ", ".join(parts) or "not estimated for this model"


async def connections(assembly: TrainingAssembly) -> str:
    """A process may open enough connections for all in-flight rollouts."""
    config = assembly.config
    needed = max(rollouts_of(config)[1], config.eval.concurrency if config.eval.sets else 0)
    needed = needed * FILES_PER_TRAJECTORY + SPARE_FILES
    allowed = allowed_files()
    message = f"about {needed} files and connections of {allowed}"
    if needed > allowed:
        raise ConfigError(
            f"{message}; raise the hard limit (ulimit -Hn), or lower queue.max_rollouts and "
            "eval.concurrency"
        )
    return message


CHECKS: tuple[checks.Check, ...] = (
    checks.Check("versions", "machine", (), packages),
    checks.Check("free memory", "machine", (), memory),
    checks.Check("free disk", "machine", (), disk),
    checks.Check("descriptors", "machine", (), descriptors),
    checks.Check("sandbox", "machine", (), sandbox),
    *checks.START,
    checks.Check("room for rollouts", "contract", checks.TRAIN, connections),
    checks.Check("room on the disk", "contract", checks.TRAIN, checkpoints),
    checks.Check("room in memory", "contract", checks.TRAIN, processes),
    *CONTRACT,
    # the ranks start and load the model; the engine starts and serves it
    checks.Check("learner", "started", checks.RUNS, checks.part("learner"), slow=True),
    checks.Check("engine", "started", checks.SAMPLING, checks.part("engine"), slow=True),
    checks.Check("log-prob parity", "measured", checks.TRAIN, parity, slow=True, after="engine"),
)
