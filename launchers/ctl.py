"""Controls a run while it trains: `agentenv ctl RUN [COMMAND ...]`, see docs/control.md.

The process that trains in RUN answers over a socket that only its owner can open. Replies contain
metadata only.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from agentenv.assembly.run import control
from agentenv.assembly.run.control import Command, ControlRequest, RequestDone, UnreachableError
from agentenv.assembly.run.exits import exit_code_of
from agentenv.assembly.run.lock import LockHolder
from agentenv.assembly.run.tables import Table
from agentenv.assembly.run.terminal import View
from agentenv.base.errors import ConfigError, ForeignError
from agentenv.base.untrusted import decode, decode_loose

COMMANDS = get_args(Command)
NUM_TREES = {"why": range(2), "cancel": range(1, sys.maxsize)}  # of the others: none
EPILOG = """commands:
  status                  phase, step, trees, queue, engine, longest wait (the default)
  why [TREE]              waits of all rollouts, or of one tree in detail
  cancel TREE ...         cancel trees: they fail, with the kind `cancelled`, and are not trained
  pause, resume           no tree, turn or update starts between the two
  checkpoint              save a checkpoint before the next update

exit codes: 0 done (`status`: the run trains or has finished), 1 no process trains in RUN or it does
not answer, 2 rejected or bad arguments, 130 interrupted"""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 no answer, 2 rejected or bad arguments, 130 interrupted."""
    arguments = _parse(argv)
    interrupted = "interrupted; the run continues and may still carry out the request"
    return exit_code_of(partial(_run, arguments), str(arguments.run), interrupted=interrupted)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="agentenv ctl",
        usage="agentenv ctl RUN [COMMAND ...] [--json]",
        description="Control a run while it trains.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", type=_folder, metavar="RUN", help="folder of the run, e.g. runs/quickstart"
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=COMMANDS,
        default="status",
        metavar="COMMAND",
        help="see below",
    )
    parser.add_argument("trees", nargs="*", type=int, metavar="TREE", help="numbers of trees")
    parser.add_argument("--json", action="store_true", help="print the reply as JSON")
    arguments = parser.parse_intermixed_args(argv)
    num_trees = len(arguments.trees)
    if num_trees not in NUM_TREES.get(arguments.command, range(1)):
        parser.error(f"{arguments.command}: {num_trees} trees are given; see --help")
    return arguments


def _folder(text: str) -> Path:
    if text in COMMANDS and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"the run comes first: agentenv ctl RUN {text}")
    return Path(text)


def _run(arguments: argparse.Namespace, view: View) -> int:
    run = arguments.run
    if not run.is_dir():
        raise ConfigError(f"{run}: no such folder; expected the folder of a run")
    request = ControlRequest(arguments.command, arguments.trees)
    if not arguments.json:
        view.wait_for(f"waiting for the process that trains in {run}")
    try:
        reply = control.send(run, request)
    except UnreachableError as error:
        num_steps = _finished(run)
        if num_steps is None:
            raise UnreachableError(_why(run, error)) from None
        text = f"{run} has finished: {num_steps} of {num_steps} updates"
        if request.command != "status":
            raise UnreachableError(f"{text}; view it with `agentenv view {run}`") from None
        facts = {"phase": "finished", "step": num_steps, "num_steps": num_steps}
        reply = RequestDone([text], facts)
    view.end()
    if arguments.json:
        sys.stdout.write(json.dumps({**reply.facts, "lines": reply.lines}, indent=2) + "\n")
    else:
        if request.command in ("status", "why"):
            show_facts(reply.facts, view)
        for line in reply.lines:
            view.log(line)
        if following := _next(run, request.command, reply.facts):
            view.suggest(following)
    return 0


def _finished(run: Path) -> int | None:
    """The number of updates of a finished run; None if a process holds the run, or if the run, or a
    continuation of it, stopped before its end."""
    try:
        if (run / "lock").exists() and (run / "lock").read_bytes():
            return None
        summary = decode((run / "summary.json").read_bytes(), dict[str, Any])
        rows = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        num_steps = int(summary["num_steps"])
        return num_steps if max(decode_loose(row)["step"] for row in rows) <= num_steps else None
    except (OSError, ForeignError, ValueError, KeyError, TypeError):
        return None


def _why(run: Path, error: UnreachableError) -> str:
    """Why no process answers, as far as the folder shows, and a remedy. Raises ConfigError for a
    folder that does not contain a run."""
    try:
        holder = decode((run / "lock").read_bytes() or b"null", LockHolder | None)
    except (OSError, ForeignError):
        holder = None
    then = (
        f"view it with `agentenv view {run}`, or repeat the command that started it with --resume"
    )
    if holder is None:
        is_evaluation = (run / "rows.jsonl").is_file()
        if is_evaluation or not (run / "config.json").is_file():
            raise ConfigError(
                f"{run} is not a run of `agentenv train`; expected a folder such as runs/quickstart"
            )
        return f"no process trains in {run} now; {then}"
    if holder.host != socket.gethostname():
        return (
            f"{run} is trained by process {holder.pid} on {holder.host}, which can only be "
            "controlled from that host"
        )
    if not os.path.exists(f"/proc/{holder.pid}"):
        return f"the process that trained in {run} was killed; {then}"
    who = f"process {holder.pid} trains in {run} since {holder.since}, but does not answer"
    return f"{who}: {error}"


# Output on the terminal.


def show_facts(facts: dict[str, Any], view: View) -> None:
    """Print the facts that are set; lists are tables."""
    for name, value in facts.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            names = [key for key in value[0] if any(one[key] not in ("", False) for one in value)]
            rows = [[_text(one[key]) for key in names] for one in value]
            left = [place for place, key in enumerate(names) if isinstance(value[0][key], str)]
            columns = [*map(_title, names)]
            view.show(Table(title=_title(name), columns=columns, rows=rows, left=left))
        elif value not in ("", {}, []):
            view.log(f"{_title(name):<18} {_text(value)}")


def _title(name: str) -> str:
    return name.removeprefix("num_").replace("_", " ")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    return f"{round(value, 1):g}" if isinstance(value, float) else str(value)


def _next(run: Path, command: Command, facts: dict[str, Any]) -> dict[str, str]:
    """Commands to suggest next, each with its use."""
    page = {f"agentenv view {run}": "its curves and trees"}
    if command == "pause" or facts.get("is_paused"):
        return {f"agentenv ctl {run} resume": "end the pause"}
    if command == "status" and facts.get("phase") != "finished":
        return {f"agentenv ctl {run} why": "waits of its rollouts", **page}
    if waits := facts.get("waits"):
        return {f"agentenv ctl {run} why {waits[0]['tree']}": "this tree in detail"}
    return page if command in ("status", "checkpoint") else {}
