"""A port chosen for a server is still free when it listens, after any delay."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from agentenv.base.ports import hold_port, port_of, stop_listening
from tests.support.ports import held_ports

LOCAL_PORT_RANGE = 51  # IP_LOCAL_PORT_RANGE, from which ports are chosen


async def _serve_once(port: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()


async def test_a_server_listens_at_a_held_port_and_again_after_its_end() -> None:
    with held_ports(2) as ports:
        for port in (*ports, *ports):
            await _serve_once(port)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))


def _choose(port: int, sharing: bool, listener: socket.socket | None) -> None:
    """Have the system choose a port where this is the only choice; for a connection, if there is a
    listener to connect to."""
    with socket.socket() as one:
        if sharing:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.setsockopt(
                socket.IPPROTO_IP, LOCAL_PORT_RANGE, struct.pack("=I", port | port << 16)
            )
        except OSError:
            pytest.skip("this system does not choose from a range (Linux 6.3 does)")
        if listener is None:
            one.bind(("127.0.0.1", 0))
        else:
            one.connect(listener.getsockname())
        assert port_of(one) == port


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("connects", [False, True])
def test_a_held_port_is_not_assigned_to_another_process(sharing: bool, connects: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        listener = somebody if connects else None
        with hold_port() as held:
            port = port_of(held)
            with pytest.raises(OSError, match=r"in use|assign"):
                _choose(port, sharing, listener)
        _choose(port, sharing, listener)  # it is for all again


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_port_of_all_addresses_is_held() -> None:
    with hold_port("::") as held, socket.create_server(("::", port_of(held)), family=held.family):
        socket.create_connection(("::1", port_of(held)), timeout=5).close()


def test_a_port_with_a_listener_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OSError, match="in use"):
        hold_port(port=port_of(listener))


@pytest.mark.parametrize("turns", range(6))
async def test_no_accepted_connection_is_lost_when_a_server_closes(turns: int) -> None:
    arrived: list[asyncio.BaseTransport] = []

    class Arriving(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            arrived.append(transport)

    server = await asyncio.get_running_loop().create_server(Arriving, "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()) as client:
        client.settimeout(10)
        for _ in range(turns):
            await asyncio.sleep(0)
        await stop_listening(server)
        for transport in arrived:
            transport.close()
        await asyncio.sleep(0.01)
        try:
            assert client.recv(1) == b""
        except ConnectionResetError:  # never accepted
            assert not arrived
