"""An HTTP service that others run: rate limit, retries, circuit breaker.

429 and 5xx, broken connections and time-outs are failures of infrastructure: they are retried,
then raised as InfraError, and never come back as a reply.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec
from msgspec import Struct, field

from agentenv.deadline import admitted, backoff_s, waiting
from agentenv.envs.search.keys import TrafficConfig
from agentenv.errors import ConfigError, InfraError
from agentenv.http import retry_after_s


class Reply(Struct, frozen=True, omit_defaults=True):
    """What came back: HTTP status, body, and for pages their type and final address."""

    status: int
    body: bytes
    content_type: str = ""
    url: str = ""


# Equal calls that are in flight at once share one fetch.

T = TypeVar("T")


class SharedFetches(Generic[T]):
    """Runs one fetch a key at a time; equal calls meanwhile wait for the same one.

    A waiter that is cancelled leaves the fetch alone: others wait for it, and its result is
    cached. `close` cancels what is still in the air.
    """

    def __init__(self) -> None:
        self._in_flight: dict[str, asyncio.Task[T]] = {}

    async def run(self, key: str, fetch: Callable[[], Awaitable[T]]) -> T:
        """The result of `fetch`, or of an equal call's; all waiters see the same exception."""
        task = self._in_flight.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(_await(fetch))
            self._in_flight[key] = task
            task.add_done_callback(lambda done: self._landed(key, done))
            return await asyncio.shield(task)
        with waiting("a request that another rollout has made"):
            return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel every fetch and wait until each is gone."""
        tasks = list(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _landed(self, key: str, done: asyncio.Task[T]) -> None:
        del self._in_flight[key]
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
            with waiting("the end of a pause that a search service asked for"):
                await asyncio.sleep(self._paused_until - loop.time())
        if self._rate <= 0:
            return
        now = loop.time()
        # a full bucket lies `burst` tokens of time in the past of the next free slot
        self._free_at = max(self._free_at, now) + 1 / self._rate
        delay = self._free_at - now - self._burst / self._rate
        if delay > 0:
            with waiting("the rate limit of a search service"):
                await asyncio.sleep(delay)

    def pause(self, seconds: float) -> None:
        """Give nobody a token for so long: the provider has asked for it."""
        until = asyncio.get_running_loop().time() + seconds
        self._paused_until = max(self._paused_until, until)


class CircuitBreaker:
    """After `max_failures` failures in a row nobody is let through for `cool_down_s`; calls wait.

    Then one of them is a probe. Its success closes the circuit, and those who wait go on. Its
    failure opens it for another `cool_down_s`, and is theirs too: nobody waits for two probes.
    """

    def __init__(self, name: str, max_failures: int, cool_down_s: float) -> None:
        self._name = name
        self._max_failures = max_failures
        self._cool_down_s = cool_down_s
        self._num_failures = 0
        self._open_until: float | None = None
        self._probe: asyncio.Future[bool | None] | None = None  # None: it was given up

    async def admit(self) -> bool:
        """Wait while the circuit is open; whether the caller is the probe. It says how its call
        ended by `succeeded`, `failed` or `left`.

        Raises InfraError when the probe that it waited for has failed.
        """
        loop = asyncio.get_running_loop()
        while self._open_until is not None:
            if self._probe is not None:
                if await asyncio.shield(self._probe) is False:
                    raise InfraError(
                        f"{self._name}: failed {self._num_failures} times in a row, and still does "
                        f"after {self._cool_down_s:g} s"
                    )
            elif loop.time() < self._open_until:
                await asyncio.sleep(self._open_until - loop.time())
            else:
                self._probe = loop.create_future()
                return True
        return False

    def succeeded(self) -> None:
        """Close the circuit."""
        self._num_failures, self._open_until = 0, None
        self._settle(True)

    def failed(self, is_probe: bool) -> None:
        """Count a failure, and open the circuit if there are too many."""
        self._num_failures += 1
        if self._num_failures >= self._max_failures:
            self._open_until = asyncio.get_running_loop().time() + self._cool_down_s
        if is_probe:
            self._settle(False)

    def left(self, is_probe: bool) -> None:
        """The call ended otherwise, by its caller's deadline say: if it was the probe, the next
        one is."""
        if is_probe:
            self._settle(None)

    def _settle(self, outcome: bool | None) -> None:
        if self._probe is not None:
            self._probe.set_result(outcome)
            self._probe = None


MAX_REPLY_BYTES = 8_000_000
BURST = 20  # requests that may start at once
FIRST_DELAY_S = 0.5  # before a retry; doubles, jittered
MAX_DELAY_S = 30.0  # the longest wait between attempts
MAX_FAILURES = 20  # calls that fail in a row until the service is left alone
COOL_DOWN_S = 30.0  # how long the service is left alone; then one call is a probe


# A wrong key, one that may not do this, or a plan that is used up: Tavily says 432 and 433.
_REFUSED = (401, 402, 403, 407, 432, 433)
# What some, as SerpAPI, say with 429 when a plan is used up, which no retry mends.
_SPENT = re.compile(
    r"run out of|not enough credits|out of credits|insufficient (?:credit|balance|quota)",
    re.IGNORECASE,
)


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
        """The reply, of a status below 500 and none that means a key or an account, nor 429.

        Raises InfraError when all attempts failed, and ConfigError when the key is refused or the
        plan is used up.
        """
        problem, is_probe = "", False
        wanted_s: float | None = None
        for attempt in range(self.config.num_retries + 1):
            if attempt:
                delay_s = backoff_s(
                    attempt - 1,
                    f"{self.name} {request.key}",
                    first_s=FIRST_DELAY_S,
                    max_s=MAX_DELAY_S,
                    at_least_s=wanted_s or 0.0,
                )
                with waiting(f"a break before {self.name} is asked again"):
                    await asyncio.sleep(delay_s)
            with waiting(f"{self.name}, which has failed, to answer again"):
                is_probe = await self._breaker.admit()
            outcome = None
            try:
                await self._bucket.take()
                async with admitted(
                    self._slots, f"a place at {self.name}"
                ):  # only while the request is in the air
                    self.num_requests += 1
                    self.num_retries += attempt > 0
                    outcome = await self._attempt(request)
            finally:
                if outcome is None:
                    self._breaker.left(is_probe)
            if isinstance(outcome, Reply):
                self._breaker.succeeded()
                return outcome
            problem, wanted_s = outcome
            if wanted_s:  # the service speaks to all of us
                self._bucket.pause(min(wanted_s, MAX_DELAY_S))
            if is_probe:
                break
        self._breaker.failed(is_probe)
        raise InfraError(f"{self.name}: {attempt + 1} attempts failed: {problem}")

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
                if status in _REFUSED:
                    raise self._refusal(status)
                if status == 429:
                    text = (await response.content.read(10_000)).decode("utf-8", "replace")
                    if _SPENT.search(text):
                        raise self._refusal(status)
                if status == 429 or status >= 500:
                    return f"status {status}", retry_after_s(response.headers)
                return Reply(status, await _read(response, self.name))
        except TimeoutError:
            return f"no reply within {self.config.timeout_s:g} s", None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # the text of the error may hold the address, and so a key
            return f"{type(error).__name__}", None

    def _refusal(self, status: int) -> ConfigError:
        return ConfigError(
            f"{self.name} refused the request with status {status}; {self._refused_hint}"
        )


async def _read(response: aiohttp.ClientResponse, name: str) -> bytes:
    body = await response.content.read(MAX_REPLY_BYTES)
    while len(body) < MAX_REPLY_BYTES:
        more = await response.content.read(MAX_REPLY_BYTES - len(body))
        if not more:
            return body
        body += more
    raise InfraError(f"{name}: the reply is over {MAX_REPLY_BYTES} bytes")
