"""Benchmarks.

    python launchers/bench.py learner [--json FILE] [--shapes NAME ...] [--repeats N] [--dense]

learner: CPU seconds and peak memory of training trees as trees, beside flat layouts of the same
trajectories, and beside what counting tokens, attention pairs and FLOPs lets one expect.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run by its path: the repository root is what holds the packages
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # Threads that wait by spinning would be counted as work.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

from agentenv.errors import AgentEnvError, ConfigError
from launchers.terminal import View


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status."""
    options = _parse(argv)
    from launchers.benchmark import learner as bench_learner

    view = View()
    try:
        if options.json and not options.json.absolute().parent.is_dir():
            raise ConfigError(f"--json {options.json}: there is no such folder")
        figures = bench_learner.run(options.shapes, options.repeats, options.dense, view)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except (AgentEnvError, OSError) as error:
        view.fail(str(error))
        return 2
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launchers/bench.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    learner = parts.add_parser("learner", help="trees against flat layouts")
    learner.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    learner.add_argument("--shapes", nargs="+", metavar="NAME", help="only these; default all")
    learner.add_argument("--repeats", type=int, default=3, metavar="N", help="medians of N")
    learner.add_argument("--dense", action="store_true", help="also trees under a dense mask")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
