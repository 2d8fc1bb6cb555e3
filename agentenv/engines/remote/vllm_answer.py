"""A request in vLLM's format, and the parser of its stream into chunks and an outcome.

A server with the plugin returns exact entropies in the ranks of tokens. From other servers the
client requests the top log-probs of tokens that need entropies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from agentenv.base.errors import EngineError, ForeignError
from agentenv.base.types import SAMPLING, Chunk
from agentenv.base.untrusted import decode
from agentenv.contract.http_client import Count, FailedError, Logprob, RefusedError
from agentenv.contract.request import BusyError, ServerLostError, ServerRequest
from agentenv.engines.remote.base import AnswerParser, LabeledSpan, top_k_entropies
from agentenv.engines.remote.probes import ENTROPY, STOP_STRINGS, VLLM_TRIED

NO_LOGPROB = -9999.0  # vLLM's value for minus infinity, NaN, and unknown


class _Position(Struct, gc=False):
    logprob: Logprob
    rank: int | None = None
    top_logprobs: list[_Position] = []


class _Logprobs(Struct, gc=False):
    content: list[_Position]


class _Choice(Struct, gc=False):
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[LabeledSpan] | None = None


class _Details(Struct):
    cached_tokens: Count | None = None


class _Usage(Struct):
    prompt_tokens_details: _Details | None = None


class _Failure(Struct):
    message: str = "no reason given"
    code: int = 500


class _Event(Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Failure | None = None


def request_body(
    request_id: str,
    request: ServerRequest,
    entropy_top_k: int,
    cache_salt: str,
    adapter: str = "",
    *,
    plugin: bool = False,
) -> dict[str, Any]:
    """The JSON body; all parameters are set, since the server may take defaults from the model.
    `plugin`: the server has the plugin."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        **{name: getattr(sampling, name) for name in SAMPLING},
        "logprobs": entropy_top_k if request.with_entropies and not plugin else 0,
    }
    if sampling.guide:
        params["structured_outputs"] = {"structural_tag": sampling.guide}
    if request.stream_interval > 1:
        params["stream_interval"] = request.stream_interval
    if sampling.seed is not None:
        params["seed"] = sampling.seed % 2**63  # -1 would mean none
    params |= _stop_params(request, plugin=plugin)
    served = {"model": adapter} if adapter else {}
    return {
        "request_id": request_id, **served,
        "token_ids": list(request.prompt_ids), "sampling_params": params, "stream": True,
        "stream_options": {"include_usage": True}, "cache_salt": cache_salt,
    }  # fmt: skip


def _stop_params(request: ServerRequest, *, plugin: bool) -> dict[str, Any]:
    """The parameters by which the turn stops, or not at all."""
    sampling = request.sampling
    if sampling.stop and not plugin:
        # A stop string may contain special tokens, and is matched in the decoded text.
        params: dict[str, Any] = {
            "stop": sampling.stop,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
    else:
        # Otherwise the API server decodes each token and its `logprobs` top alternatives.
        params = {"detokenize": False}
        if sampling.stop:
            params["extra_args"] = {STOP_STRINGS: sampling.stop}
    if request.stop_token_ids:
        # The engine itself stops at these. Without the plugin, the API server matches stop strings,
        # and the engine samples useless tokens until its abort arrives.
        params["stop_token_ids"] = request.stop_token_ids
    return params


class NoPluginError(ServerLostError):
    """The ranks of a server's tokens are ordinary ranks."""


class VLLMAnswer(AnswerParser):
    """Each event has the tokens since the last one. `plugin`: token ranks contain entropies."""

    has_cached_tokens = False

    def __init__(self, *arguments: Any, plugin: bool = False, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self._plugin = plugin

    def add(self, event: bytes) -> Chunk | None:
        try:
            found = decode(event, _Event)
        except ForeignError as error:
            text = f"{self._server} streamed an event that vLLM {VLLM_TRIED} does not send: {error}"
            raise ServerLostError(text) from None
        if (failure := found.error) is not None:
            text = f"{self._server} aborted the request: {failure.message}"
            if failure.code == 429:
                raise BusyError(text)
            kind = FailedError if failure.code >= 500 else RefusedError
            raise kind(text, failure.code, failure.message)
        if found.usage is not None and found.usage.prompt_tokens_details is not None:
            cached = found.usage.prompt_tokens_details.cached_tokens
            self._num_cached_tokens = cached or 0
            self.has_cached_tokens = cached is not None
        return self._extend(found.choices[0]) if found.choices else None

    def _extend(self, choice: _Choice) -> Chunk | None:
        if choice.finish_reason is not None:
            self._reason, self._spans = choice.finish_reason, choice.weight_versions or []
            if isinstance(choice.stop_reason, str):
                self._stop = choice.stop_reason
        if not choice.token_ids:
            return None
        positions = choice.logprobs.content if choice.logprobs is not None else []
        logprobs = [position.logprob for position in positions]
        if len(logprobs) != len(choice.token_ids) or NO_LOGPROB in logprobs:
            raise EngineError(
                f"{self._server} sampled a token without a log-prob; its logits may be NaN"
            )
        return self._chunk(choice.token_ids, logprobs, lambda: self._entropies(positions))

    def _entropies(self, positions: Sequence[_Position]) -> list[float]:
        if not self._plugin:
            return top_k_entropies([[top.logprob for top in one.top_logprobs] for one in positions])
        ranks = [position.rank or 0 for position in positions]
        if min(ranks) < ENTROPY:
            raise NoPluginError(f"{self._server} runs without agentenv's plugin")
        bits = np.array(ranks, np.int64) - ENTROPY
        found: list[float] = bits.astype(np.int32).view(np.float32).tolist()
        return found
