"""Client of one SGLang server (tried with 0.5.23). SGLang itself is not imported.

generate:      check -> POST /generate (stream, our own rid) -> chunks ... -> Completion
               cancelled or failed -> POST /abort_request, at once
load_weights:  check the directory -> /pause_generation retract -> /update_weights_from_disk
               -> /flush_cache -> /continue_generation: what runs goes back to the queue, keeps its
               tokens, and has its keys and values computed again under the new weights
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from agentenv.engines.background import Background
from agentenv.engines.entropy import check_top_k
from agentenv.engines.http import HttpClient, RefusedError, Timeouts
from agentenv.engines.served import Served
from agentenv.engines.server import Request, ServerInfo, ServerLoad
from agentenv.engines.sglang_broadcast import SGLangReceiver
from agentenv.engines.sglang_control import Control
from agentenv.engines.sglang_load import read_load
from agentenv.engines.sglang_probe import Facts, check_logprobs, probe
from agentenv.engines.sglang_turn import SGLangTurn, check_turn, request_body
from agentenv.errors import EngineError
from agentenv.types import Chunk, Completion

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
