"""Simulations against real runs: `python -m tests.simulated`, a part of `make long`.

The quick start's model, after its cold start, is trained a few steps on the CPU by the real
command, with the embedded engine, real tools and a real learner. Two runs, of a light and of a full
load, provide the traces: the steps of one are too similar to show how durations grow with the work.
Two others, with other settings, are compared with their simulations from the traces alone, next to
the cores used by other processes meanwhile, sessions of the sandbox among them: if these differ
between runs, a difference means little. Exit status: 1 if seconds per step, the busy share of the
learner, or staleness are over 15 % off.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.config import load_config
from benchmarks.parts import simulation as machine
from benchmarks.parts.timings import Trace, read_trace
from tests.support.snippets import ran

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS = 16
ALLOWED = 0.15
BASE = (
    "queue.groups_per_step=16", "learner.groups_per_minibatch=8",
    # A policy that learns has ever fewer groups with signal, in each run at another step.
    "learner.learning_rate=1e-12", "learner.muon_learning_rate=1e-12",
)  # fmt: skip
TRACED = {
    "full load": (),
    "light load": ("queue.groups_per_step=4", "learner.groups_per_minibatch=4"),
}
OTHERS = {
    "no staleness, more trees": ("queue.max_staleness=0", "queue.groups_per_step=32"),
    "deeper queue, smaller groups": ("queue.max_staleness=3", "algorithm.group_size=4"),
}


def train(config: Path, name: str, *overrides: str) -> tuple[Path, float]:
    """The folder of a successful run, and the number of cores used by other processes meanwhile."""
    before_s, began_s = cpu_of_others_s(), time.monotonic()
    keys = [f"run.dir={config.parent}/runs", f"run.name={name}", *overrides]
    ran(sys.executable, "-m", "benchmarks.parts.timings", config, *keys, timeout=None)
    others = (cpu_of_others_s() - before_s) / (time.monotonic() - began_s)
    return config.parent / "runs" / name, others


def cpu_of_others_s() -> float:
    """CPU seconds of the machine since its start, but for those of our own processes that ended."""
    user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split()[1:4])
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole_s = (user + nice + system) / os.sysconf("SC_CLK_TCK")
    return whole_s - ours.ru_utime - ours.ru_stime


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        text = (ROOT / "configs" / "quickstart.toml").read_text(encoding="utf-8")
        whole, plain = Path(folder) / "whole.toml", Path(folder) / "plain.toml"
        whole.write_text(text)
        plain.write_text(text.split("[sft]")[0])
        cold, _ = train(
            whole, "cold", "train.num_steps=1", "eval.sets={}", 'checkpoint.best_metric=""'
        )
        keys = (*BASE, f"model.path={cold}/checkpoints/step-000000", f"train.num_steps={NUM_STEPS}")
        names = ("s a step", "learner works", "staleness", "others")
        print_line(f"{'':32}" + "".join(f" {name:>16}" for name in names))
        traced = {
            name: train(plain, name.replace(" ", "-"), *keys, *overrides)
            for name, overrides in TRACED.items()
        }
        traces = {name: read_trace(run) for name, (run, _) in traced.items()}
        model, work = machine.fitted(*traces.values()), machine.together([*traces.values()])
        for name, overrides in TRACED.items():
            said = of(plain, (*keys, *overrides), work, model)
            show(f"traced: {name}", machine.recorded(traces[name]), said, traced[name][1])
        worst = 0.0
        for name, overrides in OTHERS.items():
            run, others = train(plain, name.replace(" ", "-"), *keys, *overrides)
            found = machine.recorded(read_trace(run))
            said = of(plain, (*keys, *overrides), work, model)
            worst = max(worst, show(name, found, said, others))
    print_line(f"at most {worst:.0%} off, allowed are {ALLOWED:.0%}")
    return int(worst > ALLOWED)


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def of(
    config: Path, keys: tuple[str, ...], work: Trace, model: machine.ServiceModel
) -> machine.Figures:
    """The figures of the simulation."""
    loaded = load_config(TrainConfig, config, list(keys))
    return machine.simulate(
        loaded, work, machine.Variant(name="as configured"), 2 * NUM_STEPS, model
    )


def show(name: str, real: machine.Figures, simulated: machine.Figures, others: float) -> float:
    """A line; the largest of the relative errors."""
    pairs = [
        (real.step_s, simulated.step_s),
        (1 - real.idle_share, 1 - simulated.idle_share),
        (real.staleness, simulated.staleness),
    ]
    cells = [f"{one:6.2f} as {other:6.2f}" for one, other in pairs] + [f"{others:.1f} cores"]
    print_line(f"{name:32}" + "".join(f" {cell:>16}" for cell in cells))
    return max(abs(other - one) / max(one, 1e-9) for one, other in pairs)


if __name__ == "__main__":
    sys.exit(main())
