"""The embedded engine: samples in this process with torch, in a thread beside the event loop.

generate() --Request--> queue --> EngineThread: Scheduler.step, step, step ...
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

import torch
from msgspec import Struct

from agentenv.engines.embedded import EmbeddedConfig
from agentenv.engines.embedded.cache import SlotCache
from agentenv.engines.embedded.scheduler import (
    Call,
    Event,
    Request,
    Scheduler,
    check_request,
    settle,
)
from agentenv.engines.embedded.weights import Weights, read_architecture
from agentenv.engines.stop_strings import StopStrings
from agentenv.errors import EngineDeadError, EngineError
from agentenv.types import Chunk, Completion, SamplingParams

# The thread of the embedded engine: it carries out commands between the steps of its scheduler.

logger = logging.getLogger(__name__)


class Load(Struct, frozen=True, eq=False):
    """Replace the weights."""

    source: Path
    policy_version: int
    done: asyncio.Future[None]


class Nap(Struct, frozen=True, eq=False):
    """Fall asleep, or wake up."""

    asleep: bool
    done: asyncio.Future[None]


class Cancel(Struct, frozen=True, eq=False):
    """Free the slot of a request."""

    request: Request


class EngineThread:
    """Runs while there is something to step; sleeps until the next command otherwise.

    On the event loop, `deliver` is called with what a step produced, and `on_end` with the reason
    when the thread has ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        num_threads: int,
        deliver: Callable[[list[Event]], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.reason: str | None = None  # why it has ended
        self.busy_s = 0.0  # CPU seconds
        self._scheduler, self._num_threads = scheduler, num_threads
        self._deliver, self._on_end = deliver, on_end
        self._commands: SimpleQueue[Request | Load | Nap | Cancel | None] = SimpleQueue()
        self._thread: Thread | None = None

    def report_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call back on this loop from now on; the first one starts the thread."""
        self.loop = loop
        if self._thread is None:
            self._thread = Thread(target=self._run, name="embedded-engine", daemon=True)
            self._thread.start()

    def put(self, command: Request | Load | Nap | Cancel) -> None:
        """To be done between two steps, in order. Settles its future, if it has one."""
        self._commands.put(command)

    async def stop(self) -> None:
        """After the commands so far. Idempotent."""
        self._commands.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        reason = "the engine is closed"
        try:
            torch.set_num_threads(self._num_threads)
            with torch.inference_mode():
                self._serve()
        except Exception as error:  # whatever it was, no caller may be left waiting
            reason = f"the engine thread died: {type(error).__name__}: {error}"
            logger.exception("the engine thread died")
        self.reason = reason
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._post(self._on_end, reason)

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
        self.busy_s = time.thread_time()
        if self._scheduler.events:
            events, self._scheduler.events = self._scheduler.events, []
            self._post(self._deliver, events)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(function, *args)


__all__ = ["EmbeddedConfig", "EmbeddedEngine"]


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
        self._scheduler = Scheduler(
            self._arch,
            weights,
            SlotCache(self._arch, config.max_num_seqs, config.num_cached_seqs, dtype, device),
            StopStrings(model_path, self._arch.vocab_size),
            policy_version,
            config.max_num_seqs,
        )
        self._thread = EngineThread(self._scheduler, config.num_threads, self._deliver, self._end)
        self._calls: dict[Request, Call] = {}
        self._loads: set[asyncio.Future[None]] = set()  # and naps
        self._slept_s = 0.0  # without the sleep that is going on
        self._asleep_since: float | None = None  # loop time
        self._reason: str | None = None  # why the engine serves no more

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
        prompt = check_request(prompt_ids, sampling, self._arch.vocab_size, self._max_length)
        request = Request(prompt, sampling, session, stream_interval if on_tokens else 0)
        call = self._calls[request] = Call(loop.create_future(), on_tokens)
        self._thread.put(request)
        try:
            return await call.future
        finally:
            call.over = True
            if self._calls.pop(request, None) is not None:  # cancelled, or a callback failed
                self._thread.put(Cancel(request))

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """Replace the weights between two steps; see Engine.load_weights. It wakes up if it sleeps.

        `source` holds model.safetensors (or its shards and index); no other file is read.
        """
        await self._have_done(partial(Load, source, policy_version))
        self._asleep_until_now()

    async def sleep(self) -> None:
        """See SleepingEngine.sleep. What runs has its keys and values computed again later."""
        await self._have_done(partial(Nap, True))
        if self._asleep_since is None:
            self._asleep_since = asyncio.get_running_loop().time()

    async def wake(self) -> None:
        """See SleepingEngine.wake."""
        await self._have_done(partial(Nap, False))
        self._asleep_until_now()

    @property
    def outage_s(self) -> float:
        """Seconds asleep so far."""
        if self._asleep_since is None:
            return self._slept_s
        return self._slept_s + asyncio.get_running_loop().time() - self._asleep_since

    def _asleep_until_now(self) -> None:
        self._slept_s, self._asleep_since = self.outage_s, None

    def stats(self) -> dict[str, float]:
        """Counters since the start, requests running and waiting, CPU seconds of the thread."""
        scheduler = self._scheduler
        names = "requests prompt_tokens cached_tokens sampled_tokens steps weight_updates"
        counts: dict[str, float] = {name: scheduler.counts[name] for name in names.split()}
        counts["cross_version_hits"] = scheduler.counts["cross_version_hits"]
        counts["running"], counts["waiting"] = len(scheduler.running), len(scheduler.waiting)
        counts["busy_s"] = self._thread.busy_s
        counts["sleeps"], counts["outage_s"] = scheduler.counts["sleeps"], self.outage_s
        return counts

    async def close(self) -> None:
        """Stop the thread; pending calls raise EngineDeadError. Idempotent."""
        self._end(self._reason or self._thread.reason or "the engine is closed")
        await self._thread.stop()

    def _enter(self) -> asyncio.AbstractEventLoop:
        """The running loop, with the thread started. EngineDeadError if the engine is gone."""
        reason = self._reason or self._thread.reason
        if reason is not None:
            raise EngineDeadError(reason)
        loop = asyncio.get_running_loop()
        if loop is not self._thread.loop and (self._calls or self._loads):
            raise EngineError("calls of another event loop are still running")
        self._thread.report_to(loop)
        return loop

    async def _have_done(self, command: Callable[[asyncio.Future[None]], Load | Nap]) -> None:
        """Let the engine thread carry out a command between two steps."""
        done: asyncio.Future[None] = self._enter().create_future()
        self._loads.add(done)
        self._thread.put(command(done))
        try:
            await done
        finally:
            self._loads.discard(done)

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
