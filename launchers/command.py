"""Common code of the training commands: arguments, run directory, exit code."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from agentenv.assembly.keys.help import KeysParser, add_key_help, refuse_verl_keys
from agentenv.assembly.run.checkpoints import LATEST
from agentenv.assembly.serving.gpus import ASSUMED_GPU_GIB
from agentenv.base.config import load_config
from agentenv.base.errors import EXIT_MISSING

if TYPE_CHECKING:
    from agentenv.assembly.run.rundir import RunDirectory
    from agentenv.assembly.run.terminal import View
    from agentenv.evaluation.subject import Subject

T = TypeVar("T", bound=msgspec.Struct)
Work = Callable[[Any, "RunDirectory", "View", str], Coroutine[Any, Any, None]]
Suggest = Callable[[argparse.Namespace, Path], Mapping[str, str]]


def make_parser(
    prog: str, purpose: str, config_type: type[T], example: str = "", *, resumes: bool = True
) -> KeysParser:
    """CONFIG [key.sub=value ...] [--resume [WHICH]] [--dry-run], with help on tables and keys;
    `example` is the path of a CONFIG. `resumes` adds --resume."""
    usage = f"{prog} CONFIG [key.sub=value ...] [options]"
    parser = KeysParser(prog=prog, usage=usage, description=purpose)
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help=f"TOML file{example and ', e.g. '}{example}"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key.sub=value",
        help="values that override the file's; none removes an optional value or table",
    )
    parser.set_defaults(resume="")
    if resumes:
        parser.add_argument(
            "--resume",
            nargs="?",
            const=LATEST,
            metavar="latest|best|PATH",
            help="continue a stopped run from a checkpoint, by default its last one",
        )
    add_dry_run(parser)
    add_key_help(parser, config_type)
    return parser


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add --dry-run and the options that describe its target machine."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="start nothing: print the configuration, the processes, their GPUs and an estimate of "
        "their memory; check the first and last 1,000 rows of each data file; report the same "
        f"errors as a start; exit code {EXIT_MISSING} if something is missing",
    )
    parser.add_argument(
        "--defaults",
        action="store_true",
        help="with --dry-run: also print keys with default values",
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="dry run for N GPUs; default: this machine's"
    )
    parser.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help=f"memory of one GPU; default: of this machine's, else {ASSUMED_GPU_GIB:g}",
    )


def add_subject(parser: KeysParser, config_type: type[msgspec.Struct], kinds: str) -> None:
    """SUBJECT [key.sub=value ...] and the options of commands with a policy; `kinds` of SUBJECT are
    for its help text."""
    from agentenv.assembly.run.kept import BEST  # late imports: fast --help
    from agentenv.evaluation.subject import LAST, START

    parser.add_argument("subject", metavar="SUBJECT", help=f"run, checkpoint, {kinds}")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of its settings")
    which = "checkpoint of the run; start: its initial model"
    parser.add_argument("--checkpoint", choices=(LAST, BEST, START), default=LAST, help=which)
    parser.set_defaults(resume="", env="")
    add_key_help(parser, config_type)


def subject_of(arguments: argparse.Namespace, view: View, sets: Sequence[str] = ()) -> Subject:
    """The subject of a command that queries a policy. A dry run fetches nothing."""
    from agentenv.evaluation.subject import find_subject  # late: fast --help

    return find_subject(
        arguments.subject,
        sets=sets,
        checkpoint=arguments.checkpoint,
        model=arguments.model,
        tokenizer=arguments.tokenizer,
        report=None if arguments.dry_run else view.log,
    )


def add_questions(parser: KeysParser, config_type: type[msgspec.Struct], out: str) -> None:
    """`add_subject`, and the options of commands that query a policy; `out` is the help text of
    --out."""
    add_subject(parser, config_type, "model directory, or http(s)://HOST")
    parser.add_argument("--env", default="", help="environment id; default for a run: its own")
    parser.add_argument("--n", type=int, default=0, help="first n questions of each set; 0: all")
    parser.add_argument("--model", default="", help="for an endpoint: name of the model")
    of_server = "for a vLLM or SGLang server: its tokenizer, to send and receive token ids"
    parser.add_argument("--tokenizer", default="", metavar="DIR", help=of_server)
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. A `key=value` after --resume is an override, not a checkpoint. Options
    of a dry run require --dry-run."""
    arguments = parser.parse_intermixed_args(argv)
    if "=" in arguments.resume and not Path(arguments.resume).exists():
        arguments.overrides.append(arguments.resume)
        arguments.resume = LATEST
    for name in ("defaults", "gpus", "gpu_memory"):
        value, option = getattr(arguments, name), f"--{name.replace('_', '-')}"
        if value is not None and value is not False and not arguments.dry_run:
            parser.error(f"{option} requires --dry-run")
        if value is not None and value < 0:
            parser.error(f"{option} must not be negative")
    return arguments


async def until_stopped(view: View, lines: Iterable[str]) -> None:
    """Print how to reach a server that is ready, and return at Ctrl-C or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    view.end()
    for line in lines:
        view.console.print(line, markup=False, soft_wrap=True)  # with a new key
    await stop.wait()
    view.log("stopping")


def run_command(
    arguments: argparse.Namespace,
    config_type: type[T],
    work: Work,
    then: str = "",
    suggest: Suggest | None = None,
) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 3 something is
    missing (dry run only), 130 interrupted.

    `work` trains; `then` names the phase after the start-up, for the terminal. After a successful
    run, the terminal shows the commands that `suggest` returns for the arguments and the folder of
    the run."""
    from agentenv.assembly.parts.session import run_session
    from agentenv.assembly.run.exits import exit_code_of, run_until_done

    def execute(view: View) -> int:
        left_out: list[str] = []
        config: Any = load_config(
            config_type,
            arguments.config,
            arguments.overrides,
            report=left_out.append,
            explain=refuse_verl_keys,
        )
        folder = Path(config.run.dir) / (config.run.name or arguments.config.stem)
        if arguments.dry_run:
            for line in left_out:
                view.log(line)
            from agentenv.lab.diagnosis.dry_run import dry_run  # slow to load

            return dry_run(config, arguments, view, folder)
        resume = arguments.resume
        with run_session(config, folder, view, resume=bool(resume), left_out=left_out) as run:
            view.wait_for(f"getting {folder} ready", then)
            run_until_done(work(config, run, view, resume), view)
            if suggest is not None:
                view.suggest(suggest(arguments, folder))
        return 0

    return exit_code_of(execute, "writing the run")
