"""A local HTTP server that answers like the services that search calls."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.test_utils import TestServer

from agentenv.envs.search.keys import FetchConfig, TrafficConfig
from agentenv.envs.search.upstream import HttpRequest, Reply, Upstream
from tests.support.begun import closing

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

QUICK = TrafficConfig(rate_per_s=0, num_retries=2)
ONLY_127_0_0_1 = FetchConfig(allow_networks=("127.0.0.1/32",))
PAGE = """<html><head><title>Lima</title><script>track()</script></head><body>
<nav><a href="/">Home</a></nav><article><h1>Lima</h1>
<p>Lima is the capital of Peru and its largest city, on the coast of the Pacific Ocean.</p>
<p>It was founded in 1535 by the Spanish, who called it the City of the Kings, and it grew.</p>
<p>Today some ten million people live there, a third of all people of the country.</p>
</article><footer>All rights reserved</footer></body></html>"""


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """The address of a server on 127.0.0.1 that answers everything with `handler`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application(client_max_size=10_000_000)
    app.router.add_route("*", "/{path:.*}", answer)
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("/")).rstrip("/")
    finally:
        await server.close()


class Scripted:
    """A service that answers with these statuses in turn, then with 200; counts what it saw."""

    def __init__(self, *statuses: int, headers: dict[str, str] | None = None) -> None:
        self.statuses = list(statuses)
        self.headers = headers or {}
        self.num_requests = 0

    async def __call__(self, request: web.Request) -> web.Response:
        self.num_requests += 1
        status = self.statuses.pop(0) if self.statuses else 200
        return web.Response(status=status, text="fine", headers=self.headers)


async def send(url: str, config: TrafficConfig = QUICK) -> Reply:
    async with closing(Upstream("service", config)) as upstream:
        return await upstream.send(HttpRequest("GET", url))


class Names(AbstractResolver):
    """Resolves the names that it knows."""

    def __init__(self, **names: list[str]) -> None:
        self.names = {name.replace("_", "."): addresses for name, addresses in names.items()}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        if host not in self.names:
            raise OSError("unknown name")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self.names[host]
        ]

    async def close(self) -> None:
        pass
