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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from agentenv.engines.adapter_layout import is_adapter
from agentenv.engines.checkpoint_layout import Layout, check_layout, read_layout
from agentenv.engines.http import HttpClient, RefusedError, Timeouts
from agentenv.engines.request_check import check_request
from agentenv.engines.running import Running
from agentenv.engines.server import (
    BrokenOffError,
    Request,
    ServerInfo,
    ServerLoad,
    ServerLostError,
)
from agentenv.engines.vllm_adapter import FEATURE, VLLMAdapters, with_features
from agentenv.engines.vllm_broadcast import VLLMReceiver
from agentenv.engines.vllm_control import Control
from agentenv.engines.vllm_probe import GENERATE, TRIAL, Facts, check_tied, check_trial, probe
from agentenv.engines.vllm_stream import Answer, entropy_kind, request_body
from agentenv.errors import ConfigError, EngineError
from agentenv.types import Chunk, Completion

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
        if entropy_top_k != -1 and entropy_top_k < 1:
            raise ConfigError(f"entropy_top_k must be -1 (all) or at least 1, not {entropy_top_k}")
        self._http = HttpClient(url, timeouts, api_key)
        controls = [HttpClient(each, timeouts, api_key) for each in control_urls]
        self._control = Control(controls or [self._http])
        self._top_k, self._given_vocab_size = entropy_top_k, vocab_size
        self._facts: Facts | None = None
        self._layout: Layout | None = None  # of the weights that are served
        self._version = 0
        # A version number returns in later runs with other weights, so a salt is never used twice.
        self._salts = (f"{secrets.token_hex(8)}-{each}" for each in count())
        self._salt = next(self._salts)
        self._loading = asyncio.Lock()
        self._open = asyncio.Event()  # cleared while weights are being replaced
        self._open.set()
        self._doubt: str | None = "connect was not called"  # why nobody knows what it serves
        self._half_loaded = False  # since a load that was not completed
        self._running = Running()
        self._background: set[asyncio.Task[None]] = set()
        self.receiver = VLLMReceiver(
            self._control, self._loading, lambda: self._layout, self._replace
        )
        self._adapters = VLLMAdapters(
            self._control, self._running, lambda: self._layout, self._replace
        )

    @property
    def name(self) -> str:
        return self._http.name

    @property
    def policy_version(self) -> int:
        return self._version

    async def connect(self, policy_version: int) -> ServerInfo:
        """See Server.connect. Also resumes a server that was left paused. After a load that was
        not completed it serves nothing before load_weights has succeeded."""
        async with self._loading:
            facts = await probe(self._control.servers[0], self._given_vocab_size, self._top_k)
            check_tied(self.name, facts)
            await self._control.wake(facts)
            await self._control.name_version(policy_version)
            await self._control.reset_prefix_cache()
            self._facts, self._layout = facts, facts.layout
            self._adapters.name = ""
            self._take_version(policy_version)
            await self._control.load()
            if not self._half_loaded:  # such an engine would die of a request
                await self._try_out(facts)
                self._doubt = None
            return with_features(facts)

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> Completion:
        """See Server.generate. While weights are being replaced a new request waits."""
        num_sent = 0
        while True:
            await self._open.wait()
            if self._facts is None or self._doubt is not None:
                raise ServerLostError(f"{self.name} cannot be used: {self._doubt}")
            check_request(request, self._facts.vocab_size, self._facts.max_model_len)
            request_id = f"{request.id}-{num_sent}" if num_sent else request.id
            num_sent += 1
            answer = await self._sample(request_id, request, on_chunk)
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
        async with self._loading:
            if is_adapter(source) or FEATURE in with_features(facts).features:
                await self._adapters.load(source, facts, policy_version)
                return
            layout = await asyncio.to_thread(read_layout, source)
            if self._layout is not None:
                check_layout(source, layout, self._layout)
            await self._replace(
                partial(self._control.reload, facts, layout.directory), policy_version
            )
            self._layout = self._layout or layout

    async def sleep(self) -> None:
        async with self._loading:
            self._doubt = "it sleeps"
            await self._control.fall_asleep()

    async def wake(self) -> None:
        async with self._loading:
            await self._control.wake(self._connected())

    async def fingerprint(self) -> dict[str, str]:
        """See Server.fingerprint. Empty on the CPU, where vLLM keeps packed copies of most
        parameters elsewhere and tells the checksum of nothing."""
        if "fingerprint" not in self._connected().features or self._adapters.name:
            return {}
        return await self._control.fingerprint()

    async def close(self) -> None:
        if self._background:  # aborts on their way
            await asyncio.wait(self._background, timeout=HEALTH_S)
        for task in self._background:
            task.cancel()
        for http in {self._http, *self._control.servers}:
            await http.close()

    async def _replace(self, change: Callable[[], Awaitable[None]], policy_version: int) -> None:
        """Pause, let `change` put other weights in place, name them, resume. A RefusedError of
        `change` says that nothing was touched."""
        self._open.clear()
        doubt, self._doubt = self._doubt, "its weights are being replaced"
        changed = False
        try:
            await self._control.pause()
            await asyncio.sleep(SETTLE_S)
            # Requests without a token would start on prefixes of the old weights.
            self._running.break_off(self._running.unstarted)
            await change()
            changed = True
            await self._control.reset_prefix_cache()
            await self._control.name_version(policy_version)
            self._take_version(policy_version)
            await self._control.resume()
            self._doubt, self._half_loaded = None, False
        except BaseException as error:  # a cancellation too: it must not stay paused
            refused = isinstance(error, RefusedError) and not changed
            if refused and len(self._control.servers) == 1:
                await self._control.resume()
                self._doubt = doubt
                raise
            await self._give_up(error)
            if not isinstance(error, EngineError):
                raise
            raise ServerLostError(f"{self.name}: {self._doubt}") from error
        finally:
            self._open.set()

    async def _sample(
        self, request_id: str, request: Request, on_chunk: Callable[[Chunk], None]
    ) -> Answer | None:
        """One request to the server; None if other weights came before its first token."""
        answer = Answer(self.name, entropy_kind(self._top_k, self._connected().vocab_size))
        body = request_body(request_id, request, self._top_k, self._salt, self._adapters.name)
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
                    raise BrokenOffError(f"{self.name} got another adapter") from None
                raise ServerLostError(f"{self.name}: {self._doubt}") from None
            finally:
                if not whole:
                    self._spawn(self._control.abort(self._connected(), [request_id]))
        return answer

    async def _try_out(self, facts: Facts) -> None:
        """Sample one token, since routes and settings do not tell all."""
        try:
            answer = await self._sample(f"probe-{self._salt}", TRIAL, lambda chunk: None)
        except RefusedError as error:
            cure = ": start it with --enable-scale-out" if error.status == 403 else ""
            raise ConfigError(f"{error}{cure}") from error
        assert answer is not None
        check_trial(self.name, facts, answer, self._version)

    def _connected(self) -> Facts:
        if self._facts is None:
            raise ServerLostError(f"{self.name} cannot be used: {self._doubt}")
        return self._facts

    def _take_version(self, policy_version: int) -> None:
        self._version = policy_version
        self._salt = next(self._salts)

    async def _give_up(self, error: BaseException) -> None:
        """After a load that was not completed: nothing stays paused, nothing samples unseen."""
        self._doubt = f"a load of weights was not completed ({error or type(error).__name__})"
        self._half_loaded = True

        async def release() -> None:
            # Half-loaded weights kill an engine that goes on with its requests.
            ids = self._running.ids
            self._running.break_off(ids)
            await self._control.abort(self._connected(), ids)
            await self._control.resume_if_possible()

        task = self._spawn(release())
        if not isinstance(error, asyncio.CancelledError):
            await asyncio.wait({task})

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
