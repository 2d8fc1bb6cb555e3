"""The command line of `launchers/evaluate.py`."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from agentenv.config import Tree, override_kinds, read_toml, to_plain
from agentenv.errors import ConfigError
from launchers.assembly import import_from_working_directory
from launchers.evaluation.ask import SET, ask_one
from launchers.evaluation.assisted import check_assist
from launchers.evaluation.report import write_report
from launchers.evaluation.run import run_evaluation
from launchers.evaluation.run_config import EvaluateConfig, merged, resolve_sets
from launchers.evaluation.store import Saved, identity
from launchers.evaluation.subject import Subject, find_subject, weights_digest
from launchers.exits import to_its_end
from launchers.keys import add_key_help
from launchers.planning.dry_run import add_dry_run, check_arguments, dry_run
from launchers.verl_keys import refuse_verl_keys
from launchers.view import View

STORED = ("compare", "regrade", "report")  # commands over stored evaluations
FOLDER = "evals"
EPILOG = "of stored ones: evaluate.py report DIR, compare A B, regrade DIR [grader.key=value]"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    if argv and argv[0] in STORED:
        found = importlib.import_module(f"launchers.evaluation.{argv[0]}")
        code: int = found.main(argv[1:])
        return code
    arguments = _parse(argv)
    import_from_working_directory()
    view = View()
    return to_its_end(
        lambda: _run(arguments, view),
        view,
        writing="writing the evaluation",
        interrupted="interrupted; the same command goes on with what is missing",
    )


def _run(arguments: argparse.Namespace, view: View) -> int:
    names = [name for name in arguments.set.split(",") if name]
    subject = find_subject(
        arguments.subject,
        sets=[] if arguments.config else names,
        best=arguments.checkpoint == "best",
        model=arguments.model,
        tokenizer=arguments.tokenizer,
    )
    config = _configuration(arguments, subject, view)
    config = _chosen(config, names, arguments.n)
    check_assist(config)
    if arguments.dry_run:
        dry_run(config, arguments, view, subject.run, str(subject.model or ""))
        return 0
    if arguments.question:
        return asyncio.run(ask_one(config, subject, arguments.question, arguments.answer, view))
    out = arguments.out or Path(FOLDER) / _name(config, subject)
    try:
        num_failed = asyncio.run(run_evaluation(config, subject, out, view))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    if num_failed:
        view.say(f"{num_failed} trajectories failed; the same command asks them again")
    write_report(out, view)
    return 0


def _configuration(arguments: argparse.Namespace, subject: Subject, view: View) -> EvaluateConfig:
    """That of the subject, over it the file, over both the command line."""
    raw: Tree = subject.raw
    source = arguments.subject
    if arguments.config is not None:
        source = str(arguments.config)
        given = read_toml(arguments.config)
        raw = merged({k: v for k, v in raw.items() if k != "sets" or not _asks(given)}, given)
        if subject.model is None:
            raw["engine"] = merged(_own_engine(raw), subject.raw["engine"])
    if any(text.startswith("data=") for text in arguments.overrides):
        raw = {key: value for key, value in raw.items() if key != "sets"}
    if arguments.env:
        raw = merged(raw, {"env": {"id": arguments.env}})
    override_kinds(EvaluateConfig, raw, arguments.overrides, view.say)
    if arguments.question:  # instead of those that the rest of the command names
        raw = {key: value for key, value in raw.items() if key not in ("data", "rows")}
        raw["sets"] = {SET: {"path": "-"}}
    refuse_verl_keys(raw, source)
    return resolve_sets(raw, source)


def _asks(raw: Tree) -> bool:
    return bool(raw.get("sets") or raw.get("data"))


def _own_engine(raw: Tree) -> Tree:
    """The file's keys of an endpoint; those of another engine mean nothing to it."""
    engine = raw.get("engine") or {}
    return engine if engine.get("name") == "openai" else {}


def _chosen(config: EvaluateConfig, names: Sequence[str], num_tasks: int) -> EvaluateConfig:
    for name in names:
        if name not in config.sets:
            raise ConfigError(f"--set {name}: there are the sets {sorted(config.sets)}")
    sets = {name: config.sets[name] for name in names or config.sets}
    if num_tasks:
        sets = {name: replace(one, max_tasks=num_tasks) for name, one in sets.items()}
    return replace(config, sets=sets)


def _name(config: EvaluateConfig, subject: Subject) -> str:
    """A directory of its own for each thing asked: the same command finds it again."""
    told = {"url": subject.name}
    if subject.model is not None:
        told = {"weights": weights_digest(subject.model)}
    saved = Saved(subject=told, run="", config=to_plain(config))
    digest = hashlib.sha256(msgspec.json.encode(identity(saved), order="sorted")).hexdigest()
    return f"{subject.name.replace('/', '-')}-{'-'.join(config.sets)}"[:80] + f"-{digest[:6]}"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launchers/evaluate.py",
        usage="evaluate.py SUBJECT [key.sub=value ...] [options]",
        description="Evaluate a run, a checkpoint, a model directory, or an endpoint by its URL, "
        f"through the env API. {EPILOG}.",
    )
    parser.add_argument("subject", metavar="SUBJECT", help="directory, or http(s)://HOST[:PORT]")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of an evaluation")
    parser.add_argument("--env", default="", help="environment id; of a run: its own")
    parser.add_argument("--n", type=int, default=0, help="first n questions of each set; 0: all")
    parser.add_argument(
        "--set", default="", metavar="NAMES", help="sets by name, with commas; of a run: the one "
        "that it reports"
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint", choices=("last", "best"), default="last", help="which one of a run"
    )
    parser.add_argument("--model", default="", help="of an endpoint: the model's name there")
    parser.add_argument(
        "--tokenizer", default="", metavar="DIR",
        help="of a vLLM or SGLang server: its tokenizer, so that token ids go in and out"
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help=f"where rows and report go, and are taken up again; default {FOLDER}/NAME"
    )  # fmt: skip
    parser.add_argument("--question", default="", help="stream one rollout of this question")
    parser.add_argument(
        "--answer", action="append", default=[], help="its right answer, so that it is graded"
    )
    add_dry_run(parser)
    add_key_help(parser, EvaluateConfig)
    arguments = parser.parse_intermixed_args(argv)
    check_arguments(parser, arguments)
    return arguments
