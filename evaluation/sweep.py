"""A sweep: one training configuration, several arms, several seeds, and a folder of their runs.

    FOLDER/sweep.json            arms, seeds, and the digest of the configuration
    FOLDER/ARM/seed-N/           the run
    FOLDER/ARM/seed-N.log        its output

A run with a summary is finished and not repeated; an interrupted one is resumed with --resume.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, product
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.config import load_config, read_toml
from agentenv.base.deadline import at_most
from agentenv.base.disk import make_folder, write_whole
from agentenv.base.errors import ConfigError
from agentenv.base.model_files import read_as, read_object
from agentenv.base.offload import in_thread, start_process
from agentenv.base.secrets import SECRETS
from agentenv.processes.supervisor import log_tail

SWEEP_FILE = "sweep.json"
START = "start"  # the arm from which the others start
GRACE_S = 60.0  # for a run to save a checkpoint
NAME = re.compile(r"[\w.+=-]+")
# a value of --vary: up to a comma outside brackets and quotes
VALUE = re.compile(r"""(?:\[[^\]]*\]|\{[^}]*\}|"[^"]*"|'[^']*'|[^,])+""")
State = Literal["finished", "interrupted", "new"]


class SweepConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """A sweep file. Overrides are those of `agentenv train`; "{seed}" stands for the seed, and
    "{start}" for the folder of the seed's start run."""

    config: str  # training configuration, relative to this file
    seeds: str | list[int]  # "0-4", "1,3", or a list
    arms: dict[str, list[str]]  # overrides by name
    overrides: list[str] = []  # of every run
    start: list[str] | None = None  # overrides of one run per seed, before its arms
    after_start: list[str] = []  # overrides of every arm
    baseline: str = ""  # the baseline of `agentenv compare`; default: the first arm


class Made(SweepConfig, kw_only=True):
    """The content of sweep.json: the resolved sweep, with the digest of its configuration."""

    seeds: list[int]
    config_digest: str


class SweepRun(NamedTuple):
    """A run of a sweep: its arm, its seed, its folder."""

    arm: str
    seed: int
    path: Path
    overrides: tuple[str, ...]

    @property
    def log(self) -> Path:
        return self.path.with_name(f"{self.path.name}.log")

    def state(self) -> State:
        """The state of the run, from its files."""
        if (self.path / "summary.json").is_file():
            return "finished"
        return "interrupted" if (self.path / "config.json").is_file() else "new"

    def __str__(self) -> str:
        return f"{self.arm} seed {self.seed}"


def seeds_of(text: str | Sequence[int]) -> list[int]:
    """The seeds of "200-202,207". Raises ConfigError."""
    if not isinstance(text, str):
        return list(dict.fromkeys(text))
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"seeds: {text!r}: expected numbers and ranges, such as 0-4,7")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return list(dict.fromkeys(found))


def grid(varied: Sequence[str]) -> dict[str, list[str]]:
    """Arms for all combinations of KEY=VALUE,VALUE,...; commas in brackets or quotes do not
    separate values. Raises ConfigError."""
    axes = []
    for one in varied:
        key, equals, values = one.partition("=")
        found = VALUE.findall(values)
        choices = [value.strip() for value in found]
        is_whole = bool(found) and ",".join(found) == values
        if not (key.strip() and equals and all(choices) and is_whole):
            raise ConfigError(f"--vary {one}: expected key.sub=value,value,...")
        axes.append([f"{key.strip()}={choice}" for choice in choices])
    arms = {}
    for chosen in product(*axes):
        parts = [one.partition("=") for one in chosen]
        name = "+".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in parts)
        arms[re.sub(r"[^\w.+=-]+", "_", name)] = list(chosen)
    return arms


def read_sweep(path: Path) -> SweepConfig:
    """The sweep in a file. Raises ConfigError with the file's name."""
    try:
        found = msgspec.convert(read_toml(path), SweepConfig)
    except msgspec.ValidationError as error:
        keys = ", ".join(SweepConfig.__struct_fields__)
        raise ConfigError(f"{path}: {error}; a sweep file has {keys}") from error
    return replace(found, config=str((path.parent / found.config).resolve()))


def check(config: SweepConfig) -> Made:
    """Check and resolve a sweep before anything starts. Raises ConfigError."""
    path = Path(config.config)
    if not config.arms:
        raise ConfigError("a sweep needs at least one arm")
    for name in config.arms:
        if not NAME.fullmatch(name) or name == START:
            raise ConfigError(
                f"arms.{name}: a name has letters, digits and ._+=- and is not {START!r}"
            )
    if config.baseline and config.baseline not in config.arms:
        raise ConfigError(f"baseline {config.baseline!r} is not an arm: {', '.join(config.arms)}")
    seeds = seeds_of(config.seeds)
    if not seeds:
        raise ConfigError("seeds: a sweep needs at least one")
    if config.start is None:
        for one in [*config.after_start, *(one for arm in config.arms.values() for one in arm)]:
            if "{start}" in one:
                raise ConfigError(f"{one}: {{start}} requires the key `start`")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    resolved = {"seeds": seeds, "baseline": config.baseline or next(iter(config.arms))}
    made = Made(**asdict(config) | resolved, config_digest=digest)
    for run in runs_of(path.parent, replace(made, seeds=seeds[:1])):
        load_config(TrainConfig, path, run.overrides, report=lambda _: None)
    return made


def read_made(folder: Path) -> Made:
    """Read the sweep.json of a folder. Raises ConfigError and DataError."""
    path = folder / SWEEP_FILE
    if not path.is_file():
        raise ConfigError(f"{folder} is not a sweep: it has no {SWEEP_FILE}")
    return read_as(path, "record of a sweep", Made)


def remember(folder: Path, made: Made) -> Made:
    """Write sweep.json, including arms and seeds of earlier commands. Raises DataError for an
    unreadable one, and ConfigError if the folder has runs of another configuration, or an arm with
    other overrides."""
    if (folder / SWEEP_FILE).exists():
        old = read_made(folder)
        problem = next(_differences(old, SECRETS.tree(made)), "")
        if problem:
            raise ConfigError(f"{folder} contains another sweep: {problem}; choose another --out")
        seeds = list(dict.fromkeys([*old.seeds, *made.seeds]))
        made = replace(made, arms=old.arms | made.arms, seeds=seeds)
    make_folder(folder)
    write_whole(folder / SWEEP_FILE, msgspec.json.format(msgspec.json.encode(SECRETS.tree(made))))
    return made


def _differences(old: Made, new: Made) -> Iterator[str]:
    if old.config_digest != new.config_digest:
        yield f"{new.config} was changed, or differs from {old.config}"
    for name in ("overrides", "start", "after_start"):
        if getattr(old, name) != getattr(new, name):
            yield f"{name}: {getattr(old, name)} -> {getattr(new, name)}"
    for arm in old.arms.keys() & new.arms.keys():
        if old.arms[arm] != new.arms[arm]:
            yield f"arms.{arm}: {old.arms[arm]} -> {new.arms[arm]}"


def runs_of(folder: Path, made: Made) -> Iterator[SweepRun]:
    """All runs of the sweep, seed by seed, the start run first."""
    for seed in made.seeds:
        start = (folder / START / f"seed-{seed}").resolve()
        arms = {arm: [*made.after_start, *given] for arm, given in made.arms.items()}
        if made.start is not None:
            arms = {START: made.start, **arms}
        for arm, overrides in arms.items():
            filled = (
                one.replace("{seed}", f"{seed}").replace("{start}", f"{start}")
                for one in (*made.overrides, *overrides)
            )
            yield SweepRun(arm, seed, folder / arm / f"seed-{seed}", tuple(filled))


FORKLESS = "the algorithm never forked"
Report = Callable[[SweepRun, str, str], None]  # run, outcome, its log's last line


async def train_all(
    config: str, runs: Iterable[SweepRun], *, jobs: int, report: Report
) -> list[SweepRun]:
    """Train every unfinished run, `jobs` at a time; the arms of a seed follow its start run.
    `runs`: as of `runs_of`. Returns the failed runs."""
    slots, failed = asyncio.Semaphore(jobs), list[SweepRun]()
    threads = {"OMP_NUM_THREADS": "1"} if jobs > 1 else {}

    async def is_trained(run: SweepRun) -> bool:
        if run.state() == "finished":
            return True
        async with slots:
            code = await _train(config, run, threads)
        if code == 0 and run.state() == "finished":
            summary = await in_thread(read_object, run.path / "summary.json", "summary of a run")
            report(run, "finished", FORKLESS if summary.get("never_forked") else "")
            return True
        failed.append(run)
        last = (await in_thread(log_tail, run.log)).rpartition("\n")[2].strip()
        report(run, f"failed with exit status {code}", last)
        return False

    async def train_seed(same_seed: Sequence[SweepRun]) -> None:
        if same_seed[0].arm == START and not await is_trained(same_seed[0]):
            return
        async with asyncio.TaskGroup() as group:
            for run in same_seed:
                group.create_task(is_trained(run))

    async with asyncio.TaskGroup() as group:
        for _, same_seed in groupby(runs, lambda run: run.seed):
            group.create_task(train_seed([*same_seed]))
            await asyncio.sleep(0)  # seeds acquire slots in order
    return failed


async def _train(config: str, run: SweepRun, threads: Mapping[str, str]) -> int:
    """Train a run; returns the exit status. A cancellation interrupts the run, and waits until it
    has saved a checkpoint."""
    await in_thread(make_folder, run.path.parent)
    command = [sys.executable, "-m", "agentenv.launchers", "train", config, *run.overrides]
    command += [f"run.seed={run.seed}", f"run.dir={run.path.parent.resolve()}"]
    command += [f"run.name={run.path.name}"]
    command += ["--resume"] if run.state() == "interrupted" else []
    with await in_thread(run.log.open, "ab") as log:
        process = await start_process(
            *command, stdout=log, stderr=log, env={**threads, **os.environ}, start_new_session=True
        )
    try:
        return await process.wait()
    except asyncio.CancelledError:
        await _interrupt(process)
        raise


async def _interrupt(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.returncode is None:
            with suppress(ProcessLookupError):  # reaped, and its code is set soon
                os.killpg(process.pid, number)
            await at_most(GRACE_S, process.wait())
