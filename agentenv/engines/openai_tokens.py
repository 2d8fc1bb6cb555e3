"""Token ids in, token ids out, of a server that somebody runs: vLLM by /v1/completions, SGLang by
/generate. Unlike the engines of training it asks nothing else of the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from agentenv.engines.openai_config import OpenAIConfig
from agentenv.engines.openai_endpoint import Endpoint, MalformedReplyError, no_weights
from agentenv.errors import ConfigError, EngineError
from agentenv.types import Chunk, Completion, SamplingParams, VersionSpan


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
