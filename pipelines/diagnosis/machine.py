"""What the machine offers, whatever the configuration: versions, memory, disk, descriptors, the
rungs of the sandbox.
"""

from __future__ import annotations

import importlib.metadata
import re
import resource
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import psutil

from agentenv.disk import existing
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.install import DISTRIBUTION, install_hint
from agentenv.pipelines.diagnosis.escapes import RUNGS, attack_all, known_attacks
from agentenv.pipelines.diagnosis.results import Probe, Skip
from agentenv.pipelines.run.terminal import MAX_FILES

GIB = float(2**30)
LEAST_PYTHON = (3, 11)
LEAST_MEMORY = 4 * GIB  # that README promises to be enough for the quick start
LEAST_DISK = 2 * GIB
LEAST_FILES = 4096
NEEDED = "train"  # the extra without which no command of training runs
MAX_TOLD = 3
ATTACK_S = 1.0  # of a snippet that tries to escape
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*([^;]*)(?:;\s*(.*))?")


class Machine(NamedTuple):
    """Of this machine; `folder` is where runs are written. `is_quick`: what takes a minute is left
    out."""

    folder: Path
    is_quick: bool = False


async def python(machine: Machine) -> str:
    """The version of Python."""
    if sys.version_info < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        raise ConfigError(
            f"Python {sys.version.split()[0]} is too old; make an environment with {least} or newer"
        )
    return f"Python {sys.version.split()[0]}"


async def packages(machine: Machine) -> str:
    """What the distribution asks for is installed, in the versions that it asks for."""
    try:
        asked = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        raise Skip("agentenv is not installed as a package, so it names no versions") from None
    problems, found = [], []
    for text in asked:
        name, wanted, marker = requirement(text)
        if marker and f'"{NEEDED}"' not in marker.replace("'", '"'):
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{name} is not installed ({wanted or 'any version'})")
            continue
        if not satisfies(version, wanted):
            problems.append(f"{name} {version} is installed, {wanted} is asked for")
        elif name in ("torch", "transformers", "deepspeed"):
            found.append(f"{name} {version}")
    if problems:
        raise ConfigError(f"{', '.join(problems)}; {install_hint(NEEDED)}")
    return ", ".join(found)


def requirement(text: str) -> tuple[str, str, str]:
    """Name, versions and marker of a line like "torch>=2.9; extra == 'train'"."""
    match = _REQUIREMENT.match(text)
    assert match is not None
    name, wanted, marker = match.groups()
    return name, (wanted or "").strip(), (marker or "").strip()


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version is within bounds like ">=0.19,<0.20"; numbers only are compared."""
    have = _numbers(version)
    for bound in filter(None, map(str.strip, wanted.split(","))):
        match = re.match(r"(>=|<=|==|<|>|!=|~=)\s*(.*)", bound)
        if match is None:
            continue
        operator, edge = match[1], _numbers(match[2])
        short = have[: len(edge)] if operator in ("==", "!=") else have
        holds = {
            ">=": have >= edge,
            "<=": have <= edge,
            ">": have > edge,
            "<": have < edge,
            "==": short == edge,
            "!=": short != edge,
            "~=": have >= edge and have[: len(edge) - 1] == edge[:-1],
        }[operator]
        if not holds:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


async def accelerators(machine: Machine) -> str:
    """The GPUs that are visible."""
    from agentenv.pipelines.serving.gpus import visible_gpus

    here = visible_gpus()
    if not here:
        raise Skip("this machine has no GPU; small models train on its processor")
    return f"{len(here)} GPUs"


async def memory(machine: Machine) -> str:
    """Main memory that is free."""
    found = psutil.virtual_memory()
    told = f"{found.available / GIB:.1f} of {found.total / GIB:.1f} GiB are free"
    if found.available < LEAST_MEMORY / 2:
        raise ConfigError(f"{told}, {LEAST_MEMORY / 2 / GIB:g} are the least; end other processes")
    return told


async def disk(machine: Machine) -> str:
    """The disk of the runs' folder."""
    place = existing(machine.folder)
    free = shutil.disk_usage(place).free
    told = f"{free / GIB:.1f} GiB are free at {place}"
    if free < LEAST_DISK:
        raise ConfigError(
            f"{told}, {LEAST_DISK / GIB:g} are the least; free some, or choose another run.dir=DIR"
        )
    return told


async def descriptors(machine: Machine) -> str:
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


async def sandbox(machine: Machine) -> str:
    """The rungs of the Python sandbox that this machine offers, each of which has stopped the
    escapes that are tried on it before each run and, unless it is to be quick, every known one."""
    attacks = {} if machine.is_quick else known_attacks()
    offered, lacking = [], []
    for rung in RUNGS:
        try:
            outcomes = await attack_all(attacks, rung, ATTACK_S)
            through = {name: one.hole for name, one in outcomes.items() if one.hole}
        except AgentEnvError as error:
            lacking.append(f"{rung}: {error}")
            continue
        if through:
            told = "; ".join(f"{name}: {hole}" for name, hole in list(through.items())[:MAX_TOLD])
            raise ConfigError(
                f"{len(through)} of {len(attacks)} escapes got through {rung} ({told}); use "
                "python.remote_url, or no Python tool, on this machine, and report it"
            )
        offered.append(rung)
    if not offered:
        raise ConfigError(
            f"no rung of the sandbox stops every escape here ({' | '.join(lacking)}); install "
            "bubblewrap, or a kernel with Landlock; without one the Python tool is refused unless "
            "python.allow_unsafe = true"
        )
    tried = f"all of {len(attacks)} escapes" if attacks else "every escape that is tried"
    return f"{', '.join(offered)}: {tried} stopped"


MACHINE = (
    Probe("Python", python),
    Probe("versions", packages),
    Probe("GPUs of the machine", accelerators),
    Probe("free memory", memory),
    Probe("free disk", disk),
    Probe("descriptors", descriptors),
    Probe("sandbox escapes", sandbox),
)
