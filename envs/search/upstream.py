"""Client of an external HTTP service: rate limit, retries, circuit breaker.

Temporary statuses (429, 5xx), broken connections and time-outs are infrastructure failures: they
are retried, then raised as InfraError, and never returned as a reply.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct, field

from agentenv.base.deadline import admitted, waiting
from agentenv.base.errors import ConfigError, InfraError
from agentenv.base.retries import retried
from agentenv.contract.http import is_temporary, retry_after_s
from agentenv.contract.http_session import HttpSession, LargeReplyError, read_body, read_refusal
from agentenv.envs.search.keys import TrafficConfig


class Reply(Struct, frozen=True, omit_defaults=True):
    """A reply: HTTP status, body, and for pages their type and final address."""

    status: int
    body: bytes
    content_type: str = ""
    url: str = ""


class TokenBucket:
    """At most `rate_per_s` requests per second on average, and `burst` at once.

    Callers are served in order of arrival. A rate of 0 means no limit.
    """

    def __init__(self, rate_per_s: float, burst: int) -> None:
        self._rate = rate_per_s
        self._burst = max(1, burst)
        self._free_at = 0.0  # loop time at which the bucket is full again
        self._paused_until = 0.0

    async def take(self) -> None:
        """Wait for a token, and for the end of a pause."""
        loop = asyncio.get_running_loop()
        while loop.time() < self._paused_until:
            with waiting("the end of a pause of a search service"):
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
        """Issue no token for this time, as the provider requested it or fails."""
        until = asyncio.get_running_loop().time() + seconds
        self._paused_until = max(self._paused_until, until)


BURST = 20  # requests that may start at the same time
MAX_PAUSE_S = 30.0  # of all callers, as the service requests
MAX_FAILURES = 20  # consecutive failed calls until requests to the service pause
COOL_DOWN_S = 30.0  # length of this pause


# A wrong key, missing permissions, or an exhausted plan (Tavily: 432 and 433).
_REFUSED = (401, 402, 403, 407, 432, 433)
# Words of a 429 for an exhausted plan (of some providers), which no retry fixes.
_SPENT = re.compile(
    rb"run out of|not enough credits|out of credits|insufficient (?:credit|balance|quota)",
    re.IGNORECASE,
)


class HttpRequest(Struct, frozen=True):
    """A request. Secrets are separate fields, which never appear in keys and messages."""

    method: str
    url: str
    params: dict[str, str] = field(default_factory=dict)
    json: Any = None
    secret_headers: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A text that is equal for equal requests."""
        public = [self.method, self.url, self.params, self.json]
        return msgspec.json.encode(public, order="sorted").decode()

    def __repr__(self) -> str:
        return f"HttpRequest({self.key})"


@dataclass(eq=False)
class Upstream:
    """The client of one service; shared by all episodes."""

    name: str
    traffic: TrafficConfig
    refused_hint: str = "check the key in the environment and the address"

    def __post_init__(self) -> None:
        self.num_requests = self.num_retries = 0
        self._bucket = TokenBucket(self.traffic.rate_per_s, BURST)
        self._num_failures = 0  # consecutive calls
        self._slots = asyncio.Semaphore(self.traffic.max_concurrency)
        self._session = HttpSession()

    async def send(self, request: HttpRequest) -> Reply:
        """The reply, with a status that is neither temporary nor about a key or an account.

        Raises InfraError if all attempts fail, and ConfigError if the key is rejected or the plan
        is exhausted.
        """

        async def ask(attempt: int) -> Reply:
            await self._bucket.take()
            async with admitted(self._slots, f"a slot at {self.name}"):  # while it is in flight
                self.num_requests += 1
                self.num_retries += attempt > 0
                return await self._attempt(request)

        try:
            key = f"{self.name} {request.key}"
            reply = await retried(ask, self.name, key, self.traffic.num_retries)
        except InfraError as error:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                self._bucket.pause(COOL_DOWN_S)
            num_sent = self.traffic.num_retries + 1
            raise InfraError(f"{self.name}: {num_sent} attempts failed: {error}") from error
        self._num_failures = 0
        return reply

    def stats(self) -> dict[str, float]:
        """The number of sent requests, and of retries among them."""
        return {
            "upstream/num_requests": self.num_requests,
            "upstream/num_retries": self.num_retries,
        }

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self._session.close()

    async def _attempt(self, request: HttpRequest) -> Reply:
        """A reply. Raises InfraError with the problem, and the delay that the service requests."""
        try:
            async with (
                asyncio.timeout(self.traffic.timeout_s),
                await self._session.send(
                    request.method,
                    request.url,
                    params=request.params,
                    json=request.json,
                    headers=request.secret_headers,
                ) as response,
            ):
                status = response.status
                if status in _REFUSED:
                    raise self._refusal(status)
                if is_temporary(status):
                    text = await read_refusal(response)
                    if status == 429 and _SPENT.search(text):
                        raise self._refusal(status)
                    wanted_s = retry_after_s(response.headers) or 0.0
                    self._bucket.pause(min(wanted_s, MAX_PAUSE_S))
                    raise InfraError(f"status {status}", wanted_s)
                return Reply(status, await read_body(response))
        except TimeoutError as error:
            raise InfraError(f"no reply within {self.traffic.timeout_s:g} s") from error
        except LargeReplyError as error:
            raise InfraError(str(error)) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # the error's text may contain the address, and thus a key
            raise InfraError(type(error).__name__) from error

    def _refusal(self, status: int) -> ConfigError:
        return ConfigError(
            f"{self.name} rejected the request with status {status}; {self.refused_hint}"
        )
