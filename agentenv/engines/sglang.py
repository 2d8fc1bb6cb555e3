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
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentenv.engines.checkpoint_layout import Layout, check_layout, read_layout
from agentenv.engines.http import HttpClient, RefusedError, Timeouts
from agentenv.engines.server import Request, ServerInfo, ServerLoad, ServerLostError
from agentenv.engines.sglang_broadcast import SGLangReceiver
from agentenv.engines.sglang_load import read_load
from agentenv.engines.sglang_probe import Facts, check_logprobs, probe
from agentenv.engines.sglang_turn import SGLangTurn, check_turn, request_body
from agentenv.errors import ConfigError, EngineError
from agentenv.types import Chunk, Completion

logger = logging.getLogger(__name__)

HEALTH_S = 5.0
NOTHING_DONE = "Failed to get weights iterator"  # a refusal before any weight was touched


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
        if entropy_top_k != -1 and entropy_top_k < 1:
            raise ConfigError(f"entropy_top_k must be -1 (all) or at least 1, not {entropy_top_k}")
        self._http = HttpClient(url, timeouts, api_key)
        self._controls = [HttpClient(u, timeouts, api_key) for u in control_urls] or [self._http]
        self._entropy_top_k, self._given_vocab_size = entropy_top_k, vocab_size
        self._facts: Facts | None = None
        self._layout: Layout | None = None  # of the weights that are served
        self._version = 0
        self._cache_salt = ""
        self._doubt = "connect was not called"  # why nobody knows what it serves; empty: known
        self._lock = asyncio.Lock()  # one load at a time
        self._open = asyncio.Event()  # cleared while weights are replaced
        self._open.set()
        self._aborts: set[asyncio.Task[None]] = set()
        self.receiver = SGLangReceiver(
            self._controls, self._everywhere, _post, self._lock, lambda: self._layout, self._replace
        )

    @property
    def name(self) -> str:
        """The URL without credentials."""
        return self._http.name

    @property
    def policy_version(self) -> int:
        """Version of the weights that choose its next token, as far as this client set it."""
        return self._version

    async def connect(self, policy_version: int) -> ServerInfo:
        """See Server.connect; a server that an earlier run left paused goes on."""
        async with self._lock:
            facts = await probe(self._controls[0], self._given_vocab_size, self._layout)
            await self._everywhere("/continue_generation", {})
            body = {"new_version": str(policy_version), "abort_all_requests": False}
            await self._everywhere("/update_weight_version", body)
            await check_logprobs(self._http, facts)
            self._facts, self._layout = facts, facts.layout
            self._adopt(policy_version)
            self._doubt = ""
            return facts.info

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> Completion:
        """See Server.generate. While weights are being replaced a new request waits."""
        facts = self._known()
        check_turn(request, facts.limits)
        await self._open.wait()
        self._known()
        body = request_body(request, facts.limits, self._entropy_top_k, self._cache_salt)
        turn = SGLangTurn(self.name, request, self._entropy_top_k)
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
                self._abort(request.id)
        return completion

    async def healthy(self) -> bool:
        """Whether its scheduler answers; unlike /health this neither generates nor takes 1 s."""
        try:
            for control in self._controls:
                await control.call("GET", "/server_info", timeout_s=HEALTH_S)
        except EngineError:
            return False
        return True

    async def load(self) -> ServerLoad:
        """Sums over data-parallel ranks and workers; the fullest cache. Preemptions are told with
        --enable-metrics, else 0. The figures are up to 15 steps old, or as many as
        --load-snapshot-publish-interval says."""
        return await read_load(self._controls)

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """See Server.load_weights. `source` must be visible to the server under the same path."""
        async with self._lock:
            if self._facts is None:
                raise EngineError(f"{self.name}: {self._doubt}")
            layout = await asyncio.to_thread(read_layout, source)
            if self._layout is not None:
                check_layout(source, layout, self._layout)
            await self._replace(partial(self._load, source, policy_version), policy_version)
            self._layout = self._layout or layout

    async def sleep(self) -> None:
        """See Server.sleep. What is left on it is aborted: it must be idle to sleep."""
        async with self._lock:
            self._doubt = "it sleeps"
            timeout_s = self._http.timeouts.load_s
            await self._everywhere("/pause_generation", {"mode": "abort"})
            await self._everywhere("/release_memory_occupation", {}, timeout_s=timeout_s)

    async def wake(self) -> None:
        """See Server.wake. It stays paused until weights are loaded, so that nothing runs on
        those that it had."""
        async with self._lock:
            timeout_s = self._http.timeouts.load_s
            await self._everywhere("/resume_memory_occupation", {}, timeout_s=timeout_s)

    async def fingerprint(self) -> dict[str, str]:
        """A checksum per parameter, of every rank of every worker; see Server.fingerprint."""
        if "fingerprint" not in self._known().info.features:
            return {}
        answers = await self._everywhere(
            "/weights_checker", {"action": "checksum"}, timeout_s=self._http.timeouts.load_s
        )
        ranks = [rank for answer in answers for rank in answer["ranks"]]
        return {
            f"{name}@{number}" if number else name: checksum
            for number, rank in enumerate(ranks)
            for name, checksum in rank["checksums"].items()
        }

    async def close(self) -> None:
        """Drop the connections, after the aborts that are under way. Idempotent."""
        await asyncio.gather(*self._aborts)
        for http in {self._http, *self._controls}:
            await http.close()

    def _known(self) -> Facts:
        """ServerLostError if nobody knows what the server serves."""
        if self._facts is None or (self._doubt and self._open.is_set()):
            raise ServerLostError(f"{self.name} cannot be used: {self._doubt}")
        return self._facts

    def _adopt(self, policy_version: int) -> None:
        self._version = policy_version
        # Not the version alone: a run that is resumed gives its number to other weights.
        self._cache_salt = f"{policy_version}-{secrets.token_hex(8)}"

    async def _replace(self, change: Callable[[], Awaitable[None]], policy_version: int) -> None:
        """Pause, let `change` put other weights in place, drop old prefixes, go on. A
        RefusedError of `change` says that nothing was touched."""
        doubt, self._doubt = self._doubt, f"its update to {policy_version} was not completed"
        self._open.clear()
        try:
            await self._everywhere("/pause_generation", {"mode": "retract"})
            try:
                await change()
            except RefusedError:
                await self._everywhere("/continue_generation", {})
                self._doubt = doubt
                raise
            await self._flush()
            self._adopt(policy_version)
            await self._everywhere("/continue_generation", {})
            self._doubt = ""
        finally:
            # In doubt it stays paused: nothing is sampled from weights that nobody knows.
            # The next connect or load lets it go on.
            self._open.set()

    async def _load(self, source: Path, policy_version: int) -> None:
        """RefusedError: no weight was touched. After any other failure nobody knows."""
        body = {
            "model_path": str(await asyncio.to_thread(source.absolute)),
            "weight_version": str(policy_version),
            "flush_cache": False,  # with it, a refused flush would report an update as failed
            "abort_all_requests": False,
        }
        try:
            timeout_s = self._http.timeouts.load_s
            await self._everywhere("/update_weights_from_disk", body, timeout_s=timeout_s)
        except RefusedError as error:
            if NOTHING_DONE in error.reason:
                raise
            raise ServerLostError(f"nobody knows what weights it has: {error}") from error

    async def _flush(self) -> None:
        try:
            # Its own parameter to wait would wait for retracted requests to end.
            for control in self._controls:
                await control.call("POST", "/flush_cache")
        except RefusedError as error:  # a request that waited may have an old cache salt
            raise ServerLostError(f"prefixes of old weights remain: {error}") from error

    async def _everywhere(
        self, path: str, body: dict[str, Any], *, timeout_s: float | None = None
    ) -> list[Any]:
        """POST to every worker. RefusedError if all refused, else any failure of one is a
        ServerLostError: they may differ now."""
        calls = (_post(control, path, body, timeout_s) for control in self._controls)
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

    def _abort(self, request_id: str) -> None:
        """Not awaited: a cancelled caller must end now."""
        for control in self._controls:
            task = asyncio.get_running_loop().create_task(_send_abort(control, request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)


async def _post(http: HttpClient, path: str, body: dict[str, Any], timeout_s: float | None) -> Any:
    answer = await http.call_json("POST", path, body, timeout_s=timeout_s)
    if isinstance(answer, dict) and answer.get("success") is False:
        raise RefusedError(f"{http.name}{path} failed: {answer}", 200, str(answer))
    return answer


async def _send_abort(http: HttpClient, request_id: str) -> None:
    try:
        await http.call("POST", "/abort_request", {"rid": request_id})
    except EngineError as error:
        logger.debug("abort of %s: %s", request_id, error)
