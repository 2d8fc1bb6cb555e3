"""One OpenAI-compatible endpoint: requests with retries, and what its failures mean.

429, 5xx, a lost connection, no reply in time, a reply that is none   sent again, then EngineError
401, 403, 404                                                        EngineDeadError: no request
                                                                     can succeed
other 4xx                                                            EngineError: this one cannot
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any, TypeVar

from yarl import URL

from agentenv.engines.http import HttpClient, RefusedError, Timeouts
from agentenv.engines.openai_config import OpenAIConfig
from agentenv.engines.server import ServerLostError
from agentenv.errors import ConfigError, EngineDeadError, EngineError

FIRST_DELAY_S, MAX_DELAY_S = 0.5, 30.0
HOPELESS = (401, 403, 404)
CONTINUES = ("vllm", "sglang")  # owners of models, by /models, that know our extensions

T = TypeVar("T")
Event = dict[str, Any]


class MalformedReplyError(EngineError):
    """A reply with status 200 that is not what was asked for."""


class Endpoint:
    """`start` finds the model; then `send` asks. `owner` is who serves it, if it says; `table`
    is the one of the configuration that messages name."""

    def __init__(self, config: OpenAIConfig, table: str = "engine") -> None:
        url = URL(config.url.rstrip("/"))
        api = url if url.path.strip("/") else url / "v1"
        key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
        if config.api_key_env and not key:
            raise ConfigError(f"{table}.api_key_env: {config.api_key_env} is not set")
        timeouts = Timeouts(call_s=config.timeout_s, idle_s=config.timeout_s)
        self.config = config
        self._table = table
        self.api = HttpClient(str(api), timeouts, key)
        root = str(api).removesuffix("/v1")
        self.root = HttpClient(root, timeouts, key)  # routes beside the standard
        self.model = config.model
        self.owner = ""
        self.served_from = ""  # directory or hub name of the model, if it says
        self.max_model_len = config.max_model_len
        self.counts = {"requests": 0.0, "retries": 0.0, "sampled_tokens": 0.0, "prompt_tokens": 0.0}
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._dead = ""

    async def start(self) -> None:
        """Raises ConfigError if it is not there, or does not have the model."""
        try:
            found = await self.api.call_json("GET", "/models", timeout_s=30.0)
            models = {str(one["id"]): one for one in found["data"]}
        except RefusedError as error:
            if error.status in (401, 403) or not self.model:
                raise ConfigError(f"{self._table}: {error}") from error
            models = {}  # some endpoints list nothing
        except (EngineError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{self._table}.url: {self.api.name} does not list its models ({error}); expected "
                "an OpenAI-compatible endpoint"
            ) from error
        if not self.model:
            if len(models) != 1:
                raise ConfigError(
                    f"{self._table}.model: {self.api.name} has {sorted(models)}; give one"
                    + (" with --model" if self._table == "engine" else "")
                )
            (self.model,) = models
        if models and self.model not in models:
            raise ConfigError(
                f"{self._table}.model: {self.api.name} has no {self.model!r}; it has "
                f"{sorted(models)[:20]}"
            )
        own = models.get(self.model, {})
        self.owner = str(own.get("owned_by") or "")
        self.served_from = str(own.get("root") or "")
        self.max_model_len = self.max_model_len or int(own.get("max_model_len") or 0)

    @property
    def known(self) -> bool:
        """Whether the server is one that knows our extensions of the standard."""
        return self.owner in CONTINUES

    async def send(self, path: str, body: Event, read: Callable[[Any], T], rng: Random) -> T:
        """POST until `read` makes something of the reply; it raises MalformedReplyError.
        Paths below the standard's begin with /chat or /completions, others are at the root."""
        problem: EngineError | None = None
        for attempt in range(self.config.num_retries + 1):
            if self._dead:
                raise EngineDeadError(self._dead)
            if attempt:
                self.counts["retries"] += 1
                delay = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (attempt - 1))
                await asyncio.sleep(delay * rng.uniform(0.5, 1.5))
            try:
                async with self._slots:
                    self.counts["requests"] += 1
                    return read(await self._client(path).call_json("POST", path, body))
            except RefusedError as error:
                self._refused(error)
                raise
            except EngineError as error:  # lost, 5xx, 429, no JSON, malformed
                problem = error
        assert problem is not None
        self._give_up(problem)
        raise problem

    async def events(self, path: str, body: Event) -> AsyncIterator[bytes]:
        """The same as a stream of events, asked once."""
        async with self._slots:
            self.counts["requests"] += 1
            try:
                async with self._client(path).stream(path, {**body, "stream": True}) as events:
                    async for event in events:
                        yield event
            except RefusedError as error:
                self._refused(error)
                raise

    async def close(self) -> None:
        """Idempotent; what comes later raises EngineDeadError."""
        self._dead = self._dead or "the engine is closed"
        await self.api.close()
        await self.root.close()

    def _client(self, path: str) -> HttpClient:
        return self.api if path.startswith(("/chat", "/completions")) else self.root

    def _refused(self, error: RefusedError) -> None:
        if error.status in HOPELESS:
            self._dead = str(error)
            raise EngineDeadError(self._dead) from error

    def _give_up(self, problem: EngineError) -> None:
        """A server that nothing reaches ends the run, one that is slow or busy does not."""
        gone = isinstance(problem, ServerLostError) and "connection lost" in str(problem)
        if gone and not isinstance(problem.__cause__, TimeoutError):
            self._dead = f"{problem}; after {self.config.num_retries} retries"
            raise EngineDeadError(self._dead) from problem


def no_weights(name: str) -> EngineError:
    """Why load_weights of such an engine cannot work."""
    return EngineError(f"{name} is only asked; its weights cannot be replaced")
