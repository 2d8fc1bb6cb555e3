"""Calls that change or ask an SGLang server as a whole, sent to each worker behind one URL."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.engines.client import HttpClient, RefusedError, check_request
from agentenv.engines.server import Request, ServerLoad, ServerLostError, top_k_entropy
from agentenv.errors import EngineError
from agentenv.types import Chunk, Completion, SamplingParams, VersionSpan

logger = logging.getLogger(__name__)

NOTHING_DONE = "Failed to get weights iterator"  # a refusal before any weight was touched


class Control:
    """The routes of one or more workers that hold the same weights."""

    def __init__(self, servers: Sequence[HttpClient]) -> None:
        self.servers = servers

    async def post(
        self, path: str, body: dict[str, Any], *, timeout_s: float | None = None
    ) -> list[Any]:
        """To all at once. RefusedError if all refused, else any failure of one is a
        ServerLostError: they may differ now."""
        calls = (post(server, path, body, timeout_s) for server in self.servers)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if not errors:
            return outcomes
        for error in errors:
            if not isinstance(error, RefusedError):
                raise error
        if len(errors) < len(outcomes):
            raise ServerLostError(f"not all workers did it: {errors[0]}") from errors[0]
        raise errors[0]

    async def pause(self) -> None:
        """What runs goes back to the queue with its tokens."""
        await self.post("/pause_generation", {"mode": "retract"})

    async def reload(self, source: Path, policy_version: int) -> None:
        """Read the weights from a directory. RefusedError: no weight was touched. After any other
        failure nobody knows."""
        body = {
            "model_path": str(await asyncio.to_thread(source.absolute)),
            "weight_version": str(policy_version),
            "flush_cache": False,  # with it, a refused flush would report an update as failed
            "abort_all_requests": False,
        }
        try:
            await self.post("/update_weights_from_disk", body, timeout_s=self._load_s)
        except RefusedError as error:
            if NOTHING_DONE in error.reason:
                raise
            raise ServerLostError(f"nobody knows what weights it has: {error}") from error

    async def flush(self) -> None:
        """Drop the prefix cache."""
        try:
            # Its own parameter to wait would wait for retracted requests to end.
            for server in self.servers:
                await server.call("POST", "/flush_cache")
        except RefusedError as error:  # a request that waited may have an old cache salt
            raise ServerLostError(f"prefixes of old weights remain: {error}") from error

    async def name_version(self, policy_version: int) -> None:
        """Tokens from now on are labelled with it."""
        body = {"new_version": str(policy_version), "abort_all_requests": False}
        await self.post("/update_weight_version", body)

    async def resume(self) -> None:
        await self.post("/continue_generation", {})

    async def abort(self, request_id: str) -> None:
        """Errors do not matter: the request is gone with its server, or it has just ended."""
        await asyncio.gather(*(_abort(server, request_id) for server in self.servers))

    async def fall_asleep(self) -> None:
        """What is left is aborted: it must be idle to sleep."""
        await self.post("/pause_generation", {"mode": "abort"})
        await self.post("/release_memory_occupation", {}, timeout_s=self._load_s)

    async def wake(self) -> None:
        """It stays paused."""
        await self.post("/resume_memory_occupation", {}, timeout_s=self._load_s)

    async def fingerprint(self) -> dict[str, str]:
        """A checksum per parameter, of every rank of every worker."""
        body = {"action": "checksum"}
        answers = await self.post("/weights_checker", body, timeout_s=self._load_s)
        ranks = [rank for answer in answers for rank in answer["ranks"]]
        return {
            f"{name}@{number}" if number else name: checksum
            for number, rank in enumerate(ranks)
            for name, checksum in rank["checksums"].items()
        }

    @property
    def _load_s(self) -> float:
        return self.servers[0].timeouts.load_s


async def post(
    server: HttpClient, path: str, body: dict[str, Any], timeout_s: float | None = None
) -> Any:
    """To one worker; RefusedError also for an answer that says success: false."""
    answer = await server.call_json("POST", path, body, timeout_s=timeout_s)
    if isinstance(answer, dict) and answer.get("success") is False:
        raise RefusedError(f"{server.name}{path} failed: {answer}", 200, str(answer))
    return answer


async def _abort(server: HttpClient, request_id: str) -> None:
    try:
        await server.call("POST", "/abort_request", {"rid": request_id})
    except EngineError as error:
        logger.debug("abort of %s: %s", request_id, error)


# Load figures of SGLang servers.

RETRACTED = b"sglang:num_retracted_requests_total"


class RankLoad(Struct, frozen=True):
    """One data-parallel rank in the answer to GET /v1/loads."""

    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float


class Loads(Struct, frozen=True):
    """The answer."""

    loads: list[RankLoad]


async def read_load(workers: Iterable[HttpClient]) -> ServerLoad:
    """Sums over ranks and workers; the fullest cache. Raises EngineError for an unknown answer."""
    ranks: list[RankLoad] = []
    num_preemptions = 0
    for worker in workers:
        body = await worker.call("GET", "/v1/loads", params={"include": "core"})
        try:
            ranks += msgspec.json.decode(body, type=Loads).loads
        except msgspec.DecodeError as error:
            raise EngineError(f"{worker.name}/v1/loads: unknown answer: {error}") from error
        num_preemptions += await _count_preemptions(worker)
    return ServerLoad(
        num_running=sum(rank.num_running_reqs for rank in ranks),
        num_waiting=sum(rank.num_waiting_reqs for rank in ranks),
        kv_usage=min(max((rank.token_usage for rank in ranks), default=0.0), 1.0),
        num_preemptions=num_preemptions,
    )


async def _count_preemptions(worker: HttpClient) -> int:
    try:
        text = await worker.call("GET", "/metrics")
    except RefusedError:  # without --enable-metrics
        return 0
    lines = (line for line in text.splitlines() if line.startswith(RETRACTED))
    return sum(int(float(line.rsplit(b" ", 1)[1])) for line in lines)


# What one request says to SGLang, and how its answer becomes chunks and a Completion.

MAX_STOPS = 32  # of one request, in SGLang

TokenLogprob = tuple[float | None, int, str | None]


class Limits(Struct, frozen=True):
    """What a server takes: tokens of a prompt, of prompt and turn together, ids below
    `vocab_size`, the largest top_k for which it tells log-probs after truncation, and seeds."""

    max_prompt: int
    max_model_len: int
    vocab_size: int
    max_top_k: int
    use_seed: bool


class Span(Struct, frozen=True):
    version: str
    start: int
    end: int


class Meta(Struct, frozen=True):
    """The part of `meta_info` that is read."""

    completion_tokens: int
    finish_reason: dict[str, Any] | None = None
    output_token_logprobs: list[TokenLogprob] = []
    output_top_logprobs: list[list[TokenLogprob] | None] = []
    output_token_sampling_mask: list[list[int]] = []
    output_token_sampling_logprobs: list[list[float]] = []
    weight_versions: list[Span] = []
    cached_tokens: int = 0


class Event(Struct, frozen=True):
    """One server-sent event; either the first two or the last are set."""

    output_ids: list[int] = []
    meta_info: Meta | None = None
    error: Any = None


DECODER = msgspec.json.Decoder(Event)


def is_truncated(sampling: SamplingParams) -> bool:
    """Whether some tokens of the vocabulary cannot be sampled. Greedy is not truncated: it
    reports the distribution at temperature 1."""
    return sampling.temperature > 0 and (
        sampling.top_p < 1 or sampling.top_k != -1 or sampling.min_p > 0
    )


def check_turn(request: Request, limits: Limits) -> None:
    """Raises EngineError for what SGLang would refuse, clamp, die of, or do in another way."""
    sampling = request.sampling
    check_request(request, limits.vocab_size, limits.max_model_len)
    if len(request.prompt_ids) > limits.max_prompt:
        raise EngineError(
            f"{len(request.prompt_ids)} prompt tokens exceed the {limits.max_prompt} that this "
            "SGLang server takes"
        )
    if sampling.repetition_penalty != 1:
        raise EngineError(
            "repetition_penalty must be 1 with SGLang: it penalises sampled tokens only, the other "
            "engines those of the prompt as well"
        )
    if len(sampling.stop) > MAX_STOPS:
        raise EngineError(f"SGLang takes at most {MAX_STOPS} stop strings, found {sampling.stop}")
    if is_truncated(sampling) and _top_k(sampling, limits) > limits.max_top_k:
        raise EngineError(
            "SGLang tells log-probs after top_p, top_k or min_p only together with top_k up to "
            f"{limits.max_top_k}: set top_k, or start it with --sampling-mask-max-tokens N"
        )


def _top_k(sampling: SamplingParams, limits: Limits) -> int:
    return limits.vocab_size if sampling.top_k == -1 else min(sampling.top_k, limits.vocab_size)


def request_body(
    request: Request, limits: Limits, entropy_top_k: int, cache_salt: str
) -> dict[str, Any]:
    """JSON of POST /generate. Every sampling field is named, so that no default of the model's
    generation_config or of the server applies."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(request.stop_token_ids),
        "no_stop_trim": True,
        "n": 1,
        "stream_interval": request.stream_interval,
    }
    body: dict[str, Any] = {
        "rid": request.id,
        "input_ids": list(request.prompt_ids),
        "sampling_params": params,
        "return_logprob": True,
        "stream": True,
        "cache_salt": cache_salt,
    }
    if is_truncated(sampling):
        # The ordinary log-probs are those before truncation; the sampling mask has those after.
        params |= {"top_p": sampling.top_p, "min_p": sampling.min_p}
        params["top_k"] = _top_k(sampling, limits)
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
    else:
        body["top_logprobs_num"] = limits.vocab_size if entropy_top_k == -1 else entropy_top_k
    if limits.use_seed and sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return body


class SGLangTurn:
    """Collects the events of one request."""

    def __init__(self, name: str, request: Request, entropy_top_k: int) -> None:
        self._name, self._request = name, request
        self._truncated = is_truncated(request.sampling)
        self._exact = entropy_top_k == -1 or self._truncated
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._entropies: list[float] = []
        self._last: Meta | None = None

    def read(self, data: bytes) -> Chunk | None:
        """The tokens that are new in an event.

        An event holds all tokens since the start or, with --incremental-streaming-output, those
        since the last one; `completion_tokens` counts from the start in both.
        """
        try:
            event = DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self._name}/generate: cannot read an event: {error}") from error
        if event.error is not None or event.meta_info is None:
            self._refuse(event.error)
        meta = self._last = event.meta_info
        assert meta is not None
        reason = meta.finish_reason
        if reason is not None and reason.get("type") == "abort" and "status_code" in reason:
            self._refuse({"message": reason.get("message"), "code": reason["status_code"]})
        num_new = meta.completion_tokens - len(self._token_ids)
        if num_new <= 0:
            return None
        chunk = self._chunk(event.output_ids[-num_new:], meta, num_new)
        if len(chunk.token_ids) < num_new or len(chunk.logprobs) < num_new:
            raise ServerLostError(f"{self._name}/generate: tokens are missing from the stream")
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._entropies += chunk.entropies
        return chunk

    def completion(self) -> Completion:
        """What the last event tells. ServerLostError if the stream had no end."""
        meta = self._last
        if meta is None or meta.finish_reason is None:
            raise ServerLostError(f"{self._name}/generate: the stream ended before the turn did")
        kind, matched = meta.finish_reason.get("type"), meta.finish_reason.get("matched")
        if kind not in ("stop", "length", "abort"):
            raise EngineError(f"{self._name}/generate: unknown finish reason {meta.finish_reason}")
        if kind == "length" and len(self._token_ids) < self._request.sampling.max_tokens:
            raise EngineError(
                f"{self._name} ended a turn at {len(self._token_ids)} tokens, before its "
                f"max_tokens {self._request.sampling.max_tokens}; is SGLANG_MAX_NEW_TOKENS_LIMIT "
                "set there?"
            )
        return Completion(
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            entropies=self._entropies,
            finish_reason=kind,
            version_spans=[self._span(span) for span in meta.weight_versions],
            stop=matched if isinstance(matched, str) else None,
            entropy_kind="exact" if self._exact else "top_k",
            num_cached_tokens=meta.cached_tokens,
        )

    def _chunk(self, token_ids: list[int], meta: Meta, num_new: int) -> Chunk:
        if self._truncated:
            masks = meta.output_token_sampling_mask[-num_new:]
            supports = meta.output_token_sampling_logprobs[-num_new:]
            rows = list(zip(token_ids, masks, supports, strict=False))
            logprobs = [support[mask.index(token)] for token, mask, support in rows]
            return Chunk(token_ids, logprobs, [top_k_entropy(support) for support in supports])
        sampled = meta.output_token_logprobs[-num_new:]
        tops = meta.output_top_logprobs[-num_new:]
        return Chunk(
            token_ids,
            [logprob for logprob, _, _ in sampled if logprob is not None],
            [top_k_entropy(p for p, _, _ in top or () if p is not None) for top in tops],
        )

    def _span(self, span: Span) -> VersionSpan:
        try:
            return VersionSpan(int(span.version), span.start, span.end)
        except ValueError as error:
            raise EngineError(
                f"{self._name} sampled with weights labelled {span.version!r}, which this run did "
                "not load; does something else update this server?"
            ) from error

    def _refuse(self, error: Any) -> None:
        details = error if isinstance(error, dict) else {"message": error}
        code = details.get("code")
        text = f"{self._name}/generate: {details.get('message') or 'no reason given'}"
        if isinstance(code, int) and (code >= 500 or code == 429):
            raise ServerLostError(text)
        raise EngineError(text)
