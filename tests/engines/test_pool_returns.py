"""A server that returns while an update begins loads the weights of that update: the earlier ones
are removed as soon as the update has returned."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.errors import EngineError
from tests.engines.pool_bench import Bench, virtual


@pytest.mark.parametrize("slow", ["healthy", "connect", "load_weights"])
@pytest.mark.parametrize("begins_s", [0.05, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
@virtual(2, is_leased=False)
async def test_no_server_reads_removed_weights(b: Bench, slow: str, begins_s: float) -> None:
    there = {"initial"}
    read_late: list[str] = []

    def watch(server: Any) -> None:
        load, slowed = server.load_weights, getattr(server, slow)

        async def load_weights(source: Path, version: int) -> None:
            if source.name not in there:
                read_late.append(source.name)
                raise EngineError(f"{source.name} is gone")
            await (slowed if slow == "load_weights" else load)(source, version)
            if source.name not in there:
                read_late.append(f"{source.name} at its end")

        async def slowly(*given: Any) -> Any:
            await asyncio.sleep(2.0)
            return await slowed(*given)

        if slow != "load_weights":
            setattr(server, slow, slowly)
        else:
            server.load_s = 2.0
        server.load_weights = load_weights

    watch(b.servers[0])
    there.add("v1")
    await b.load(1)
    there.discard("initial")
    b.servers[0].restart()  # its keeper finds that out, and brings it back
    await asyncio.sleep(begins_s)
    there.add("v2")
    await b.load(2)
    there.discard("v1")  # as the publisher does
    await b.until_up(2)
    assert read_late == []
    assert b.servers[0].weights == "v2"


@virtual(2, is_leased=False)
async def test_a_dead_server_is_queried_ever_more_rarely_and_does_not_end_the_pool(
    b: Bench,
) -> None:
    num_checks = 0
    healthy = b.servers[0].healthy

    async def counted() -> bool:
        nonlocal num_checks
        num_checks += 1
        return await healthy()

    b.servers[0].healthy = counted  # type: ignore[method-assign]
    b.servers[0].kill()
    await asyncio.sleep(3600.0)
    b.pool.check_alive()
    assert num_checks < 2 * 3600 / 20 + 20
    b.servers[0].restart()
    await asyncio.sleep(60.0)
    assert b.pool.stats()["servers_up"] == 2
