"""`agentenv retriever` as a separate process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def retriever(*overrides: str) -> Iterator[str]:
    """The address of a server that is started with these keys; it ends cleanly on request."""
    command = [
        sys.executable,
        *("-m", "agentenv.launchers", "retriever"),
        "port=0",
        *overrides,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout)
            address = next(line for line in lines if line.startswith("serving on "))
            yield address.split()[2]
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
