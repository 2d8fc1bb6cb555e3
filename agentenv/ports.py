"""Ports that nobody else is given, before and between the times that a server listens at them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


def hold_port(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A socket bound to a port, 0 for any that is free. Until it is closed the system gives that
    port to nobody who asks for any port. Who is told it can listen there, and again after its end,
    if it sets SO_REUSEADDR as asyncio, uvloop and the engines do; a connection is refused
    meanwhile. Raises OSError if the port cannot be had.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))
    except BaseException:
        held.close()
        raise
    return held


def port_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """So many free ports of this machine, held to the end of the block."""
    with ExitStack() as stack:
        yield [port_of(stack.enter_context(hold_port())) for _ in range(count)]
