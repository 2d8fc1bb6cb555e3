"""Shows a run or an evaluation in the browser: `agentenv view RUN`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from agentenv.base.errors import ConfigError

MAX_MB = 30.0


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="agentenv view",
        description="Show a run in the browser: curves, the trees of each step token by token, "
        "evaluations. Reads the files of the run, also while it trains; changes nothing.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run or an evaluation")
    parser.add_argument(
        "others", type=Path, nargs="*", metavar="DIR", help="evaluations to compare with"
    )
    parser.add_argument(
        "--port", type=int, default=0, help="port on 127.0.0.1; default: a free one"
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="OUT",
        help="export instead: OUT.html is one self-contained file",
    )
    parser.add_argument(
        "--max-mb",
        type=float,
        default=MAX_MB,
        help=f"size limit of an export; the rest is left out and listed; default {MAX_MB:g}",
    )
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.port < 65536:
        parser.error(f"--port {arguments.port}: expected 0 to 65535")
    if arguments.max_mb <= 0:
        parser.error(f"--max-mb {arguments.max_mb:g}: expected more than 0")

    from agentenv.assembly.run.exits import exit_code_of  # after --help
    from agentenv.assembly.run.terminal import View  # after --help

    def work(view: View) -> int:
        def report(text: str) -> None:
            view.end()
            view.console.print(text, markup=False, soft_wrap=True)  # with a new key

        from agentenv.assembly.run.exits import run_until_done
        from agentenv.evaluation.sweep import SWEEP_FILE
        from agentenv.lab.viewing.folder import Folder
        from agentenv.lab.viewing.page import FolderServer, export, serve

        view.wait_for(f"reading {arguments.run}", "the address")
        if (arguments.run / SWEEP_FILE).is_file():
            raise ConfigError(
                f"{arguments.run} is a sweep: view one of its runs, ARM/seed-N, or compare them "
                f"with: agentenv compare {arguments.run}"
            )
        folder = Folder(arguments.run, arguments.others)
        if arguments.export is not None:
            for line in export(folder, arguments.export, arguments.max_mb):
                report(line)
            return 0
        with suppress(KeyboardInterrupt):  # the usual end
            run_until_done(serve(FolderServer(folder), arguments.port, report), view)
        return 0

    return exit_code_of(work, str(arguments.export or arguments.run))
