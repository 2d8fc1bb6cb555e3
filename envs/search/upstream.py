"""One HTTP service that others run: rate limit, retries, circuit breaker, cassette.

429 and 5xx, broken connections and time-outs are failures of infrastructure: they are retried,
then raised as InfraError, and never come back as a reply.
"""

from __future__ import annotations

import asyncio
import email.utils
from collections.abc import Mapping
from random import Random
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta, Struct, field

from agentenv.errors import ConfigError, InfraError
from envs.search.cassette import Cassette, Reply
from envs.search.limits import CircuitBreaker, TokenBucket

MAX_REPLY_BYTES = 8_000_000


class TrafficConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a service is called. The limits hold for each process."""

    rate_per_s: Annotated[float, Meta(ge=0, description="requests a second; 0: no limit")] = 20.0
    burst: Annotated[int, Meta(ge=1, description="requests that may start at once")] = 20
    max_concurrency: Annotated[int, Meta(ge=1, description="requests in the air at once")] = 64
    timeout_s: Annotated[float, Meta(gt=0, description="for one attempt")] = 20.0
    num_retries: Annotated[int, Meta(ge=0, description="after 429, 5xx, a lost connection")] = 5
    first_delay_s: Annotated[float, Meta(ge=0, description="before a retry; doubles, jittered")] = (
        0.5
    )
    max_delay_s: Annotated[float, Meta(ge=0, description="longest wait between attempts")] = 30.0
    max_failures: Annotated[
        int, Meta(ge=1, description="calls failing in a row until the service is left alone")
    ] = 20
    cool_down_s: Annotated[float, Meta(gt=0, description="how long it is left alone")] = 30.0


class HttpRequest(Struct, frozen=True):
    """A request. What is secret is kept apart: it enters no key, no message and no cassette."""

    method: str
    url: str
    params: dict[str, str] = field(default_factory=dict)
    json: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    secret_headers: dict[str, str] = field(default_factory=dict)
    secret_params: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What equal requests share."""
        public = [self.method, self.url, self.params, self.json]
        return msgspec.json.encode(public, order="sorted").decode()

    def __repr__(self) -> str:
        return f"HttpRequest({self.key})"


class Upstream:
    """Calls one service; shared by all episodes. `num_requests` counts what was really sent."""

    def __init__(
        self,
        name: str,
        config: TrafficConfig,
        cassette: Cassette | None = None,
        *,
        refused_hint: str = "check the key in the environment and the address",
        seed: int = 0,
    ) -> None:
        self.name = name
        self._refused_hint = refused_hint
        self.config = config
        self.num_requests = 0
        self.num_retries = 0
        self._cassette = cassette
        self._random = Random(f"{seed}/{name}")
        self._bucket = TokenBucket(config.rate_per_s, config.burst)
        self._breaker = CircuitBreaker(name, config.max_failures, config.cool_down_s)
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def send(self, request: HttpRequest) -> Reply:
        """The reply, of a status below 500 and not 401, 403, 407 or 429.

        Raises InfraError when all attempts failed and ConfigError when the key is refused.
        """
        if self._cassette is not None:
            return await self._cassette.through(request.key, lambda: self._send(request))
        return await self._send(request)

    async def close(self) -> None:
        """Close the connections; idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _send(self, request: HttpRequest) -> Reply:
        problem = ""
        async with self._slots:
            for attempt in range(self.config.num_retries + 1):
                self._breaker.check()
                await self._bucket.take()
                self.num_requests += 1
                self.num_retries += attempt > 0
                outcome = await self._attempt(request)
                if isinstance(outcome, Reply):
                    self._breaker.succeeded()
                    return outcome
                problem, wanted_s = outcome
                if wanted_s:  # the service speaks to all of us
                    self._bucket.pause(min(wanted_s, self.config.max_delay_s))
                if attempt < self.config.num_retries:
                    await asyncio.sleep(self._delay_s(attempt, wanted_s))
        self._breaker.failed()
        raise InfraError(f"{self.name}: {self.config.num_retries + 1} attempts failed: {problem}")

    async def _attempt(self, request: HttpRequest) -> Reply | tuple[str, float | None]:
        """A reply, or what went wrong and the wait that the service asks for in seconds."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector)
        try:
            async with (
                asyncio.timeout(self.config.timeout_s),
                self._session.request(
                    request.method,
                    request.url,
                    params={**request.params, **request.secret_params},
                    json=request.json,
                    headers={**request.headers, **request.secret_headers},
                    allow_redirects=False,
                ) as response,
            ):
                status = response.status
                if status == 429 or status >= 500:
                    return f"status {status}", retry_after_s(response.headers)
                if status in (401, 403, 407):
                    raise ConfigError(
                        f"{self.name} refused the request with status {status}; "
                        f"{self._refused_hint}"
                    )
                return Reply(status, await _read(response, self.name))
        except TimeoutError:
            return f"no reply within {self.config.timeout_s:g} s", None
        except (aiohttp.ClientError, OSError) as error:
            # the text of the error may hold the address, and so a key
            return f"{type(error).__name__}", None

    def _delay_s(self, attempt: int, wanted_s: float | None) -> float:
        backoff: float = self.config.first_delay_s * 2.0**attempt
        delay = min(self.config.max_delay_s, max(backoff, wanted_s or 0.0))
        return delay * self._random.uniform(1.0, 1.5)  # never before the time asked for


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or as a date; None without one."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        until = email.utils.parsedate_to_datetime(text)
        now = email.utils.parsedate_to_datetime(headers.get("Date", ""))
        return max(0.0, (until - now).total_seconds())
    except (ValueError, TypeError):
        return None


async def _read(response: aiohttp.ClientResponse, name: str) -> bytes:
    body = await response.content.read(MAX_REPLY_BYTES)
    while len(body) < MAX_REPLY_BYTES:
        more = await response.content.read(MAX_REPLY_BYTES - len(body))
        if not more:
            return body
        body += more
    raise InfraError(f"{name}: the reply is over {MAX_REPLY_BYTES} bytes")
