"""Sockets that listen: reserved ports, and the one door of every server.

`docs/security.md` lists all of them; `tests/test_doors.py` finds those that are opened elsewhere.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from functools import lru_cache
from ipaddress import ip_address

from agentenv.base.errors import ConfigError

ACCEPT_TURNS = 4
LOOPBACK_DEVICE = "lo"
BACKLOG = 4096  # concurrent connects; a client that the kernel drops retries after seconds


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether only this machine reaches this address or name."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_key(host: str, *, has_key: bool) -> None:
    """Raises ConfigError for a server beyond loopback without a key."""
    if not has_key and not is_loopback(host):
        raise ConfigError(f"host {host} is reachable from other machines; set a key (api_key_env)")


async def open_server(
    make: Callable[[], asyncio.BaseProtocol], host: str, port: int, *, has_key: bool
) -> asyncio.Server:
    """Listen at `host`; port 0 is any free one. `has_key`: clients need a key or a token, without
    which only loopback is served. Raises ConfigError."""
    check_key(host, has_key=has_key)
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(make, host, port, backlog=BACKLOG, start_serving=False)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "the port is in use; choose another one, or 0 for any free one"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
    try:
        await server.start_serving()
    except BaseException:  # a cancellation would leave the socket open
        server.close()
        raise
    return server


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
