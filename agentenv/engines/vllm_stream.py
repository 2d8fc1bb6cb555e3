"""One request as vLLM takes it, and what it streams, read into chunks and a Completion."""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from agentenv.engines.entropy import top_k_entropy
from agentenv.engines.http import FailedError, RefusedError
from agentenv.engines.server import Request, ServerLostError
from agentenv.errors import EngineError
from agentenv.types import Chunk, Completion, VersionSpan

NO_LOGPROB = -9999.0  # what vLLM writes for minus infinity, NaN, and for "not known"


class _Top(Struct):
    logprob: float


class _Position(Struct):
    logprob: float
    top_logprobs: list[_Top] = []


class _Logprobs(Struct):
    content: list[_Position]


class _Span(Struct):
    version: str
    start: int
    end: int


class _Choice(Struct):
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens_details: _Details | None = None


class _Failure(Struct):
    message: str = "no reason given"
    code: int = 500


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Failure | None = None


_decode = msgspec.json.Decoder(_Event).decode


def request_body(
    request_id: str, request: Request, entropy_top_k: int, cache_salt: str, adapter: str = ""
) -> dict[str, Any]:
    """What is posted; no default is left to the server, it may read them from the model."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": entropy_top_k,
    }
    if request.stream_interval > 1:
        params["stream_interval"] = request.stream_interval
    if sampling.seed is not None:
        params["seed"] = sampling.seed % 2**63  # -1 would mean none
    if sampling.stop:
        # A stop string may hold special tokens, and it is looked for in the decoded text.
        params |= {
            "stop": sampling.stop,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
    else:
        # Otherwise the API server decodes each token and its `logprobs` largest rivals.
        params["detokenize"] = False
    if request.stop_token_ids:
        # The engine stops at these by itself. Stop strings are found by the API server, and until
        # its abort arrives the engine samples on for nothing.
        params["stop_token_ids"] = request.stop_token_ids
    return {
        "request_id": request_id,
        **({"model": adapter} if adapter else {}),
        "token_ids": request.prompt_ids,
        "sampling_params": params,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": cache_salt,
    }


def entropy_kind(top_k: int, vocab_size: int) -> Literal["exact", "top_k"]:
    """What entropies from the `top_k` largest log-probs are; -1 stands for all."""
    return "exact" if top_k == -1 or top_k >= vocab_size else "top_k"


class Answer:
    """Grows with each event. Lists of `completion` and of the chunks are equally long."""

    def __init__(self, server: str, entropy_kind: Literal["exact", "top_k"]) -> None:
        self._server = server
        self._reason: str | None = None
        self.has_cached_tokens = False
        self.completion = Completion([], [], [], "abort", [], entropy_kind=entropy_kind)

    def add(self, event: bytes) -> Chunk | None:
        """Take one event; the new tokens, if it has any.

        Raises ServerLostError for an error of the engine, EngineError for a refusal or for
        tokens without a log-prob.
        """
        try:
            found = _decode(event)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self._server} streamed what vLLM 0.32 does not: {error}") from None
        if found.error is not None:
            text = f"{self._server} broke off: {found.error.message}"
            kind = FailedError if found.error.code >= 500 else RefusedError
            raise kind(text, found.error.code, found.error.message)
        if found.usage is not None and found.usage.prompt_tokens_details is not None:
            cached = found.usage.prompt_tokens_details.cached_tokens
            self.completion.num_cached_tokens = cached or 0
            self.has_cached_tokens = cached is not None
        return self._extend(found.choices[0]) if found.choices else None

    def finish(self) -> Completion:
        """The whole turn. ServerLostError if the stream ended without a finish reason."""
        done = self.completion
        if self._reason not in ("stop", "length", "abort"):
            raise ServerLostError(f"{self._server} ended the stream with {self._reason!r}")
        done.finish_reason = cast(Literal["stop", "length", "abort"], self._reason)
        spans = done.version_spans
        if [0, *(s.end for s in spans)] != [*(s.start for s in spans), len(done.token_ids)]:
            raise EngineError(
                f"{self._server} gave version spans {spans} for {len(done.token_ids)} tokens"
            )
        return done

    def _extend(self, choice: _Choice) -> Chunk | None:
        done = self.completion
        if choice.finish_reason is not None:
            self._reason = choice.finish_reason
            if isinstance(choice.stop_reason, str):
                done.stop = choice.stop_reason
            done.version_spans = [self._span(span) for span in choice.weight_versions or []]
        if not choice.token_ids:
            return None
        positions = choice.logprobs.content if choice.logprobs is not None else []
        logprobs = [position.logprob for position in positions]
        if len(logprobs) != len(choice.token_ids) or NO_LOGPROB in logprobs:
            raise EngineError(
                f"{self._server} sampled a token without telling its log-prob; "
                "its logits may be NaN"
            )
        entropies = [
            top_k_entropy([top.logprob for top in position.top_logprobs]) for position in positions
        ]
        done.token_ids += choice.token_ids
        done.logprobs += logprobs
        done.entropies += entropies
        return Chunk(choice.token_ids, logprobs, entropies)

    def _span(self, span: _Span) -> VersionSpan:
        try:
            return VersionSpan(int(span.version), span.start, span.end)
        except ValueError:
            raise EngineError(
                f"{self._server} names the weights of tokens {span.start} to {span.end} "
                f"{span.version!r}, not the number of a policy version: did someone else load "
                "weights into it?"
            ) from None
