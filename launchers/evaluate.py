"""Evaluates: `agentenv evaluate SUBJECT [key=value ...]`, see docs/evaluation.md.

SUBJECT is a run, a checkpoint, a model directory, or the URL of an endpoint. The env API, actor,
renderer, tools and limits are those of training.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from agentenv.assembly.keys.evaluation import EvaluateConfig, resolve_sets
from agentenv.assembly.keys.help import KeysParser
from agentenv.assembly.run.exits import exit_code_of, run_until_done
from agentenv.assembly.run.terminal import View
from agentenv.assembly.serving.gpus import gpus_for_others
from agentenv.base.installation import require_train
from agentenv.evaluation.report import report_of
from agentenv.evaluation.run import FOLDER, chosen_sets, default_folder, evaluate_and_report
from agentenv.evaluation.subject import configured, lower_limits
from agentenv.launchers import compare
from agentenv.launchers.command import add_dry_run, add_questions, parse, subject_of

EPILOG = (
    "Stored evaluations: agentenv evaluate report DIR, compare A B, regrade DIR [grader.key=value]"
)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 3 something is
    missing (dry run only), 130 interrupted."""
    if argv and argv[0] in STORED:
        return STORED[argv[0]](argv[1:])
    parser = KeysParser(
        prog="agentenv evaluate",
        usage="agentenv evaluate SUBJECT [key.sub=value ...] [options]",
        description="Evaluate a run, a checkpoint, a model directory, or an endpoint by its URL. "
        f"{EPILOG}.",
    )
    out = f"folder of rows and report, from which the command also resumes; default {FOLDER}/NAME"
    add_dry_run(parser)
    add_questions(parser, EvaluateConfig, out)
    parser.add_argument(
        "--set",
        default="",
        metavar="NAMES",
        help="sets by name, separated by commas; default for a run: the one that it reports",
    )
    return exit_code_of(
        partial(_run, parse(parser, argv)),
        "writing the evaluation",
        interrupted="interrupted; the same command continues with the missing trajectories",
    )


def _run(arguments: argparse.Namespace, view: View) -> int:
    """Evaluate the subject of the arguments; returns the exit code."""
    names = [name for name in arguments.set.split(",") if name]
    subject = subject_of(arguments, view, [] if arguments.config else names)
    config = configured(arguments, subject, EvaluateConfig, resolve_sets, view.log)
    config = chosen_sets(config, names, arguments.n)
    for line in lower_limits(config, subject.raw):
        view.warn(line)
    if arguments.dry_run:
        from agentenv.lab.diagnosis.dry_run import dry_run  # slow to load

        return dry_run(config, arguments, view, subject.run, str(subject.model or ""))
    if subject.model is not None:
        require_train("torch", "transformers")
    view.wait_for("getting ready", "the questions")
    out = arguments.out or default_folder(config, subject)
    with gpus_for_others(config):
        problem, _ = run_until_done(evaluate_and_report(config, subject, out, view), view)
    view.suggest(next_commands(out))
    if problem is not None:
        raise problem
    return 0


def next_commands(out: Path) -> dict[str, str]:
    """Commands to suggest after an evaluation, each with its use."""
    path = shlex.quote(str(out))
    return {
        f"agentenv view {path}": "every trajectory, in the browser",
        f"agentenv evaluate compare {path} OTHER": "a paired comparison with another evaluation",
    }


# Commands over stored evaluations.


def _report(argv: Sequence[str]) -> int:
    parser = KeysParser(
        prog="agentenv evaluate report",
        description="Report a stored evaluation: on the terminal, in summary.json and in "
        "report.md.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--k", default="", help="k of pass@k and maj@k, e.g. 1,3,5; default 1,2,4,.."
    )
    parser.add_argument(
        "--compat",
        choices=("reference",),
        default="",
        help="reference: em, F1, contains and math of the published code",
    )
    arguments = parser.parse_args(argv)
    ks = [int(k) if k.strip().isdecimal() else 0 for k in arguments.k.split(",") if k]
    if not all(ks):
        parser.error(f"--k {arguments.k}: expected numbers from 1, e.g. 1,3,5")

    def work(view: View) -> None:
        asyncio.run(report_of(arguments.folder, view, ks=ks, compat=arguments.compat))
        view.suggest(next_commands(arguments.folder))

    return exit_code_of(work, "writing the report")


def _regrade(argv: Sequence[str]) -> int:
    parser = KeysParser(
        prog="agentenv evaluate regrade",
        description="Regrade the stored trajectories of an evaluation, without generating.",
        epilog="grader.key=value changes that key of the evaluation's grader, sets.NAME.grader."
        "key=value that of one set; a new grader.kind drops the keys that it does not use. Without "
        "any, the same grader regrades.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("overrides", nargs="*", default=[], metavar="grader.key=value")
    given = parser.parse_args(argv)

    def work(view: View) -> None:
        from agentenv.evaluation.regrade import regrade

        asyncio.run(regrade(given.folder, given.overrides, view))
        view.suggest(next_commands(given.folder))

    return exit_code_of(work, "writing the grades")


STORED = {"report": _report, "compare": compare.main, "regrade": _regrade}
