"""The engine over the token routes of a running vLLM or SGLang server, for inference only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from agentenv.base.errors import ConfigError, EngineError, ForeignError
from agentenv.base.types import Completion, SamplingParams
from agentenv.base.untrusted import convert
from agentenv.contract.http_client import MalformedReplyError, TokenId
from agentenv.engines.openai import EndpointEngine, OpenAIConfig, unmeasured


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
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
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

    token_ids: list[TokenId] | None = None
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

    output_ids: list[TokenId]
    meta_info: _Meta


def _read(reply: Any) -> Completion:
    try:
        choice = convert(reply, _Reply).choices[0]
    except ForeignError as error:
        raise MalformedReplyError(f"not a completion ({error}): {_shown(reply)}") from error
    if choice.token_ids is None:
        raise MalformedReplyError(
            f"a completion without token_ids: {_shown(reply)}; token_ids require vLLM 0.11 or newer"
        )
    return _completion(choice.token_ids, choice.finish_reason, choice.stop_reason)


def _read_sglang(reply: Any) -> Completion:
    try:
        found = convert(reply, _Generated)
    except ForeignError as error:
        raise MalformedReplyError(f"output_ids are missing ({error}): {_shown(reply)}") from error
    why = found.meta_info.finish_reason
    return _completion(found.output_ids, why.type, why.matched)


def _shown(reply: Any) -> str:
    return repr(msgspec.json.encode(reply)[:200])


def _completion(ids: list[int], reason: str | None, stop: Any) -> Completion:
    if reason not in ("stop", "length") or not ids:
        raise EngineError(f"the server ended a turn of {len(ids)} tokens with {reason!r}")
    kind: Literal["stop", "length"] = "stop" if reason == "stop" else "length"
    return unmeasured(ids, kind, stop if isinstance(stop, str) else None)
