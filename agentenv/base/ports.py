"""Reserved ports, and the end of listening."""

from __future__ import annotations

import asyncio
import socket

ACCEPT_TURNS = 4


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


async def stop_listening(server: asyncio.Server) -> None:
    """Close it. A connection that the event loop has accepted becomes known to its protocol some
    turns of the loop later; if the server closed in between, asyncio would lose it while it is
    open."""
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    try:
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
    finally:
        server.close()


def port_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])
