"""Reserved ports."""

from __future__ import annotations

import socket


def hold_port(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Reserve a port (0: any free one) by a socket that is bound to it. Until the socket is closed,
    the system assigns the port to no other process. A process that knows the port can listen on it,
    repeatedly, if it sets SO_REUSEADDR as asyncio, uvloop and the engines do; connections are
    refused meanwhile. Raises OSError if the port is not available.
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
