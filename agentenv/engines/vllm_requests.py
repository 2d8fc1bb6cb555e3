"""Requests on a vLLM server: each can be broken off, and is aborted there unless it has ended."""

from __future__ import annotations

from collections.abc import Callable

from agentenv.engines.background import Background
from agentenv.engines.http import HttpClient, RefusedError
from agentenv.engines.running import Running
from agentenv.engines.served import Served
from agentenv.engines.server import BrokenOffError, Request, ServerLostError
from agentenv.engines.vllm_control import Control
from agentenv.engines.vllm_probe import GENERATE, TRIAL, Facts, check_trial
from agentenv.engines.vllm_stream import Answer, entropy_kind, request_body
from agentenv.errors import ConfigError
from agentenv.types import Chunk


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
