"""Programs, and processes that run a piece of Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.sources import ROOT

LIMIT_S = 600  # of a process that hangs


def ran(
    *command: object, expected: int | None = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The ended program, with both outputs as text, and the `expected` exit code, None for any."""
    done = subprocess.run(
        [*map(str, command)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT, "timeout": LIMIT_S}
        | options,
        text=True,
        check=False,
    )
    assert expected in (None, done.returncode), f"{done.stdout}{done.stderr}"
    return done


def run_python(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return ran(sys.executable, "-c", code, *arguments, **options)


@contextmanager
def ready_python(
    code: str, *arguments: object, **options: Any
) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """The process after its line "ready", and the lines of its output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT, **options}
    with subprocess.Popen(command, **given, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process, process.stdout
        finally:
            process.kill()
