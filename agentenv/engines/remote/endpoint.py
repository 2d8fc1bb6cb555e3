"""An OpenAI-compatible endpoint: requests with retries, chat replies, auxiliary models.

408, 429, 5xx, a lost connection, no reply in time, a malformed reply   retried
any other status                                                        RefusedError at once

Replies are decoded here; an invalid one is a MalformedReplyError.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct
from yarl import URL

from agentenv.call_syntax import after_thoughts
from agentenv.deadline import admitted, backoff_s, waiting
from agentenv.engines.remote.client import Count, HttpClient, MalformedReplyError, RefusedError
from agentenv.engines.remote.request import BusyError
from agentenv.errors import ConfigError, EngineDeadError, EngineError, ForeignError
from agentenv.server_config import ChatModelConfig, read_key
from agentenv.untrusted import convert, decode

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 60.0  # even if a server requests more
CONTINUES = ("vllm", "sglang")  # owners of models (/models) that support the extensions used here
CHAT_PATH = "/chat/completions"
GAP = "\n...\n"

T = TypeVar("T")
Json = dict[str, Any]


class EndpointConfig(Protocol):
    """The keys of an endpoint; an empty `api_key_env` means no key, `timeout_s` applies to one
    request."""

    @property
    def url(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def api_key_env(self) -> str: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def num_retries(self) -> int: ...
    @property
    def max_concurrency(self) -> int: ...


class Endpoint:
    """An endpoint; `send` makes requests. `start` finds the model if none is named, and its
    reported properties: `owner` is its server, `served_from` its directory or hub name,
    `max_model_len` in tokens; empty or 0 if not reported. `table` is the configuration table in
    error messages."""

    def __init__(self, config: EndpointConfig, table: str) -> None:
        url = config.url
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{table}.url: expected http(s)://HOST of an OpenAI-compatible endpoint, got "
                f"{url!r}"
            )
        base = URL(url.rstrip("/"))
        api = base if base.path.strip("/") else base / "v1"
        key = read_key(config.api_key_env, f"{table}.api_key_env")
        timeout_s = config.timeout_s
        self.model = config.model
        self.owner = self.served_from = ""
        self.max_model_len = 0
        self.api, self.root = (  # `root` has the non-standard routes
            HttpClient(one, api_key=key, call_s=timeout_s, wait_s=timeout_s)
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
            found = await self.api.call_as(_Models, "GET", "/models", timeout_s=30.0)
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
        own = models.get(self.model, _Model(self.model))
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
        problem: EngineError | None = None
        for attempt in range(self.num_retries + 1):
            if attempt:
                self.counts["retries"] += 1
                wanted_s = problem.retry_after_s if isinstance(problem, BusyError) else 0.0
                delay_s = backoff_s(
                    attempt - 1, key, first_s=FIRST_DELAY_S, max_s=MAX_DELAY_S, at_least_s=wanted_s
                )
                with waiting(f"a pause before {self.api.name} is retried"):
                    await asyncio.sleep(delay_s)
            self._check_open()
            try:
                async with admitted(self._slots, self._slot):
                    self.counts["requests"] += 1
                    return read(await self._client(path).call_json("POST", path, body))
            except RefusedError:
                raise
            except EngineError as error:  # lost, 5xx, 429, malformed
                problem = error
        assert problem is not None
        problem.is_final = True
        raise problem

    async def close(self) -> None:
        """Close the connections; later requests raise EngineDeadError. Idempotent."""
        self._closed = True
        await self.api.close()
        await self.root.close()

    def _client(self, path: str) -> HttpClient:
        return self.api if path.startswith(("/chat", "/completions")) else self.root

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError(f"the connection to {self.api.name} is closed")


# The used parts of replies.

MAX_TOKENS = 1 << 20  # of a turn, as counted by its server


class _Model(Struct):
    id: str
    owned_by: str | None = None
    root: str | None = None
    max_model_len: int | None = None


class _Models(Struct):
    data: list[_Model]


class ChatFunction(Struct):
    """A tool call of the model, which is checked when it is executed. `arguments` is a JSON text or
    a JSON value."""

    name: Any = None
    arguments: Any = None


class ChatCall(Struct):
    """A tool call."""

    id: str | None = None
    function: ChatFunction | None = None


class ChatMessage(Struct):
    """The model's message; `reasoning_content` and `reasoning` are two names of its thoughts; `raw`
    is the whole turn as sampled, from `agentenv serve`."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    raw: str | None = None
    tool_calls: list[ChatCall] | None = None


class ChatChoice(Struct):
    """`stop_reason` (vLLM) and `matched_stop` (SGLang) name the stop string or token, if any."""

    message: ChatMessage
    finish_reason: str | None = None
    stop_reason: Any = None
    matched_stop: Any = None


class ChatUsage(Struct):
    """In tokens."""

    prompt_tokens: Count | None = None
    completion_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None


class ChatReply(Struct):
    """A reply to /chat/completions."""

    choices: Annotated[list[ChatChoice], Meta(min_length=1)]
    usage: ChatUsage | None = None


class ModelReply(Struct, frozen=True):
    """A reply of a model: its text with and without thoughts; `whole` unless it was truncated;
    `num_tokens` of request and reply together, 0 if not reported."""

    raw: str
    text: str
    whole: bool
    num_tokens: int


def read_chat(reply: Any) -> ChatReply:
    """Decode a reply from bytes or plain values. Raises MalformedReplyError."""
    try:
        return decode(reply, ChatReply) if isinstance(reply, bytes) else convert(reply, ChatReply)
    except ForeignError as error:
        shown = reply if isinstance(reply, bytes) else msgspec.json.encode(reply)
        text = shown[:200].decode(errors="replace")
        raise MalformedReplyError(f"not a chat completion ({error}): {text}") from error


def read_reply(reply: Any) -> ModelReply:
    """The model's reply. Raises MalformedReplyError."""
    found = read_chat(reply)
    choice, usage = found.choices[0], found.usage or ChatUsage()
    raw = choice.message.content or ""
    num_tokens = (usage.prompt_tokens or 0) + (usage.completion_tokens or 0)
    return ModelReply(
        raw, after_thoughts(raw).strip(), choice.finish_reason != "length", num_tokens
    )


def fenced(text: str, *, name: str = "DATA", digest_of: str = "") -> str:
    """Untrusted text for a model, between marks that the text cannot contain: they are derived from
    the text, or from `digest_of`, which must determine the text."""
    digest = hashlib.sha256((digest_of or text).encode(errors="replace")).hexdigest()
    mark = f"{name}-{digest[:16]}"
    return f"[{mark}]\n{text}\n[/{mark}]"


def shortened(text: str, max_chars: int, gap: str = GAP) -> str:
    """The text, or the head and tail of a text longer than `max_chars`."""
    half = max_chars // 2
    return text if len(text) <= max_chars else text[:half] + gap + text[-half:]


class ChatModel:
    """An auxiliary model behind an endpoint, for independent questions: judge, summarizer, helpers.

    `table` is the configuration table of `config`, `settings` are further keys of each request.
    `start` of its `endpoint` is necessary only if no model is named.
    """

    def __init__(self, config: ChatModelConfig, table: str, **settings: Any) -> None:
        self.name = table.rpartition(".")[2]
        self.endpoint = Endpoint(config, table)
        self._settings = {**settings, "max_tokens": config.max_tokens, **config.extra_body}

    async def complete(self, system: str, user: str) -> ModelReply:
        """Ask one question. Raises EngineError if the endpoint rejects it, or all attempts fail."""
        return read_reply(await self.reply(self.body(system, user)))

    def body(self, system: str, user: str) -> Json:
        """A request with one question and an optional system prompt."""
        prompt = [{"role": "system", "content": system}] if system else []
        messages = [*prompt, {"role": "user", "content": user}]
        return {"model": self.endpoint.model, "messages": messages, **self._settings}

    async def reply(self, body: Json) -> Json:
        """The reply to such a request, for `read_reply`. Raises EngineError."""
        return await self.endpoint.send(CHAT_PATH, body, _readable, str(body["messages"]))

    def stats(self) -> dict[str, float]:
        """The number of requests, and of retries among them."""
        counts = self.endpoint.counts
        return {
            f"{self.name}/num_requests": counts["requests"],
            f"{self.name}/num_retries": counts["retries"],
        }


def _readable(reply: Any) -> Json:
    read_reply(reply)
    return dict(reply)
