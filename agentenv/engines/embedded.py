"""The embedded engine: samples in this process with torch, in a thread beside the event loop.

generate() --Request--> queue --> engine thread: Scheduler.step, step, step ...
    ^                                   |
    +---- chunks, completions <---------+   one call_soon_threadsafe a step
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from agentenv.engines.embedded_architecture import read_architecture
from agentenv.engines.embedded_cache import IntArray, SlotCache
from agentenv.engines.embedded_config import EmbeddedConfig
from agentenv.engines.embedded_request import Call, Event, Request, settle
from agentenv.engines.embedded_scheduler import Scheduler
from agentenv.engines.embedded_weights import Weights
from agentenv.engines.pool_outage import Outage
from agentenv.engines.stop_strings import StopStrings
from agentenv.errors import EngineDeadError, EngineError
from agentenv.types import Chunk, Completion, SamplingParams

__all__ = ["EmbeddedConfig", "EmbeddedEngine"]

logger = logging.getLogger(__name__)

MIN_TEMPERATURE = 1e-3  # below it logits / temperature could overflow; 0 is greedy


class Load(msgspec.Struct, frozen=True, eq=False):
    """Ask the engine thread to replace the weights between two steps."""

    source: Path
    policy_version: int
    done: asyncio.Future[None]


class Nap(msgspec.Struct, frozen=True, eq=False):
    """Ask the engine thread to fall asleep, or to wake up."""

    asleep: bool
    done: asyncio.Future[None]


class Cancel(msgspec.Struct, frozen=True, eq=False):
    """Ask the engine thread to free the slot of a request."""

    request: Request


class EmbeddedEngine:
    """Engine over a Hugging Face directory of a Qwen3, Qwen2 or Llama model.

    Entropies are exact. temperature 0 is greedy and reports the distribution at temperature 1.
    With a `seed` a request's tokens do not depend on the others in the batch, up to rounding.
    Raises EngineError if the directory cannot be served or there is no such device.
    """

    def __init__(self, config: EmbeddedConfig, model_path: Path, policy_version: int = 0) -> None:
        self._arch = read_architecture(model_path)
        self._max_length = config.max_model_len or self._arch.max_length
        if self._max_length > self._arch.max_length:
            raise EngineError(
                f"max_model_len {self._max_length} exceeds max_position_embeddings "
                f"{self._arch.max_length} of {model_path}"
            )
        device = pick_device(config.device)
        dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        weights = Weights(self._arch, dtype, device)
        weights.load(model_path)
        self._num_threads = config.num_threads
        self._scheduler = Scheduler(
            self._arch,
            weights,
            SlotCache(self._arch, config.max_num_seqs, config.num_cached_seqs, dtype, device),
            StopStrings(model_path, self._arch.vocab_size),
            policy_version,
            config.max_num_seqs,
        )
        self._commands: SimpleQueue[Request | Load | Nap | Cancel | None] = SimpleQueue()
        self._calls: dict[Request, Call] = {}
        self._loads: set[asyncio.Future[None]] = set()  # and naps
        self._outage = Outage()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._reason: str | None = None  # why the engine serves no more
        self._busy_s = 0.0

    @property
    def policy_version(self) -> int:
        """Version of the weights that choose the next token."""
        return self._scheduler.policy_version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 1,
    ) -> Completion:
        """Sample one turn; see Engine.generate. A stop string's tokens stay in the output."""
        loop = self._enter()
        if stream_interval < 1:
            raise EngineError(f"stream_interval must be at least 1, found {stream_interval}")
        prompt = self._check_request(prompt_ids, sampling)
        request = Request(prompt, sampling, session, stream_interval if on_tokens else 0)
        call = self._calls[request] = Call(loop.create_future(), on_tokens)
        self._commands.put(request)
        try:
            return await call.future
        finally:
            call.over = True
            if self._calls.pop(request, None) is not None:  # cancelled, or a callback failed
                self._commands.put(Cancel(request))

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """Replace the weights between two steps; see Engine.load_weights. It wakes up if it sleeps.

        `source` holds model.safetensors (or its shards and index); no other file is read.
        """
        await self._have_done(partial(Load, source, policy_version))
        self._outage.watch(running=False)

    async def sleep(self) -> None:
        """See SleepingEngine.sleep. What runs has its keys and values computed again later."""
        await self._have_done(partial(Nap, True))
        self._outage.watch(running=True, wanted=True)

    async def wake(self) -> None:
        """See SleepingEngine.wake."""
        await self._have_done(partial(Nap, False))
        self._outage.watch(running=False)

    @property
    def outage_s(self) -> float:
        """Seconds asleep so far."""
        return self._outage.total_s

    def stats(self) -> dict[str, float]:
        """Counters since the start, requests running and waiting, CPU seconds of the thread."""
        scheduler = self._scheduler
        names = "requests prompt_tokens cached_tokens sampled_tokens steps weight_updates"
        counts: dict[str, float] = {name: scheduler.counts[name] for name in names.split()}
        counts["cross_version_hits"] = scheduler.counts["cross_version_hits"]
        counts["running"], counts["waiting"] = len(scheduler.running), len(scheduler.waiting)
        counts["busy_s"] = self._busy_s
        counts["sleeps"], counts["outage_s"] = scheduler.counts["sleeps"], self.outage_s
        return counts

    async def close(self) -> None:
        """Stop the thread; pending calls raise EngineDeadError. Idempotent."""
        self._end(self._reason or "the engine is closed")
        self._commands.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _enter(self) -> asyncio.AbstractEventLoop:
        """The running loop, with the thread started. EngineDeadError if the engine is gone."""
        if self._reason is not None:
            raise EngineDeadError(self._reason)
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._calls or self._loads:
                raise EngineError("calls of another event loop are still running")
            self._loop = loop
        if self._thread is None:
            self._thread = Thread(target=self._run, name="embedded-engine", daemon=True)
            self._thread.start()
        return loop

    async def _have_done(self, command: Callable[[asyncio.Future[None]], Load | Nap]) -> None:
        """Let the engine thread carry out a command between two steps."""
        done: asyncio.Future[None] = self._enter().create_future()
        self._loads.add(done)
        self._commands.put(command(done))
        try:
            await done
        finally:
            self._loads.discard(done)

    def _check_request(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> IntArray:
        prompt = np.asarray(prompt_ids)
        if prompt.ndim != 1 or not len(prompt) or prompt.dtype.kind not in "iu":
            raise EngineError("the prompt must be a non-empty list of token ids")
        if prompt.min() < 0 or prompt.max() >= self._arch.vocab_size:
            raise EngineError(
                f"the prompt has token ids from {prompt.min()} to {prompt.max()}, "
                f"the vocabulary {self._arch.vocab_size}"
            )
        if sampling.max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, found {sampling.max_tokens}")
        if len(prompt) + sampling.max_tokens > self._max_length:
            raise EngineError(
                f"{len(prompt)} prompt tokens and max_tokens {sampling.max_tokens} exceed "
                f"max_model_len {self._max_length}"
            )
        if not (
            (sampling.temperature == 0 or MIN_TEMPERATURE <= sampling.temperature < float("inf"))
            and 0 < sampling.top_p <= 1
            and (sampling.top_k == -1 or sampling.top_k >= 1)
            and 0 <= sampling.min_p <= 1
            and 0 < sampling.repetition_penalty < float("inf")
        ):
            raise EngineError(
                "temperature, top_p, top_k, min_p or repetition_penalty is out of range: "
                f"{sampling}"
            )
        return prompt.astype(np.int32)

    def _run(self) -> None:
        """Body of the engine thread."""
        reason = "the engine is closed"
        try:
            torch.set_num_threads(self._num_threads)
            with torch.inference_mode():
                self._serve()
        except Exception as error:  # whatever it was, no caller may be left waiting
            reason = f"the engine thread died: {type(error).__name__}: {error}"
            logger.exception("the engine thread died")
        self._reason = self._reason or reason
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._post(self._end, reason)

    def _serve(self) -> None:
        scheduler = self._scheduler
        while True:
            while scheduler.idle or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                self._apply(command)
            scheduler.step()
            self._flush()

    def _apply(self, command: Request | Load | Nap | Cancel) -> None:
        if isinstance(command, Cancel):
            self._scheduler.cancel(command.request)
        elif isinstance(command, Nap):
            (self._scheduler.sleep if command.asleep else self._scheduler.wake)()
            self._post(settle, command.done, None)
        elif isinstance(command, Load):
            outcome = None
            try:
                self._scheduler.load_weights(command.source, command.policy_version)
            except EngineError as error:
                outcome = error
            self._post(settle, command.done, outcome)
        else:
            self._scheduler.submit(command)
            self._flush()

    def _flush(self) -> None:
        """Send what the last step produced to the loop, all requests at once."""
        self._busy_s = time.thread_time()
        if self._scheduler.events:
            events, self._scheduler.events = self._scheduler.events, []
            self._post(self._deliver, events)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *args)

    def _deliver(self, events: list[Event]) -> None:
        """On the loop: chunks to their callbacks, outcomes to their futures."""
        for request, chunk, outcome in events:
            call = self._calls.get(request)
            if call is None:
                continue
            if chunk is not None:
                # A call of its own: one callback that raises must not cost the others theirs.
                asyncio.get_running_loop().call_soon(call.report, chunk)
            if outcome is not None:
                del self._calls[request]
                settle(call.future, outcome)

    def _end(self, reason: str) -> None:
        """On the loop: everyone who waits, and everyone who comes, raises EngineDeadError."""
        self._reason = reason
        for call in self._calls.values():
            settle(call.future, EngineDeadError(reason))
        for done in self._loads:
            settle(done, EngineDeadError(reason))


def pick_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Raises EngineError if cuda is asked for and there is none."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise EngineError("device cuda is asked for, but torch finds no GPU")
    return torch.device("cuda" if available and name != "cpu" else "cpu")
