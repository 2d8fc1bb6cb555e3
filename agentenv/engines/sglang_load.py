"""Load figures of SGLang servers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from agentenv.engines.http import HttpClient, RefusedError
from agentenv.engines.server import ServerLoad
from agentenv.errors import EngineError

RETRACTED = b"sglang:num_retracted_requests_total"


class RankLoad(Struct, frozen=True):
    """One data-parallel rank in the answer to GET /v1/loads."""

    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float


class Loads(Struct, frozen=True):
    """The answer."""

    loads: list[RankLoad]


async def read_load(workers: Iterable[HttpClient]) -> ServerLoad:
    """Sums over ranks and workers; the fullest cache. Raises EngineError for an unknown answer."""
    ranks: list[RankLoad] = []
    num_preemptions = 0
    for worker in workers:
        body = await worker.call("GET", "/v1/loads", params={"include": "core"})
        try:
            ranks += msgspec.json.decode(body, type=Loads).loads
        except msgspec.DecodeError as error:
            raise EngineError(f"{worker.name}/v1/loads: unknown answer: {error}") from error
        num_preemptions += await _count_preemptions(worker)
    return ServerLoad(
        num_running=sum(rank.num_running_reqs for rank in ranks),
        num_waiting=sum(rank.num_waiting_reqs for rank in ranks),
        kv_usage=min(max((rank.token_usage for rank in ranks), default=0.0), 1.0),
        num_preemptions=num_preemptions,
    )


async def _count_preemptions(worker: HttpClient) -> int:
    try:
        text = await worker.call("GET", "/metrics")
    except RefusedError:  # without --enable-metrics
        return 0
    lines = (line for line in text.splitlines() if line.startswith(RETRACTED))
    return sum(int(float(line.rsplit(b" ", 1)[1])) for line in lines)
