"""--dry-run: print what a run would be, and refuse what cannot fit. Nothing is started."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

from agentenv.errors import ConfigError
from launchers.config import TrainConfig
from launchers.planning.files import missing_files
from launchers.planning.memory import GIB
from launchers.planning.plan import make_plan
from launchers.planning.processes import Machine
from launchers.planning.show import show_plan, show_sizes, show_values
from launchers.rl.units import check_units
from launchers.serving.gpus import visible_gpus
from launchers.view import View

ASSUMED_GPU_GIB = 80.0
NOT_ALL = "what is known of it fits, but not every model's size is known"


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """--dry-run, and the machine that it is for."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="start nothing: print the resolved configuration, the processes, their GPUs and an "
        "estimate of their memory; refuse what cannot fit",
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
    for name in ("gpus", "gpu_memory"):
        value = getattr(arguments, name)
        if value is not None and not arguments.dry_run:
            parser.error(f"--{name.replace('_', '-')} belongs to --dry-run")
        if value is not None and value < 0:
            parser.error(f"--{name.replace('_', '-')} is not negative")


def dry_run(
    config: Any, arguments: argparse.Namespace, view: View, run: Path, model: str = ""
) -> None:
    """Print everything about a run of `config` in the folder `run`, which need not be there.

    `model` is the policy's path where the configuration does not hold it, as in an evaluation.
    Raises ConfigError at the end for what cannot work.
    """
    machine = find_machine(arguments.gpus, arguments.gpu_memory)

    def resolve(text: str) -> Path:
        return Path(text.replace("{run}", str(run)))

    if isinstance(config, TrainConfig):
        _check(config)
    plan = make_plan(config, machine, resolve, model)
    plan.missing += missing_files(config, resolve)
    show_values(config, view)
    show_sizes(config, view)
    show_plan(plan, view)
    if plan.problems:
        raise ConfigError("; ".join(plan.problems))
    fits = "it fits" if plan.is_whole else NOT_ALL
    view.say(f"dry run: nothing was started; by this estimate {fits}")


def find_machine(num_gpus: int | None, gpu_memory_gib: float | None) -> Machine:
    """What was asked for, else what is here."""
    here = visible_gpus()
    number = len(here) if num_gpus is None else num_gpus
    main = _main_memory() if num_gpus is None else 0.0
    if not number:
        return Machine(0, 0.0, main, "this machine, which has no GPU" if main else "no GPU")
    told = f"the {number} GPUs of this machine" if num_gpus is None else f"{number} GPUs"
    if gpu_memory_gib is not None:
        told += f" with {gpu_memory_gib:g} GiB each"
        return Machine(number, gpu_memory_gib * GIB, main, told)
    found = _memory_of(here[0]) if here and num_gpus is None else 0.0
    if found:
        return Machine(number, found, main, f"{told} with {found / GIB:.0f} GiB each")
    told += f" with {ASSUMED_GPU_GIB:g} GiB each (assumed, see --gpu-memory)"
    return Machine(number, ASSUMED_GPU_GIB * GIB, main, told)


def _memory_of(gpu: str) -> float:
    """Bytes of a GPU as its driver says; 0 where it cannot be asked."""
    command = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return float(answer.stdout.strip()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0.0


def _check(config: TrainConfig) -> None:
    from launchers.serving.roles import check_roles  # brings an HTTP client along

    check_units(config)
    check_roles(config)


def _main_memory() -> float:
    """Bytes of this machine's main memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
