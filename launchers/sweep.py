"""Trains several arms on several seeds: `agentenv sweep SUBJECT [key.sub=value ...]`, see
docs/sets.md.

SUBJECT is a configuration of training, or a sweep file that names one.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from agentenv.assembly.keys.help import KeysParser
from agentenv.assembly.run.exits import exit_code_of
from agentenv.assembly.run.tables import Table
from agentenv.assembly.run.terminal import View
from agentenv.base.config import read_toml
from agentenv.base.errors import ConfigError
from agentenv.evaluation import sweep

FOLDER = Path("sweeps")


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 a run failed, 2 bad input, 130 interrupted."""
    return exit_code_of(
        partial(_run, _parse(argv)),
        "writing the sweep",
        interrupted="interrupted; the same command continues and keeps finished runs",
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = KeysParser(prog="agentenv sweep", description="Train several arms on several seeds.")
    parser.add_argument("subject", type=Path, metavar="SUBJECT", help="TOML file of a run or sweep")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value")
    parser.add_argument(
        "--seeds", metavar="LIST", help="such as 0-4,7; default: the file's, or 0-2"
    )
    arms = "one arm per value; if repeated, per combination"
    parser.add_argument("--vary", action="append", default=[], metavar="key.sub=V,V", help=arms)
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: sweeps/NAME of SUBJECT")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="concurrent runs; default 1"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, list the runs, start none"
    )
    options = parser.parse_intermixed_args(argv)
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    return options


def _config(options: argparse.Namespace) -> sweep.SweepConfig:
    if "arms" in read_toml(options.subject):  # else the configuration of a run
        if options.overrides or options.vary:
            raise ConfigError(
                f"{options.subject} is a sweep file, which names overrides and arms itself; "
                "expected none on the command line"
            )
        config = sweep.read_sweep(options.subject)
    else:
        arms = sweep.grid(options.vary) if options.vary else {"all": []}
        config = sweep.SweepConfig(
            config=str(options.subject.resolve()),
            seeds="0-2",
            arms=arms,
            overrides=options.overrides,
        )
    if options.seeds:
        config.seeds = options.seeds
    return config


def _run(options: argparse.Namespace, view: View) -> int:
    config = _config(options)
    made = sweep.check(config)
    folder = options.out or FOLDER / options.subject.stem
    if not options.dry_run:
        made = sweep.remember(folder, made)
    runs = list(sweep.runs_of(folder, made))
    waiting = [run for run in runs if run.state() != "finished"]
    if options.dry_run:
        view.show(_plan(runs, made))
        view.log(f"{len(waiting)} of {len(runs)} runs to train; nothing was started")
        return 0
    view.log(f"{len(waiting)} of {len(runs)} runs to train, {options.jobs} at a time, in {folder}")
    done = len(runs) - len(waiting)

    def report(run: sweep.SweepRun, outcome: str, why: str) -> None:
        nonlocal done
        done += outcome == "finished"
        view.log(f"{run}: {outcome} ({done} of {len(runs)})" + (f": {why}" if why else ""))

    failed = asyncio.run(sweep.train_all(made.config, runs, jobs=options.jobs, report=report))
    for run in failed:
        view.warn(f"{run} failed: see {run.log}")
    if failed:
        view.log("next: fix the cause and repeat the command; finished runs are kept")
        return 1
    view.log(f"next: agentenv compare {folder}")
    return 0


def _plan(runs: Sequence[sweep.SweepRun], made: sweep.Made) -> Table:
    """A row per arm: its seeds, and the overrides that only this arm has."""
    rows = []
    for arm in dict.fromkeys(run.arm for run in runs):
        own = made.start if arm == sweep.START else made.arms[arm]
        states = [f"{run.seed} {run.state()}" for run in runs if run.arm == arm]
        rows.append([arm, ", ".join(states), " ".join(own or ())])
    return Table(title="Runs", columns=["arm", "seeds", "overrides"], rows=rows, left=[0, 1, 2])
