"""An HTTP service that others run: rate limit, retries, circuit breaker.

429 and 5xx, broken connections and time-outs are failures of infrastructure: they are retried,
then raised as InfraError, and never come back as a reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Generic, TypeVar

import aiohttp
import msgspec
from msgspec import Meta, Struct, field

from agentenv.backoff import backoff_s
from agentenv.engines.client import retry_after_s
from agentenv.errors import ConfigError, InfraError


class Reply(Struct, frozen=True, omit_defaults=True):
    """What came back: HTTP status, body, and for pages their type and final address."""

    status: int
    body: bytes
    content_type: str = ""
    url: str = ""


# Single flight: equal calls that are in the air at once share one fetch.

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Runs one fetch a key at a time; whoever asks meanwhile waits for the same one.

    A waiter that is cancelled leaves the fetch alone: others wait for it, and its result is
    cached. `close` cancels what is still in the air.
    """

    def __init__(self) -> None:
        self._flying: dict[str, asyncio.Task[T]] = {}

    async def run(self, key: str, fetch: Callable[[], Awaitable[T]]) -> T:
        """The result of `fetch`, or of an equal call's; all waiters see the same exception."""
        flight = self._flying.get(key)
        if flight is None:
            flight = asyncio.get_running_loop().create_task(_await(fetch))
            self._flying[key] = flight
            flight.add_done_callback(lambda done: self._landed(key, done))
        return await asyncio.shield(flight)

    async def close(self) -> None:
        """Cancel every fetch and wait until each is gone."""
        flights = list(self._flying.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    def _landed(self, key: str, done: asyncio.Task[T]) -> None:
        del self._flying[key]
        if not done.cancelled():
            done.exception()  # looked at: all waiters may be gone


async def _await(fetch: Callable[[], Awaitable[T]]) -> T:
    return await fetch()


# What protects a provider: a token bucket, and a circuit breaker.


class TokenBucket:
    """At most `rate_per_s` requests a second in the long run, and `burst` at once.

    Callers are served in order of arrival. A rate of 0 means no limit.
    """

    def __init__(self, rate_per_s: float, burst: int) -> None:
        self._rate = rate_per_s
        self._burst = max(1, burst)
        self._free_at = 0.0  # loop time at which the bucket has refilled to the full
        self._paused_until = 0.0

    async def take(self) -> None:
        """Wait for a token, and for the end of a pause."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._paused_until:
            await asyncio.sleep(self._paused_until - loop.time())
        if self._rate <= 0:
            return
        now = loop.time()
        # a full bucket lies `burst` tokens of time in the past of the next free slot
        self._free_at = max(self._free_at, now) + 1 / self._rate
        delay = self._free_at - now - self._burst / self._rate
        if delay > 0:
            await asyncio.sleep(delay)

    def pause(self, seconds: float) -> None:
        """Give nobody a token for so long: the provider has asked for it."""
        until = asyncio.get_running_loop().time() + seconds
        self._paused_until = max(self._paused_until, until)


class CircuitBreaker:
    """After `max_failures` failures in a row calls fail at once for `cool_down_s`.

    Then one call is let through as a probe: its success closes the circuit, its failure opens it
    for another `cool_down_s`.
    """

    def __init__(self, name: str, max_failures: int, cool_down_s: float) -> None:
        self._name = name
        self._max_failures = max_failures
        self._cool_down_s = cool_down_s
        self._num_failures = 0
        self._open_until: float | None = None

    def check(self) -> None:
        """Raises InfraError while the circuit is open."""
        if self._open_until is None:
            return
        now = asyncio.get_running_loop().time()
        if now < self._open_until:
            raise InfraError(
                f"{self._name}: not called for {self._open_until - now:.1f} s more, after "
                f"{self._num_failures} failures in a row"
            )
        self._open_until = now + self._cool_down_s  # this caller is the probe

    def succeeded(self) -> None:
        """Close the circuit."""
        self._num_failures, self._open_until = 0, None

    def failed(self) -> None:
        """Count a failure, and open the circuit if there are too many."""
        self._num_failures += 1
        if self._num_failures >= self._max_failures:
            self._open_until = asyncio.get_running_loop().time() + self._cool_down_s


MAX_REPLY_BYTES = 8_000_000
BURST = 20  # requests that may start at once
FIRST_DELAY_S = 0.5  # before a retry; doubles, jittered
MAX_DELAY_S = 30.0  # the longest wait between attempts
MAX_FAILURES = 20  # calls that fail in a row until the service is left alone
COOL_DOWN_S = 30.0  # how long the service is left alone; then one call is a probe


class TrafficConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a service is called. The limits hold for each process."""

    rate_per_s: Annotated[float, Meta(ge=0, description="requests a second; 0: no limit")] = 20.0
    max_concurrency: Annotated[int, Meta(ge=1, description="requests in the air at once")] = 64
    timeout_s: Annotated[float, Meta(gt=0, description="for one attempt")] = 20.0
    num_retries: Annotated[int, Meta(ge=0, description="after 429, 5xx, a lost connection")] = 5


class HttpRequest(Struct, frozen=True):
    """A request. What is secret is kept apart: it enters no key and no message."""

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
    """Calls one service; shared by all episodes."""

    def __init__(
        self,
        name: str,
        config: TrafficConfig,
        *,
        refused_hint: str = "check the key in the environment and the address",
    ) -> None:
        self.name = name
        self._refused_hint = refused_hint
        self.config = config
        self.num_requests = 0
        self.num_retries = 0
        self._bucket = TokenBucket(config.rate_per_s, BURST)
        self._breaker = CircuitBreaker(name, MAX_FAILURES, COOL_DOWN_S)
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def send(self, request: HttpRequest) -> Reply:
        """The reply, of a status below 500 and not 401, 403, 407 or 429.

        Raises InfraError when all attempts failed and ConfigError when the key is refused.
        """
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
                    self._bucket.pause(min(wanted_s, MAX_DELAY_S))
                if attempt < self.config.num_retries:
                    await asyncio.sleep(
                        backoff_s(
                            attempt,
                            f"{self.name} {request.key}",
                            first_s=FIRST_DELAY_S,
                            max_s=MAX_DELAY_S,
                            at_least_s=wanted_s or 0.0,
                        )
                    )
        self._breaker.failed()
        raise InfraError(f"{self.name}: {self.config.num_retries + 1} attempts failed: {problem}")

    def stats(self) -> dict[str, float]:
        """Requests that were really sent, and those of them that were not the first try."""
        return {
            "upstream/num_requests": self.num_requests,
            "upstream/num_retries": self.num_retries,
        }

    async def close(self) -> None:
        """Close the connections; idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

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


async def _read(response: aiohttp.ClientResponse, name: str) -> bytes:
    body = await response.content.read(MAX_REPLY_BYTES)
    while len(body) < MAX_REPLY_BYTES:
        more = await response.content.read(MAX_REPLY_BYTES - len(body))
        if not more:
            return body
        body += more
    raise InfraError(f"{name}: the reply is over {MAX_REPLY_BYTES} bytes")
