"""What training trees as trees is worth: tree against flat layouts of the same trajectories.

    tree     every shared token once, attention in blocks between forks
    dense    the same tokens, attention under one dense mask (--dense)
    varlen   every trajectory by itself, side by side without padding
    padded   every trajectory by itself, in rows of equal length

All compute the same loss and, with it, the same gradients. `counted` is the ratio, varlen
over tree, of floating point operations: what a machine would reach on which every operation costs
the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from rich.table import Table

from agentenv.errors import ConfigError
from launchers.benchmark.layouts import FLAT, LAYOUTS, Nodes, count, make_model, make_step, peak_mb
from launchers.view import View

SHAPES = Path(__file__).with_name("shapes.json")
WARM_UP = [[[-1, 0, 64], [0, 64, 0], [0, 64, 0]]]


@dataclass(frozen=True)
class Figures:
    """Of one shape: medians of CPU seconds and peak memory by layout, and counted ratios."""

    cpu_s: dict[str, float]
    peak_mb: dict[str, float]
    tokens: float
    pairs: float
    flops: float

    @property
    def flat_best_over_tree(self) -> float:
        return min(self.cpu_s[name] for name in FLAT) / self.cpu_s["tree"]


def run(names: Sequence[str] | None, repeats: int, dense: bool, view: View) -> dict[str, float]:
    """Measure shapes, show a table, and return the figures as {SHAPE.figure: value}."""
    shapes = load_shapes()
    unknown = sorted(set(names or ()) - set(shapes))
    if unknown or repeats < 1:
        raise ConfigError(f"--shapes: unknown {unknown}; known: {sorted(shapes)}; --repeats >= 1")
    found: dict[str, Figures] = {}
    for name in names or shapes:
        view.say(f"{name}: {shapes[name]['source']}")
        layouts = (*LAYOUTS, "dense") if dense else LAYOUTS
        found[name] = measure(shapes[name]["trees"], layouts, repeats)
    for table in tables(found):
        view.show(table)
    return flattened(found)


def load_shapes() -> dict[str, Any]:
    """Recorded shapes, and one prefix with 16 leaves."""
    leaves = [[0, 128 + 8 * (i * 7 % 17), 0] for i in range(16)]
    prefix = [[[-1, 0, 2048], *leaves]]
    shapes: dict[str, Any] = msgspec.json.decode(SHAPES.read_bytes())
    source = "one prefix of 2,048 tokens and 16 leaves of 128 to 256"
    return {"prefix2048x16": {"source": source, "trees": prefix}} | shapes


def measure(trees: list[Nodes], layouts: Sequence[str], repeats: int) -> Figures:
    """Interleaved, so that a busy moment of the machine hits all layouts alike."""
    torch.set_num_threads(1)
    model = make_model()
    make_step("tree", WARM_UP, model)()
    steps = {name: make_step(name, trees, model) for name in layouts}
    seconds: dict[str, list[float]] = {name: [] for name in layouts}
    losses = {}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.process_time()
            losses[name] = step()
            seconds[name].append(time.process_time() - start)
    for name, loss in losses.items():
        if abs(loss - losses["varlen"]) > 1e-4 * abs(losses["varlen"]):
            raise ArithmeticError(f"layouts differ: {name} {losses}")
    counts = {name: count(name, trees, model) for name in ("tree", "varlen")}
    ratios = (flat / tree for flat, tree in zip(counts["varlen"], counts["tree"], strict=True))
    return Figures(
        {name: median(values) for name, values in seconds.items()},
        {name: in_own_process(name, trees) for name in layouts},
        *ratios,
    )


def in_own_process(layout: str, trees: list[Nodes]) -> float:
    """Peak memory is that of a process, so each layout gets one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(peak_mb, layout, trees).result()


def tables(found: dict[str, Figures]) -> tuple[Table, Table]:
    """One row a shape: speed beside what was counted, and memory."""
    layouts = list(next(iter(found.values())).cpu_s)
    speed = _table("CPU seconds; ratios are flat over tree, share is measured over counted FLOPs")
    for name in ("shape", *layouts, "best flat", "FLOPs", "share", "tokens", "pairs"):
        speed.add_column(name, justify="left" if name == "shape" else "right", no_wrap=True)
    memory = _table("peak memory of a step beyond the model, MB")
    for name in ("shape", *layouts):
        memory.add_column(name, justify="left" if name == "shape" else "right", no_wrap=True)
    for name, one in found.items():
        ratio = one.flat_best_over_tree
        figures = (*one.cpu_s.values(), ratio, one.flops, ratio / one.flops, one.tokens, one.pairs)
        speed.add_row(name, *(f"{figure:.2f}" for figure in figures))
        memory.add_row(name, *(f"{figure:.0f}" for figure in one.peak_mb.values()))
    return speed, memory


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", min_width=76, box=None, padding=(0, 2, 0, 0))


def flattened(found: dict[str, Figures]) -> dict[str, float]:
    """{SHAPE.figure: value} of all shapes."""
    figures: dict[str, float] = {}
    for name, one in found.items():
        figures |= {
            f"{name}.flat_best_over_tree": one.flat_best_over_tree,
            f"{name}.counted": one.flops,
            f"{name}.counted_tokens": one.tokens,
            f"{name}.counted_pairs": one.pairs,
        }
        for layout in one.cpu_s:
            figures[f"{name}.{layout}_cpu_s"] = one.cpu_s[layout]
            figures[f"{name}.{layout}_peak_mb"] = one.peak_mb[layout]
    return {name: round(value, 4) for name, value in figures.items()}
