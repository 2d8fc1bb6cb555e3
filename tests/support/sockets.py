"""The kernel's list of the sockets that listen."""

from __future__ import annotations

from contextlib import suppress

import psutil


def sockets_of(root: psutil.Process | None = None) -> set[tuple[str, str, int]]:
    """(module, address, port) of those of a process, this one by default, and its descendants."""
    root = root or psutil.Process()
    found = set()
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            command = process.cmdline()
            module = command[command.index("-m") + 1] if "-m" in command else process.name()
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    found.add((module.rpartition(".")[2], one.laddr.ip, one.laddr.port))
    return found
