"""The doctor: all checks of this machine and of a configuration, one after the other; and those of
the machine: versions, memory, disk, descriptors, sandbox, and whether a configuration fits it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import psutil
from packaging.requirements import Requirement
from rich.markup import escape
from rich.table import Table

from agentenv.config import Say, Tree, load_config
from agentenv.disk import existing
from agentenv.envs.sandbox.process import Rung
from agentenv.envs.sandbox.sandbox import RunResult, Sandbox
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.install import DISTRIBUTION, install_hint
from agentenv.model_files import read_model_config
from agentenv.pipelines.config.rl import RunConfig, TrainConfig
from agentenv.pipelines.config.verl_keys import refuse_verl_keys
from agentenv.pipelines.diagnosis.plan import make_plan, requirements_of
from agentenv.pipelines.rl.parts import TrainingAssembly
from agentenv.pipelines.run.terminal import MAX_FILES, View
from agentenv.pipelines.serving.gpus import GIB, find_machine
from agentenv.pipelines.setup.checks import CHECKS, CheckResult, Runner, Skip, select
from agentenv.pipelines.setup.memory import checkpoint_bytes, shape_of
from agentenv.untrusted import decode

CHECK_S = 600.0  # of one check, at most
MARKS = {"passed": "[green]pass[/]", "failed": "[bold red]FAIL[/]", "skipped": "[dim]skip[/]"}


async def examine(
    path: Path | None,
    overrides: Sequence[str],
    *,
    is_offline: bool,
    is_quick: bool,
    say: Say,
) -> AsyncIterator[CheckResult]:
    """The result of every check, one after the other. The set-up of a run is run in a folder that
    is removed afterwards. Raises ConfigError for overrides without a configuration."""
    if path is None and overrides:
        raise ConfigError(f"{overrides[0]!r}: keys belong to --config CONFIG")
    runner, config = Runner(CHECK_S), None
    result = CheckResult("configuration", "passed")
    if path is not None:
        try:
            config = load_config(TrainConfig, path, overrides, say=say, explain=_refuse_others)
        except AgentEnvError as error:
            result = runner.failure("configuration", error)
    folder = Path((RunConfig() if config is None else config.run).dir)
    for check in [one for one in CHECKS if one.stage == "machine"]:
        if not (check.slow and is_quick):
            async for one in runner.run([check], folder):
                yield one
    if path is not None:
        yield result
    if config is None:
        return
    with tempfile.TemporaryDirectory(prefix="agentenv-doctor-") as place:
        async with AsyncExitStack() as stack:
            assembly = TrainingAssembly(config, Path(place), None, stack, say)
            for check in select(config, "configuration", "measured"):
                if check.asks and is_offline:
                    yield CheckResult(check.name, "skipped", "--offline asks nobody")
                elif check.slow and is_quick:
                    why = "--quick starts neither learner nor engine"
                    yield CheckResult(check.name, "skipped", why)
                else:
                    async for one in runner.run([check], assembly):
                        yield one


def _refuse_others(raw: Tree, source: str) -> None:
    """Raises ConfigError for a configuration of another command, with what checks it."""
    if "sets" in raw and not {"algorithm", "train"} & raw.keys():
        raise ConfigError(
            f"{source} is a configuration of agentenv evaluate, which does not say whom to "
            f"ask; agentenv evaluate SUBJECT --config {source} --dry-run checks whether all of "
            "it is there, and doctor.py without --config the machine"
        )
    refuse_verl_keys(raw, source)


def show(result: CheckResult, view: View) -> None:
    """A line, or a few, in the terminal."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=4, no_wrap=True)
    grid.add_column(width=32, no_wrap=True)
    grid.add_column(overflow="fold")
    message = escape(result.message)
    if result.state == "skipped":
        message = f"[dim]{message}[/]"
    grid.add_row(MARKS[result.state], result.name, message)
    if result.remedy:
        grid.add_row("", "", f"[bold]remedy:[/] {escape(result.remedy)}")
    view.console.print(grid)


# The machine.

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


# Attacks on the host, on other sessions and on the sandbox itself: snippets that a sandbox must
# stop. In a snippet {SECRET_FILE}, {SECRET_DIR} and {HOST_SOCKET} are filled in. One that prints
# PWNED got through; so did one after which the host misses something, or the next call is not
# served.

MARK = "PWNED"
SECRET = "the secret of the host"
NEXT_CALL = "print('next', 6 * 7)"
NEXT_CALL_TIMEOUT_S = 30.0
NUM_AT_ONCE = 2
FILES = ("sandbox_attacks.json", "sandbox_attack_groups.json")  # beside this one
RUNGS: tuple[Rung, ...] = ("namespaces", "landlock")


class Outcome(NamedTuple):
    """What became of one snippet: "" or what got through, how its call ended, what it said."""

    hole: str
    end: str
    output: str


class Places(NamedTuple):
    """What the host has to lose."""

    file: Path
    server: socket.socket

    def fill_in(self, snippet: str) -> str:
        names = {
            "{SECRET_FILE}": str(self.file),
            "{SECRET_DIR}": str(self.file.parent),
            "{HOST_SOCKET}": self.server.getsockname(),
        }
        for name, text in names.items():
            snippet = snippet.replace(name, text)
        return snippet

    def damage(self) -> str:
        """What is no longer as it was; "" if nothing."""
        if not self.file.exists() or self.file.read_text() != SECRET:
            return "the secret file was changed"
        if self.file.stat().st_mode & 0o777 != 0o644:
            return "the mode of the secret file was changed"
        if sorted(os.listdir(self.file.parent)) != ["secret", "socket"]:
            return "the secret folder was changed"
        try:
            self.server.accept()[0].close()
        except BlockingIOError:
            return ""
        return "the host's socket was reached"


@contextmanager
def host_secrets() -> Iterator[Places]:
    """A secret file that anybody may read, a socket that anybody may use, an environment."""
    before = os.environ.get("SECRET_KEY")
    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as server:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "secret").write_text(SECRET)
        (folder / "secret").chmod(0o644)
        server.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        server.listen()
        server.setblocking(False)
        os.environ["SECRET_KEY"] = SECRET
        with open(folder / "secret") as leaked:  # a descriptor that a careless start would pass on
            os.set_inheritable(leaked.fileno(), True)
            try:
                yield Places(folder / "secret", server)
            finally:
                if before is None:
                    del os.environ["SECRET_KEY"]
                else:
                    os.environ["SECRET_KEY"] = before


def printed(result: RunResult) -> str:
    """What a cell printed; a traceback shows lines of the snippet, which nobody printed."""
    if result.problem.startswith("SystemExit"):
        return result.output
    return result.output.removesuffix(result.problem)


async def attack(sandbox: Sandbox, code: str, places: Places, timeout_s: float) -> Outcome:
    """Run one snippet in a session of its own, then see whether all is well."""
    session = sandbox.session(1)
    try:
        result = await session.run(code, timeout_s)
        said = printed(result)
        served = False
        for _ in range(3):  # a snippet may break its own interpreter, which is then replaced
            following = await session.run(NEXT_CALL, NEXT_CALL_TIMEOUT_S)
            said += printed(following)
            served = "next 42" in following.output
            if served:
                break
        other = sandbox.session(2)
        try:
            beside = await other.run(NEXT_CALL, NEXT_CALL_TIMEOUT_S)
        finally:
            other.close()
    except AgentEnvError as error:
        return Outcome(f"the sandbox failed: {error}", "failed", "")
    except Exception as error:  # of the host: a snippet that causes it ends a run
        return Outcome(f"the host raised {type(error).__name__}: {error}", "failed", "")
    finally:
        session.close()
    hole = places.damage()
    if MARK in said or SECRET in said or SECRET in result.output:
        hole = f"it printed {MARK}" if MARK in said else "it printed the secret"
    elif not served or beside.output != "next 42":
        hole = "the next call was not served"
    return Outcome(hole, result.end, result.output)


async def attack_all(
    attacks: Mapping[str, str], rung: Rung, timeout_s: float
) -> dict[str, Outcome]:
    """Run all snippets on one rung. Raises ConfigError when this machine does not offer it."""
    sandbox = Sandbox(rungs=(rung,))
    free = asyncio.Semaphore(NUM_AT_ONCE)
    try:
        with host_secrets() as places:
            await sandbox.start()

            async def one(code: str) -> Outcome:
                async with free:
                    return await attack(sandbox, places.fill_in(code), places, timeout_s)

            outcomes = await asyncio.gather(*map(one, attacks.values()))
    finally:
        await sandbox.close()
    return dict(zip(attacks, outcomes, strict=True))


def known_attacks() -> dict[str, str]:
    """The snippets that come with the doctor, by name."""
    folder = resources.files("agentenv.pipelines.diagnosis")
    found: dict[str, str] = {}
    for name in FILES:
        found |= decode(folder.joinpath(name).read_bytes(), dict[str, str])
    return found
