"""Which requests run: the thread side of the embedded engine, one step at a time.

A step admits waiting requests (each takes over or copies the longest prefix the cache has),
computes their prompts together with one token of every running request, samples, and lets
requests that are done go.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from pathlib import Path

import torch

from agentenv.engines.embedded_architecture import Architecture
from agentenv.engines.embedded_cache import SlotCache
from agentenv.engines.embedded_model import DecoderModel
from agentenv.engines.embedded_request import Event, Request
from agentenv.engines.embedded_rows import Rows
from agentenv.engines.embedded_weights import Weights
from agentenv.engines.stop_strings import StopStrings
from agentenv.errors import EngineError

MAX_PREFILL_TOKENS = 4096  # new prompt tokens of one step, unless one prompt alone has more
MIN_WAIT_GAIN = 16  # a prompt waits a step for a twin that saves it this many tokens
ROOM = 16  # columns reserved beyond a prompt, so that short turns need no move


class Scheduler:
    """Waiting and running requests over the model and its slots. Used by one thread only."""

    def __init__(
        self,
        arch: Architecture,
        weights: Weights,
        cache: SlotCache,
        stop_strings: StopStrings,
        policy_version: int,
        max_num_seqs: int,
    ) -> None:
        self.policy_version = policy_version
        self.counts: Counter[str] = Counter()
        self.events: list[Event] = []  # since the last step, for the callers
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # by slot
        self.asleep = False
        self._arch, self._weights, self._cache = arch, weights, cache
        self._model = DecoderModel(arch, weights)
        self._stop_strings = stop_strings
        self._max_num_seqs = max_num_seqs
        self._device = weights.embed.device
        self._rows: Rows | None = None  # of the last step, if the next one may have the same
        self._steps_to_grow = 0

    @property
    def idle(self) -> bool:
        """True when a step would do nothing."""
        return self.asleep or not (self.waiting or self.running)

    def submit(self, request: Request) -> None:
        """Queue a request."""
        try:
            request.matcher = self._stop_strings.matcher(request.sampling.stop)
        except EngineError as error:
            self.events.append((request, None, error))
            return
        request.enders = self._arch.eos_ids
        if request.matcher is not None:
            request.enders |= request.matcher.candidates
        self.counts["requests"] += 1
        self.counts["prompt_tokens"] += len(request.prompt)
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request; unknown and finished ones are ignored."""
        if self.running.get(request.slot) is request:
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def load_weights(self, source: Path, policy_version: int) -> None:
        """Replace the weights in place, awake from now on. Raises EngineError and keeps the old
        ones if they misfit."""
        self.wake()
        self._weights.load(source)
        self._cache.forget_all()
        self.policy_version = policy_version
        for request in self.running.values():
            request.enter_version(policy_version)
        self.counts["weight_updates"] += 1

    def sleep(self) -> None:
        """Free the memory of the cache and, off the CPU, of the weights. What runs goes back to
        the head of the queue with its tokens."""
        if self.asleep:
            return
        for request in reversed(self.running.values()):
            request.lie_down()
            self.waiting.appendleft(request)
        self.running.clear()
        self._rows = None
        self._cache.clear()
        if self._device.type != "cpu":
            self._weights.give_back()
            torch.cuda.empty_cache()
        self.asleep = True
        self.counts["sleeps"] += 1

    def wake(self) -> None:
        """Go on, if it sleeps."""
        if self.asleep and self._device.type != "cpu":
            self._weights.take_back()
        self.asleep = False

    def step(self) -> None:
        """Admit, compute one token of every running request, sample, let go of those done."""
        if self._steps_to_grow == 0:
            self._grow_slots()
        fresh = self._admit()
        if not self.running:
            return
        rows = self._rows
        if rows is None:
            rows = Rows(self._cache, self.running, fresh, self._arch.vocab_size, self._device)
            self._rows, self._steps_to_grow = rows, rows.num_steps
        self._cache.append(rows.slots, rows.inputs)
        uniforms = [request.rng.random() for request in rows.requests]
        sampled, logprobs, entropies = rows.sampler.sample(
            self._model.forward(rows.batch),
            torch.tensor(uniforms, dtype=torch.float64, device=self._device),
        )
        for request in fresh:
            self._cache.publish(request.slot, self.policy_version)
        self._steps_to_grow -= 1
        if fresh:
            self._rows = None
        token_ids = sampled.tolist()
        self._record(rows.requests, token_ids, logprobs.tolist(), entropies.tolist())
        if self._rows is rows:
            rows.advance(sampled, token_ids)

    def _grow_slots(self) -> None:
        """Move the running slots that are full to a larger pool."""
        self._rows = None
        for slot in self.running:
            length = int(self._cache.lengths[slot])
            if length == self._cache.location(slot)[0].capacity:
                self._cache.grow(slot, length + 1)

    def _admit(self) -> list[Request]:
        """Open slots for waiting requests, in order; returns those to prefill in this step."""
        fresh: list[Request] = []
        held: list[Request] = []
        budget = MAX_PREFILL_TOKENS
        while self.waiting and len(self.running) + len(held) < self._max_num_seqs:
            request = self.waiting[0]
            source, common = self._cache.find(request.context, request.session, self.policy_version)
            num_new = max(1, len(request.context) - common)
            if fresh and num_new > budget:
                break
            self.waiting.popleft()
            if twin_prefix(request, fresh) >= common + MIN_WAIT_GAIN:
                held.append(request)
                continue
            budget -= num_new
            if source is not None and self._cache.version(source) != self.policy_version:
                self.counts["cross_version_hits"] += 1
            self._open(request, source, common)
            fresh.append(request)
        self.waiting.extendleft(reversed(held))
        return fresh

    def _open(self, request: Request, source: int | None, common: int) -> None:
        room = min(request.sampling.max_tokens - len(request.token_ids), ROOM)
        request.slot, request.num_cached = self._cache.open(
            request.context, request.session, source, common, room
        )
        self._model.reserve(len(request.prompt) + request.sampling.max_tokens)
        self.running[request.slot] = request
        request.enter_version(self.policy_version)
        self.counts["cached_tokens"] += request.num_cached
        self._rows = None

    def _record(
        self,
        requests: list[Request],
        token_ids: list[int],
        logprobs: list[float],
        entropies: list[float],
    ) -> None:
        """Give every row its token; make the events; release the rows that are done."""
        self.counts["steps"] += 1
        self.counts["sampled_tokens"] += len(token_ids)
        if not math.isfinite(sum(logprobs)):
            raise EngineError(f"the logits of policy version {self.policy_version} are not finite")
        done: list[Request] = []
        for request, token, logprob, entropy in zip(
            requests, token_ids, logprobs, entropies, strict=True
        ):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.entropies.append(entropy)
            completion = None
            num_tokens = len(request.token_ids)
            if token in request.enders or num_tokens == request.sampling.max_tokens:
                completion = request.end(token in self._arch.eos_ids)
                if completion is not None:
                    done.append(request)
            chunk = None
            if request.chunk_size and num_tokens - request.num_reported >= request.chunk_size:
                chunk = request.take_chunk()
            if chunk is not None or completion is not None:
                self.events.append((request, chunk, completion))
        for request in done:
            self._release(request)

    def _release(self, request: Request) -> None:
        self._cache.close(request.slot, self.policy_version)
        del self.running[request.slot]
        self._rows = None


def twin_prefix(request: Request, others: list[Request]) -> int:
    """Length of the longest prefix shared with a prompt of the same session among `others`."""
    longest = 0
    for other in others:
        if other.session == request.session:
            size = min(len(other.context), len(request.context))
            differs = other.context[:size] != request.context[:size]
            longest = max(longest, int(differs.argmax()) if differs.any() else size)
    return longest
