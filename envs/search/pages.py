"""Web pages as text: allowed addresses, fetching, and extraction.

A page's text is cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import io
import ipaddress
import logging
import os
import re
import resource
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp
import psutil
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from agentenv.base.deadline import admitted
from agentenv.base.errors import (
    SHOWN,
    ConfigError,
    InfraError,
    MissingError,
    ToolError,
    reported_as,
)
from agentenv.base.installation import install_hint
from agentenv.base.result_cache import ResultCache
from agentenv.base.retries import retried
from agentenv.base.untrusted import decode_text, printable
from agentenv.contract.env import tally
from agentenv.contract.http import is_temporary, retry_after_s
from agentenv.contract.http_session import HttpSession, LargeReplyError, Names, proxies, read_body
from agentenv.envs.search.keys import FetchConfig
from agentenv.envs.search.upstream import Reply
from agentenv.processes.worker_pool import JobError, JobStoppedError, WorkerPool

# Allowed network addresses of pages: public ones, and configured networks.


logger = logging.getLogger(__name__)
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class RefusedAddress(OSError):
    """The address is private, loopback, or otherwise not on the public internet; the message names
    its kind."""


# Networks that Python 3.11 wrongly counts as public: metadata services of Azure and Oracle, 6to4
# relays, site-local, and documentation addresses.
_NOT_PUBLIC = [
    *map(ipaddress.ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24")),
    *map(ipaddress.ip_network, ("fec0::/10", "3fff::/20", "5f00::/16")),
]
# Networks of IPv6 that stand for IPv4 addresses, with the places of their bytes: compatible,
# mapped, translated, NAT64 (of local use: of each length of prefix, RFC 6052), 6to4.
_STANDS_FOR = {
    ipaddress.IPv6Network(network): places
    for network, *places in (
        ("::/96", (12, 13, 14, 15)),
        ("::ffff:0:0/96", (12, 13, 14, 15)),
        ("::ffff:0:0:0/96", (12, 13, 14, 15)),
        ("64:ff9b::/96", (12, 13, 14, 15)),
        ("64:ff9b:1::/48", (12, 13, 14, 15), (6, 7, 9, 10), (7, 9, 10, 11), (9, 10, 11, 12)),
        ("2002::/16", (2, 3, 4, 5)),
    )
}
_ISATAP = re.compile(rb"[\0-\3]\0\x5e\xfe")  # before the IPv4 address in the last four bytes
PORTS = (80, 443)
USER_AGENT = "Mozilla/5.0 (compatible; agentenv)"


class AddressRule:
    """Allows public addresses on PORTS, and those of `allow_networks` (e.g. "10.1.0.0/16") on all
    ports."""

    def __init__(self, allow_networks: Sequence[str] = ()) -> None:
        form = '; expected networks such as "10.1.0.0/16"'
        with reported_as(ConfigError, "pages.allow_networks", ValueError, end=form):
            self._allowed = [ipaddress.ip_network(network) for network in allow_networks]

    def check(self, address: str) -> None:
        """Raises RefusedAddress. An IPv6 address that stands for an IPv4 address counts as that."""
        if not self._is_allowed(address) and not all(map(_is_public, _judged(address))):
            raise RefusedAddress("it is not a public address")

    def check_port(self, port: int, addresses: Iterable[str]) -> None:
        """Raises RefusedAddress for other ports, unless all these addresses are in allowed
        networks."""
        if port not in PORTS and not all(map(self._is_allowed, addresses)):
            raise RefusedAddress(f"its port is not one of {', '.join(map(str, PORTS))}")

    def _is_allowed(self, address: str) -> bool:
        own = any(_usual(address) in network for network in self._allowed)
        return own or all(any(one in net for net in self._allowed) for one in _judged(address))


def _usual(address: str) -> _Address:
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # an unusual notation may hide the address
        raise RefusedAddress("it is not a public address") from None


def _is_public(address: _Address) -> bool:
    special = any(address in network for network in _NOT_PUBLIC)
    return address.is_global and not address.is_multicast and not special


def _judged(address: str) -> Sequence[_Address]:
    """The addresses that decide about this one: those for which it stands, and itself if it also
    leads elsewhere."""
    found = _usual(address)
    if isinstance(found, ipaddress.IPv4Address):
        return [found]
    for network, places in _STANDS_FOR.items():
        if found in network:
            inner = [ipaddress.IPv4Address(bytes(found.packed[i] for i in one)) for one in places]
            return [one for one in inner if one.packed[0]] or inner[:1]  # 0.0.0.0/8: no address
    if found.teredo:
        return list(found.teredo)
    if _ISATAP.match(found.packed, 8):
        return [found, ipaddress.IPv4Address(found.packed[12:])]
    return [found]


class GuardedResolver(AbstractResolver):
    """A resolver that rejects addresses; connections use exactly the checked addresses.

    So a name that resolves differently the second time (DNS rebinding) has no effect.
    """

    def __init__(self, rule: AddressRule, inner: AbstractResolver | None = None) -> None:
        self._rule = rule
        self._inner = inner or Names()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of `host`. Raises RefusedAddress if one of them is not allowed."""
        found = await self._inner.resolve(host, port, family)
        addresses = [result["host"] for result in found]
        for address in addresses:
            self._rule.check(address)
        self._rule.check_port(port, addresses)
        return found

    async def close(self) -> None:
        """Close the wrapped resolver."""
        await self._inner.close()


# Fetching pages that the policy names, with no access to private addresses and bounded reads.

MAX_REDIRECTS = 5
MAX_BYTES = 2_000_000  # of a page; the rest is not read
MAX_PDF_BYTES = 10_000_000  # of a PDF, whose index is at its end
MAX_PAGE_CHARS = 100_000  # of the text of a page; the rest is not kept
MAX_CONCURRENCY = 64  # pages fetched at the same time
NUM_RETRIES = 2  # after 429 and 5xx
MEMORY_BYTES = 2_000_000_000
NUM_WORKERS = 2  # processes that extract text
EXTRACT_S = 5.0  # CPU time for the text of one page
PDF_S = 2.0  # CPU time after which no further page of a PDF is read
PDF_MEMORY_BYTES = 40_000_000  # on top of the worker's
PAGE_BREAK = "\f"  # between the pages of a PDF, and nowhere else
DEAD_S = 600.0  # until a page that could not be read is requested again
MAX_DEAD = 10_000  # pages
_REDIRECTS = (301, 302, 303, 307, 308)
_TEXT_TYPES = ("text/", "application/xhtml", "application/xml", "application/json")
_ACCEPTED = "text/html,text/*;q=0.9,application/pdf;q=0.8"
_PDF_TYPES = ("application/pdf", "application/x-pdf", "application/octet-stream")
# names of refused types in metrics, any other is "other"
_COUNTED = re.compile("image|audio|video|font|zip|octet-stream|officedocument|msword|ms-excel")


# such a host is an address in an unusual notation, not a name: 127.1, 0x7f.1
_ENDS_IN_NUMBER = re.compile(r"(?:^|\.)(?:\d+|0[xX][0-9a-fA-F]*)\.?$")


class PageFetcher:
    """Fetches pages, with connections to allowed addresses only."""

    def __init__(self, config: FetchConfig, resolver: AbstractResolver | None = None) -> None:
        self.config = config
        self._rule = AddressRule(config.allow_networks)
        self._resolver = GuardedResolver(self._rule, resolver)
        self._slots = asyncio.Semaphore(MAX_CONCURRENCY)
        if proxies().keys() & {"http", "https"}:
            logger.warning("web pages are opened directly, not by HTTP_PROXY", extra=SHOWN)
        self._session = HttpSession(
            by_proxy=False, resolver=self._resolver, use_dns_cache=False, force_close=True
        )

    async def fetch(self, url: str) -> Reply:
        """The page, after redirects, truncated at MAX_BYTES.

        Raises ToolError for a failure of the address: rejected, unknown, too slow, neither a text
        nor a PDF, or a status other than 200 (429 and 5xx are retried first). Raises InfraError if
        this machine lacks resources.
        """

        async def ask(attempt: int) -> Reply:
            try:
                async with (
                    admitted(self._slots, "a slot to fetch a page"),
                    asyncio.timeout(self.config.timeout_s),
                ):
                    return await self._follow(url)
            except InfraError as error:  # its status
                if attempt < NUM_RETRIES:
                    raise
                raise ToolError(str(error)) from error
            except TimeoutError:
                limit = self.config.timeout_s
                raise ToolError(f"{url} did not answer within {limit:g} seconds.") from None
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise _named(url, error) from error

        return await retried(ask, "a page", url, NUM_RETRIES)

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self._session.close()

    async def _follow(self, url: str) -> Reply:
        """One attempt, following redirects; each address is checked."""
        target = self._checked(url, requested=url)
        for _ in range(MAX_REDIRECTS + 1):
            headers = {"User-Agent": USER_AGENT, "Accept": _ACCEPTED}
            async with await self._session.send("GET", target, headers=headers) as response:
                location = response.headers.get("Location")
                if response.status in _REDIRECTS and location:
                    target = self._checked(location, requested=url, base=target)
                    continue
                if response.status != 200:
                    text = f"{url} answered with status {response.status}."
                    if is_temporary(response.status):
                        raise InfraError(text, retry_after_s(response.headers) or 0.0)
                    raise ToolError(text)
                kind, body = printable(response.content_type), b""
                if is_text := kind.startswith(_TEXT_TYPES):
                    body = await read_body(response, MAX_BYTES, cut=True)
                elif kind in _PDF_TYPES:
                    with reported_as(ToolError, url, LargeReplyError, end="."):
                        body = await read_body(response, MAX_PDF_BYTES)
                if not is_text and not _is_pdf(body):
                    name = _COUNTED.search(kind)
                    counted = tally(f"pages/refused/{name[0] if name else 'other'}")
                    counted.add(1, f"pages of the type {kind} are not read, such as {url}")
                    raise ToolError(f"{url} is not a text but {kind}.")
                kind = printable(response.headers.get("Content-Type", ""))
                return Reply(200, body, kind, str(target))
        raise ToolError(f"{url} redirects more than {MAX_REDIRECTS} times.")

    def _checked(self, address: str, *, requested: str, base: URL | None = None) -> URL:
        """The address, or that of a redirect from `base`, as a URL; checks literal addresses, which
        the resolver does not see."""
        to = printable(address)[:200]
        wrong = requested if base is None else f"{requested} redirects to {to}, which"
        with reported_as(ToolError, f"{wrong} is not an address", ValueError, end="."):
            url = URL(address) if base is None else base.join(URL(address))
            host, port = url.raw_host or "", url.port
        if url.scheme not in ("http", "https") or not host or port is None:
            raise ToolError(f"{wrong} is not an http or https address.")
        if ":" in host or _ENDS_IN_NUMBER.search(host):
            self._rule.check(host)
            self._rule.check_port(port, [host])
        return url.with_user(None)


# errors for exhausted resources of this machine: files, memory, ports
_OURS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL}


def _named(url: str, error: BaseException) -> ToolError | InfraError:
    """The error of a failed fetch: ToolError if the page is the cause, InfraError if this host."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RefusedAddress):
            return ToolError(f"{url} may not be opened: {cause}.")
        if isinstance(cause, OSError) and cause.errno in _OURS:
            return InfraError(f"page {url}: {os.strerror(cause.errno)}")
        cause = cause.__cause__ or cause.__context__
    return ToolError(f"{url} could not be reached.")


class PageReader:
    """Reads the text of pages; shared by all episodes. At most NUM_WORKERS processes extract it at
    once, each in `limit_s` seconds of CPU time."""

    def __init__(self, config: FetchConfig, cache: ResultCache, limit_s: float = EXTRACT_S) -> None:
        self._cache = cache
        self._limit_s = limit_s
        self._dead: dict[str, tuple[float, str]] = {}  # until when, and why
        self._fetcher = PageFetcher(config)
        handler = "agentenv.envs.search.pages:PageText"
        self._pool = WorkerPool(
            handler, name="pages", max_jobs=NUM_WORKERS, memory_bytes=MEMORY_BYTES, environment={}
        )

    @staticmethod
    def check() -> None:
        """Raises MissingError without the packages that extract the text of pages."""
        if not all(map(importlib.util.find_spec, ("trafilatura", "pypdf"))):
            hint = install_hint("search")
            raise MissingError(f"reading pages requires the packages trafilatura and pypdf: {hint}")

    async def text(self, url: str) -> str:
        """The page's text, at most MAX_PAGE_CHARS. Raises ToolError, for DEAD_S seconds the same
        without another request, or InfraError."""
        until_s, reason = self._dead.get(url, (0.0, ""))
        if asyncio.get_running_loop().time() < until_s:
            raise ToolError(reason)
        return await self._cache.through(f"page:{url}", lambda: self._read(url), decode_text)

    async def extract(self, page: Reply) -> str:
        """The text of a fetched page; plain text is only decoded. Raises ToolError if the page
        needs too much time or memory, and InfraError if no process can be started."""
        try:
            payload = {"kind": page.content_type, "body": page.body}
            return str(await self._pool.run(payload, self._limit_s))
        except JobStoppedError:
            raise ToolError(f"{page.url} could not be read: its text takes too long.") from None
        except JobError as error:
            raise ToolError(f"{page.url} could not be read.") from error

    def stats(self) -> dict[str, float]:
        """The number of extracted pages, and of aborted ones."""
        return self._pool.stats()

    async def close(self) -> None:
        """Kill the workers and close the connections; idempotent."""
        self._pool.close()
        await self._fetcher.close()

    async def _read(self, url: str) -> bytes:
        try:
            text = await self.extract(await self._fetcher.fetch(url))
            text = text[:MAX_PAGE_CHARS].strip(" \n")
            if not text.strip():
                raise ToolError(f"{url} holds no text.")
        except ToolError as error:
            self._dead[url] = asyncio.get_running_loop().time() + DEAD_S, str(error)
            if len(self._dead) > MAX_DEAD:
                del self._dead[next(iter(self._dead))]
            raise
        return text.encode("utf-8", "replace")


# Extraction of text, in workers that are killed if a page makes them hang.

_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s{0,9}=\s{0,9}["']?([\w-]{1,40})""", re.I)


def decoded(kind: str, body: bytes) -> str:
    """The decoded text of a page, by its content type, its meta element, or UTF-8."""
    charset = kind.partition("charset=")[2].strip(" \"'").lower()
    if not charset:
        declared = _CHARSET.search(body[:4096])
        charset = declared[1].decode() if declared else "utf-8"
    with contextlib.suppress(LookupError, ValueError):
        return body.decode(charset, "replace")
    return body.decode("utf-8", "replace")


def _is_pdf(body: bytes) -> bool:
    return body[:1024].lstrip().startswith(b"%PDF-")


class PageText:
    """The worker's handler, called with {"kind": content type, "body": page}."""

    def __init__(self) -> None:
        self._trafilatura: Any = importlib.import_module("trafilatura")
        self._text_of("<p>warm</p>")  # before the first fork
        self._pypdf: Any = importlib.import_module("pypdf")
        self._pypdf.overwrite_configuration(jbig2dec_binary=None)  # it would run a program

    def __call__(self, payload: dict[str, Any]) -> str:
        """The text; the whole content if it is neither HTML nor a PDF."""
        kind, body = payload["kind"], payload["body"]
        if _is_pdf(body):
            return self._text_of_pdf(body)
        page = decoded(kind, body)
        if "html" in kind.lower() or b"<html" in body[:1000].lower():
            page = self._text_of(page)
        return page.replace(PAGE_BREAK, "\n").encode("utf-8", "replace").decode()

    def _text_of_pdf(self, body: bytes) -> str:
        """The texts of the first pages, in PDF_S seconds, without the breaks of their lines."""
        text, process = "", psutil.Process()
        limits, end_s = resource.getrlimit(resource.RLIMIT_AS), process.cpu_times().user + PDF_S
        most = process.memory_info().vms + PDF_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
        try:
            for page in self._pypdf.PdfReader(io.BytesIO(body)).pages:
                text += " ".join(page.extract_text().split()) + PAGE_BREAK
                if len(text) > MAX_PAGE_CHARS or process.cpu_times().user > end_s:
                    break
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        return text.encode("utf-8", "replace").decode()

    def _text_of(self, page: str) -> str:
        """The main text, if there is any, else all text."""
        keys = {"include_comments": False, "include_tables": True, "fast": True}
        found = self._trafilatura.extract(page, **keys)
        return str(found or self._trafilatura.html2txt(f"<html>{page}"))
