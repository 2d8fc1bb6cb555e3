"""Client of a vLLM server; vLLM itself is only required on the server side.

VLLMServer   POST /inference/v1/generate (stream) --> chunks --> PartEnd (remote/vllm_answer.py);
             after a cancellation or failure --> POST /inference/v1/abort_requests, at once; and the
             steps of a weight update (remote/weight_sync.py)
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from math import nan
from pathlib import Path
from typing import Any, ClassVar

from msgspec.structs import replace

from agentenv.base.errors import ConfigError, EngineError, reported_as
from agentenv.base.offload import in_thread
from agentenv.base.types import Chunk
from agentenv.contract.engine import check_request
from agentenv.contract.http_client import RefusedError
from agentenv.contract.request import (
    ForeignWeightsError,
    PartEnd,
    RequestAbortedError,
    ServerLoad,
    ServerLostError,
    ServerRequest,
)
from agentenv.contract.weights import Bucket, Group, SharedWeights, Wire, check_adapter, is_adapter
from agentenv.engines.pool.pooled_engine import SERVERS, PooledEngineConfig
from agentenv.engines.remote import probes
from agentenv.engines.remote.scoring import by_vllm
from agentenv.engines.remote.vllm_answer import NoPluginError, VLLMAnswer, request_body
from agentenv.engines.remote.weight_sync import WeightSync
from agentenv.text.endpoint import Models

METRICS: dict[str, Callable[[list[float]], float]] = {
    "vllm:num_requests_running": sum,
    "vllm:num_requests_waiting": sum,
    "vllm:kv_cache_usage_perc": max,  # the fullest of data-parallel engines
    "vllm:num_preemptions_total": sum,
}


class Sent:
    """An abortable request on the server. `on_purpose`: aborted without a fault, so that it may be
    sent again at once."""

    def __init__(self, on_chunk: Callable[[Chunk], None]) -> None:
        self.timeout = asyncio.timeout(None)  # expires when the request is aborted
        self.has_tokens = self.on_purpose = False
        self._on_chunk = on_chunk

    def receive(self, chunk: Chunk) -> None:
        if self.timeout.when() is None:
            self.has_tokens = True
            self._on_chunk(chunk)

    def abort(self, *, on_purpose: bool = False) -> None:
        if self.timeout.when() is None:
            self.timeout.reschedule(asyncio.get_running_loop().time())
            self.on_purpose = on_purpose


ID_PREFIX = "generate-tokens-"  # the engine's prefix of request ids
MAX_BUCKET = 1 << 62  # bytes
SETTLE_S = 0.02  # after a pause, for tokens in transit


class VLLMServer(WeightSync[probes.VLLMFacts]):
    """Server over one vLLM API server, or several behind one URL (see RemoteServer).

    One LoRA adapter is served at a time, and each version has its own name: the name is part of the
    key of vLLM's prefix cache, and requests name their adapter, so that versions cannot mix.
    Running requests are aborted, since they cannot change their adapter; they resume from their
    tokens under the new one.
    """

    transfer = probes.VLLM_TRANSFER
    tried = f"{probes.VLLM_TRIED}."
    facts = probes.VLLMFacts

    def __init__(self, url: str, **options: Any) -> None:
        """`options`: see RemoteServer."""
        super().__init__(url, **options)
        self._running: dict[str, Sent] = {}  # by request id
        self._adapter = ""  # the name in requests; empty: the model itself

    @property
    def has_free_entropies(self) -> bool:
        return self._facts is not None and self._facts.plugin

    async def _probe(self) -> probes.VLLMFacts:
        facts = await probes.probe_vllm(self._http, self._vocab_size, self._top_k)
        self._adapter = ""
        return facts

    async def _unpause(self) -> None:
        await self._wake()

    # requests

    async def generate(self, request: ServerRequest, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        """See RemoteServer.generate. With the cache kept, a request without a token is sent again
        after an update, so that each has the salt of the weights with which it starts."""
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
        self,
        request_id: str,
        request: ServerRequest,
        vocab_size: int,
        on_chunk: Callable[[Chunk], None],
    ) -> VLLMAnswer | None:
        """One request to the server; None if the weights changed before its first token."""
        plugin, entropies = self._connected().plugin, request.with_entropies
        exact = plugin or not 0 < self._top_k < vocab_size
        answer = VLLMAnswer(
            self.name, exact, self._span, vocab_size, with_entropies=entropies, plugin=plugin
        )
        body = request_body(
            request_id, request, self._top_k, self._salt, self._adapter, plugin=plugin
        )
        sent = self._running[request_id] = Sent(on_chunk)
        try:
            async with sent.timeout:
                await self._stream(probes.GENERATE, request_id, body, request, answer, sent.receive)
        except TimeoutError:
            if not sent.timeout.expired():
                raise
            if not sent.has_tokens:
                return None
            if sent.on_purpose:
                raise RequestAbortedError(f"{self.name} received a different adapter") from None
            raise ServerLostError(f"{self.name}: {self._unusable}") from None
        except RefusedError as error:
            if error.status == 404 and self._adapter:  # a new process, without the adapter
                raise ServerLostError(str(error)) from error
            raise
        finally:
            del self._running[request_id]
        return answer

    async def scores(self, ids: Sequence[int], start: int) -> list[float]:
        facts = await self._known()
        keys = {"model": self._adapter or facts.info.model, "cache_salt": self._salt}
        rows = await by_vllm(self._http, ids, start, 0, keys)
        return [one.get(token, nan) for token, one in zip(ids[start:], rows, strict=True)]

    async def _try_out(self) -> None:
        await self._drop_prefixes()
        await self.load()
        problem = f"{self.name} does not report which weights sampled a token"
        try:
            with reported_as(ConfigError, problem, ForeignWeightsError):
                try:
                    await self._try_request(plugin=True)
                except NoPluginError:
                    await self._try_request(plugin=False)
        except RefusedError as error:
            cure = ": start it with --enable-scale-out" if error.status == 403 else ""
            raise ConfigError(f"{error}{cure}") from error

    async def _try_request(self, *, plugin: bool) -> None:
        facts = self._facts = replace(self._connected(), plugin=plugin)
        chunks: list[Chunk] = []
        request_id = f"probe-{self._label}{'-p' * plugin}"
        answer = await self._sample(request_id, probes.TRIAL, facts.vocab_size, chunks.append)
        assert answer is not None
        end, counts_cached = answer.finish(), answer.has_cached_tokens
        probes.check_trial(self.name, end, chunks, self.policy_version, counts_cached=counts_cached)

    async def _abort_all(self, *, on_purpose: bool = False) -> None:
        """Abort all requests, also on the server. `on_purpose`: they may be sent again at once."""
        for sent in self._running.values():
            sent.abort(on_purpose=on_purpose)
        await self._abort(list(self._running))

    def _abort_calls(self, request_ids: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield probes.ABORT, {"request_ids": [ID_PREFIX + each for each in request_ids]}

    async def load(self) -> ServerLoad:
        """Summed over data-parallel engines."""
        found = probes.read_metrics(await self._http.call("GET", "/metrics"), METRICS)
        for name, values in found.items():
            if not values:
                raise ConfigError(
                    f"{self.name}/metrics has no {name}: start it without --disable-log-stats"
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
        """Serve an adapter, or the server's original model without one."""
        old = self._adapter
        directory = await in_thread(source.absolute)
        if is_adapter(source):
            await in_thread(check_adapter, source, self._layout)
            new = f"{self._connected().info.model}-v{policy_version}-{secrets.token_hex(4)}"
        else:
            new = ""
            if self._layout is None or directory != self._layout.directory:
                raise EngineError(
                    "this server was started with --enable-lora: it accepts adapters of its model, "
                    f"not the weights in {source}"
                )

        async def change() -> None:
            if new:
                body = {"lora_name": new, "lora_path": str(directory)}
                await self._http.call("POST", "/v1/load_lora_adapter", body)
                models = (await self._http.call_as(Models, "GET", "/v1/models")).data
                if not any(m.id == new and m.root == str(directory) for m in models):
                    raise ServerLostError(f"{self.name} does not list the adapter {new}")
            await self._abort_all(on_purpose=True)
            self._adapter = new

        await self._replace(change, policy_version)
        if old:
            body = {"lora_name": old}
            with suppress(EngineError):  # no request uses it anymore
                await self._http.call("POST", "/v1/unload_lora_adapter", body)

    async def _replace(self, change: Callable[[], Awaitable[None]], policy_version: int) -> None:
        try:
            await super()._replace(change, policy_version)
        except RefusedError:
            raise
        except BaseException as error:
            if self._is_asleep:  # no request runs, and resuming without memory would crash it
                raise
            task = self._spawn(self._release())
            if not isinstance(error, asyncio.CancelledError):
                await asyncio.wait({task})
            raise

    async def _release(self) -> None:
        """Abort the requests and resume: an engine with half-loaded weights crashes when it resumes
        requests."""
        await self.before_release()
        await self._abort_all()
        with suppress(EngineError):
            await self._http.call("POST", "/resume")

    async def _pause(self) -> None:
        """Pause in place; new requests queue. With the cache kept, requests without a token are
        aborted, since they would start on prefixes of the old weights."""
        keep = self._update_kv == "keep"
        await self._post("/pause", mode="keep", clear_cache="false" if keep else "true")
        await asyncio.sleep(SETTLE_S)
        if keep:
            for sent in self._running.values():
                if not sent.has_tokens:
                    sent.abort()

    async def _reload(self, directory: Path) -> None:
        method = probes.REPACK if self._connected().extension else "reload_weights"
        body = {"method": method, "kwargs": {"weights_path": str(directory)}}
        await self._post("/collective_rpc", body, self._load_s)

    async def _drop_prefixes(self) -> None:
        """Drop cached prefixes. The salt separates the cache of running requests from later ones.
        If nothing may remain, a server that reports otherwise has ignored `clear_cache`, as newer
        versions may."""
        strict = self._update_kv == "recompute" and not self._open.is_set()
        dropped = await self._http.read(bool, "POST", "/reset_prefix_cache", "success", True)
        if strict and not dropped:
            raise ServerLostError(
                f"{self.name} kept the KV cache of the old weights across a pause; set "
                'engine.update_kv = "keep"'
            )

    async def _write_label(self, label: str) -> None:
        await self._post("/update_weight_version", {"new_version": label})

    async def _read_label(self, *, fresh: bool = False) -> str:
        return await self._http.read(str, "GET", "/weight_info", "weight_version", "", fresh=fresh)

    async def _resume(self) -> None:
        await self._post("/resume")

    async def _fall_asleep(self) -> None:
        """Drop weights and cache; the base model of adapters, which is not loaded again, moves to
        main memory. On the CPU, only pause."""
        has_adapters = self._facts is not None and "adapters" in self._facts.info.features
        level = "1" if has_adapters else "2"
        await self._post("/sleep", None, self._load_s, level=level, mode="abort")

    async def _wake(self) -> None:
        """Resume engines that were left paused or asleep."""
        routes = self._connected().routes
        paths = [path for path in ("/wake_up", "/resume") if f"POST {path}" in routes]
        for path in paths:
            if await self._http.read(bool, "GET", "/is_paused", "is_paused"):
                await self._http.call("POST", path, timeout_s=self._load_s)

    async def _take(
        self, weights: SharedWeights, number: int, release: Callable[[], Awaitable[None]]
    ) -> None:
        info = {
            "names": weights.names,
            "dtype_names": weights.dtypes,
            "shapes": weights.shapes,
            "offsets": weights.offsets,
            "num_bytes": weights.num_bytes,
            "memory": weights.exports_of(number),
        }
        with reported_as(ServerLostError, "its weight version is unknown", EngineError):
            if self._is_asleep:
                await self._post("/wake_up", None, self._load_s, tags="weights")
            await self._post(self.transfer.start, self.transfer.empty)
            await self._post(self.transfer.receive, {"update_info": info}, self._load_s)
            await self._post(self.transfer.finish, self.transfer.empty, self._load_s)
            if self._is_asleep:
                await release()
                await self._post("/wake_up", None, self._load_s, tags="kv_cache")

    async def num_ranks(self) -> int:
        params = {"include_dp": "true"}
        return await self._http.read(int, "GET", "/get_world_size", "world_size", params=params)

    @property
    def wire(self) -> Wire:
        return probes.WIRES[self._connected().transfer]

    def _join_body(self, group: Group, first_rank: int) -> dict[str, Any]:
        info: dict[str, Any] = {
            "rank_offset": first_rank,
            "world_size": group.world_size,
            # One call is one packed tensor of any size.
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


class VLLMConfig(PooledEngineConfig, frozen=True, kw_only=True, tag="vllm", tag_field="name"):
    """vLLM servers."""

    client: ClassVar[type[VLLMServer]] = VLLMServer
    capabilities: ClassVar = replace(SERVERS, can_map=True, has_adapters=True, keeps_cache=True)
