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
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from agentenv.engines.adapter_layout import is_adapter
from agentenv.engines.background import Background
from agentenv.engines.entropy import check_top_k
from agentenv.engines.http import HttpClient, RefusedError, Timeouts
from agentenv.engines.request_check import check_request
from agentenv.engines.served import Served
from agentenv.engines.server import Request, ServerInfo, ServerLoad, ServerLostError
from agentenv.engines.vllm_adapter import FEATURE, VLLMAdapters, with_features
from agentenv.engines.vllm_broadcast import VLLMReceiver
from agentenv.engines.vllm_control import Control
from agentenv.engines.vllm_probe import Facts, check_tied, probe
from agentenv.engines.vllm_requests import VLLMRequests
from agentenv.errors import EngineError
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
