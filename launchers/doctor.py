"""Checks a machine, a configuration or the trees of a run: `agentenv doctor`, see
docs/doctor.md.

    agentenv doctor                          check the machine
    agentenv doctor --config X [key=value]   also check the requirements of a run of X
    agentenv doctor audit RUN                regrade the rewards of a run
    agentenv doctor signs RUN                which numbers of a turn show that it was lost
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agentenv.assembly.run.exits import exit_code_of, run_until_done
from agentenv.assembly.run.terminal import View
from agentenv.base.errors import EXIT_FAILED

if TYPE_CHECKING:
    from agentenv.assembly.checks.checks import CheckResult

EPILOG = """exit codes: 0 every check passed or was skipped, 1 one failed, 2 bad arguments

of a run: agentenv doctor audit RUN, agentenv doctor signs RUN [--help]"""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 all passed, 1 a check failed, 2 bad arguments, 130 interrupted."""
    if argv[:1] == ["audit"]:
        from agentenv.lab.diagnosis.audit import main as audit

        return audit(argv[1:])
    if argv[:1] == ["signs"]:
        from agentenv.lab.diagnosis.signs import main as signs

        return signs(argv[1:])
    arguments = make_parser().parse_intermixed_args(argv)
    return exit_code_of(lambda view: run_until_done(_run(arguments, view), view), "the checks")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentenv doctor",
        usage="agentenv doctor [--config CONFIG [key.sub=value ...]] [options]",
        description="Check this machine and a training configuration.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, help="configuration of agentenv train; none: check the machine alone"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--offline", action="store_true", help="no requests to other machines")
    parser.add_argument("--quick", action="store_true", help="do not start learner and engine")
    return parser


async def _run(arguments: argparse.Namespace, view: View) -> int:
    from agentenv.lab.diagnosis.doctor import examine, show  # slow to load

    results: list[CheckResult] = []
    async for result in examine(
        arguments.config,
        arguments.overrides,
        is_offline=arguments.offline,
        is_quick=arguments.quick,
        report=lambda text: None if arguments.json else view.log(text),
        on_begin=lambda name: None if arguments.json else view.wait_for(f"checking {name}"),
    ):
        view.end()
        results.append(result)
        if not arguments.json:
            show(result, view)
    states = [one.state for one in results]
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(results)).decode() + "\n")
    else:
        view.console.print(
            f"\n{states.count('passed')} passed, {states.count('failed')} failed, "
            f"{states.count('skipped')} skipped"
        )
        view.suggest(next_commands(arguments, "failed" in states))
    return EXIT_FAILED if "failed" in states else 0


def next_commands(arguments: argparse.Namespace, has_failed: bool) -> dict[str, str]:
    """Commands to suggest after the checks, each with its use."""
    if arguments.config is None:
        again = {"agentenv doctor": "check again after the fix"}
        return (again if has_failed else {}) | {
            "agentenv doctor --config CONFIG": "check the requirements of a run",
            "agentenv new NAME": "create your own environment, ready to train",
        }
    given = shlex.join([str(arguments.config), *arguments.overrides])
    if has_failed:
        return {f"agentenv doctor --config {given}": "check again after the fix"}
    return {f"agentenv train {given}": "start the run"}
