"""One OpenAI-compatible endpoint: requests with retries, and what its failures mean.

429, 5xx, a lost connection, no reply in time, a reply that is none   sent again, then EngineError
401, 403, 404                                                        EngineDeadError: no request
                                                                     can succeed
other 4xx                                                            EngineError: this one cannot
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from math import nan
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, field
from yarl import URL

from agentenv.engine import EngineConfig
from agentenv.engines.client import HttpClient, RefusedError, Timeouts
from agentenv.engines.server import ServerLostError
from agentenv.errors import ConfigError, EngineDeadError, EngineError
from agentenv.types import Chunk, Completion, SamplingParams, VersionSpan

# Settings of an OpenAI-compatible endpoint that answers in place of an engine of ours.


class OpenAIConfig(
    EngineConfig,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="openai",
    tag_field="name",
):
    """An endpoint that is only asked: its weights never change. For evaluation."""

    url: Annotated[str, Meta(description="base URL, e.g. http://HOST:8000 or https://HOST/v1")]
    model: Annotated[
        str, Meta(description="model name there; empty: the only one that the endpoint lists")
    ] = ""
    tokenizer: Annotated[
        str,
        Meta(
            description="directory with the served model's tokenizer: token ids go in and out, as "
            "in training (vLLM, SGLang); empty: chat messages, for any endpoint"
        ),
    ] = ""
    api_key_env: Annotated[
        str, Meta(description="environment variable that holds the API key; empty: none")
    ] = ""
    continuation: Annotated[
        Literal["auto", "continue", "prefix", "turns"],
        Meta(
            description="how the tag protocol goes on behind a tool result in chat messages: "
            "'continue' the assistant's text (vLLM, SGLang), with 'prefix' = true (DeepSeek, "
            "Mistral), or results as 'turns' of the user; auto: 'continue' where it is known"
        ),
    ] = "auto"
    max_tokens_key: Annotated[
        Literal["max_tokens", "max_completion_tokens"],
        Meta(description="key of the turn's limit in chat requests, as the endpoint wants it"),
    ] = "max_tokens"
    max_model_len: Annotated[
        int, Meta(ge=0, description="tokens of prompt and response; 0: what it says, else no check")
    ] = 0
    timeout_s: Annotated[float, Meta(gt=0, description="deadline of one request")] = 300.0
    num_retries: Annotated[int, Meta(ge=0, description="after 429, 5xx, lost connections")] = 6
    max_concurrency: Annotated[int, Meta(ge=1, description="requests in flight")] = 64
    extra_body: Annotated[
        dict[str, Any], Meta(description="more keys of each request, e.g. chat_template_kwargs")
    ] = field(default_factory=dict)

    has_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"engine.url: expected http(s)://HOST, got {self.url!r}")


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


# Token ids in, token ids out, of a server that somebody runs: vLLM by /v1/completions, SGLang by
# /generate. Unlike the engines of training it asks nothing else of the server.


class TokensEngine:
    """Engine over an Endpoint. Log-probs and entropies are not asked for and are NaN."""

    policy_version = 0

    def __init__(self, config: OpenAIConfig) -> None:
        self.endpoint = Endpoint(config)

    async def start(self) -> None:
        """Raises ConfigError for an endpoint that does not speak in token ids."""
        await self.endpoint.start()
        if not self.endpoint.known:
            raise ConfigError(
                f"engine.tokenizer: {self.endpoint.api.name} is served by "
                f"{self.endpoint.owner or 'an unknown server'}, which does not take and give token "
                "ids; leave the tokenizer out to speak in chat messages"
            )

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 1,
    ) -> Completion:
        """See Engine.generate; with `on_tokens` the request is streamed and not sent again."""
        sglang = self.endpoint.owner == "sglang"
        body = _sglang_body(prompt_ids, sampling) if sglang else self._body(prompt_ids, sampling)
        path, read = ("/generate", _read_sglang) if sglang else ("/completions", _read)
        if on_tokens is not None and not sglang:
            done = await self._stream(body, on_tokens)
        else:
            rng = Random(f"{sampling.seed}/{session}")
            done = await self.endpoint.send(path, body, read, rng)
            if on_tokens is not None:
                on_tokens(_chunk(done.token_ids))
        self.endpoint.counts["sampled_tokens"] += len(done.token_ids)
        self.endpoint.counts["prompt_tokens"] += len(prompt_ids)
        return done

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """Raises EngineError."""
        raise no_weights(self.endpoint.api.name)

    def stats(self) -> dict[str, float]:
        return dict(self.endpoint.counts)

    async def close(self) -> None:
        await self.endpoint.close()

    def _body(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
        return {
            "model": self.endpoint.model,
            "prompt": list(prompt_ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "return_token_ids": True,
            **({} if sampling.seed is None else {"seed": sampling.seed % 2**63}),
            **self.endpoint.config.extra_body,
        }

    async def _stream(self, body: dict[str, Any], on_tokens: Callable[[Chunk], None]) -> Completion:
        ids: list[int] = []
        last: dict[str, Any] = {}
        async for event in self.endpoint.events("/completions", body):
            try:
                choices = msgspec.json.decode(event).get("choices")
            except (msgspec.DecodeError, AttributeError) as error:
                raise MalformedReplyError(f"a malformed event: {event[:200]!r}") from error
            if not choices:
                continue
            new = choices[0].get("token_ids") or []
            ids += new
            last = choices[0] if choices[0].get("finish_reason") else last
            if new:
                on_tokens(_chunk(new))
        return _read({"choices": [{**last, "token_ids": ids}]})


def _sglang_body(prompt_ids: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed % 2**31
    return {"input_ids": list(prompt_ids), "sampling_params": params}


def _read(reply: Any) -> Completion:
    try:
        choice = reply["choices"][0]
        ids, reason, stop = choice["token_ids"], choice["finish_reason"], choice.get("stop_reason")
    except (LookupError, TypeError) as error:
        raise MalformedReplyError(
            f"no completion with token_ids: {msgspec.json.encode(reply)[:200]!r}; it takes vLLM "
            "0.11 or newer"
        ) from error
    return _completion(ids, reason, stop)


def _read_sglang(reply: Any) -> Completion:
    try:
        ids, why = reply["output_ids"], reply["meta_info"]["finish_reason"]
        return _completion(ids, why["type"], why.get("matched"))
    except (LookupError, TypeError) as error:
        raise MalformedReplyError(f"no output_ids: {msgspec.json.encode(reply)[:200]!r}") from error


def _completion(ids: list[int], reason: str, stop: Any) -> Completion:
    if reason not in ("stop", "length") or not ids:
        raise EngineError(f"the server ended a turn of {len(ids)} tokens with {reason!r}")
    kind: Literal["stop", "length"] = "stop" if reason == "stop" else "length"
    unknown = [nan] * len(ids)
    return Completion(
        token_ids=ids,
        logprobs=unknown,
        entropies=list(unknown),
        finish_reason=kind,
        version_spans=[VersionSpan(0, 0, len(ids))],
        stop=stop if isinstance(stop, str) else None,
    )


def _chunk(ids: list[int]) -> Chunk:
    return Chunk(ids, [nan] * len(ids), [nan] * len(ids))
