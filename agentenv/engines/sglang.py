"""Client of one SGLang server (tried with 0.5.23). SGLang itself is not imported.

request_body, SGLangAnswer   what one request says to SGLang, and its answer read into chunks
read_load                  load figures
probe, check_logprobs      what a server is and can do, found out when the client connects
SGLangServer               check -> POST /generate (stream, our own rid) -> chunks -> PartEnd;
                           cancelled or failed -> POST /abort_request, at once; and the steps of a
                           change of weights (remote.py)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import nan
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from msgspec import Struct

from agentenv.engines.pool.engine import PooledEngineConfig
from agentenv.engines.remote.client import (
    Count,
    HttpClient,
    Logprob,
    MalformedReplyError,
    RefusedError,
    check_request,
)
from agentenv.engines.remote.server import (
    BusyError,
    NoDescriptorError,
    PartEnd,
    Request,
    ServerInfo,
    ServerLoad,
    ServerLostError,
)
from agentenv.engines.remote.weight_sync import (
    HEALTH_S,
    QUANTIZED,
    SPECULATIVE,
    Answer,
    Facts,
    LabelledSpan,
    RemoteServer,
    TransferRoutes,
    metric,
    routing,
    top_k_entropies,
    vocabulary,
)
from agentenv.engines.remote.weights import Bucket, Group, Layout, Manifest, find_layout
from agentenv.errors import ConfigError, EngineError, ForeignError
from agentenv.offload import in_thread
from agentenv.types import Chunk, SamplingParams, VersionSpan
from agentenv.untrusted import decode

logger = logging.getLogger(__name__)

RESERVED = 2  # tokens of its context length that an SGLang server never fills
QUEUE_FULL = "queue is full"  # a refusal by --max-queued-requests
NOTHING_DONE = "Failed to get weights iterator"  # a refusal before any weight was touched

# What one request says to SGLang, and how its answer becomes chunks and their end.

MAX_STOPS = 32  # of one request, in SGLang

TokenLogprob = tuple[Logprob | None, int, str | None]


class SGLangFacts(Facts, frozen=True):
    """What a server takes: tokens of a prompt, the largest top_k for which it tells log-probs after
    truncation, and seeds."""

    max_prompt: int
    max_top_k: int
    use_seed: bool


class Reason(Struct, frozen=True):
    """Why a turn ended; `message` and `status_code` are of a request that was refused."""

    type: str | None = None
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class Failure(Struct, frozen=True):
    """An error in place of tokens."""

    message: str | None = None
    code: int | None = None


class Meta(Struct, frozen=True):
    """The part of `meta_info` that is read."""

    completion_tokens: Count
    finish_reason: Reason | None = None
    output_token_logprobs: list[TokenLogprob] = []
    output_top_logprobs: list[list[TokenLogprob] | None] | None = None
    output_token_sampling_mask: list[list[int]] = []
    output_token_sampling_logprobs: list[list[Logprob]] = []
    weight_versions: list[LabelledSpan] = []
    cached_tokens: Count = 0


class Event(Struct, frozen=True):
    """One server-sent event; either the first two or the last are set."""

    output_ids: list[int] = []
    meta_info: Meta | None = None
    error: Failure | str | None = None


def is_truncated(sampling: SamplingParams) -> bool:
    """Whether some tokens of the vocabulary cannot be sampled. Greedy is not truncated: it
    reports the distribution at temperature 1."""
    return sampling.temperature > 0 and (
        sampling.top_p < 1 or sampling.top_k != -1 or sampling.min_p > 0
    )


def check_turn(request: Request, facts: SGLangFacts) -> None:
    """Raises EngineError for what SGLang would refuse, clamp, die of, or do in another way."""
    sampling = request.sampling
    check_request(request.prompt_ids, sampling, facts.vocab_size, facts.info.max_model_len)
    if len(request.prompt_ids) > facts.max_prompt:
        raise EngineError(
            f"{len(request.prompt_ids)} prompt tokens exceed the {facts.max_prompt} that this "
            "SGLang server takes"
        )
    if sampling.repetition_penalty != 1:
        raise EngineError(
            "repetition_penalty must be 1 with SGLang: it penalises sampled tokens only, the other "
            "engines those of the prompt as well"
        )
    if len(sampling.stop) > MAX_STOPS:
        raise EngineError(f"SGLang takes at most {MAX_STOPS} stop strings, found {sampling.stop}")
    if is_truncated(sampling) and _top_k(sampling, facts) > facts.max_top_k:
        raise EngineError(
            "SGLang tells log-probs after top_p, top_k or min_p only together with top_k up to "
            f"{facts.max_top_k}: set top_k, or start it with --sampling-mask-max-tokens N"
        )


def _top_k(sampling: SamplingParams, facts: SGLangFacts) -> int:
    return facts.vocab_size if sampling.top_k == -1 else min(sampling.top_k, facts.vocab_size)


def request_body(
    request: Request, facts: SGLangFacts, entropy_top_k: int, cache_salt: str
) -> dict[str, Any]:
    """JSON of POST /generate. Every sampling field is named, so that no default of the model's
    generation_config or of the server applies. The rid is new each time and none begins with
    another: SGLang aborts all that begin with the one named, and 2 s after the end of a stream
    aborts its rid once more."""
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
        "rid": f"{request.id}.{uuid4().hex}",
        "input_ids": list(request.prompt_ids),
        "sampling_params": params,
        "return_logprob": True,
        "stream": True,
        "cache_salt": cache_salt,
    }
    if is_truncated(sampling):
        # The ordinary log-probs are those before truncation; the sampling mask has those after.
        params |= {"top_p": sampling.top_p, "min_p": sampling.min_p}
        params["top_k"] = _top_k(sampling, facts)
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
    elif request.with_entropies:
        body["top_logprobs_num"] = facts.vocab_size if entropy_top_k == -1 else entropy_top_k
    if facts.use_seed and sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return body


class SGLangAnswer(Answer):
    """An event holds the tokens since the last one; `completion_tokens` counts from the start."""

    def __init__(
        self,
        server: str,
        request: Request,
        entropy_top_k: int,
        name_span: Callable[[str, int, int], VersionSpan],
        vocab_size: int,
    ) -> None:
        self._truncated = is_truncated(request.sampling)
        exact = entropy_top_k == -1 or self._truncated
        super().__init__(
            server,
            "exact" if exact else "top_k",
            name_span,
            vocab_size,
            with_entropies=request.with_entropies,
        )
        self._max_tokens = request.sampling.max_tokens

    def add(self, data: bytes) -> Chunk | None:
        """The tokens that are new in an event."""
        try:
            event = decode(data, Event)
        except ForeignError as error:
            raise ServerLostError(
                f"{self._server}/generate: cannot read an event: {error}"
            ) from error
        meta = event.meta_info
        if event.error is not None or meta is None:
            failure = event.error if isinstance(event.error, Failure) else Failure(event.error)
            raise self._refusal(failure.message, failure.code)
        if meta.finish_reason is not None:
            self._end(meta, meta.finish_reason)
        num_new = meta.completion_tokens - self._num_tokens
        if num_new <= 0:
            return None
        chunk = self._chunk(event.output_ids[-num_new:], meta, num_new)
        if {len(chunk.token_ids), len(chunk.logprobs), len(chunk.entropies)} != {num_new}:
            raise ServerLostError(f"{self._server}/generate: tokens are missing from the stream")
        return self._take(chunk.token_ids, chunk.logprobs, chunk.entropies)

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

    def _chunk(self, token_ids: list[int], meta: Meta, num_new: int) -> Chunk:
        if self._truncated:
            masks = meta.output_token_sampling_mask[-num_new:]
            supports = meta.output_token_sampling_logprobs[-num_new:]
            rows = list(zip(token_ids, masks, supports, strict=False))
            known = [
                support[mask.index(token)]
                for token, mask, support in rows
                if token in mask[: len(support)]
            ]
            if not self._with_entropies:
                return Chunk(token_ids, known, [nan] * len(supports))
            return Chunk(token_ids, known, top_k_entropies(supports))
        sampled = meta.output_token_logprobs[-num_new:]
        logprobs = [logprob for logprob, _, _ in sampled if logprob is not None]
        if not self._with_entropies:
            return Chunk(token_ids, logprobs, [nan] * len(logprobs))
        tops = (meta.output_top_logprobs or [])[-num_new:]
        return Chunk(
            token_ids,
            logprobs,
            top_k_entropies([[p for p, _, _ in top or () if p is not None] for top in tops]),
        )

    def _refusal(self, message: str | None, code: int | None) -> EngineError:
        text = f"{self._server}/generate: {message or 'no reason given'}"
        if code == 429 or (code == 503 and message and QUEUE_FULL in message):
            return BusyError(text)
        lost = code is not None and code >= 500
        return ServerLostError(text) if lost else EngineError(text)


# Load figures.

RETRACTED = b"sglang:num_retracted_requests_total"


class RankLoad(Struct, frozen=True):
    """One data-parallel rank in the answer to GET /v1/loads."""

    num_running_reqs: Count
    num_waiting_reqs: Count
    token_usage: float


class Loads(Struct, frozen=True):
    """The answer."""

    loads: list[RankLoad]


async def read_load(workers: Iterable[HttpClient]) -> ServerLoad:
    """Sums over ranks and workers; the fullest cache. Raises EngineError for an unknown answer."""
    ranks: list[RankLoad] = []
    num_preemptions = 0
    for worker in workers:
        params = {"include": "core"}
        ranks += (await worker.call_as(Loads, "GET", "/v1/loads", params=params)).loads
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
    return sum(int(metric(line.decode(errors="replace"))) for line in lines)


# What an SGLang server is and can do, asked once when the client connects.

TRIED = "0.5.23"
NEEDED = (
    "POST /generate",
    "POST /abort_request",
    "POST /pause_generation",
    "POST /continue_generation",
    "POST /update_weights_from_disk",
    "POST /update_weight_version",
    "POST /flush_cache",
    "GET /model_info",
    "GET /server_info",
    "GET /v1/loads",
)
BROADCAST = (
    "POST /init_weights_update_group",
    "POST /begin_weight_update",
    "POST /update_weights_from_distributed",
    "POST /end_weight_update",
    "POST /destroy_weights_update_group",
)
MEMORY_SAVER = ("POST /release_memory_occupation", "POST /resume_memory_occupation")
FIELDS = ("rid", "cache_salt", "return_sampling_mask", "sampling_logprobs_mode")
SAMPLING_FIELDS = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop"}
MODEL_SLACK = 4  # tokens by which prompt and turn together may exceed the longest prompt
PROBE_TEMPERATURE = 2.0
PROBE_TOP_K = 4
MAX_RATIO = 0.75  # of the distances; 0.5 is right, 1 is not
LEAST_GAP = 0.02  # nats; below it rounding hides what the probe looks for


class ServerArgs(Struct, frozen=True):
    """The part of /server_info that is read."""

    version: str
    max_req_input_len: int
    sampling_mask_max_tokens: int = 0
    skip_tokenizer_init: bool = False
    incremental_streaming_output: bool = False
    enable_deterministic_inference: bool = False
    enable_memory_saver: bool = False
    enable_metrics: bool = False
    preferred_sampling_params: Any = None
    speculative_algorithm: str | None = None
    quantization: str | None = None
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1


class ModelInfo(Struct, frozen=True):
    """The part of /model_info that is read. `model_path` follows updates, whose directories are
    often gone; `tokenizer_path` does not."""

    served_model_name: str
    model_path: str
    tokenizer_path: str
    is_generation: bool = True
    weight_version: str | None = None


async def probe(http: HttpClient, vocab_size: int | None, layout: Layout | None) -> SGLangFacts:
    """Reads routes, version, settings and limits; `layout`: of its model, if it is known already.

    Raises ConfigError for what the run cannot do without.
    """
    routes = await http.routes()
    if missing := [route for route in NEEDED if route not in routes]:
        raise ConfigError(
            f"{http.name} lacks {', '.join(missing)}; expected SGLang {TRIED} or newer"
        )
    try:
        model = await http.call_as(ModelInfo, "GET", "/model_info")
        args = await http.call_as(ServerArgs, "GET", "/server_info")
    except MalformedReplyError as error:
        raise ConfigError(
            f"cannot read /server_info or /model_info: {error}; expected SGLang {TRIED} or newer"
        ) from error
    places = [Path(model.model_path), Path(model.tokenizer_path)]
    await _check_fields(http, args)
    _check_args(http.name, args, model)
    layout = layout or await in_thread(find_layout, places)
    features = {"broadcast"} if routes.issuperset(BROADCAST) else set()
    if args.enable_memory_saver and routes.issuperset(MEMORY_SAVER):
        features.add("sleep")  # without the flag these routes end the server
    max_len = args.max_req_input_len + MODEL_SLACK
    return SGLangFacts(
        ServerInfo("sglang", args.version, model.served_model_name, max_len, frozenset(features)),
        vocabulary(http.name, vocab_size, layout, str(places[0])),
        layout,
        args.dp_size,
        max_prompt=args.max_req_input_len - 1,
        max_top_k=args.sampling_mask_max_tokens,
        use_seed=args.enable_deterministic_inference,
    )


async def _check_fields(http: HttpClient, args: ServerArgs) -> None:
    """Unknown fields of a request would be ignored in silence."""
    schema = await http.call_json("GET", "/openapi.json")
    try:
        known = schema["components"]["schemas"]["GenerateReqInput"]["properties"].keys()
    except (LookupError, TypeError, AttributeError):
        known = set()
    missing = [field for field in FIELDS if field not in known]
    if missing:
        raise ConfigError(
            f"{http.name}: POST /generate of SGLang {args.version} does not know "
            f"{', '.join(missing)}; expected SGLang {TRIED} or newer"
        )


def _check_args(name: str, args: ServerArgs, model: ModelInfo) -> None:
    """Raises ConfigError for a server that would change what is sampled."""
    if not model.is_generation:
        raise ConfigError(f"{name} serves an embedding model, which samples nothing")
    if args.skip_tokenizer_init:
        raise ConfigError(f"{name} finds no stop strings; start it without --skip-tokenizer-init")
    preferred = args.preferred_sampling_params
    if preferred and not (isinstance(preferred, dict) and preferred.keys() <= SAMPLING_FIELDS):
        raise ConfigError(
            f"{name} changes requests by --preferred-sampling-params {preferred}; start it without"
        )
    if not args.incremental_streaming_output:
        raise ConfigError(
            f"{name} repeats the whole turn in every event, which makes gigabytes of long turns; "
            "start it with --incremental-streaming-output"
        )
    if args.speculative_algorithm:
        raise ConfigError(SPECULATIVE.format(name, "--speculative-algorithm"))
    if args.quantization:
        raise ConfigError(QUANTIZED.format(name, args.quantization))
    if not args.enable_metrics:
        logger.warning(
            "%s does not count preemptions, to which its number of requests is fitted; start it "
            "with --enable-metrics",
            name,
        )
    if not args.enable_deterministic_inference:
        logger.info("%s ignores seeds; --enable-deterministic-inference makes it heed them", name)


async def check_logprobs(http: HttpClient, vocab_size: int) -> None:
    """Raises ConfigError unless log-probs are those after temperature.

    Temperature 2 halves the distance between two of them, against greedy sampling, which
    reports the distribution at temperature 1.
    """
    plain = await _ask(http, 0.0, vocab_size)
    scaled = await _ask(http, PROBE_TEMPERATURE, vocab_size)
    both = plain.keys() & scaled.keys()
    if not both:
        raise ConfigError(f"{http.name}/generate tells other tokens at another temperature")
    top, low = max(both, key=plain.__getitem__), min(both, key=plain.__getitem__)
    gap = plain[top] - plain[low]
    if gap < LEAST_GAP:
        logger.warning(
            "%s: the log-probs of a probe are all alike, so it is not known whether they are those "
            "after temperature",
            http.name,
        )
    elif (scaled[top] - scaled[low]) / gap > MAX_RATIO:
        raise ConfigError(
            f"{http.name} reports log-probs before temperature; start it without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB"
        )


class _Probed(Struct, frozen=True):
    meta_info: Meta


async def _ask(http: HttpClient, temperature: float, vocab_size: int) -> dict[int, float]:
    """The largest log-probs behind a fixed prompt, by token id."""
    body = {
        "input_ids": [index % vocab_size for index in range(8)],
        "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": PROBE_TOP_K,
    }
    try:
        answer = await http.call_as(_Probed, "POST", "/generate", body)
        top = (answer.meta_info.output_top_logprobs or [])[0] or []
    except (RefusedError, MalformedReplyError, IndexError) as error:
        raise ConfigError(f"{http.name}/generate tells no log-probs: {error}") from error
    return {token: logprob for logprob, token, _ in top if logprob is not None}


class SGLangServer(RemoteServer[SGLangFacts]):
    """Server over one SGLang server, or several workers behind one URL (see RemoteServer).

    Entropies come from the `entropy_top_k` largest log-probs (-1: all, exact but slow); with top_p,
    top_k or min_p, log-probs and entropies are those after truncation, and exact. Truncation is in
    SGLang's order: top_k, top_p, min_p. Seeds count with --enable-deterministic-inference only.
    """

    transfer = TransferRoutes(
        join="/init_weights_update_group",
        start="/begin_weight_update",
        receive="/update_weights_from_distributed",
        finish="/end_weight_update",
        leave="/destroy_weights_update_group",
        empty={},
    )
    tried = TRIED
    facts = SGLangFacts

    async def _probe(self) -> SGLangFacts:
        return await probe(self._controls[0], self._given_vocab_size, self._layout)

    async def _go_on(self) -> None:
        await self._resume()

    async def _try_out(self) -> None:
        await check_logprobs(self._http, self._connected().vocab_size)

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        """See Server.generate. While weights are being replaced a new request waits."""
        await self._known()
        facts = self._connected()
        check_turn(request, facts)
        body = request_body(request, facts, self._top_k, self._salt)
        answer = SGLangAnswer(self.name, request, self._top_k, self._span, facts.vocab_size)
        complete = False
        try:
            with self._ranks.take(request.session) as rank:
                if rank is not None:
                    body["routed_dp_rank"] = rank
                headers = routing(request.session, rank)
                async with self._http.stream("/generate", body, headers) as events:
                    async for event in events:
                        chunk = answer.add(event)
                        if chunk is not None:
                            on_chunk(chunk)
            end = answer.finish()
            complete = True
        except NoDescriptorError:
            complete = True  # there is nothing to abort
            raise
        finally:
            if not complete:  # a disconnect alone would be noticed after seconds
                self._spawn(self._abort(body["rid"]))
        return end

    async def _abort(self, rid: str) -> None:
        """Errors do not matter: the request is gone with its server, or it has just ended."""
        for server in self._controls:
            with suppress(EngineError):
                await server.call("POST", "/abort_request", {"rid": rid})

    async def healthy(self) -> bool:
        """Whether its scheduler answers; unlike /health this neither generates nor takes 1 s."""
        try:
            for server in self._controls:
                await server.call("GET", "/server_info", timeout_s=HEALTH_S)
        except EngineError:
            return False
        return True

    async def load(self) -> ServerLoad:
        """Sums over data-parallel ranks and workers; the fullest cache. Preemptions are told with
        --enable-metrics, else 0. The figures are up to 15 steps old, or as many as
        --load-snapshot-publish-interval says."""
        return await read_load(self._controls)

    # weights

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """See Server.load_weights. What runs goes back to the queue, keeps its tokens, and has its
        keys and values computed again under the new weights."""
        self._connected()
        await super().load_weights(source, policy_version)

    async def _pause(self) -> None:
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
            raise ServerLostError(f"nobody knows what weights it has: {error}") from error

    async def _drop_prefixes(self) -> None:
        try:
            # Its own parameter to wait would wait for retracted requests to end.
            for server in self._controls:
                await server.call("POST", "/flush_cache")
        except RefusedError as error:  # a request that waited may have an old cache salt
            raise ServerLostError(f"prefixes of old weights remain: {error}") from error

    async def _write_label(self, label: str) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        await self._post("/update_weight_version", body)

    async def _read_label(self, server: HttpClient, *, fresh: bool = False) -> str:
        told = await server.call_as(ModelInfo, "GET", "/model_info", fresh=fresh)
        return told.weight_version or ""

    async def _resume(self) -> None:
        await self._post("/continue_generation", {})

    async def _fall_asleep(self) -> None:
        """What is left is aborted: it must be idle to sleep."""
        await self._post("/pause_generation", {"mode": "abort"})
        await self._post("/release_memory_occupation", {}, self._load_s)

    async def _wake(self) -> None:
        """It stays paused until weights are loaded, so that nothing runs on those that it had."""
        await self._post("/resume_memory_occupation", {}, self._load_s)

    # weights by broadcast; NCCL and gloo are both SGLang's own

    async def _num_workers(self, server: HttpClient) -> int:
        """Raises EngineError where SGLang's own workers would take the same rank."""
        info = await server.call_as(ServerArgs, "GET", "/server_info")
        for name, size in (("dp_size", info.dp_size), ("pp_size", info.pp_size)):
            if size > 1:
                raise EngineError(
                    f"{server.name}: SGLang takes no broadcast with {name} = {size}; use "
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
            "flush_cache": False,  # done once, when all is there
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


class SGLangConfig(
    PooledEngineConfig,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="sglang",
    tag_field="name",
):
    """SGLang servers."""

    client: ClassVar[type[SGLangServer]] = SGLangServer
    _reserved: ClassVar[int] = RESERVED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.update_kv == "keep":
            raise ConfigError(
                'engine.update_kv = "keep" is for vLLM; SGLang recomputes what runs in an update'
            )
        if self.lora == "adapter":
            raise ConfigError('engine.lora = "adapter" is for vLLM; to SGLang adapters go "merged"')
