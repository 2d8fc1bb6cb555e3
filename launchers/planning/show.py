"""A dry run in print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from launchers.config import TrainConfig
from launchers.planning.memory import GIB
from launchers.planning.processes import Plan, Process
from launchers.planning.values import values_of
from launchers.supervised.dpo_config import DPORunConfig
from launchers.supervised.sft_config import SFTRunConfig
from launchers.view import View


def show_values(config: Any, view: View) -> None:
    """What differs from the defaults first, then all the rest."""
    values = list(values_of(config))
    view.say("configuration, what is not the default:")
    for value in values:
        if value.chosen:
            view.say(f"  {value.key} = {value.text}")
    view.say("\nconfiguration, the defaults:")
    for value in values:
        if not value.chosen:
            view.say(f"  {value.key} = {value.text}")


def show_sizes(config: Any, view: View) -> None:
    """What an update, a step or an evaluation takes."""
    view.say("\nsizes:")
    for line in _sizes(config):
        view.say(f"  {line}")


def _sizes(config: Any) -> Iterator[str]:
    if isinstance(config, TrainConfig):
        groups, size = config.queue.groups_per_step, config.algorithm.group_size
        steps = groups // config.learner.groups_per_minibatch * config.learner.num_epochs_per_batch
        yield (
            f"an update takes {groups} prompts x {size} = {groups * size} trajectories in "
            f"{steps} optimizer steps; at most {config.queue.max_staleness} versions old"
        )
        most = groups * (config.queue.max_staleness + 1)
        yield f"up to {most} prompts = {most * size} trajectories are under way at a time"
        passes = f"{config.train.num_epochs} passes over the questions"
        yield passes if config.train.num_steps is None else f"{config.train.num_steps} updates"
    elif isinstance(config, SFTRunConfig | DPORunConfig):
        loop = config.sft if isinstance(config, SFTRunConfig) else config.dpo
        length = f"{loop.num_steps} steps" if loop.num_steps else f"{loop.num_epochs or 3} passes"
        yield (
            f"a step takes {loop.batch_size} rows x {loop.gradient_accumulation} = "
            f"{loop.rows_per_step} rows; {length}"
        )
    for name, one in getattr(config, "sets", {}).items():
        number = f"at most {one.max_tasks} questions" if one.max_tasks else "all questions"
        if one.max_tasks is None and one.benchmark:
            number = "the benchmark's number of questions"
        yield f"{name}: {number} of {one.path}, {one.num_samples} times each"


def show_plan(plan: Plan, view: View) -> None:
    """Processes with their GPUs and memory, each GPU, and what is missing."""
    view.say("")
    table = Table(title=f"processes on {plan.machine.told}", title_justify="left", box=SIMPLE)
    for name in ("process", "number", "GPUs"):
        table.add_column(name)
    for name in ("GiB on each", "main memory, GiB"):
        table.add_column(name, justify="right")
    for process in plan.processes:
        table.add_row(*_row(process))
    view.show(table)
    for process in plan.processes:
        for line in _details(process):
            view.say(line)
    alike: dict[float, list[str]] = {}
    for gpu, needed in plan.gpu_bytes.items():
        alike.setdefault(needed, []).append(gpu)
    for needed, gpus in alike.items():
        view.say(f"GPU {span(gpus)}: {needed / GIB:.1f} of {plan.machine.gpu_bytes / GIB:.1f} GiB")
    if plan.missing:
        view.say("\nmissing here:")
        for line in dict.fromkeys(plan.missing):
            view.say(f"  {line}")


def span(gpus: Sequence[str]) -> str:
    """0-3, 6"""
    numbers = sorted(map(int, gpus))
    parts = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else f"{members[0]}")
    return ", ".join(parts)


def _row(process: Process) -> tuple[str, ...]:
    on_gpu = process.room.budget if process.room is not None else process.memory.gpu_bytes
    main = process.main_bytes
    return (
        process.name,
        str(process.count or "runs already"),
        span(process.gpus),
        f"{on_gpu / GIB:.1f}" if process.gpus else "",
        f"{main / GIB:.1f}" if main else "",
    )


def _details(process: Process) -> list[str]:
    what = ", ".join(filter(None, (process.model, process.note)))
    lines = [f"{process.name}: {what}"]
    memory = process.memory
    for sizes, place in ((memory.gpu, "GiB"), (memory.host, "GiB in main memory")):
        parts = [f"{name} {size / GIB:.1f}" for name, size in sizes.items() if size > 0.05 * GIB]
        if parts:
            lines.append(f"    {' + '.join(parts)} {place}")
    if process.room is not None:
        lines.append(
            f"    keys and values of {process.room.tokens} tokens, {process.room.sequences:.1f} "
            "requests of full length"
        )
    return lines
