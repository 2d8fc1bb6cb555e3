"""Client of one SGLang server (tried with 0.5.23). SGLang itself is not imported.

generate:      check -> POST /generate (stream, our own rid) -> chunks ... -> Completion
               cancelled or failed -> POST /abort_request, at once
load_weights:  check the directory -> /pause_generation retract -> /update_weights_from_disk
               -> /flush_cache -> /continue_generation: what runs goes back to the queue, keeps its
               tokens, and has its keys and values computed again under the new weights
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from agentenv.engines.client import (
    Background,
    HttpClient,
    RefusedError,
    Replace,
    Served,
    Timeouts,
    all_of,
)
from agentenv.engines.pool.engine import PooledEngineConfig, ServerClient
from agentenv.engines.server import Request, ServerInfo, ServerLoad, ServerLostError, check_top_k
from agentenv.engines.sglang_wire import (
    Control,
    Limits,
    SGLangTurn,
    check_turn,
    post,
    read_load,
    request_body,
)
from agentenv.engines.weights import Group, Layout, Manifest, check_manifest, read_layout
from agentenv.errors import ConfigError, EngineError
from agentenv.types import Chunk, Completion

# Weights by broadcast into an SGLang server; NCCL and gloo are both its own.

JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
START, RECEIVE = "/begin_weight_update", "/update_weights_from_distributed"
FINISH = "/end_weight_update"
RESERVED = 2  # tokens of its context length that an SGLang server never fills
SLACK_S = 15.0  # an HTTP call outlives the collective call behind it by this


class SGLangReceiver:
    """See Receiver."""

    def __init__(self, control: Control, served: Served, replace: Replace) -> None:
        self._control, self._served, self._replace = control, served, replace

    async def num_ranks(self) -> int:
        return sum([await _num_workers(worker) for worker in self._control.servers])

    async def join(self, group: Group, first_rank: int) -> None:
        calls = []
        for worker in self._control.servers:
            body = {
                "master_address": group.address.host,
                "master_port": group.address.port,
                "rank_offset": first_rank,
                "world_size": group.world_size,
                "group_name": group.name,
                "backend": group.address.backend,
            }
            first_rank += await _num_workers(worker)
            calls.append(post(worker, JOIN, body, group.timeout_s + SLACK_S))
        await all_of(calls)

    async def receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        async with self._served.lock:
            check_manifest(manifest, self._served.layout)
            change = partial(self._receive, group, manifest, policy_version)
            await self._replace(change, policy_version)

    async def leave(self, group: Group) -> None:
        with suppress(EngineError):
            await self._control.post(LEAVE, {"group_name": group.name}, timeout_s=SLACK_S)

    async def _receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        try:
            await self._control.post(START, {})
        except RefusedError:  # an earlier update was broken off
            with suppress(EngineError):
                await self._control.post(FINISH, {})
            await self._control.post(START, {})
        try:
            for bucket in manifest.buckets:
                body = {
                    "names": bucket.names,
                    "dtypes": bucket.dtypes,
                    "shapes": bucket.shapes,
                    "group_name": group.name,
                    "flush_cache": False,  # done once, when all is there
                    "abort_all_requests": False,
                    "weight_version": str(policy_version),
                }
                timeout_s = group.timeout_s * len(bucket.names) + SLACK_S
                await self._control.post(RECEIVE, body, timeout_s=timeout_s)
            await self._control.post(FINISH, {})
        except EngineError as error:
            with suppress(EngineError):  # an open session would refuse the next one
                await self._control.post(FINISH, {})
            raise ServerLostError(f"nobody knows what weights it has: {error}") from error


async def _num_workers(worker: HttpClient) -> int:
    """Raises EngineError where SGLang's own workers would take the same rank."""
    info = await worker.call_json("GET", "/server_info")
    for name in ("dp_size", "pp_size"):
        if int(info.get(name, 1)) > 1:
            raise EngineError(
                f"{worker.name}: SGLang takes no broadcast with {name} = {info[name]}; use "
                'engine.weights = "directory"'
            )
    return int(info["tp_size"])


# What an SGLang server is and can do, asked once when the client connects.

logger = logging.getLogger(__name__)

TRIED = "0.5.23"
NEEDED = (
    "generate",
    "abort_request",
    "continue_generation",
    "update_weight_version",
    "flush_cache",
)
NEEDED_READS = ("model_info", "server_info", "v1/loads")
FEATURES = {
    "load_weights": ("pause_generation", "update_weights_from_disk"),
    "pause": ("pause_generation",),
    "fingerprint": ("weights_checker",),
    "broadcast": (
        "init_weights_update_group",
        "begin_weight_update",
        "update_weights_from_distributed",
        "end_weight_update",
        "destroy_weights_update_group",
    ),
}
MEMORY_SAVER = ("release_memory_occupation", "resume_memory_occupation")
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


class Facts(Struct, frozen=True):
    """The outcome; `layout` is None if the model directory is not on this machine."""

    info: ServerInfo
    limits: Limits
    layout: Layout | None


async def probe(http: HttpClient, vocab_size: int | None, layout: Layout | None) -> Facts:
    """Reads routes, version, settings and limits; `layout`: of its model, if it is known already.

    Raises ConfigError for what the run cannot do without.
    """
    routes = await http.routes()
    missing = [f"POST /{name}" for name in NEEDED if f"POST /{name}" not in routes]
    missing += [f"GET /{name}" for name in NEEDED_READS if f"GET /{name}" not in routes]
    if missing:
        raise ConfigError(
            f"{http.name} lacks {', '.join(missing)}; expected SGLang {TRIED} or newer"
        )
    model: dict[str, Any] = await http.call_json("GET", "/model_info")
    try:
        args = msgspec.convert(await http.call_json("GET", "/server_info"), ServerArgs)
        served_name = str(model["served_model_name"])
        # The first follows updates, whose directories are often gone; the second does not.
        places = [Path(model["model_path"]), Path(model["tokenizer_path"])]
    except (msgspec.ValidationError, LookupError) as error:
        raise ConfigError(
            f"{http.name}: cannot read /server_info or /model_info ({error}); expected SGLang "
            f"{TRIED} or newer"
        ) from error
    await _check_fields(http, args)
    _check_args(http.name, args, model)
    layout = layout or await asyncio.to_thread(_find_layout, places)
    size = vocab_size or (layout.vocab_size if layout else None)
    if size is None:
        raise ConfigError(
            f"{http.name}: the vocabulary of {places[0]} is not known, since that directory is "
            "not on this machine; give vocab_size"
        )
    max_len = args.max_req_input_len + MODEL_SLACK
    limits = Limits(
        max_prompt=args.max_req_input_len - 1,
        max_model_len=max_len,
        vocab_size=size,
        max_top_k=args.sampling_mask_max_tokens,
        use_seed=args.enable_deterministic_inference,
    )
    features = frozenset(_features(routes, args))
    info = ServerInfo("sglang", args.version, served_name, max_len, features)
    return Facts(info, limits, layout)


def _features(routes: frozenset[str], args: ServerArgs) -> Iterator[str]:
    yield "versions"
    for feature, names in FEATURES.items():
        if all(f"POST /{name}" in routes for name in names):
            yield feature
    if args.enable_memory_saver and all(f"POST /{name}" in routes for name in MEMORY_SAVER):
        yield "sleep"  # without the flag these routes end the server
    if args.enable_deterministic_inference:
        yield "seed"


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


def _check_args(name: str, args: ServerArgs, model: dict[str, Any]) -> None:
    if not model.get("is_generation", True):
        raise ConfigError(f"{name} serves an embedding model, which samples nothing")
    if args.skip_tokenizer_init:
        raise ConfigError(f"{name} finds no stop strings; start it without --skip-tokenizer-init")
    preferred = args.preferred_sampling_params
    if preferred and not (isinstance(preferred, dict) and preferred.keys() <= SAMPLING_FIELDS):
        raise ConfigError(
            f"{name} changes requests by --preferred-sampling-params {preferred}; start it without"
        )
    if not args.incremental_streaming_output:
        logger.warning(
            "%s repeats the whole turn in every event; start it with "
            "--incremental-streaming-output",
            name,
        )
    if not args.enable_metrics:
        logger.warning(
            "%s does not count preemptions, to which its number of requests is fitted; start it "
            "with --enable-metrics",
            name,
        )
    if not args.enable_deterministic_inference:
        logger.info("%s ignores seeds; --enable-deterministic-inference makes it heed them", name)


def _find_layout(places: Iterable[Path]) -> Layout | None:
    """Of the first directory that is on this machine and holds a model."""
    for place in places:
        try:
            if place.is_dir():
                return read_layout(place)
        except EngineError as error:
            logger.debug("weights to load are not compared with those in %s: %s", place, error)
    return None


async def check_logprobs(http: HttpClient, facts: Facts) -> None:
    """Raises ConfigError unless log-probs are those after temperature.

    Temperature 2 halves the distance between two of them, against greedy sampling, which
    reports the distribution at temperature 1.
    """
    plain = await _ask(http, 0.0, facts.limits.vocab_size)
    scaled = await _ask(http, PROBE_TEMPERATURE, facts.limits.vocab_size)
    both = plain.keys() & scaled.keys()
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


async def _ask(http: HttpClient, temperature: float, vocab_size: int) -> dict[int, float]:
    """The largest log-probs behind a fixed prompt, by token id."""
    body = {
        "input_ids": [index % vocab_size for index in range(8)],
        "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": PROBE_TOP_K,
    }
    try:
        answer = await http.call_json("POST", "/generate", body)
        top = answer["meta_info"]["output_top_logprobs"][0]
        return {token: logprob for logprob, token, _ in top}
    except (RefusedError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{http.name}/generate tells no log-probs: {error}") from error


HEALTH_S = 5.0


class SGLangServer:
    """Server over one SGLang server (see Server). `url` samples; `control_urls` are the workers
    behind it, if it is a router.

    Entropies come from the `entropy_top_k` largest log-probs (-1: all, exact but slow); with top_p,
    top_k or min_p, log-probs and entropies are those after truncation, and exact. Truncation is in
    SGLang's order: top_k, top_p, min_p. Without `vocab_size` it is read from the directory that
    the server was started from. Seeds count with --enable-deterministic-inference only.
    """

    def __init__(
        self,
        url: str,
        *,
        entropy_top_k: int = 20,
        timeouts: Timeouts | None = None,
        vocab_size: int | None = None,
        api_key: str = "",
        control_urls: Sequence[str] = (),
    ) -> None:
        check_top_k(entropy_top_k)
        self._http = HttpClient(url, timeouts, api_key)
        controls = [HttpClient(each, timeouts, api_key) for each in control_urls]
        self._control = Control(controls or [self._http])
        self._top_k, self._given_vocab_size = entropy_top_k, vocab_size
        self._facts: Facts | None = None
        self._served = Served(self.name)
        self._background = Background()
        self.receiver = SGLangReceiver(self._control, self._served, self._replace)

    @property
    def name(self) -> str:
        """The URL without credentials."""
        return self._http.name

    @property
    def policy_version(self) -> int:
        """Version of the weights that choose its next token, as far as this client set it."""
        return self._served.policy_version

    async def connect(self, policy_version: int) -> ServerInfo:
        """See Server.connect; a server that an earlier run left paused goes on."""
        served = self._served
        async with served.lock:
            facts = await probe(self._control.servers[0], self._given_vocab_size, served.layout)
            await self._control.resume()
            await self._control.name_version(policy_version)
            await check_logprobs(self._http, facts)
            self._facts, served.layout = facts, facts.layout
            served.adopt(policy_version)
            served.doubt = ""
            return facts.info

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> Completion:
        """See Server.generate. While weights are being replaced a new request waits."""
        await self._served.known()
        facts = self._connected()
        check_turn(request, facts.limits)
        body = request_body(request, facts.limits, self._top_k, self._served.salt)
        turn = SGLangTurn(self.name, request, self._top_k)
        complete = False
        try:
            async with self._http.stream("/generate", body) as events:
                async for event in events:
                    chunk = turn.read(event)
                    if chunk is not None:
                        on_chunk(chunk)
            completion = turn.completion()
            complete = True
        finally:
            if not complete:  # a disconnect alone would be noticed after seconds
                self._background.spawn(self._control.abort(request.id))
        return completion

    async def healthy(self) -> bool:
        """Whether its scheduler answers; unlike /health this neither generates nor takes 1 s."""
        try:
            for server in self._control.servers:
                await server.call("GET", "/server_info", timeout_s=HEALTH_S)
        except EngineError:
            return False
        return True

    async def load(self) -> ServerLoad:
        """Sums over data-parallel ranks and workers; the fullest cache. Preemptions are told with
        --enable-metrics, else 0. The figures are up to 15 steps old, or as many as
        --load-snapshot-publish-interval says."""
        return await read_load(self._control.servers)

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """See Server.load_weights. `source` must be visible to the server under the same path."""
        self._connected()
        async with self._served.lock:
            layout = await self._served.check(source)
            change = partial(self._control.reload, source, policy_version)
            await self._replace(change, policy_version)
            self._served.layout = self._served.layout or layout

    async def sleep(self) -> None:
        """See Server.sleep. What is left on it is aborted: it must be idle to sleep."""
        async with self._served.lock:
            self._served.doubt = "it sleeps"
            await self._control.fall_asleep()

    async def wake(self) -> None:
        """See Server.wake. It stays paused until weights are loaded, so that nothing runs on
        those that it had."""
        async with self._served.lock:
            await self._control.wake()

    async def fingerprint(self) -> dict[str, str]:
        """A checksum per parameter, of every rank of every worker; see Server.fingerprint."""
        await self._served.known()
        if "fingerprint" not in self._connected().info.features:
            return {}
        return await self._control.fingerprint()

    async def close(self) -> None:
        """Drop the connections, after the aborts that are under way. Idempotent."""
        await self._background.close()
        for http in {self._http, *self._control.servers}:
            await http.close()

    async def _replace(self, change: Callable[[], Awaitable[None]], policy_version: int) -> None:
        """Pause, let `change` put other weights in place, drop old prefixes, go on. A
        RefusedError of `change` says that nothing was touched."""
        served = self._served
        doubt, served.doubt = served.doubt, f"its update to {policy_version} was not completed"
        served.open.clear()
        try:
            await self._control.pause()
            try:
                await change()
            except RefusedError:
                await self._control.resume()
                served.doubt = doubt
                raise
            await self._control.flush()
            served.adopt(policy_version)
            await self._control.resume()
            served.doubt = ""
        finally:
            # In doubt it stays paused: nothing is sampled from weights that nobody knows.
            # The next connect or load lets it go on.
            served.open.set()

    def _connected(self) -> Facts:
        if self._facts is None:
            raise self._served.lost()
        return self._facts


class SGLangConfig(
    PooledEngineConfig,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="sglang",
    tag_field="name",
):
    """SGLang servers."""

    _reserved: ClassVar[int] = RESERVED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora == "adapter":
            raise ConfigError('engine.lora = "adapter" is for vLLM; to SGLang adapters go "merged"')

    def _client(self) -> ServerClient:
        return SGLangServer
