"""Fetching pages that the policy names: nothing private is reached, nothing endless is read."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated

import aiohttp
from aiohttp.abc import AbstractResolver
from msgspec import Meta, Struct
from yarl import URL

from agentenv.errors import InfraError, ToolError
from envs.search.addresses import AddressRule, GuardedResolver, RefusedAddress
from envs.search.cassette import Cassette, Reply

MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_TEXT_TYPES = ("text/", "application/xhtml", "application/xml", "application/json")


# such a host is an address and no name, in one of the many ways to write one: 127.1, 0x7f.1
_ENDS_IN_NUMBER = re.compile(r"(?:^|\.)(?:\d+|0[xX][0-9a-fA-F]*)\.?$")


class FetchConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How pages are fetched. Private and loopback addresses are refused."""

    max_bytes: Annotated[int, Meta(ge=1000, description="of a page; the rest is not read")] = (
        2_000_000
    )
    timeout_s: Annotated[float, Meta(gt=0, description="for a page, with its redirects")] = 20.0
    max_concurrency: Annotated[int, Meta(ge=1, description="pages fetched at once")] = 64
    num_retries: Annotated[int, Meta(ge=0, description="after 429 and 5xx")] = 2
    allow_networks: Annotated[
        tuple[str, ...], Meta(description='networks to allow though private, as "10.1.0.0/16"')
    ] = ()
    user_agent: Annotated[str, Meta(description="how the fetcher names itself")] = (
        "Mozilla/5.0 (compatible; agentenv)"
    )


class PageFetcher:
    """Fetches pages, over connections that only go to permitted addresses."""

    def __init__(
        self,
        config: FetchConfig,
        cassette: Cassette | None = None,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self.config = config
        self._cassette = cassette
        self._rule = AddressRule(config.allow_networks)
        self._resolver = GuardedResolver(self._rule, resolver)
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, url: str) -> Reply:
        """The page, after redirects, cut at `max_bytes`.

        Raises ToolError for what is a fact of the address (refused, unknown, 404, too slow, not a
        text), and InfraError when it still answers 429 or 5xx after the retries.
        """
        if self._cassette is not None:
            reply = await self._cassette.through(f"page {url}", lambda: self._recorded(url))
            if reply.status != 200:
                raise ToolError(reply.body.decode())
            return reply
        return await self._fetch(url)

    async def close(self) -> None:
        """Close the connections; idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _recorded(self, url: str) -> Reply:
        """What the policy would read about a page that cannot be had is recorded too."""
        try:
            return await self._fetch(url)
        except ToolError as error:
            return Reply(404, str(error).encode("utf-8", "replace"))

    async def _fetch(self, url: str) -> Reply:
        status = 0
        async with self._slots:
            for attempt in range(self.config.num_retries + 1):
                if attempt:
                    await asyncio.sleep(0.5 * 2.0**attempt)
                try:
                    async with asyncio.timeout(self.config.timeout_s):
                        reply = await self._follow(url)
                except TimeoutError:
                    limit = self.config.timeout_s
                    raise ToolError(f"{url} did not answer within {limit:g} seconds.") from None
                except (aiohttp.ClientError, OSError, UnicodeError) as error:
                    raise ToolError(_problem(url, error)) from error
                status = reply.status
                if status == 429 or status >= 500:
                    continue
                if status != 200:
                    raise ToolError(f"{url} answered with status {status}.")
                return reply
        raise InfraError(f"page {url}: status {status} after {self.config.num_retries} retries")

    async def _follow(self, url: str) -> Reply:
        """One try, through the redirects; each address on the way is checked."""
        target = self._checked(url, url)
        for _ in range(MAX_REDIRECTS + 1):
            headers = {"User-Agent": self.config.user_agent, "Accept": "text/html,text/*;q=0.9"}
            async with self._client().get(
                target, headers=headers, allow_redirects=False
            ) as response:
                location = response.headers.get("Location")
                if response.status in _REDIRECTS and location:
                    target = self._checked(str(target.join(URL(location))), url)
                    continue
                if response.status != 200:
                    return Reply(response.status, b"")
                kind = response.content_type
                if not kind.startswith(_TEXT_TYPES):
                    raise ToolError(f"{url} is not a text but {kind}.")
                body = await self._read(response)
                return Reply(200, body, response.headers.get("Content-Type", ""), str(target))
        raise ToolError(f"{url} redirects more than {MAX_REDIRECTS} times.")

    def _checked(self, address: str, asked: str) -> URL:
        """The address as a URL; literal addresses are checked here, since no name is resolved."""
        try:
            url = URL(address)
            host, port = url.raw_host or "", url.port
        except ValueError as error:
            raise ToolError(f"{asked} is not an address: {error}.") from error
        if url.scheme not in ("http", "https") or not host or port is None:
            raise ToolError(f"{asked} is not an http or https address.")
        if ":" in host or _ENDS_IN_NUMBER.search(host):
            self._rule.check(host)
        return url.with_user(None)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=self._resolver, limit=0, use_dns_cache=False, force_close=True
            )
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for part in response.content.iter_chunked(65_536):
            body += part
            if len(body) >= self.config.max_bytes:
                break
        return bytes(body[: self.config.max_bytes])


def _problem(url: str, error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RefusedAddress):
            return f"{url} may not be opened: it is not a public address."
        cause = cause.__cause__ or cause.__context__
    return f"{url} could not be reached."
