"""Client of a vLLM server; vLLM itself is needed only on the other side of the connection.

request_body, VLLMAnswer   one request as vLLM takes it, and what it streams, read into chunks
VLLMServer                 POST /inference/v1/generate (stream) --> chunks --> PartEnd; cancelled or
                           failed --> POST /inference/v1/abort_requests, at once; and the steps of
                           a change of weights (remote/weight_sync.py)
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from agentenv.engine import check_request
from agentenv.engines.pool import PooledEngineConfig
from agentenv.engines.remote import (
    BrokenOffError,
    BusyError,
    ForeignWeightsError,
    PartEnd,
    Request,
    ServerLoad,
    ServerLostError,
)
from agentenv.engines.remote.base import Answer, LabelledSpan, top_k_entropies
from agentenv.engines.remote.client import (
    Count,
    FailedError,
    HttpClient,
    Logprob,
    RefusedError,
    all_of,
)
from agentenv.engines.remote.probes import (
    ABORT,
    ENTROPY,
    GENERATE,
    REPACK,
    STOP_STRINGS,
    TRIAL,
    VLLM_TRANSFER,
    VLLM_TRIED,
    WIRES,
    Models,
    VLLMFacts,
    check_trial,
    probe_vllm,
    read_metrics,
)
from agentenv.engines.remote.weight_sync import WeightSync
from agentenv.engines.remote.weights import Bucket, Group, Wire, check_adapter, is_adapter
from agentenv.errors import ConfigError, EngineError, ForeignError
from agentenv.offload import in_thread
from agentenv.types import Chunk
from agentenv.untrusted import decode

# One request as vLLM takes it, and what it streams, read into chunks and their end. A server with
# our plugin gives exact entropies, as the ranks of its tokens; of any other the rivals of a token
# are asked for where entropies are wanted.

NO_LOGPROB = -9999.0  # what vLLM writes for minus infinity, NaN, and for "not known"
P = TypeVar("P", bound="_Position")


class _Position(Struct, gc=False):
    logprob: Logprob


class _WithRank(_Position, gc=False):
    rank: int | None = None


class _WithRivals(_WithRank, gc=False):
    top_logprobs: list[_Position] = []


class _Logprobs(Struct, Generic[P], gc=False):
    content: list[P]


class _Choice(Struct, Generic[P], gc=False):
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: _Logprobs[P] | None = None
    weight_versions: list[LabelledSpan] | None = None


class _Details(Struct):
    cached_tokens: Count | None = None


class _Usage(Struct):
    prompt_tokens_details: _Details | None = None


class _Failure(Struct):
    message: str = "no reason given"
    code: int = 500


class _Event(Struct, Generic[P], gc=False):
    choices: list[_Choice[P]] = []
    usage: _Usage | None = None
    error: _Failure | None = None


BARE: type[_Event[_Position]] = _Event[_Position]
WITH_RANK: type[_Event[_WithRank]] = _Event[_WithRank]
WITH_RIVALS: type[_Event[_WithRivals]] = _Event[_WithRivals]


def request_body(
    request_id: str,
    request: Request,
    entropy_top_k: int,
    cache_salt: str,
    adapter: str = "",
    *,
    plugin: bool = False,
) -> dict[str, Any]:
    """The JSON that is posted; no default is left to the server, which may read them from the
    model. `plugin`: the server has ours."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": entropy_top_k if request.with_entropies and not plugin else 0,
    }
    if request.stream_interval > 1:
        params["stream_interval"] = request.stream_interval
    if sampling.seed is not None:
        params["seed"] = sampling.seed % 2**63  # -1 would mean none
    if sampling.stop and not plugin:
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
        if sampling.stop:
            params["extra_args"] = {STOP_STRINGS: sampling.stop}
    if request.stop_token_ids:
        # The engine stops at these by itself. Without our plugin stop strings are found by the API
        # server, and until its abort arrives the engine samples on for nothing.
        params["stop_token_ids"] = request.stop_token_ids
    return {
        "request_id": request_id,
        **({"model": adapter} if adapter else {}),
        "token_ids": list(request.prompt_ids),
        "sampling_params": params,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": cache_salt,
    }


class NoPluginError(ServerLostError):
    """The ranks of a server's tokens are ranks."""


class VLLMAnswer(Answer):
    """Each event holds the tokens since the last one. `plugin`: ranks of tokens hold entropies."""

    has_cached_tokens = False

    def __init__(self, *arguments: Any, plugin: bool = False, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self._event: type[_Event[Any]] = BARE
        if self._with_entropies:
            self._event = WITH_RANK if plugin else WITH_RIVALS

    def add(self, event: bytes) -> Chunk | None:
        try:
            found = decode(event, self._event)
        except ForeignError as error:
            text = f"{self._server} streamed what vLLM {VLLM_TRIED} does not: {error}"
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

    def _extend(self, choice: _Choice[Any]) -> Chunk | None:
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

    def _entropies(self, positions: Sequence[Any]) -> list[float]:
        if self._event is not WITH_RANK:
            return top_k_entropies([[top.logprob for top in one.top_logprobs] for one in positions])
        ranks = [position.rank or 0 for position in positions]
        if min(ranks) < ENTROPY:
            raise NoPluginError(f"{self._server} does not have agentenv's plugin")
        bits = np.array(ranks, np.int64) - ENTROPY
        found: list[float] = bits.astype(np.int32).view(np.float32).tolist()
        return found


METRICS: dict[str, Callable[[list[float]], float]] = {
    "vllm:num_requests_running": sum,
    "vllm:num_requests_waiting": sum,
    "vllm:kv_cache_usage_perc": max,  # the fullest of data-parallel engines
    "vllm:num_preemptions_total": sum,
}


class Sent:
    """A request on the server, which can be aborted; `on_purpose`: nothing is wrong, it may be
    sent again at once."""

    def __init__(self, on_chunk: Callable[[Chunk], None]) -> None:
        self.timeout = asyncio.timeout(None)  # to be entered; it expires when aborted
        self.has_tokens = self.on_purpose = False
        self._on_chunk = on_chunk

    def receive(self, chunk: Chunk) -> None:
        if self.timeout.when() is None:
            self.has_tokens = True
            self._on_chunk(chunk)

    def break_off(self, *, on_purpose: bool = False) -> None:
        if self.timeout.when() is None:
            self.timeout.reschedule(asyncio.get_running_loop().time())
            self.on_purpose = on_purpose


ID_PREFIX = "generate-tokens-"  # what the engine puts before the request id that it was given
MAX_BUCKET = 1 << 62  # bytes
SETTLE_S = 0.02  # after a pause: tokens that were sampled before it are on their way


class VLLMServer(WeightSync[VLLMFacts]):
    """Server over one vLLM API server, or several behind one URL (see RemoteServer).

    LoRA adapters are served one at a time, each version under a name of its own: the name is part
    of the key of vLLM's prefix cache, and requests name the adapter that they want, so that
    versions cannot mix. Running requests are aborted, since one cannot change its adapter; they
    go on from their tokens under the new one.
    """

    transfer = VLLM_TRANSFER
    tried = f"{VLLM_TRIED}."
    facts = VLLMFacts

    def __init__(self, url: str, **options: Any) -> None:
        """`options`: see RemoteServer."""
        super().__init__(url, **options)
        self._running: dict[str, Sent] = {}  # by request id
        self._adapter = ""  # name that requests ask for; empty: the model itself

    async def _probe(self) -> VLLMFacts:
        facts = await probe_vllm(self._controls[0], self._given_vocab_size, self._top_k)
        self._adapter = ""
        return facts

    async def _unpause(self) -> None:
        await self._wake()

    # requests

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        """See RemoteServer.generate. With the cache kept, a request without a token is sent again,
        so that each carries the salt of the weights it starts with."""
        num_sent = 0
        while True:
            facts = await self._known()
            max_len = facts.info.max_model_len
            check_request(request.prompt_ids, request.sampling, facts.vocab_size, max_len)
            request_id = f"{request.id}-{num_sent}" if num_sent else request.id
            num_sent += 1
            answer = await self._sample(request_id, request, facts.vocab_size, on_chunk)
            if answer is not None:
                return answer.finish()

    async def _sample(
        self, request_id: str, request: Request, vocab_size: int, on_chunk: Callable[[Chunk], None]
    ) -> VLLMAnswer | None:
        """One request to the server; None if other weights came before its first token."""
        plugin, entropies = self._connected().plugin, request.with_entropies
        exact = plugin or not 0 < self._top_k < vocab_size
        kind: Literal["exact", "top_k"] = "exact" if exact else "top_k"
        answer = VLLMAnswer(
            *(self.name, kind, self._span, vocab_size), with_entropies=entropies, plugin=plugin
        )
        body = request_body(
            *(request_id, request, self._top_k, self._salt, self._adapter), plugin=plugin
        )
        sent = self._running[request_id] = Sent(on_chunk)
        try:
            async with sent.timeout:
                await self._stream(
                    GENERATE, request_id, body, request.session, answer, sent.receive
                )
        except TimeoutError:
            if not sent.timeout.expired():
                raise
            if not sent.has_tokens:
                return None
            if sent.on_purpose:
                raise BrokenOffError(f"{self.name} got another adapter") from None
            raise ServerLostError(f"{self.name}: {self._doubt}") from None
        except RefusedError as error:
            if error.status == 404 and self._adapter:  # another process, without the adapter
                raise ServerLostError(str(error)) from error
            raise
        finally:
            del self._running[request_id]
        return answer

    async def _try_out(self) -> None:
        await self._drop_prefixes()
        await self.load()
        try:
            try:
                await self._try_request(plugin=True)
            except NoPluginError:
                await self._try_request(plugin=False)
        except ForeignWeightsError as error:
            raise ConfigError(
                f"{self.name} does not say which weights sampled a token: {error}"
            ) from error
        except RefusedError as error:
            cure = ": start it with --enable-scale-out" if error.status == 403 else ""
            raise ConfigError(f"{error}{cure}") from error

    async def _try_request(self, *, plugin: bool) -> None:
        facts = self._facts = replace(self._connected(), plugin=plugin)
        chunks: list[Chunk] = []
        request_id = f"probe-{self._label}{'-p' * plugin}"
        answer = await self._sample(request_id, TRIAL, facts.vocab_size, chunks.append)
        assert answer is not None
        end, counts_cached = answer.finish(), answer.has_cached_tokens
        check_trial(self.name, end, chunks, self.policy_version, counts_cached=counts_cached)

    async def _break_off_all(self, *, on_purpose: bool = False) -> None:
        """End all, also on the server. `on_purpose`: they may be sent again at once."""
        for sent in self._running.values():
            sent.break_off(on_purpose=on_purpose)
        await self._abort(list(self._running))

    def _abort_calls(self, request_ids: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield ABORT, {"request_ids": [ID_PREFIX + each for each in request_ids]}

    async def load(self) -> ServerLoad:
        """Summed over API servers and data-parallel engines."""
        found: dict[str, list[float]] = {name: [] for name in METRICS}
        for server in self._controls:
            for name, values in read_metrics(await server.call("GET", "/metrics"), METRICS).items():
                found[name] += values
        for name, values in found.items():
            if not values:
                raise ConfigError(
                    f"{server.name}/metrics has no {name}: start it without --disable-log-stats"
                )
        running, waiting, usage, preemptions = (f(found[name]) for name, f in METRICS.items())
        return ServerLoad(int(running), int(waiting), usage, int(preemptions))

    # weights

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """See WeightSync.load_weights. The server must see `source` under the same path."""
        if is_adapter(source) or "adapters" in self._connected().info.features:
            async with self._changing:
                await self._load_adapter(source, policy_version)
        else:
            await super().load_weights(source, policy_version)

    async def _load_adapter(self, source: Path, policy_version: int) -> None:
        """Serve an adapter, or the model that the server was started from without one."""
        old = self._adapter
        directory = await in_thread(source.absolute)
        if is_adapter(source):
            await in_thread(check_adapter, source, self._layout)
            new = f"{self._connected().info.model}-v{policy_version}-{secrets.token_hex(4)}"
        else:
            new = ""
            if self._layout is None or directory != self._layout.directory:
                raise EngineError(
                    f"this server was started with --enable-lora: it takes adapters of its model, "
                    f"not the weights in {source}"
                )

        async def change() -> None:
            if new:
                body = {"lora_name": new, "lora_path": str(directory)}
                await all_of(s.call("POST", "/v1/load_lora_adapter", body) for s in self._controls)
                for server in self._controls:
                    models = (await server.call_as(Models, "GET", "/v1/models")).data
                    if not any(m.id == new and m.root == str(directory) for m in models):
                        raise ServerLostError(f"{server.name} does not list the adapter {new}")
            await self._break_off_all(on_purpose=True)
            self._adapter = new

        await self._replace(change, policy_version)
        if old:
            body = {"lora_name": old}
            with suppress(EngineError):  # nothing asks for it any more
                await all_of(
                    s.call("POST", "/v1/unload_lora_adapter", body) for s in self._controls
                )

    async def _replace(self, change: Callable[[], Awaitable[None]], policy_version: int) -> None:
        try:
            await super()._replace(change, policy_version)
        except RefusedError:
            raise
        except BaseException as error:
            task = self._spawn(self._release())
            if not isinstance(error, asyncio.CancelledError):
                await asyncio.wait({task})
            raise

    async def _release(self) -> None:
        """Nothing stays paused, nothing samples unseen: half-loaded weights kill an engine that
        goes on with its requests."""
        await self.before_release()
        await self._break_off_all()
        for server in self._controls:
            with suppress(EngineError):
                await server.call("POST", "/resume")

    async def _pause(self) -> None:
        """Requests stay where they are; new ones queue. With the cache kept, those without a token
        would start on prefixes of the old weights."""
        keep = self._update_kv == "keep"
        await self._post("/pause", mode="keep", clear_cache="false" if keep else "true")
        await asyncio.sleep(SETTLE_S)
        if keep:
            for sent in self._running.values():
                if not sent.has_tokens:
                    sent.break_off()

    async def _reload(self, directory: Path) -> None:
        method = REPACK if self._connected().extension else "reload_weights"
        body = {"method": method, "kwargs": {"weights_path": str(directory)}}
        await self._post("/collective_rpc", body, self._load_s)

    async def _drop_prefixes(self) -> None:
        """What running requests hold is kept from later ones by the salt. Where nothing may be
        held, a server that says otherwise has ignored `clear_cache`, as newer ones may."""
        strict = self._update_kv == "recompute" and not self._open.is_set()
        for server in self._controls:
            dropped = await server.read(bool, "POST", "/reset_prefix_cache", "success", True)
            if strict and not dropped:
                raise ServerLostError(
                    f"{server.name} kept keys and values of the old weights in a pause; set "
                    'engine.update_kv = "keep"'
                )

    async def _write_label(self, label: str) -> None:
        await self._post("/update_weight_version", {"new_version": label})

    async def _read_label(self, server: HttpClient, *, fresh: bool = False) -> str:
        return await server.read(str, "GET", "/weight_info", "weight_version", "", fresh=fresh)

    async def _resume(self) -> None:
        await self._post("/resume")

    async def _fall_asleep(self) -> None:
        """Weights go to main memory, the cache is dropped; on the CPU they only pause."""
        await self._post("/sleep", None, self._load_s, level="1", mode="abort")

    async def _wake(self) -> None:
        """Resume those that were left paused, or asleep, which counts as paused."""
        routes = self._connected().routes
        paths = [path for path in ("/wake_up", "/resume") if f"POST {path}" in routes]
        for server in self._controls:
            for path in paths:
                if await server.read(bool, "GET", "/is_paused", "is_paused"):
                    await server.call("POST", path, timeout_s=self._load_s)

    async def _num_workers(self, server: HttpClient) -> int:
        params = {"include_dp": "true"}
        return await server.read(int, "GET", "/get_world_size", "world_size", params=params)

    @property
    def wire(self) -> Wire:
        return WIRES[self._connected().transfer]

    def _join_body(self, group: Group, first_rank: int) -> dict[str, Any]:
        info: dict[str, Any] = {
            "rank_offset": first_rank,
            "world_size": group.world_size,
            # One call is one packed tensor, however large.
            "packed": True,
            "packed_buffer_size_bytes": MAX_BUCKET,
        }
        if self.wire == "nccl":
            info["nccl_unique_id_b64"] = group.address.unique_id
        else:
            info |= {
                "master_address": group.address.host,
                "master_port": group.address.port,
                "group_name": group.name,
                "timeout_s": group.timeout_s,
            }
        return {"init_info": info}

    def _bucket_body(self, group: Group, bucket: Bucket) -> dict[str, Any]:
        info = {"names": bucket.names, "dtype_names": bucket.dtypes, "shapes": bucket.shapes}
        return {"update_info": info}


class VLLMConfig(
    PooledEngineConfig,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="vllm",
    tag_field="name",
):
    """vLLM servers."""

    client: ClassVar[type[VLLMServer]] = VLLMServer
