"""The command line of `launchers/synthesize.py`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from launchers.assembly import import_from_working_directory
from launchers.evaluation.arguments import add_arguments, given_keys
from launchers.evaluation.subject import Subject, find_subject
from launchers.exits import to_its_end
from launchers.planning.dry_run import check_arguments, dry_run
from launchers.synthesis.config import Plan, SynthesisConfig, make_plan
from launchers.synthesis.run import synthesize
from launchers.view import View

FOLDER = "synthesis"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    arguments = _parse(argv)
    import_from_working_directory()
    view = View()
    return to_its_end(
        lambda: _run(arguments, view),
        view,
        writing="writing the data",
        interrupted="interrupted; the same command goes on with what is missing",
    )


def _run(arguments: argparse.Namespace, view: View) -> int:
    subject = find_subject(arguments.subject, model=arguments.model, tokenizer=arguments.tokenizer)
    plan = _plan(arguments, subject, view)
    if arguments.dry_run:
        dry_run(plan.evaluation, arguments, view, subject.run, str(subject.model or ""))
        return 0
    out = arguments.out or Path(FOLDER) / f"{subject.name}-{'-'.join(plan.sets)}".replace("/", "-")
    try:
        num_failed = asyncio.run(synthesize(plan, subject, out, view))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    if num_failed:
        view.say(f"{num_failed} trajectories failed; the same command asks them again")
    return 0


def _plan(arguments: argparse.Namespace, subject: Subject, view: View) -> Plan:
    """The subject's settings are asked for, its sets are not."""
    own = {key: value for key, value in subject.raw.items() if key != "sets"}
    raw, source = given_keys(arguments, subject._replace(raw=own), SynthesisConfig, view.say)
    plan = make_plan(raw, source)
    if not arguments.n:
        return plan
    sets = {name: replace(one, max_tasks=arguments.n) for name, one in plan.evaluation.sets.items()}
    return replace(plan, evaluation=replace(plan.evaluation, sets=sets))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launchers/synthesize.py",
        usage="synthesize.py SUBJECT [key.sub=value ...] [options]",
        description="Sample trajectories of questions with and without tools, and sort them into "
        "data for launchers/sft.py and questions for launchers/train.py.",
    )
    out = f"where the data goes, and is taken up again; default {FOLDER}/NAME"
    add_arguments(parser, SynthesisConfig, out)
    arguments = parser.parse_intermixed_args(argv)
    check_arguments(parser, arguments)
    return arguments
