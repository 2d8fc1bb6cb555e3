"""Compares the arms of a sweep, or runs, by their curves, and two evaluations by their questions:
`agentenv compare SWEEP`, `compare RUN RUN ...`, `compare EVALUATION EVALUATION`; see docs/sets.md
and docs/evaluation.md. `agentenv evaluate compare` is the same command."""

from __future__ import annotations

import argparse
import asyncio
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from agentenv.assembly.keys.help import KeysParser
from agentenv.assembly.run.exits import exit_code_of
from agentenv.assembly.run.terminal import View
from agentenv.base.disk import write_whole
from agentenv.base.errors import ConfigError
from agentenv.evaluation.store import ROWS_FILE
from agentenv.evaluation.sweep import START, SWEEP_FILE, read_made, runs_of


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input."""
    parser = KeysParser(
        prog="agentenv compare",
        description="Compare the arms of a sweep, or runs: held-out success against tool calls; or "
        "two stored evaluations, paired by the questions that both contain.",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="PATH", help="a sweep, runs, or two evaluations"
    )
    parser.add_argument("--baseline", default="", metavar="ARM", help="default: the sweep's")
    parser.add_argument(
        "--set", default="", metavar="NAME", help="evaluation set; default: reported"
    )
    out = (
        "of runs: a folder, default the sweep or here; of evaluations: a Markdown file of all "
        "changed questions"
    )
    parser.add_argument("--out", type=Path, metavar="PATH", help=out)
    return exit_code_of(partial(_run, parser.parse_args(argv)), "writing the comparison")


def _run(options: argparse.Namespace, view: View) -> int:
    if all((one / ROWS_FILE).is_file() for one in options.runs):
        return _compare_evaluations(options.runs, options.out, view)
    from agentenv.evaluation import sets as comparison

    baseline, unfinished = options.baseline, list[Path]()
    runs: dict[str, dict[int, Path]] = {}
    if len(options.runs) == 1 and (options.runs[0] / SWEEP_FILE).exists():
        out = options.out or options.runs[0]
        made = read_made(options.runs[0])
        baseline = baseline or made.baseline
        for run in runs_of(options.runs[0], made):
            if run.arm != START:
                if run.state() == "finished":
                    runs.setdefault(run.arm, {})[run.seed] = run.path
                else:
                    unfinished.append(run.path)
    else:
        out = options.out or Path()
        runs = comparison.arms_by_keys(options.runs)
        baseline = baseline or next(iter(runs))
    found, curves = comparison.compare(runs, baseline, dataset=options.set)
    for table in comparison.tables(found):
        view.show(table)
    if unfinished:
        view.warn(f"skipped, since unfinished: {', '.join(map(str, unfinished))}")
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "comparison.json", msgspec.json.format(msgspec.json.encode(found)))
    comparison.plot(curves, out / "comparison.png")
    view.log(f"wrote comparison.json and comparison.png to {out}")
    return 0


def _compare_evaluations(folders: Sequence[Path], out: Path | None, view: View) -> int:
    from agentenv.evaluation.compare import compare  # slow to load

    if len(folders) != 2:
        raise ConfigError(f"expected two evaluations, got {len(folders)}")
    first, second = folders
    asyncio.run(compare(first, second, out, view))
    both = shlex.join(map(str, folders))
    view.suggest({f"agentenv view {both}": "question by question, in the browser"})
    return 0
