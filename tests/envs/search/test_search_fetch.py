"""Fetching pages: refused addresses, and the part of a page that is read."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver

from agentenv.base.errors import ConfigError, InfraError, ToolError
from agentenv.base.retries import Backoff
from agentenv.envs.search.keys import FetchConfig
from agentenv.envs.search.pages import AddressRule, PageFetcher, RefusedAddress
from tests.envs.search_server import ONLY_127_0_0_1, PAGE, Handler, Names, Scripted, serving
from tests.support.begun import closing

MALFORMED = ["http://[bad", "http://a:99999/", "//[x", "http://:80", "http://\u2100.com/",
             "http://a:b/", "http://\udcff/"]  # fmt: skip


@asynccontextmanager
async def fetching(
    config: FetchConfig = ONLY_127_0_0_1, resolver: AbstractResolver | None = None
) -> AsyncIterator[PageFetcher]:
    async with closing(PageFetcher(config, resolver=resolver)) as fetcher:
        yield fetcher


def answering(status: int = 200, text: str = PAGE, **headers: str) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, text=text, headers=named, content_type="text/html")

    return answer


# addresses


@pytest.mark.parametrize("address", [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1",
    "169.254.169.254",  # cloud metadata
    "100.64.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00::1",
    "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::",
    "168.63.129.16",  # metadata of Azure
    "192.0.0.192",  # and of Oracle
    "::ffff:168.63.129.16", "192.88.99.1", "fec0::1", "::127.0.0.1", "64:ff9b:1::7f00:1",
    "64:ff9b:1:a00:0:100::",  # 10.0.0.1 after a prefix of 48 bits
    "64:ff9b:1:a00:0:100:808:808",
    "64:ff9b:1:7f:0:1::",  # 127.0.0.1 after 56
    "64:ff9b:1:0:7f:0:100:0",  # and after 64
    "::ffff:0:127.0.0.1",  # translated
    "::10.0.0.1", "2002:a00:1::",
    "2001:0:808:808::f5ff:fffe",  # Teredo of 10.0.0.1
    "2606:2800:220:1:0:5efe:10.0.0.1",  # ISATAP
    "2606:2800:220:1:200:5efe:127.0.0.1", "2606:2800:220:1:300:5efe:127.0.0.1",
    "fe80::5efe:808:808", "3fff::1", "5f00::1",
])  # fmt: skip
def test_private_addresses_are_refused(address: str) -> None:
    with pytest.raises(RefusedAddress):
        AddressRule().check(address)


@pytest.mark.parametrize("address", [
    "93.184.216.34", "2606:2800:220:1::1", "64:ff9b::808:808", "64:ff9b:1::808:808",
    "64:ff9b:1:808:8:800::", "::ffff:8.8.8.8", "2002:808:808::1", "2606:2800:220:1:0:5efe:8.8.8.8",
])  # fmt: skip
def test_public_addresses_are_allowed(address: str) -> None:
    AddressRule().check(address)


def test_networks_can_be_allowed() -> None:
    rule = AddressRule(["10.1.0.0/16"])
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::a01:203", "2002:a01:203::"):
        rule.check(address)
    with pytest.raises(RefusedAddress):
        rule.check("10.2.2.3")
    with pytest.raises(ConfigError, match=r"pages\.allow_networks.*expected networks"):
        AddressRule(["10.1.0.0/99"])


def test_only_ports_80_and_443_are_opened_outside_allowed_networks() -> None:
    rule = AddressRule(["10.1.0.0/16"])
    rule.check_port(443, ["93.184.216.34"])
    rule.check_port(8080, ["10.1.2.3"])
    for addresses in (["93.184.216.34"], ["10.1.2.3", "93.184.216.34"]):
        with pytest.raises(RefusedAddress, match=r"80.*443"):
            rule.check_port(8080, addresses)


@pytest.mark.parametrize("url", ["http://93.184.216.34:22/", "http://public.test:8080/"])
async def test_other_ports_of_a_public_address_are_refused(url: str) -> None:
    async with fetching(FetchConfig(), Names(public_test=["93.184.216.34"])) as fetcher:
        with pytest.raises(ToolError, match=r"80.*443\."):
            await fetcher.fetch(url)


# fetching


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/",
        "http://localhost:{port}/",
        "http://[::1]:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/",
        "http://2130706433:{port}/",  # 127.0.0.1 as one number
        "http://0x7f.1:{port}/",
        "http://127.1:{port}/",
        "http://\u2460\u2461\u2466.0.0.1:{port}/",  # circled digits
        "http://127.0.0.1.:{port}/",
        "http://user@127.0.0.1:{port}/",
        "http://intern.test:{port}/",  # resolves to a private address
        "http://both.test:{port}/",  # resolves to a public and a private one
    ],
)
async def test_private_addresses_are_not_reached_in_any_notation(url: str) -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(str(request.url))
        return web.Response(text="secret", content_type="text/html")

    names = Names(
        intern_test=["127.0.0.1"],
        both_test=["93.184.216.34", "127.0.0.1"],
        localhost=["127.0.0.1"],
        **{"2130706433": ["127.0.0.1"], "0x7f_1": ["127.0.0.1"], "127_1": ["127.0.0.1"]},
    )
    async with serving(answer) as server, fetching(FetchConfig(), names) as fetcher:
        with pytest.raises(ToolError, match="a public address"):
            await fetcher.fetch(url.format(port=server.rpartition(":")[2]))
    assert seen == []


@pytest.mark.parametrize(
    "target", ["http://127.0.0.2:1/", "http://intern.test/", "//169.254.169.254/latest/meta-data"]
)
async def test_no_redirect_leads_to_a_private_address(target: str) -> None:
    names = Names(intern_test=["10.0.0.1"])
    async with serving(answering(302, Location=target)) as url, fetching(resolver=names) as fetcher:
        with pytest.raises(ToolError, match=f"{url}/a may not be opened: it is not a public"):
            await fetcher.fetch(f"{url}/a")


@pytest.mark.parametrize("target", ["file:///etc/passwd", "gopher://x/", "http://", "javascript:1"])
async def test_only_http_is_opened(target: str) -> None:
    async with fetching() as fetcher:
        with pytest.raises(ToolError, match="is not an"):
            await fetcher.fetch(target)
        async with serving(answering(302, Location=target)) as url:
            with pytest.raises(ToolError):
                await fetcher.fetch(url)


async def test_redirects_are_followed_a_limited_number_of_times() -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/old":
            return web.Response(status=301, headers={"Location": "/new"})
        if request.path == "/new":
            return web.Response(text=PAGE, content_type="text/html")
        return web.Response(status=302, headers={"Location": "/loop"})

    async with serving(answer) as url, fetching() as fetcher:
        page = await fetcher.fetch(f"{url}/old")
        assert (page.body.decode(), page.url) == (PAGE, f"{url}/new")
        with pytest.raises(ToolError, match="than 5 times"):
            await fetcher.fetch(f"{url}/loop")


async def test_an_endless_page_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.envs.search.pages.MAX_BYTES", 200_000)

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/html"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 50_000)
        except ConnectionError:
            return response

    config = FetchConfig(allow_networks=("127.0.0.0/8",))
    async with serving(answer) as url, fetching(config) as fetcher:
        assert (await fetcher.fetch(url)).body == b"x" * 200_000


async def test_a_slow_page_times_out() -> None:
    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    config = FetchConfig(allow_networks=("127.0.0.0/8",), timeout_s=0.05)
    async with serving(answer) as url, fetching(config) as fetcher:
        with pytest.raises(ToolError, match=r"within 0\.05 seconds"):
            await fetcher.fetch(url)


@pytest.mark.parametrize(("status", "num_requests"), [(404, 1), (403, 1), (429, 3), (503, 3)])
async def test_the_error_status_of_a_page_is_a_tool_error(status: int, num_requests: int) -> None:
    service = Scripted(*[status] * 9)
    async with serving(service) as url, fetching() as fetcher:
        with pytest.raises(ToolError, match=f"{url} answered with status {status}"):
            await fetcher.fetch(url)
    assert service.num_requests == num_requests


async def test_a_briefly_busy_page_is_requested_again() -> None:
    async with serving(Scripted(503, 429)) as url, fetching() as fetcher:
        assert (await fetcher.fetch(url)).body == b"fine"


async def test_an_unreachable_page_is_a_tool_error() -> None:
    async with fetching(resolver=Names()) as fetcher:
        with pytest.raises(ToolError, match=r"http://no\.test/"):
            await fetcher.fetch("http://no.test/")
        with pytest.raises(ToolError, match="not be reached"):
            await fetcher.fetch("http://127.0.0.1:9/")


async def test_a_shortage_of_the_own_machine_is_an_infra_error() -> None:
    class Full(Names):
        async def resolve(self, *_: Any) -> NoReturn:
            raise OSError(errno.EMFILE, "too many")

    async with fetching(resolver=Full()) as fetcher:
        with pytest.raises(InfraError, match=r"http://a\.test/"):
            await fetcher.fetch("http://a.test/")


async def test_pages_that_wait_for_a_retry_hold_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.envs.search.pages.MAX_CONCURRENCY", 1)
    monkeypatch.setattr("agentenv.base.retries.REQUESTS", Backoff(60.0, 60.0))
    asked = asyncio.Event()

    async def busy(request: web.Request) -> web.Response:
        asked.set()
        return web.Response(status=503)

    async with serving(busy) as url, serving(Scripted()) as other, fetching() as fetcher:
        waiting = asyncio.ensure_future(fetcher.fetch(url))
        await asked.wait()
        async with asyncio.timeout(30):
            assert (await fetcher.fetch(other)).body == b"fine"
        assert not waiting.done()
        waiting.cancel()


@pytest.mark.parametrize(
    ("kind", "body", "problem"),
    [
        ("application/octet-stream", b"PK", "octet-stream"),
        ("application/pdf", b"%PDF-" + b" " * 10_000_000, "exceeds 10000000 bytes"),
        ("application/x-made-up", b"%PDF-", "x-made-up"),
    ],
)
async def test_content_that_is_neither_a_text_nor_a_pdf_is_refused(
    kind: str, body: bytes, problem: str
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind)

    async with serving(answer) as url, fetching() as fetcher:
        with pytest.raises(ToolError, match=problem):
            await fetcher.fetch(url)


@pytest.mark.parametrize("location", MALFORMED)
async def test_a_malformed_redirect_is_a_tool_error(location: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n"
        writer.write(head.encode("utf-8", "surrogateescape"))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, fetching() as fetcher:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        with pytest.raises(ToolError, match=r"redirects to .* is not an") as caught:
            await fetcher.fetch(url)
        str(caught.value).encode()
