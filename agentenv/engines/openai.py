"""An OpenAI-compatible endpoint as an engine, for inference only: its keys, and the common base of
the engines for token ids, and for chat messages (chat.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, field

from agentenv.base.config import about
from agentenv.base.errors import ConfigError, EngineDeadError, EngineError
from agentenv.base.types import SAMPLING, Chunk, Completion, SamplingParams, VersionSpan
from agentenv.base.urls import checked_url
from agentenv.contract import http_client
from agentenv.contract.engine import Engine, EngineCapabilities, EngineConfig
from agentenv.contract.request import ServerLostError
from agentenv.contract.server_config import ChatModelConfig, ExtraBody, ServerKeyEnv
from agentenv.text.endpoint import ModelEndpoint


class OpenAIConfig(EngineConfig, frozen=True, kw_only=True, tag="openai", tag_field="name"):
    """An endpoint for evaluation: its weights never change."""

    url: Annotated[str, about("base URL, e.g. http://HOST:8000 or https://HOST/v1")]
    model: Annotated[
        str, about("model name at the endpoint; empty: the only one that it lists")
    ] = ""
    tokenizer: Annotated[
        str,
        about(
            "directory with the served model's tokenizer: token ids go in and out, as "
            "in training (vLLM, SGLang); empty: chat messages, for any endpoint"
        ),
    ] = ""
    api_key_env: ServerKeyEnv = ""
    continuation: Annotated[
        Literal["auto", "continue", "prefix", "turns"],
        about(
            "how the tag protocol continues after a tool result in chat messages: 'continue' the "
            "assistant's text (vLLM, SGLang), with 'prefix' = true (DeepSeek, Mistral), or results "
            "as 'turns' of the user; auto: 'continue' where the server is known to support it"
        ),
    ] = "auto"
    break_control_tokens: Annotated[
        bool,
        about(
            "in chat messages, break the control tokens of every known family in texts "
            "of tools and users, so that they cannot end a message; false: send them unchanged"
        ),
    ] = True
    max_tokens_key: Annotated[
        Literal["max_tokens", "max_completion_tokens"],
        about("name of the token limit in chat requests that the endpoint expects"),
    ] = "max_tokens"
    max_model_len: Annotated[
        int,
        about(
            "tokens of prompt and response; 0: the value that the endpoint reports, else no check",
            ge=0,
        ),
    ] = 0
    timeout_s: Annotated[float, about("deadline of one request", gt=0)] = 300.0
    num_retries: Annotated[int, about("after 429, 5xx, lost connections", ge=0)] = 6
    max_concurrency: Annotated[int, about("requests in flight", ge=1)] = 64
    extra_body: ExtraBody = field(default_factory=dict)

    capabilities: ClassVar = EngineCapabilities(has_weights=False)

    def __post_init__(self) -> None:
        checked_url(self.url, "engine.url")


HOPELESS = (401, 403, 404)  # after these, no request can succeed
SHARED_KEYS = ("url", "model", "api_key_env", "timeout_s", "num_retries", "max_concurrency")


class EndpointEngine(Engine):
    """Common base of the engines over a ModelEndpoint. An endpoint that rejects everything, or that
    is unreachable, ends the run: EngineDeadError.
    """

    policy_version = 0

    def __init__(self, config: OpenAIConfig) -> None:
        self.config = config
        keys = {name: getattr(config, name) for name in SHARED_KEYS}
        self.endpoint = ModelEndpoint(ChatModelConfig(**keys), "engine")
        self._dead = ""  # the reason

    @property
    def max_model_len(self) -> int:
        """Context length, tokens: the configuration's, else the endpoint's."""
        return self.config.max_model_len or self.endpoint.max_model_len

    async def start(self) -> None:
        """Raises ConfigError if the endpoint cannot be used."""
        await self.endpoint.start()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 1,
        order: tuple[int, int] = (0, 0),
    ) -> Completion:
        """See Engine.generate; `on_tokens` gets the whole turn at its end."""
        if self._dead:
            raise EngineDeadError(self._dead)
        try:
            done = await self._turn(prompt_ids, sampling, session)
        except http_client.RefusedError as error:
            if error.status not in HOPELESS:
                raise
            self._dead = str(error)
            raise EngineDeadError(self._dead) from error
        except (http_client.FailedError, http_client.SilentServerError):
            raise
        except ServerLostError as error:  # unreachable; a slow or busy one does not end the run
            self._dead = f"{error}; after {self.config.num_retries} retries"
            raise EngineDeadError(self._dead) from error
        if on_tokens is not None:
            on_tokens(Chunk(done.token_ids, done.logprobs, done.entropies))
        return done

    @abstractmethod
    async def _turn(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        """Request one turn, and count its tokens."""

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """Raises EngineError."""
        raise EngineError(
            f"{self.endpoint.api.name} is an inference endpoint; its weights cannot be replaced"
        )

    def stats(self) -> dict[str, float]:
        """See ModelEndpoint.counts."""
        return dict(self.endpoint.counts)

    async def close(self) -> None:
        """Idempotent."""
        self._dead = self._dead or "the engine is closed"
        await self.endpoint.close()


def unmeasured(ids: list[int], reason: Literal["stop", "length"], stop: str | None) -> Completion:
    """A turn without log-probs and entropies."""
    spans = [VersionSpan(0, 0, len(ids))]
    return Completion(ids, [nan] * len(ids), [nan] * len(ids), reason, spans, stop)


# The engine over the token routes of a running vLLM or SGLang server, for inference only.


class TokensEngine(EndpointEngine):
    """Token ids in, token ids out, on a running server: vLLM by /v1/completions, SGLang by
    /generate. Log-probs and entropies are not requested and are NaN. A turn also ends at any of
    `eos_ids`, independently of the server's end tokens."""

    def __init__(self, config: OpenAIConfig, eos_ids: Collection[int] = ()) -> None:
        super().__init__(config)
        self._ends = {"stop_token_ids": sorted(eos_ids)} if eos_ids else {}

    async def start(self) -> None:
        """Connect. Raises ConfigError for an endpoint without token ids."""
        await super().start()
        if not self.endpoint.known:
            raise ConfigError(
                f"engine.tokenizer: {self.endpoint.api.name} is served by "
                f"{self.endpoint.owner or 'an unknown server'}, which does not support token ids "
                "in and out; omit the tokenizer to use chat messages"
            )

    async def _turn(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, session: str
    ) -> Completion:
        send, key = self.endpoint.send, f"{sampling.seed}/{session}"
        if self.endpoint.owner == "sglang":
            body = _sglang_body(prompt_ids, sampling, self._ends)
            done = await send("/generate", body, _read_sglang, key)
        else:
            done = await send("/completions", self._body(prompt_ids, sampling), _read, key)
        self.endpoint.counts["sampled_tokens"] += len(done.token_ids)
        self.endpoint.counts["prompt_tokens"] += len(prompt_ids)
        return done

    def _body(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
        return {
            "model": self.endpoint.model,
            "prompt": list(prompt_ids),
            "max_tokens": sampling.max_tokens,
            **_sampling(sampling, self._ends),
            "include_stop_str_in_output": True,
            "return_token_ids": True,
            **({} if sampling.seed is None else {"seed": sampling.seed % 2**63}),
            **self.config.extra_body,
        }


def _sampling(sampling: SamplingParams, ends: Mapping[str, list[int]]) -> dict[str, Any]:
    """The keys that both servers accept."""
    return {
        **{name: getattr(sampling, name) for name in SAMPLING},
        "stop": list(sampling.stop),
        **ends,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }


def _sglang_body(
    prompt_ids: Sequence[int], sampling: SamplingParams, ends: Mapping[str, list[int]]
) -> dict[str, Any]:
    params = _sampling(sampling, ends)
    params |= {"max_new_tokens": sampling.max_tokens, "no_stop_trim": True}
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed % 2**31
    return {"input_ids": list(prompt_ids), "sampling_params": params}


class _Choice(Struct):
    """Of /completions."""

    token_ids: list[http_client.TokenId]
    finish_reason: str | None = None
    stop_reason: Any = None


class _Reply(Struct):
    choices: Annotated[list[_Choice], Meta(min_length=1)]


class _Reason(Struct):
    type: str
    matched: Any = None


class _Meta(Struct):
    finish_reason: _Reason


class _Generated(Struct):
    """A reply of SGLang's /generate."""

    output_ids: list[http_client.TokenId]
    meta_info: _Meta


def _read(reply: Any) -> Completion:
    what = "not a completion with token_ids, which require vLLM 0.11 or newer"
    choice = http_client.read_as(_Reply, reply, what).choices[0]
    return _completion(choice.token_ids, choice.finish_reason, choice.stop_reason)


def _read_sglang(reply: Any) -> Completion:
    found = http_client.read_as(_Generated, reply, "not a generated turn")
    why = found.meta_info.finish_reason
    return _completion(found.output_ids, why.type, why.matched)


def _completion(ids: list[int], reason: str | None, stop: Any) -> Completion:
    if reason not in ("stop", "length") or not ids:
        raise EngineError(f"the server ended a turn of {len(ids)} tokens with {reason!r}")
    kind: Literal["stop", "length"] = "stop" if reason == "stop" else "length"
    return unmeasured(ids, kind, stop if isinstance(stop, str) else None)
