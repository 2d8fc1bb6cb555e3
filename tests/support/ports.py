"""Free ports of this machine, reserved for a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from agentenv.base.ports import hold_port, port_of


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Reserve `count` ports during the block."""
    with ExitStack() as stack:
        yield [port_of(stack.enter_context(hold_port())) for _ in range(count)]
