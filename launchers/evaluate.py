"""Evaluates: `python launchers/evaluate.py SUBJECT [key=value ...]`, see docs/evaluation.md.

SUBJECT is a run, a checkpoint, a model directory, or the URL of an endpoint. The env API, actor,
renderer, tools and limits are those of training.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve other processes

import sys
from collections.abc import Sequence

from launchers.evaluation import command


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    return command.main(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
