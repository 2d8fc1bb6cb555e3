"""The machine that a dry run is for: its arguments on the command line, and what is here."""

from __future__ import annotations

import argparse
import os
import subprocess

from msgspec import Struct

from agentenv.pipelines.run.arguments import EXIT_MISSING
from agentenv.pipelines.serving import visible_gpus

GIB = 2.0**30
ASSUMED_GPU_GIB = 80.0


class Machine(Struct, frozen=True):
    """What the run is planned for. `main_bytes` of main memory, 0 where nobody knows; `name` is
    the machine in words."""

    num_gpus: int
    gpu_bytes: float
    main_bytes: float
    name: str


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """--dry-run, and the machine that it is for."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="start nothing: print what the configuration chooses, the processes, their GPUs and "
        "an estimate of their memory; read the first and last 1,000 rows of each data file; refuse "
        f"what the run would refuse; exit code {EXIT_MISSING} if something is not here yet",
    )
    parser.add_argument(
        "--defaults", action="store_true", help="with --dry-run: the keys at their defaults too"
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="dry run for N GPUs; default: those of this machine"
    )
    parser.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help=f"memory of one GPU; default: of this machine's, else {ASSUMED_GPU_GIB:g}",
    )


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse what only a dry run reads."""
    if arguments.defaults and not arguments.dry_run:
        parser.error("--defaults belongs to --dry-run")
    for name in ("gpus", "gpu_memory"):
        value = getattr(arguments, name)
        if value is not None and not arguments.dry_run:
            parser.error(f"--{name.replace('_', '-')} belongs to --dry-run")
        if value is not None and value < 0:
            parser.error(f"--{name.replace('_', '-')} is not negative")


def find_machine(num_gpus: int | None, gpu_memory_gib: float | None) -> Machine:
    """What was asked for, else what is here."""
    here = visible_gpus()
    number = len(here) if num_gpus is None else num_gpus
    main = _main_memory() if num_gpus is None else 0.0
    if not number:
        return Machine(0, 0.0, main, "this machine, which has no GPU" if main else "no GPU")
    name = f"the {number} GPUs of this machine" if num_gpus is None else f"{number} GPUs"
    if gpu_memory_gib is not None:
        name += f" with {gpu_memory_gib:g} GiB each"
        return Machine(number, gpu_memory_gib * GIB, main, name)
    found = _memory_of(here[0]) if here and num_gpus is None else 0.0
    if found:
        return Machine(number, found, main, f"{name} with {found / GIB:.0f} GiB each")
    name += f" with {ASSUMED_GPU_GIB:g} GiB each (assumed, see --gpu-memory)"
    return Machine(number, ASSUMED_GPU_GIB * GIB, main, name)


def _memory_of(gpu: str) -> float:
    """Bytes of a GPU as its driver says; 0 where it cannot be asked."""
    command = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return float(answer.stdout.strip()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0.0


def _main_memory() -> float:
    """Bytes of this machine's main memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
