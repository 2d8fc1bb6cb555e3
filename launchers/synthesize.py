"""Synthesizes data: `python launchers/synthesize.py SUBJECT [key=value ...]`, see
docs/synthesis.md.

Questions are asked without tools, with tools, and with hints put into answers without tools. What
is right and clean becomes dialogues for `launchers/sft.py`; what stays unanswered becomes
questions for `launchers/train.py`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve other processes

import sys
from collections.abc import Sequence

from launchers.synthesis import run as command


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    return command.main(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
