"""All parts of the bench, one after the other, into one file, and pictures of the main tables.

    python benchmarks/bench.py all [--json FILE] [--plots DIR] [--parts NAME ...]

Each part runs in a process of its own, in the bounded size that PARTS gives it. A part that fails
is told with its error, and the others go on. `load`, `chaos`, `soak` and `workers` judge faults and
machines rather than cost, and are not among them; `staleness` is only simulated here (`--updates`
trains), `peers` has one round of those that install in minutes.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentenv.disk import write_whole
from agentenv.install import DISTRIBUTION
from agentenv.pipelines.run.plots import panels, png

ROOT = Path(__file__).resolve().parents[2]
PART_S = 3600.0  # that a part may take; `peers` installs what it lacks
PARTS: dict[str, tuple[str, ...]] = {
    "start": ("--repeats", "3"),
    "overhead": ("--sizes", "1000", "--workers", "0"),
    "overhead-workers": ("--sizes", "1000", "--workers", "2"),
    "makespan": ("--seeds", "3"),
    "staleness": ("--seeds", "1", "--updates", "0"),
    "transport": ("--repeats", "3"),
    "learner": ("--repeats", "1"),
    "deal": (),
    "fork": ("--repeats", "3"),
    "tools": ("--repeats", "3"),
    "engines": ("--repeats", "3"),
    "lag": (),
    "paper": (),
    "peers": (
        *("--rounds", "1"),
        *("--only", "ours", "lock-step", "verifiers", "trl", "skyrl-gym", "gymnasium"),
    ),
}
OF = {"overhead-workers": "overhead"}  # parts that are measured by the command of another one
PACKAGES = (
    DISTRIBUTION,
    "torch",
    "transformers",
    "deepspeed",
    "vllm",
    "sglang",
    "numpy",
    "aiohttp",
)

Found = dict[str, Any]


def run(parts: Sequence[str], say: Callable[[str], None], file: Path | None = None) -> Found:
    """Machine, versions, date, commit, and under `parts` the figures, seconds or error of each;
    written to `file` after each part, so that what ends early has what was measured."""
    found: Found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": machine(),
        "versions": versions(),
        "parts": {},
    }
    for name in parts:
        began = time.monotonic()
        found["parts"][name] = _run(name)
        seconds = found["parts"][name]["seconds"] = round(time.monotonic() - began, 1)
        error = found["parts"][name].get("error")
        say(f"{name}: {seconds:.0f} s" + (f", failed: {error}" if error else ""))
        if file is not None:
            write_whole(file, json.dumps(found, indent=1) + "\n")
    return found


def command_of(name: str) -> list[str]:
    """The arguments of bench.py that measure a part."""
    return [OF.get(name, name), *PARTS[name]]


def _run(name: str) -> Found:
    with tempfile.TemporaryDirectory(prefix="agentenv-") as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, "benchmarks/bench.py", *command_of(name), "--json", str(file)]
        began = {"options": " ".join(PARTS[name]), "load": round(os.getloadavg()[0], 1)}
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PART_S)
        except subprocess.TimeoutExpired:
            return began | {"error": f"not done after {PART_S:g} s"}
        if done.returncode or not file.is_file():
            said = (done.stderr or done.stdout).strip().splitlines() or ["nothing was said"]
            return began | {"error": said[-1]}
        return began | {"figures": json.loads(file.read_text(encoding="utf-8"))}


def machine() -> Found:
    """What the figures were measured on."""
    import psutil

    return {
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load": round(os.getloadavg()[0], 1),  # at the start: above 1, others work here too
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions() -> dict[str, str]:
    """Of Python and of those packages that are there."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Of the checkout, with a + where it has changes; empty without git."""
    try:
        command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return done.stdout.strip()


# Pictures.


def plot(found: Found, folder: Path) -> list[str]:
    """PNG files of the parts that have figures; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for name, draw in PICTURES.items():
        figures = found["parts"].get(name, {}).get("figures")
        if figures:
            (folder / f"{name}.png").write_bytes(png(draw(figures)))
            names.append(f"{name}.png")
    return names


def _bars(axes: Any, title: str, names: Sequence[str], columns: dict[str, list[float]]) -> None:
    """Horizontal bars: a group a name, a bar a column."""
    height = 0.8 / len(columns)
    for number, (label, values) in enumerate(columns.items()):
        places = [place + number * height for place in range(len(names))]
        bars = axes.barh(places, values, height, label=label if len(columns) > 1 else None)
        axes.bar_label(bars, fmt="%.4g", padding=2, fontsize="x-small")
    middle = (len(columns) - 1) * height / 2
    axes.set_yticks([place + middle for place in range(len(names))], names, fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title, fontsize="medium")


def _makespan(figures: Found) -> Any:
    figure, (axes,) = panels(1, 1, (8, 4.5))
    columns = {
        label: [row[key] for row in figures.values()]
        for label, key in (("lock-step", "lockstep_s"), ("ours", "ours_s"), ("bound", "bound_s"))
    }
    _bars(axes, "seconds until the last batch is there (virtual clock)", list(figures), columns)
    return figure


def _staleness(figures: Found) -> Any:
    rows = figures["simulated"]
    figure, axes = panels(1, 3, (13, 4.2), "by the bound of staleness (virtual clock)")
    keys = (
        ("seconds", "seconds of ten steps"),
        ("discarded", "share of sampled tokens discarded"),
        ("slowness", "seconds of trained trees over those of offered"),
    )
    for one, (key, title) in zip(axes, keys, strict=True):
        for rule in ("ours", "drop"):
            of_rule = {k.split()[1]: v[key] for k, v in rows.items() if k.startswith(f"{rule} ")}
            one.plot([int(bound) for bound in of_rule], list(of_rule.values()), "o-", label=rule)
        if key == "seconds":
            one.axhline(rows["wait"][key], color="0.5", linestyle="--", label="lock-step")
        one.set(title=title, xlabel="max_staleness", ylim=(0, None))
        one.locator_params(axis="x", integer=True)
    return figure


def _transport(figures: Found) -> Any:
    figure, (left, right) = panels(1, 2, (11, 4))
    _bars(
        left, "bytes a sampled token", list(figures),
        {"bytes": [row["bytes_a_token"] for row in figures.values()]},
    )  # fmt: skip
    columns = {
        label: [row[key] for row in figures.values()]
        for label, key in (("write", "write_us"), ("read", "read_us"))
    }
    _bars(right, "CPU microseconds a sampled token", list(figures), columns)
    return figure


def _fork(figures: Found) -> Any:
    figure, (axes,) = panels(1, 1, (8, 4))
    values = [row["median_ms"] for row in figures.values()]
    _bars(axes, "a fork, median milliseconds (logarithmic)", list(figures), {"ms": values})
    axes.set_xscale("log")
    axes.margins(x=0.3)
    return figure


def _tools(figures: Found) -> Any:
    figure, (axes,) = panels(1, 1, (8, 4))
    columns = {
        label: [row[key] for row in figures.values()]
        for label, key in (("median", "p50_ms"), ("99 of 100", "p99_ms"))
    }
    _bars(axes, "a call, milliseconds (logarithmic)", list(figures), columns)
    axes.set_xscale("log")
    axes.margins(x=0.3)
    return figure


def _paper(figures: Found) -> Any:
    rows = figures["resources"]
    figure, (axes,) = panels(1, 1, (9, 4.5))
    names = [name for name in next(iter(rows.values())) if name.endswith("_share")]
    for gpus, row in rows.items():
        values = [row[name] for name in names]
        axes.plot(values, range(len(names)), "o", label=gpus)
    axes.axvline(1.0, color="0.5", linestyle="--", label="all of one")
    axes.set_yticks(
        range(len(names)), [name.removesuffix("_share").replace("_", " ") for name in names]
    )
    axes.set_xscale("log")
    axes.set_title("how much of one (core, disk, connection) is used", fontsize="medium")
    return figure


def _overhead(figures: Found) -> Any:
    figure, (axes,) = panels(1, 1, (8, 3))
    keys = (
        ("a loop that waits", "floor_us"),
        ("the controller", "cpu_us_per_env_step"),
        ("all processes", "all_processes_us"),
    )
    columns = {label: [row[key] for row in figures.values()] for label, key in keys}
    names = [f"{size} rollouts" for size in figures]
    _bars(axes, "CPU microseconds an env step", names, columns)
    return figure


def _peers(figures: Found) -> Any:
    rows = {name: one["sizes"] for name, one in figures["peers"].items() if one["sizes"]}
    sizes = list(dict.fromkeys(size for row in rows.values() for size in row))
    number = len(sizes) or 1  # nobody has figures: an empty picture
    figure, axes = panels(1, number, (6 * number, 4.5), "CPU microseconds an env step")
    keys = (("floor", "floor_us"), ("its process", "cpu_us"), ("those below it", "children_us"))
    for one, size in zip(axes, sizes, strict=False):
        those = {name: row[size] for name, row in rows.items() if size in row}
        columns = {label: [row[key] for row in those.values()] for label, key in keys}
        _bars(one, f"{size} rollouts at a time", list(those), columns)
    return figure


PICTURES: dict[str, Callable[[Found], Any]] = {
    "overhead": _overhead,
    "overhead-workers": _overhead,
    "makespan": _makespan,
    "staleness": _staleness,
    "transport": _transport,
    "fork": _fork,
    "tools": _tools,
    "paper": _paper,
    "peers": _peers,
}
