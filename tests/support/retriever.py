"""Commands that listen, as separate processes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def retriever(*overrides: str) -> Iterator[str]:
    """The address of a server that is started with these keys; it ends cleanly on request."""
    command = [sys.executable, "-m", "agentenv.launchers", "retriever", "port=0", *overrides]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout)
            address = next(line for line in lines if line.startswith("serving on "))
            yield address.split()[2]
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def interrupted(*arguments: str, at: str) -> list[str]:
    """The lines of a command that gets Ctrl-C after a line with this text, and ends cleanly."""
    command, lines = [sys.executable, "-m", "agentenv.launchers", *arguments, "port=0"], []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not re.search(r"\d+ s so far", line):  # on a slow machine
                lines.append(line.rstrip())
            if at in line:
                process.send_signal(signal.SIGINT)
    assert (process.returncode, lines[-1], max(map(len, lines)) <= 80) == (0, "stopping", True)
    return lines[:-1]
