"""An OpenAI-compatible endpoint: requests with retries.

408, 429, 5xx, a lost connection, no reply in time, a malformed reply   retried
any other status                                                        RefusedError at once
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from msgspec import Struct
from yarl import URL

from agentenv.base.deadline import admitted
from agentenv.base.errors import ConfigError, EngineDeadError, EngineError
from agentenv.base.retries import retried
from agentenv.base.urls import checked_url
from agentenv.contract.http_client import RefusedError, ServerClient, reply_bytes
from agentenv.contract.server_config import ChatModelConfig, read_key

TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
NUM_TOKENS = 32_768  # of a reply without a limit
ID_BYTES = 8
CONTINUES = ("vllm", "sglang")  # owners of models (/models) that support the extensions used here

T = TypeVar("T")
Json = dict[str, Any]


class ModelEndpoint:
    """An endpoint; `send` makes requests. `start` finds the model if none is named, and its
    reported properties: `owner` is its server, `served_from` its directory or hub name,
    `max_model_len` in tokens; empty or 0 if not reported. `table` is the configuration table in
    error messages."""

    def __init__(self, config: ChatModelConfig, table: str) -> None:
        base = URL(checked_url(config.url, f"{table}.url"))
        api = base if base.path.strip("/") else base / "v1"
        key = read_key(config.api_key_env, f"{table}.api_key_env")
        timeout_s = config.timeout_s
        self.model = config.model
        self.owner = self.served_from = ""
        self.max_model_len = 0
        self.api, self.root = (  # `root` has the non-standard routes
            ServerClient(one, api_key=key, call_s=timeout_s, wait_s=timeout_s, by_proxy=True)
            for one in (str(api), str(api).removesuffix("/v1"))
        )
        self.num_retries = config.num_retries
        self.counts = {"requests": 0.0, "retries": 0.0, "sampled_tokens": 0.0, "prompt_tokens": 0.0}
        self._table = table
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._slot = f"a slot at {self.api.name}"
        self._closed = False

    async def start(self) -> None:
        """Raises ConfigError if the endpoint is unreachable or does not have the model."""
        try:
            found = await self.api.call_as(Models, "GET", "/models", timeout_s=30.0)
            models = {one.id: one for one in found.data}
        except RefusedError as error:
            if error.status in (401, 403) or not self.model:
                raise ConfigError(f"{self._table}: {error}") from error
            models = {}  # some endpoints do not list models
        except EngineError as error:
            raise ConfigError(
                f"{self._table}.url: {self.api.name} does not list its models ({error}); expected "
                "an OpenAI-compatible endpoint"
            ) from error
        if not self.model:
            if len(models) != 1:
                raise ConfigError(
                    f"{self._table}.model: {self.api.name} serves {sorted(models)}; choose one"
                    + (" with --model" if self._table == "engine" else "")
                )
            (self.model,) = models
        if models and self.model not in models:
            raise ConfigError(
                f"{self._table}.model: {self.api.name} has no {self.model!r}; it has "
                f"{sorted(models)[:20]}"
            )
        own = models.get(self.model, Model(self.model))
        self.owner, self.served_from = own.owned_by or "", own.root or ""
        self.max_model_len = own.max_model_len or 0

    @property
    def known(self) -> bool:
        """Whether the server supports the extensions used here."""
        return self.owner in CONTINUES

    async def send(self, path: str, body: Json, read: Callable[[Any], T], key: str) -> T:
        """POST until `read` accepts the reply; it raises MalformedReplyError otherwise. Standard
        paths begin with /chat or /completions, others are at the root. The jitter of the back-off
        is drawn from `key`.

        Raises RefusedError, or the error of the last attempt.
        """
        client = self.api if path.startswith(("/chat", "/completions")) else self.root
        max_bytes = self._most_bytes(body)

        async def ask(attempt: int) -> T:
            if self._closed:
                raise EngineDeadError(f"the connection to {self.api.name} is closed")
            async with admitted(self._slots, self._slot):
                self.counts["requests"] += 1
                self.counts["retries"] += attempt > 0
                return read(await client.call_json("POST", path, body, max_bytes=max_bytes))

        try:
            return await retried(ask, self.api.name, key, self.num_retries)
        except EngineError as error:
            error.is_final = True
            raise

    def _most_bytes(self, body: Json) -> int:
        """The bound of a reply: the need of its tokens and log-probs, and of the prompt's ids."""
        params = body.get("sampling_params", body)
        limits = [params[key] for key in TOKEN_LIMITS if isinstance(params.get(key), int)]
        num_tokens = min(limits, default=self.max_model_len or NUM_TOKENS)
        num_logprobs = sum(int(params.get(key) or 0) for key in ("logprobs", "top_logprobs"))
        return reply_bytes(num_tokens, num_logprobs) + ID_BYTES * len(body.get("prompt", ()))

    async def close(self) -> None:
        """Close the connections; later requests raise EngineDeadError. Idempotent."""
        self._closed = True
        await self.api.close()
        await self.root.close()


class Model(Struct):
    """`max_model_len` is missing for an adapter."""

    id: str
    owned_by: str | None = None
    root: str | None = None
    max_model_len: int | None = None


class Models(Struct):
    """Of GET /models."""

    data: list[Model]
