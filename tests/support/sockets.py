"""The kernel's list of the sockets that listen."""

from __future__ import annotations

from contextlib import suppress

import psutil


def sockets_of(root: psutil.Process | None = None) -> dict[tuple[str, int], str]:
    """The module by (address, port) of those of a process, this one by default, and its
    descendants; a child that is being started still has those of its parent."""
    root = root or psutil.Process()
    found: dict[tuple[str, int], str] = {}
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            command = process.cmdline()
            module = command[command.index("-m") + 1] if "-m" in command else process.name()
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    found.setdefault((one.laddr.ip, one.laddr.port), module.rpartition(".")[2])
    return found
