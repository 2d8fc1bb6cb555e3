"""Client of an SGLang server; SGLang itself is only required on the server side.

request_body, SGLangAnswer   one request in SGLang's format, and its parsed answer
SGLangServer                 POST /generate (stream, our own rid) --> chunks --> PartEnd; after a
                             cancellation or failure --> POST /abort_request, at once; and the steps
                             of a weight update (remote/weight_sync.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import nan
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from msgspec import Struct
from msgspec.structs import replace

from agentenv.base.errors import EngineError, ForeignError, reported_as
from agentenv.base.types import Chunk, SamplingParams, VersionSpan
from agentenv.base.untrusted import decode
from agentenv.contract.engine import check_request
from agentenv.contract.http_client import Count, Logprob, RefusedError
from agentenv.contract.request import BusyError, PartEnd, ServerLoad, ServerLostError, ServerRequest
from agentenv.contract.server_config import SGLANG_RESERVED
from agentenv.contract.weights import Bucket, Group, Manifest
from agentenv.engines.pool.pooled_engine import SERVERS, PooledEngineConfig
from agentenv.engines.remote import probes
from agentenv.engines.remote.base import AnswerParser, LabeledSpan, top_k_entropies
from agentenv.engines.remote.scoring import by_sglang
from agentenv.engines.remote.weight_sync import WeightSync

QUEUE_FULL = "queue is full"  # a refusal by --max-queued-requests
NOTHING_DONE = "Failed to get weights iterator"  # a refusal before any weight was touched

# A request in SGLang's format, and its answer, parsed into chunks and an outcome.

MAX_STOPS = 32  # of one request, in SGLang


class Reason(Struct, frozen=True):
    """The reason of a turn's end; `message` and `status_code` belong to rejected requests."""

    type: str | None = None
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class SGLangFailure(Struct, frozen=True):
    """An error in place of tokens."""

    message: str | None = None
    code: int | None = None


class Meta(Struct, frozen=True):
    """The used part of `meta_info`."""

    completion_tokens: Count
    finish_reason: Reason | None = None
    output_token_logprobs: list[probes.TokenLogprob] = []
    output_top_logprobs: list[list[probes.TokenLogprob] | None] | None = None
    output_token_sampling_mask: list[list[int]] = []
    output_token_sampling_logprobs: list[list[Logprob]] = []
    weight_versions: list[LabeledSpan] = []
    cached_tokens: Count = 0


class Event(Struct, frozen=True):
    """One server-sent event; either the first two or the last are set."""

    output_ids: list[int] = []
    meta_info: Meta | None = None
    error: SGLangFailure | str | None = None


def is_truncated(sampling: SamplingParams) -> bool:
    """Whether some tokens of the vocabulary cannot be sampled. Greedy is not truncated: it
    reports the distribution at temperature 1."""
    return sampling.temperature > 0 and (
        sampling.top_p < 1 or sampling.top_k != -1 or sampling.min_p > 0
    )


def check_turn(request: ServerRequest, facts: probes.SGLangFacts) -> None:
    """Raises EngineError for a request that SGLang would reject, clamp or handle differently, or
    that would crash it."""
    sampling = request.sampling
    check_request(request.prompt_ids, sampling, facts.vocab_size, facts.info.max_model_len)
    if len(request.prompt_ids) > facts.max_prompt:
        raise EngineError(
            f"{len(request.prompt_ids)} prompt tokens exceed the limit of {facts.max_prompt} of "
            "this SGLang server"
        )
    if sampling.repetition_penalty != 1:
        raise EngineError(
            "repetition_penalty must be 1 with SGLang: it penalizes sampled tokens only, other "
            "engines also those of the prompt"
        )
    if len(sampling.stop) > MAX_STOPS:
        raise EngineError(f"SGLang supports at most {MAX_STOPS} stop strings, got {sampling.stop}")
    if is_truncated(sampling) and _top_k(sampling, facts) > facts.max_top_k:
        raise EngineError(
            "SGLang returns log-probs after top_p, top_k or min_p only together with top_k up to "
            f"{facts.max_top_k}: set top_k, or start it with --sampling-mask-max-tokens N"
        )


def _top_k(sampling: SamplingParams, facts: probes.SGLangFacts) -> int:
    return facts.vocab_size if sampling.top_k == -1 else min(sampling.top_k, facts.vocab_size)


def request_body(
    request: ServerRequest, facts: probes.SGLangFacts, entropy_top_k: int, cache_salt: str
) -> dict[str, Any]:
    """JSON of POST /generate. Every sampling field is set, so that no default of the model's
    generation_config or of the server applies. Each rid is new, and none is a prefix of another:
    SGLang aborts all requests whose rids begin with the given one, and 2 s after the end of a
    stream it aborts its rid again."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": 1.0,
        "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "repetition_penalty": 1.0, "stop": list(sampling.stop),
        "stop_token_ids": list(request.stop_token_ids), "no_stop_trim": True, "n": 1,
        "stream_interval": request.stream_interval,
    }  # fmt: skip
    if sampling.guide:
        params["structural_tag"] = sampling.guide
    body: dict[str, Any] = {
        "rid": f"{request.id}.{uuid4().hex}", "input_ids": list(request.prompt_ids),
        "sampling_params": params, "return_logprob": True, "stream": True, "cache_salt": cache_salt,
    }  # fmt: skip
    if is_truncated(sampling):
        # Ordinary log-probs are those before truncation; the sampling mask has those after it.
        params |= {"top_p": sampling.top_p, "min_p": sampling.min_p}
        params["top_k"] = _top_k(sampling, facts)
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
    elif request.with_entropies:
        body["top_logprobs_num"] = facts.vocab_size if entropy_top_k == -1 else entropy_top_k
    if facts.use_seed and sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return body


class SGLangAnswer(AnswerParser):
    """An event has the tokens since the last one; `completion_tokens` counts from the start."""

    def __init__(
        self,
        server: str,
        request: ServerRequest,
        entropy_top_k: int,
        name_span: Callable[[str, int, int], VersionSpan],
        vocab_size: int,
    ) -> None:
        self._truncated = is_truncated(request.sampling)
        self._returns_kept = self._truncated and request.sampling.returns_kept
        exact = entropy_top_k == -1 or self._truncated
        entropies = request.with_entropies
        super().__init__(server, exact, name_span, vocab_size, with_entropies=entropies)
        self._max_tokens = request.sampling.max_tokens

    def add(self, event: bytes) -> Chunk | None:
        try:
            found = decode(event, Event)
        except ForeignError as error:
            text = f"{self._server}/generate: cannot read an event: {error}"
            raise ServerLostError(text) from error
        meta = found.meta_info
        if found.error is not None or meta is None:
            failed = found.error
            failure = failed if isinstance(failed, SGLangFailure) else SGLangFailure(failed)
            raise self._refusal(failure.message, failure.code)
        if meta.finish_reason is not None:
            self._end(meta, meta.finish_reason)
        num_new = meta.completion_tokens - self._num_tokens
        if num_new <= 0:
            return None
        token_ids = found.output_ids[-num_new:]
        logprobs, rivals = self._logprobs(token_ids, meta, num_new)
        kept = meta.output_token_sampling_mask[-num_new:] if self._returns_kept else []
        sizes = {len(token_ids), len(logprobs), len(rivals) if self._with_entropies else num_new}
        if sizes | ({len(kept)} if self._returns_kept else set()) != {num_new}:
            raise ServerLostError(f"{self._server}/generate: tokens are missing from the stream")
        return self._chunk(token_ids, logprobs, partial(top_k_entropies, rivals), kept)

    def _end(self, meta: Meta, reason: Reason) -> None:
        if reason.type == "abort" and reason.status_code is not None:
            raise self._refusal(reason.message, reason.status_code)
        self._reason, self._spans = reason.type, meta.weight_versions
        self._stop = reason.matched if isinstance(reason.matched, str) else None
        self._num_cached_tokens = meta.cached_tokens

    def finish(self) -> PartEnd:
        """See Answer.finish."""
        num_tokens = self._num_tokens
        if self._reason == "length" and num_tokens < self._max_tokens:
            raise EngineError(
                f"{self._server} ended a turn at {num_tokens} tokens, before its max_tokens "
                f"{self._max_tokens}; is SGLANG_MAX_NEW_TOKENS_LIMIT set there?"
            )
        return super().finish()

    def _logprobs(
        self, token_ids: list[int], meta: Meta, num_new: int
    ) -> tuple[list[float], list[list[float]]]:
        """The log-probs of the new tokens, and the largest ones of each position."""
        if self._truncated:
            masks = meta.output_token_sampling_mask[-num_new:]
            supports = meta.output_token_sampling_logprobs[-num_new:]
            rows = zip(token_ids, masks, supports, strict=False)
            known = [
                support[mask.index(token)]
                for token, mask, support in rows
                if token in mask[: len(support)]
            ]
            return known, supports
        sampled = meta.output_token_logprobs[-num_new:]
        tops = (meta.output_top_logprobs or [])[-num_new:] if self._with_entropies else []
        rivals = [[p for p, _, _ in top or () if p is not None] for top in tops]
        return [logprob for logprob, _, _ in sampled if logprob is not None], rivals

    def _refusal(self, message: str | None, code: int | None) -> EngineError:
        text = f"{self._server}/generate: {message or 'no reason given'}"
        if code == 429 or (code == 503 and message and QUEUE_FULL in message):
            return BusyError(text)
        lost = code is not None and code >= 500
        return ServerLostError(text) if lost else EngineError(text)


# Load figures.

RETRACTED = "sglang:num_retracted_requests_total"


class RankLoad(Struct, frozen=True):
    """One data-parallel rank in the answer to GET /v1/loads."""

    num_running_reqs: Count
    num_waiting_reqs: Count
    token_usage: float


class Loads(Struct, frozen=True):
    """The answer."""

    loads: list[RankLoad]


class SGLangServer(WeightSync[probes.SGLangFacts]):
    """Server over one SGLang server (see RemoteServer).

    Entropies come from the `entropy_top_k` largest log-probs (-1: all, exact but slow); with top_p,
    top_k or min_p, log-probs and entropies are those after truncation, and exact. Truncation is in
    SGLang's order: top_k, top_p, min_p. Seeds count with --enable-deterministic-inference only.
    """

    transfer = probes.SGLANG_TRANSFER
    tried = probes.SGLANG_TRIED
    facts = probes.SGLangFacts
    health = "/server_info"  # unlike /health, it does not generate or take 1 s

    async def _probe(self) -> probes.SGLangFacts:
        return await probes.probe_sglang(self._http, self._vocab_size, self._layout)

    async def _unpause(self) -> None:
        await self._resume()

    async def generate(self, request: ServerRequest, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        """See RemoteServer.generate."""
        facts = await self._known()
        check_turn(request, facts)
        body = request_body(request, facts, self._top_k, self._salt)
        answer = SGLangAnswer(self.name, request, self._top_k, self._span, facts.vocab_size)
        await self._stream("/generate", body["rid"], body, request, answer, on_chunk)
        return answer.finish()

    def _of_rank(self, rank: int | None) -> dict[str, Any]:
        return {} if rank is None else {"routed_dp_rank": rank}

    def _abort_calls(self, request_ids: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        for rid in request_ids:
            yield "/abort_request", {"rid": rid}

    async def scores(self, ids: Sequence[int], start: int) -> list[float]:
        await self._known()
        rows = await by_sglang(self._http, ids, start, 0)
        return [one.get(token, nan) for token, one in zip(ids[start:], rows, strict=True)]

    async def load(self) -> ServerLoad:
        """Sums over data-parallel ranks and workers; the fullest cache. Preemptions count with
        --enable-metrics, else 0. The figures are up to 15 steps old, or as many as
        --load-snapshot-publish-interval says."""
        found = await self._http.call_as(Loads, "GET", "/v1/loads", params={"include": "core"})
        ranks, num_preemptions = found.loads, 0
        with suppress(RefusedError):  # without --enable-metrics
            metrics = probes.read_metrics(await self._http.call("GET", "/metrics"), {RETRACTED: 0})
            num_preemptions = int(sum(metrics[RETRACTED]))
        return ServerLoad(
            num_running=sum(rank.num_running_reqs for rank in ranks),
            num_waiting=sum(rank.num_waiting_reqs for rank in ranks),
            kv_usage=min(max((rank.token_usage for rank in ranks), default=0.0), 1.0),
            num_preemptions=num_preemptions,
        )

    # weights

    async def _pause(self) -> None:
        """Running requests return to the queue, keep their tokens, and have their KV cache
        recomputed under the new weights.
        """
        await self._post("/pause_generation", {"mode": "retract"})

    async def _reload(self, directory: Path) -> None:
        body = {
            "model_path": str(directory),
            "flush_cache": False,  # with it, a refused flush would report an update as failed
            "abort_all_requests": False,
        }
        try:
            await self._post("/update_weights_from_disk", body, self._load_s)
        except RefusedError as error:
            if NOTHING_DONE in error.reason:
                raise
            raise ServerLostError(f"its weight version is unknown: {error}") from error

    async def _drop_prefixes(self) -> None:
        # a request that waited may have an old cache salt
        with reported_as(ServerLostError, "cached prefixes of old weights remain", RefusedError):
            # Its own parameter to wait would wait for retracted requests to end.
            await self._http.call("POST", "/flush_cache")

    async def _write_label(self, label: str) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        await self._post("/update_weight_version", body)

    async def _read_label(self, *, fresh: bool = False) -> str:
        return await self._http.read(str, "GET", "/model_info", "weight_version", "", fresh=fresh)

    async def _resume(self) -> None:
        await self._post("/continue_generation", {})

    async def _fall_asleep(self) -> None:
        """The remaining requests are aborted: it must be idle to sleep."""
        await self._post("/pause_generation", {"mode": "abort"})
        await self._post("/release_memory_occupation", {}, self._load_s)

    async def _wake(self) -> None:
        """Resume memory, but stay paused until weights are loaded, so that no request runs on the
        old ones."""
        await self._post("/resume_memory_occupation", {}, self._load_s)

    # weights by broadcast; NCCL and gloo are both SGLang's own

    async def num_ranks(self) -> int:
        """Ranks of the server. Raises EngineError if SGLang's workers would use equal ranks."""
        info = await self._http.call_as(probes.ServerArgs, "GET", "/server_info")
        for name, size in (("dp_size", info.dp_size), ("pp_size", info.pp_size)):
            if size > 1:
                raise EngineError(
                    f"{self.name}: SGLang supports no broadcast with {name} = {size}; use "
                    'engine.weights = "directory"'
                )
        return info.tp_size

    def _join_body(self, group: Group, first_rank: int) -> dict[str, Any]:
        return {
            "master_address": group.address.host,
            "master_port": group.address.port,
            "rank_offset": first_rank,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.address.backend,
        }

    def _bucket_body(self, group: Group, bucket: Bucket) -> dict[str, Any]:
        return {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,  # flushed once, after the last bucket
            "abort_all_requests": False,
        }

    def _leave_body(self, group: Group) -> dict[str, Any] | None:
        return {"group_name": group.name}

    async def _receive(self, group: Group, manifest: Manifest) -> None:
        try:
            await super()._receive(group, manifest)
        except ServerLostError:
            with suppress(EngineError):  # an open session would refuse the next one
                await self._post(self.transfer.finish, {})
            raise


class SGLangConfig(PooledEngineConfig, frozen=True, kw_only=True, tag="sglang", tag_field="name"):
    """SGLang servers."""

    client: ClassVar[type[SGLangServer]] = SGLangServer
    capabilities: ClassVar = replace(SERVERS, has_kept=True, num_reserved=SGLANG_RESERVED)
