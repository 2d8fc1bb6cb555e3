"""Free ports of this machine, and ports that are reserved for a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from agentenv.base.ports import hold_port, port_of


def free_port() -> int:
    with hold_port("127.0.0.1", 0) as held:
        return port_of(held)


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Reserve `count` ports during the block."""
    with ExitStack() as stack:
        yield [port_of(stack.enter_context(hold_port())) for _ in range(count)]
