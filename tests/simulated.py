"""Simulations against real runs: `python -m tests.simulated`, a part of `make long`.

The quick start's model, behind its cold start, is trained a few steps on the CPU by the real
command, with the embedded engine, real tools and a real learner. One run gives the trace; two
others, with settings that it did not have, are compared with what a simulation says of them from
that trace alone. Exit status: 1 if seconds a step, or the share of the time in which the learner
works, are over 15 % off.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from agentenv.config import load_config
from launchers.config import TrainConfig
from launchers.simulation import Figures, Variant, recorded, simulate
from launchers.timings import Trace, read_trace

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS = 10
ALLOWED = 0.15
NO_EVAL = ("eval.sets={}", "checkpoint.best_metric=")
BASE = (
    *("queue.groups_per_step=8", "learner.groups_per_minibatch=8", "log.timings=true"),
    # A policy that learns has ever fewer groups with signal, in each run at another step.
    *("learner.learning_rate=1e-12", "learner.muon_learning_rate=1e-12"),
)
OTHERS = {
    "no staleness, more trees": ("queue.max_staleness=0", "queue.groups_per_step=16"),
    "deeper queue, smaller groups": ("queue.max_staleness=3", "algorithm.group_size=4"),
}


def train(config: Path, name: str, *overrides: str) -> Path:
    """The folder of a run that has ended well."""
    keys = [f"run.dir={config.parent}/runs", f"run.name={name}", *overrides]
    subprocess.run(
        [sys.executable, ROOT / "launchers" / "train.py", config, *keys],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return config.parent / "runs" / name


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        text = (ROOT / "configs" / "quickstart.toml").read_text(encoding="utf-8")
        whole, plain = Path(folder) / "whole.toml", Path(folder) / "plain.toml"
        whole.write_text(text)
        plain.write_text(text.split("[sft]")[0])
        cold = train(
            whole, "cold", "train.num_steps=1", "eval.sets={}", 'checkpoint.best_metric=""'
        )
        keys = (*BASE, f"model.path={cold}/checkpoints/step-000000", f"train.num_steps={NUM_STEPS}")
        trace = read_trace(train(plain, "trace", *keys))
        say(f"{'':32} {'s a step':>16} {'learner works':>16}")
        show("the trace itself", recorded(trace), of(plain, keys, trace))
        worst = 0.0
        for name, overrides in OTHERS.items():
            found = recorded(read_trace(train(plain, name.replace(" ", "-"), *keys, *overrides)))
            worst = max(worst, show(name, found, of(plain, (*keys, *overrides), trace)))
    say(f"at most {worst:.0%} off, allowed are {ALLOWED:.0%}")
    return int(worst > ALLOWED)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def of(config: Path, keys: tuple[str, ...], trace: Trace) -> Figures:
    """What the simulation says."""
    loaded = load_config(TrainConfig, config, list(keys))
    return simulate(loaded, trace, Variant(name="as configured"), 4 * NUM_STEPS)


def show(name: str, real: Figures, simulated: Figures) -> float:
    """A line; the larger of both relative errors."""
    pairs = [
        (real.step_s, simulated.step_s),
        (1 - real.idle_share, 1 - simulated.idle_share),
    ]
    cells = [f"{one:6.2f} as {other:6.2f}" for one, other in pairs]
    say(f"{name:32} {cells[0]:>16} {cells[1]:>16}")
    return max(abs(other / one - 1) for one, other in pairs)


if __name__ == "__main__":
    sys.exit(main())
