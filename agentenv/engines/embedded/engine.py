"""The embedded engine: samples in this process with torch, in a thread next to the event loop.

generate() --Request--> queue of commands --> thread: Scheduler.step, step, step ...
    ^                                            |
    +---- chunks, completions <------------------+   one call_soon_threadsafe a step

The thread executes commands between the steps of its scheduler, in order of arrival, and sleeps
while there are no requests.
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

import numpy as np
import torch

from agentenv.base.deadline import waiting
from agentenv.base.errors import EngineDeadError, EngineError
from agentenv.base.offload import in_thread, start_thread
from agentenv.base.types import Chunk, Completion, SamplingParams
from agentenv.contract.engine import Engine, check_request
from agentenv.contract.stop_strings import StopStrings
from agentenv.engines.embedded.model import SlotCache, avoid_cudnn
from agentenv.engines.embedded.scheduler import EmbeddedRequest, Event, Scheduler
from agentenv.engines.embedded.settings import NUM_CACHED_SEQS, EmbeddedSettings
from agentenv.engines.embedded.weights import EmbeddedWeights, read_architecture

CLOSED = "the engine is closed"
MIN_TEMPERATURE = 1e-3  # a lower one could overflow logits / temperature; 0 is greedy

logger = logging.getLogger(__name__)


class EngineCall:
    """The event loop's state of one call of generate."""

    def __init__(
        self, future: asyncio.Future[Completion], on_tokens: Callable[[Chunk], None] | None
    ) -> None:
        self.future, self._on_tokens = future, on_tokens
        self.over = False  # generate has returned or is about to
        self.wait = waiting()  # until it is admitted, and while the engine sleeps

    def report(self, chunk: Chunk) -> None:
        """Pass a chunk to the callback; if that raises, the call fails and the loop logs the
        error."""
        if self.over or self._on_tokens is None:
            return
        try:
            self._on_tokens(chunk)
        except BaseException:
            settle(self.future, EngineError("on_tokens raised; the request is aborted"))
            raise


def settle(future: asyncio.Future[Any], outcome: object) -> None:
    """Set the future's result or exception, unless it is done."""
    if future.done():
        return
    if isinstance(outcome, EngineError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class EmbeddedEngine(Engine):
    """Engine over a Hugging Face directory of a Qwen3, Qwen2 or Llama model.

    Entropies are exact. temperature 0 is greedy and reports the distribution at temperature 1.
    With a `seed` a request's tokens do not depend on the others in the batch, up to rounding.
    Raises EngineError if the directory cannot be served or the device does not exist.
    """

    def __init__(
        self,
        config: EmbeddedSettings,
        model_path: Path,
        policy_version: int = 0,
        tokenizer: Any = None,
    ) -> None:
        self._arch = read_architecture(model_path, tokenizer)
        self._max_length = config.max_model_len or self._arch.max_length
        if self._max_length > self._arch.max_length:
            raise EngineError(
                f"max_model_len {self._max_length} exceeds max_position_embeddings "
                f"{self._arch.max_length} of {model_path}"
            )
        device = pick_device(config.device)
        dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        weights = EmbeddedWeights(self._arch, dtype, device)
        weights.load(model_path)
        avoid_cudnn(device)
        self._scheduler = Scheduler(
            self._arch,
            weights,
            SlotCache(self._arch, config.max_num_seqs, NUM_CACHED_SEQS, dtype, device),
            StopStrings(model_path, self._arch.vocab_size),
            policy_version,
            config.max_num_seqs,
        )
        self._num_threads = config.num_threads
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # receives the thread's reports
        self._busy_s = 0.0  # CPU seconds of the thread
        self._calls: dict[EmbeddedRequest, EngineCall] = {}
        self._changes: set[asyncio.Future[None]] = set()  # loads, falling asleep, waking up
        self._slept_s = 0.0  # without the current sleep
        self._asleep_since: float | None = None  # loop time
        self._reason = ""  # the reason of the engine's end

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
        order: tuple[int, int] = (0, 0),
    ) -> Completion:
        """Sample one turn; see Engine.generate. A stop string's tokens stay in the output."""
        loop = self._enter()
        if stream_interval < 1:
            raise EngineError(f"stream_interval must be at least 1, found {stream_interval}")
        check_request(
            prompt_ids, sampling, self._arch.vocab_size, self._max_length, MIN_TEMPERATURE
        )
        prompt = np.asarray(prompt_ids)
        if prompt.dtype.kind not in "iu":
            raise EngineError("the prompt must be a list of token ids")
        prompt = prompt.astype(np.int32)
        request = EmbeddedRequest(
            prompt, sampling, session, stream_interval if on_tokens else 0, order
        )
        call = self._calls[request] = EngineCall(loop.create_future(), on_tokens)
        call.wait.begin()
        self._commands.put(partial(self._scheduler.submit, request))
        try:
            return await call.future
        finally:
            call.over = True
            call.wait.end()
            if self._calls.pop(request, None) is not None:  # cancelled, or a callback failed
                self._commands.put(partial(self._scheduler.cancel, request))

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """Replace the weights between two steps; see Engine.load_weights. A sleeping engine wakes
        up. `source` holds model.safetensors (or its shards and index); no other file is read."""
        await self._change(partial(self._scheduler.load_weights, source, policy_version))
        self._note_awake()

    async def sleep(self) -> None:
        """See Engine.sleep. Keys and values of running requests are recomputed later."""
        await self._change(self._scheduler.sleep)
        for call in self._calls.values():
            call.wait.begin()
        if self._asleep_since is None:
            self._asleep_since = asyncio.get_running_loop().time()

    async def wake(self) -> None:
        """See Engine.wake."""
        await self._change(self._scheduler.wake)
        self._note_awake()

    @property
    def outage_s(self) -> float:
        """Seconds asleep so far."""
        if self._asleep_since is None:
            return self._slept_s
        return self._slept_s + asyncio.get_running_loop().time() - self._asleep_since

    def stats(self) -> dict[str, float]:
        """Counters since the start, requests running and waiting, CPU seconds of the thread."""
        scheduler = self._scheduler
        names = "requests prompt_tokens cached_tokens sampled_tokens steps weight_updates sleeps"
        counts: dict[str, float] = {name: scheduler.counts[name] for name in names.split()}
        counts["running"], counts["waiting"] = len(scheduler.running), len(scheduler.waiting)
        counts["busy_s"], counts["outage_s"] = self._busy_s, self.outage_s
        return counts

    async def close(self) -> None:
        """Stop the thread; pending calls raise EngineDeadError. Idempotent."""
        self._end(self._reason or CLOSED)
        self._commands.put(None)
        if self._thread is not None:
            await in_thread(self._thread.join)

    # on the event loop

    def _enter(self) -> asyncio.AbstractEventLoop:
        """The running loop; starts the thread. Raises EngineDeadError if the engine has ended."""
        if self._reason:
            raise EngineDeadError(self._reason)
        loop = asyncio.get_running_loop()
        if loop is not self._loop and (self._calls or self._changes):
            raise EngineError("calls of another event loop are still running")
        self._loop = loop
        if self._thread is None:
            self._thread = start_thread(self._run, name="embedded-engine")
        return loop

    async def _change(self, change: Callable[[], None]) -> None:
        """Let the thread change the scheduler between two steps. Raises EngineError."""
        done: asyncio.Future[None] = self._enter().create_future()

        def command() -> None:
            outcome = None
            try:
                change()
            except EngineError as error:
                outcome = error
            self._post(settle, done, outcome)

        self._changes.add(done)
        done.add_done_callback(self._changes.discard)
        self._commands.put(command)
        await done

    def _note_awake(self) -> None:
        self._slept_s, self._asleep_since = self.outage_s, None

    def _deliver(self, events: list[Event]) -> None:
        """Deliver chunks to callbacks and outcomes to futures."""
        for request, chunk, outcome in events:
            call = self._calls.get(request)
            if call is None:
                continue
            if chunk is None and outcome is None:
                call.wait.end()
            if chunk is not None:
                # Separate calls, so that an error of one callback does not affect the others.
                asyncio.get_running_loop().call_soon(call.report, chunk)
            if outcome is not None:
                del self._calls[request]
                settle(call.future, outcome)

    def _end(self, reason: str) -> None:
        """End the engine: pending and later calls raise EngineDeadError."""
        self._reason = reason
        for call in self._calls.values():
            settle(call.future, EngineDeadError(reason))
        for done in self._changes:
            settle(done, EngineDeadError(reason))

    # in the thread

    def _run(self) -> None:
        reason = CLOSED
        try:
            torch.set_num_threads(self._num_threads)
            with torch.inference_mode():
                self._serve()
        except Exception as error:  # after any error, no caller may remain waiting
            reason = f"the engine thread died: {type(error).__name__}: {error}"
            logger.exception("the engine thread died")
        self._reason = self._reason or reason
        with suppress(RuntimeError):  # the loop is closed, so there are no callers
            self._post(self._end, self._reason)

    def _serve(self) -> None:
        """Execute commands and steps, until the command None."""
        while True:
            while self._scheduler.idle or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command()
                self._flush()
            self._scheduler.step()
            self._flush()

    def _flush(self) -> None:
        """Send the events of the last step, for all requests, to the loop."""
        self._busy_s = time.thread_time()
        if self._scheduler.events:
            events, self._scheduler.events = self._scheduler.events, []
            self._post(self._deliver, events)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *args)


def pick_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The torch device. Raises EngineError if cuda is requested but unavailable."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise EngineError("device cuda was requested, but torch finds no GPU")
    return torch.device("cuda" if available and name != "cpu" else "cpu")
