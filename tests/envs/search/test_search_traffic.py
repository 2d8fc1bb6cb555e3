"""The traffic layer: retries, single flight, rate limit, breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from agentenv.base.errors import InfraError
from agentenv.base.result_cache import ResultCache
from agentenv.base.retries import Backoff
from agentenv.envs.search.keys import TrafficConfig
from agentenv.envs.search.upstream import HttpRequest, Reply, TokenBucket, Upstream
from tests.envs.search_server import QUICK, Scripted, send, serving
from tests.support.virtual_clock import on_virtual_clock

# retries


@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_infrastructure_statuses_are_retried(status: int) -> None:
    service = Scripted(status, status)
    async with serving(service) as url:
        assert await send(url) == Reply(200, b"fine")
    assert service.num_requests == 3


async def test_an_unreachable_service_is_an_infra_error_without_the_address() -> None:
    request = HttpRequest("GET", "http://127.0.0.1:9/x", secret_headers={"X-Key": "s3cret"})
    upstream = Upstream("service", QUICK)
    with pytest.raises(InfraError, match="3 attempts failed") as raised:
        await upstream.send(request)
    await upstream.close()
    assert "s3cret" not in str(raised.value)
    assert "s3cret" not in repr(request) + request.key


async def test_a_timeout_is_an_infra_error() -> None:
    async def never(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    config = TrafficConfig(timeout_s=0.02, num_retries=0)
    async with serving(never) as url:
        with pytest.raises(InfraError, match=r"reply within 0\.02"):
            await send(url, config)


# single flight


async def test_equal_concurrent_calls_are_one_request() -> None:
    cache, gate, calls = ResultCache(), asyncio.Event(), []

    async def fetch() -> bytes:
        calls.append(1)
        await gate.wait()
        return b"7"

    waiters = [asyncio.ensure_future(cache.through("q", fetch, bytes)) for _ in range(50)]
    await asyncio.sleep(0)
    waiters[0].cancel()  # the one that started it
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*waiters[1:]) == [b"7"] * 49
    assert waiters[0].cancelled()
    assert await cache.through("q", fetch, bytes) == b"7"
    assert len(calls) == 1


async def test_a_failure_reaches_every_waiter_and_closing_cancels_them() -> None:
    cache = ResultCache()

    async def fail() -> bytes:
        await asyncio.sleep(0)
        raise InfraError("broken")

    waiters = (cache.through("q", fail, bytes) for _ in range(3))
    outcomes = await asyncio.gather(*waiters, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["broken"] * 3
    forever: Any = asyncio.Event().wait
    hanging = asyncio.ensure_future(cache.through("q", forever, bytes))
    await asyncio.sleep(0)
    await cache.close()
    with pytest.raises(asyncio.CancelledError):
        await hanging


# rate limit and breaks, on a virtual clock


@on_virtual_clock
async def test_the_bucket_keeps_its_rate() -> None:
    bucket, loop = TokenBucket(rate_per_s=10, burst=5), asyncio.get_running_loop()
    start = loop.time()

    async def take() -> float:
        await bucket.take()
        return loop.time() - start

    times = list(await asyncio.gather(*(take() for _ in range(25))))
    await asyncio.sleep(100)
    again = loop.time()
    for _ in range(6):  # refilled, but to no more than the burst
        await bucket.take()
    refilled = loop.time() - again
    assert times[:5] == [0.0] * 5
    assert times[5:] == pytest.approx([number / 10 for number in range(1, 21)])
    assert refilled == pytest.approx(0.1)


@pytest.mark.parametrize("rate_per_s", [0.0, 1000.0])
@on_virtual_clock
async def test_a_pause_delays_every_call(rate_per_s: float) -> None:
    bucket, loop = TokenBucket(rate_per_s, burst=9), asyncio.get_running_loop()
    bucket.pause(7)
    bucket.pause(3)  # does not shorten it
    await asyncio.gather(*(bucket.take() for _ in range(9)))
    assert loop.time() == pytest.approx(7, abs=0.01)


async def test_the_wait_requested_by_a_service_delays_every_call() -> None:
    service = Scripted(429, 503, headers={"Retry-After": "1"})
    config = TrafficConfig(num_retries=2)
    pauses: list[float] = []
    async with serving(service) as url:
        upstream = Upstream("service", config)
        upstream._bucket.pause = pauses.append  # type: ignore[method-assign]
        assert (await upstream.send(HttpRequest("GET", url))).status == 200
        await upstream.close()
    assert pauses == [0.002, 0.002]  # capped by MAX_PAUSE_S


BREAK_S = 30.0  # after many failures in a row


class Service(Upstream):
    """A service on a virtual clock: down until `up_at`, and each request takes a second."""

    def __init__(self, up_at: float, config: TrafficConfig) -> None:
        super().__init__("service", config)
        self.up_at = up_at
        self.times: list[float] = []

    async def _attempt(self, request: HttpRequest) -> Reply:
        self.times.append(now())
        await asyncio.sleep(1)
        if now() <= self.up_at:
            raise InfraError("status 503")
        return Reply(200, b"fine")


def now() -> float:
    return asyncio.get_running_loop().time()


async def outcomes_of(service: Service, count: int) -> list[str]:
    """The outcomes of this number of concurrent calls."""
    calls = (service.send(HttpRequest("GET", f"http://a.test/{n}")) for n in range(count))
    found = await asyncio.gather(*calls, return_exceptions=True)
    return [str(getattr(one, "status", one)) for one in found]


@on_virtual_clock
async def test_a_repeatedly_failing_service_gets_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.envs.search.upstream.MAX_FAILURES", 2)
    service = Service(up_at=10, config=TrafficConfig(num_retries=0))
    assert await outcomes_of(service, 4) == ["service: 1 attempts failed: status 503"] * 4
    await asyncio.sleep(5)  # calls wait for the end of the break
    assert await outcomes_of(service, 50) == ["200"] * 50
    assert min(service.times[4:]) == pytest.approx(1 + BREAK_S)


@on_virtual_clock
async def test_a_call_that_waits_for_a_retry_holds_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.base.retries.REQUESTS", Backoff(20.0, 30.0))
    service = Service(up_at=1.5, config=TrafficConfig(max_concurrency=1, num_retries=1))
    first = asyncio.ensure_future(outcomes_of(service, 1))
    await asyncio.sleep(2)
    assert await outcomes_of(service, 2) == ["200"] * 2
    assert now() == pytest.approx(4)
    assert await first == ["200"]
    assert service.times[-1] > 20
