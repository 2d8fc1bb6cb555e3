"""A vLLM server as the pool sees it; needs vLLM only on the other side of the connection.

generate:      check --> POST /inference/v1/generate (stream) --> chunks ... --> Completion
               cancelled or failed --> POST /inference/v1/abort_requests, at once
load_weights:  check the directory --> pause --> reload --> drop prefixes --> name --> resume
               requests that come meanwhile wait here, those without a token yet are sent again:
               so each one carries the cache salt of the weights it starts with
               of an adapter: the same with /v1/load_lora_adapter under a name of its own; all
               requests are broken off, and go on under the new name
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from agentenv.engines.client import (
    Background,
    FailedError,
    HttpClient,
    RefusedError,
    Replace,
    Running,
    Served,
    Timeouts,
    all_of,
    check_request,
)
from agentenv.engines.pool.engine import PooledEngineConfig, ServerClient
from agentenv.engines.server import (
    BrokenOffError,
    Request,
    ServerInfo,
    ServerLoad,
    ServerLostError,
    check_top_k,
)
from agentenv.engines.vllm_wire import (
    GENERATE,
    TRIAL,
    Answer,
    Control,
    Facts,
    check_tied,
    check_trial,
    entropy_kind,
    probe,
    request_body,
)
from agentenv.engines.weights import Group, Manifest, check_adapter, check_manifest, is_adapter
from agentenv.errors import ConfigError, EngineError
from agentenv.types import Chunk, Completion

# Requests on a vLLM server: each can be broken off, and is aborted there unless it has ended.


class VLLMRequests:
    """`adapter` is the name that requests ask for; empty: the model itself."""

    def __init__(
        self,
        http: HttpClient,
        control: Control,
        served: Served,
        background: Background,
        entropy_top_k: int,
    ) -> None:
        self.adapter = ""
        self._http, self._control, self._served = http, control, served
        self._background, self._top_k = background, entropy_top_k
        self._running = Running()

    async def sample(
        self, request_id: str, request: Request, facts: Facts, on_chunk: Callable[[Chunk], None]
    ) -> Answer | None:
        """One request to the server; None if other weights came before its first token."""
        answer = Answer(self._http.name, entropy_kind(self._top_k, facts.vocab_size))
        body = request_body(request_id, request, self._top_k, self._served.salt, self.adapter)
        whole = False
        with self._running.watch(request_id) as broken_off:
            try:
                async with broken_off:
                    async with self._http.stream(GENERATE, body) as events:
                        async for event in events:
                            chunk = answer.add(event)
                            if chunk is not None and broken_off.when() is None:
                                self._running.unstarted.discard(request_id)
                                on_chunk(chunk)
                    whole = True
            except TimeoutError:
                if not broken_off.expired():
                    raise
                if request_id in self._running.unstarted:
                    return None
                if self._running.was_on_purpose(request_id):
                    raise BrokenOffError(f"{self._http.name} got another adapter") from None
                raise ServerLostError(f"{self._http.name}: {self._served.doubt}") from None
            finally:
                if not whole:
                    self._background.spawn(self._control.abort(facts, [request_id]))
        return answer

    async def try_out(self, facts: Facts) -> None:
        """Sample one token, since routes and settings do not tell all."""
        salt, version = self._served.salt, self._served.policy_version
        try:
            answer = await self.sample(f"probe-{salt}", TRIAL, facts, lambda chunk: None)
        except RefusedError as error:
            cure = ": start it with --enable-scale-out" if error.status == 403 else ""
            raise ConfigError(f"{error}{cure}") from error
        assert answer is not None
        check_trial(self._http.name, facts, answer, version)

    def break_off_unstarted(self) -> None:
        """End those that have no token yet; they are sent again."""
        self._running.break_off(self._running.unstarted)

    async def break_off_all(self, facts: Facts, *, on_purpose: bool = False) -> None:
        """End all, also on the server. `on_purpose`: they may be sent again at once."""
        ids = self._running.ids
        self._running.break_off(ids, on_purpose=on_purpose)
        await self._control.abort(facts, ids)


# LoRA adapters on a vLLM server: one at a time, each version under a name of its own.
#
# The name is part of the key of vLLM's prefix cache, and requests name the adapter that they want,
# so that versions cannot mix. Running requests are broken off, since one cannot change its adapter;
# they go on from their tokens under the new one.

FEATURE = "adapters"
ROUTES = {"POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"}
SLEEP_ROUTES = {"POST /sleep", "POST /wake_up"}


class VLLMAdapters:
    """Serves one after the other."""

    def __init__(
        self, control: Control, requests: VLLMRequests, served: Served, replace: Replace
    ) -> None:
        self._control, self._requests = control, requests
        self._served, self._replace = served, replace

    async def load(self, source: Path, facts: Facts, policy_version: int) -> None:
        """Serve an adapter, or the model that the server was started from without one; errors as
        of Server.load_weights."""
        served = self._served.layout
        old, directory = self._requests.adapter, await asyncio.to_thread(source.absolute)
        if is_adapter(source):
            await asyncio.to_thread(check_adapter, source, served)
            new = f"{facts.model}-v{policy_version}-{secrets.token_hex(4)}"
        else:
            new = ""
            if served is None or directory != served.directory:
                raise EngineError(
                    f"this server was started with --enable-lora: it takes adapters of its model, "
                    f"not the weights in {source}"
                )
        await self._replace(partial(self._change, new, directory, facts), policy_version)
        if old:
            await self._control.unload_adapter(old)

    async def _change(self, name: str, directory: Path, facts: Facts) -> None:
        if name:
            await self._control.load_adapter(name, directory)
        await self._requests.break_off_all(facts, on_purpose=True)
        self._requests.adapter = name


def with_features(facts: Facts) -> ServerInfo:
    """What the server can do beyond what the probe found: load adapters, and sleep on the CPU,
    where it gives no memory back but takes part in every other way."""
    found = set(facts.features)
    if facts.cpu and facts.routes >= SLEEP_ROUTES:
        found.add("sleep")
    if facts.routes >= ROUTES:
        found.add(FEATURE)
    return replace(facts.info(), features=frozenset(found))


# Weights by broadcast into a vLLM server whose workers have the backend `agentenv`
# (vllm_plugin/agentenv_vllm_broadcast.py, an entry point of vLLM that is installed beside it).

JOIN, LEAVE = "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"
START, RECEIVE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
SLACK_S = 15.0  # an HTTP call outlives the collective call behind it by this


class VLLMReceiver:
    """See Receiver."""

    def __init__(self, control: Control, served: Served, replace: Replace) -> None:
        self._control, self._served, self._replace = control, served, replace

    async def num_ranks(self) -> int:
        return sum([await _num_workers(server) for server in self._control.servers])

    async def join(self, group: Group, first_rank: int) -> None:
        calls = []
        for server in self._control.servers:
            info = {
                "master_address": group.address.host,
                "master_port": group.address.port,
                "rank_offset": first_rank,
                "world_size": group.world_size,
                "group_name": group.name,
                "backend": group.address.backend,
                "timeout_s": group.timeout_s,
            }
            first_rank += await _num_workers(server)
            timeout_s = group.timeout_s + SLACK_S
            calls.append(server.call("POST", JOIN, {"init_info": info}, timeout_s=timeout_s))
        await all_of(calls)

    async def receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        async with self._served.lock:
            check_manifest(manifest, self._served.layout)
            await self._replace(partial(self._receive, group, manifest), policy_version)

    async def leave(self, group: Group) -> None:
        with suppress(EngineError):
            await self._control.post(LEAVE, timeout_s=SLACK_S)

    async def _receive(self, group: Group, manifest: Manifest) -> None:
        try:
            await self._control.post(START)
        except FailedError:  # an earlier update was broken off between two buckets
            with suppress(EngineError):
                await self._control.post(FINISH)
            await self._control.post(START)
        try:
            for bucket in manifest.buckets:
                update = {
                    "names": bucket.names,
                    "dtype_names": bucket.dtypes,
                    "shapes": bucket.shapes,
                }
                timeout_s = group.timeout_s * len(bucket.names) + SLACK_S
                await self._control.post(RECEIVE, {"update_info": update}, timeout_s=timeout_s)
            timeout_s = self._control.servers[0].timeouts.load_s
            await self._control.post(FINISH, timeout_s=timeout_s)
        except RefusedError as error:
            raise ServerLostError(f"nobody knows what weights it has: {error}") from error


async def _num_workers(server: HttpClient) -> int:
    found = await server.call_json("GET", "/get_world_size", params={"include_dp": "true"})
    return int(found["world_size"])


HEALTH_S = 5.0
SETTLE_S = 0.02  # after a pause: tokens that were sampled before it are on their way


class VLLMServer:
    """Server over one vLLM API server (see Server).

    `url` samples; `control_urls` are the API servers behind it, if it is a router. Entropies come
    from the `entropy_top_k` largest log-probs (-1: all, then they are exact). Without `vocab_size`
    it is read from the directory that the server was started from.
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
        self._half_loaded = False  # since a load that was not completed
        self._background = Background()
        self._requests = VLLMRequests(
            self._http, self._control, self._served, self._background, entropy_top_k
        )
        self.receiver = VLLMReceiver(self._control, self._served, self._replace)
        self._adapters = VLLMAdapters(self._control, self._requests, self._served, self._replace)

    @property
    def name(self) -> str:
        return self._http.name

    @property
    def policy_version(self) -> int:
        return self._served.policy_version

    async def connect(self, policy_version: int) -> ServerInfo:
        """See Server.connect. Also resumes a server that was left paused. After a load that was
        not completed it serves nothing before load_weights has succeeded."""
        async with self._served.lock:
            facts = await probe(self._control.servers[0], self._given_vocab_size, self._top_k)
            check_tied(self.name, facts)
            await self._control.wake(facts)
            await self._control.name_version(policy_version)
            await self._control.reset_prefix_cache()
            self._facts, self._served.layout = facts, facts.layout
            self._requests.adapter = ""
            self._served.adopt(policy_version)
            await self._control.load()
            if not self._half_loaded:  # such an engine would die of a request
                await self._requests.try_out(facts)
                self._served.doubt = ""
            return with_features(facts)

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> Completion:
        """See Server.generate. While weights are being replaced a new request waits."""
        num_sent = 0
        while True:
            await self._served.known()
            facts = self._connected()
            check_request(request, facts.vocab_size, facts.max_model_len)
            request_id = f"{request.id}-{num_sent}" if num_sent else request.id
            num_sent += 1
            answer = await self._requests.sample(request_id, request, facts, on_chunk)
            if answer is not None:
                return answer.finish()

    async def healthy(self) -> bool:
        try:
            await self._http.call("GET", "/health", timeout_s=HEALTH_S)
        except EngineError:
            return False
        return True

    async def load(self) -> ServerLoad:
        return await self._control.load()

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """See Server.load_weights. Requests that have tokens keep them; the new weights compute
        keys and values of all of them again. The server must see `source` under the same path."""
        facts = self._connected()
        async with self._served.lock:
            if is_adapter(source) or FEATURE in with_features(facts).features:
                await self._adapters.load(source, facts, policy_version)
                return
            layout = await self._served.check(source)
            await self._replace(
                partial(self._control.reload, facts, layout.directory), policy_version
            )
            self._served.layout = self._served.layout or layout

    async def sleep(self) -> None:
        async with self._served.lock:
            self._served.doubt = "it sleeps"
            await self._control.fall_asleep()

    async def wake(self) -> None:
        async with self._served.lock:
            await self._control.wake(self._connected())

    async def fingerprint(self) -> dict[str, str]:
        """See Server.fingerprint. Empty on the CPU, where vLLM keeps packed copies of most
        parameters elsewhere and tells the checksum of nothing."""
        if "fingerprint" not in self._connected().features or self._requests.adapter:
            return {}
        return await self._control.fingerprint()

    async def close(self) -> None:
        await self._background.close()
        for http in {self._http, *self._control.servers}:
            await http.close()

    async def _replace(self, change: Callable[[], Awaitable[None]], policy_version: int) -> None:
        """Pause, let `change` put other weights in place, name them, resume. A RefusedError of
        `change` says that nothing was touched."""
        served = self._served
        served.open.clear()
        doubt, served.doubt = served.doubt, "its weights are being replaced"
        changed = False
        try:
            await self._control.pause()
            await asyncio.sleep(SETTLE_S)
            # Requests without a token would start on prefixes of the old weights.
            self._requests.break_off_unstarted()
            await change()
            changed = True
            await self._control.reset_prefix_cache()
            await self._control.name_version(policy_version)
            served.adopt(policy_version)
            await self._control.resume()
            served.doubt, self._half_loaded = "", False
        except BaseException as error:  # a cancellation too: it must not stay paused
            refused = isinstance(error, RefusedError) and not changed
            if refused and len(self._control.servers) == 1:
                await self._control.resume()
                served.doubt = doubt
                raise
            await self._give_up(error)
            if not isinstance(error, EngineError):
                raise
            raise ServerLostError(f"{self.name}: {served.doubt}") from error
        finally:
            served.open.set()

    async def _give_up(self, error: BaseException) -> None:
        """After a load that was not completed: nothing stays paused, nothing samples unseen."""
        reason = str(error) or type(error).__name__
        self._served.doubt = f"a load of weights was not completed ({reason})"
        self._half_loaded = True

        async def release() -> None:
            # Half-loaded weights kill an engine that goes on with its requests.
            await self._requests.break_off_all(self._connected())
            await self._control.resume_if_possible()

        task = self._background.spawn(release())
        if not isinstance(error, asyncio.CancelledError):
            await asyncio.wait({task})

    def _connected(self) -> Facts:
        if self._facts is None:
            raise self._served.lost()
        return self._facts


class VLLMConfig(
    PooledEngineConfig,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="vllm",
    tag_field="name",
):
    """VLLM servers."""

    def _client(self) -> ServerClient:
        return VLLMServer
