"""The command line of `launchers/synthesize.py`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from agentenv.config import Tree, override_kinds, read_toml
from launchers.assembly import import_from_working_directory
from launchers.evaluation.run_config import merged
from launchers.evaluation.subject import Subject, find_subject
from launchers.exits import to_its_end
from launchers.keys import add_key_help
from launchers.planning.dry_run import add_dry_run, check_arguments, dry_run
from launchers.synthesis.config import Plan, SynthesisConfig, make_plan
from launchers.synthesis.run import synthesize
from launchers.verl_keys import refuse_verl_keys
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
    """The subject's settings without its sets, over them the file, over both the command line."""
    raw: Tree = {key: value for key, value in subject.raw.items() if key != "sets"}
    source = arguments.subject
    if arguments.config is not None:
        source = str(arguments.config)
        given = read_toml(arguments.config)
        if subject.model is None:  # an endpoint: keys of another engine mean nothing to it
            own = given.get("engine") or {}
            engine = merged(own if own.get("name") == "openai" else {}, raw["engine"])
            given = {**given, "engine": engine}
        raw = merged(raw, given)
    if any(text.startswith("data=") for text in arguments.overrides):
        raw = {key: value for key, value in raw.items() if key != "sets"}
    if arguments.env:
        raw = merged(raw, {"env": {"id": arguments.env}})
    override_kinds(SynthesisConfig, raw, arguments.overrides, view.say)
    refuse_verl_keys(raw, source)
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
    parser.add_argument(
        "subject", metavar="SUBJECT", help="run, checkpoint, model directory, or http(s)://HOST"
    )
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of a synthesis")
    parser.add_argument("--env", default="", help="environment id; of a run: its own")
    parser.add_argument("--n", type=int, default=0, help="first n questions of each set; 0: all")
    parser.add_argument("--model", default="", help="of an endpoint: the model's name there")
    parser.add_argument(
        "--tokenizer", default="", metavar="DIR",
        help="of a vLLM or SGLang server: its tokenizer, so that token ids go in and out"
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help=f"where the data goes, and is taken up again; default {FOLDER}/NAME"
    )  # fmt: skip
    add_dry_run(parser)
    add_key_help(parser, SynthesisConfig)
    arguments = parser.parse_intermixed_args(argv)
    check_arguments(parser, arguments)
    return arguments
