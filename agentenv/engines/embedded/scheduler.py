"""Scheduler of requests: the part of the embedded engine in its thread.

A step admits waiting requests (each reuses or copies the longest cached prefix), computes their
prompts together with one token of every running request, samples, and releases finished requests.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agentenv.base.errors import EngineError
from agentenv.base.types import Chunk, Completion, SamplingParams, VersionSpan
from agentenv.contract.engine import extend_spans
from agentenv.contract.stop_strings import StopMatcher, StopStrings
from agentenv.engines.embedded import model
from agentenv.engines.embedded.sampler import TokenSampler
from agentenv.engines.embedded.weights import Architecture, EmbeddedWeights

MAX_PREFILL_TOKENS = 4096  # new prompt tokens of one step, unless one prompt alone has more
MIN_WAIT_GAIN = 16  # a prompt waits a step for another one with a common prefix of this length
ROOM = 16  # columns reserved beyond a prompt, so that short turns need no move


@dataclass(eq=False)
class EmbeddedRequest:
    """The thread's state of one call of generate. `context` is the initial content of its slot: the
    prompt, and the tokens from before a sleep of the engine; `turn` has the tokens so far."""

    prompt: model.IntArray
    sampling: SamplingParams
    session: str
    chunk_size: int  # tokens of a Chunk, 0: no streaming
    order: tuple[int, int] = (0, 0)  # the smallest waiting one is admitted first
    matcher: StopMatcher | None = None
    enders: frozenset[int] = frozenset()  # tokens that may end the request
    slot: int = -1
    num_reported: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.sampling.seed)
        self.context = self.prompt
        self.turn = Completion([], [], [], "stop", [])

    def take_chunk(self) -> Chunk:
        """The tokens not reported yet."""
        turn, start = self.turn, self.num_reported
        self.num_reported = len(turn.token_ids)
        return Chunk(turn.token_ids[start:], turn.logprobs[start:], turn.entropies[start:])

    def requeue(self) -> None:
        """Release the slot, and restart after the tokens so far."""
        self.slot = -1
        self.context = np.array(self.all_ids(), dtype=np.int32)

    def all_ids(self) -> list[int]:
        """The tokens of prompt and output so far."""
        return [*self.prompt.tolist(), *self.turn.token_ids]

    def end(self, at_eos: bool) -> Completion | None:
        """The completion if the last token ended the request."""
        turn = self.turn
        if not at_eos:
            if self.matcher is not None and turn.token_ids[-1] in self.matcher.candidates:
                turn.stop = self.matcher.match(turn.token_ids)
            if turn.stop is None:
                if len(turn.token_ids) < self.sampling.max_tokens:
                    return None
                turn.finish_reason = "length"
        return turn


# A request with its new tokens or its outcome; neither: it was admitted.
Event = tuple[EmbeddedRequest, Chunk | None, Completion | EngineError | None]


class BatchStep:
    """The requests of one step and the model's batch for them: a row for each decoding request,
    block by block, then the new prompts in order. It is reused while the same requests continue in
    the same rows.

    `slots` are those of the decoding rows, `inputs` their tokens, which the next step computes;
    `num_steps` is the number of steps until a row is full.
    """

    def __init__(
        self,
        cache: model.SlotCache,
        running: Mapping[int, EmbeddedRequest],
        fresh: Sequence[EmbeddedRequest],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        decodes: list[model.DecodeGroup] = []
        slots: list[int] = []
        spare: list[int] = []  # steps until a row is full
        token_ids: list[int] = []
        positions: list[int] = []
        new = {request.slot for request in fresh}
        for block in cache.blocks.values():
            rows = [slot for slot in block.slots if slot not in new]  # the new ones come last
            if rows:
                lengths = cache.lengths[rows].tolist()
                decodes.append(model.DecodeGroup(block, len(token_ids), lengths, device))
                token_ids += [running[slot].turn.token_ids[-1] for slot in rows]
                positions += lengths
                spare.append(block.width - max(lengths))
                slots += rows
        self.slots = np.array(slots, dtype=np.int64)
        self.requests = [running[slot] for slot in slots]
        self.inputs = [request.turn.token_ids[-1] for request in self.requests]
        prefills: list[model.Prefill] = []
        for request in fresh:
            block, row = cache.place[request.slot]
            past, start = request.turn.num_cached_tokens, len(token_ids)
            ids = request.context[past:].tolist()
            prefills.append(model.Prefill(block, row, past, start, len(ids), device))
            token_ids += ids
            positions += range(past, len(request.context))
            spare.append(block.width - len(request.context) + 1)
        self.requests += fresh
        self.num_steps = min(spare)
        tokens = torch.tensor(token_ids, device=device)
        self.batch = model.ModelBatch(
            tokens, torch.tensor(positions, device=device), decodes, prefills
        )
        self.sampler = TokenSampler(
            [request.sampling for request in self.requests],
            device,
            vocab_size,
            lambda row: self.requests[row].all_ids(),
        )

    def advance(self, sampled: Tensor, token_ids: list[int]) -> None:
        """Continue with the tokens just sampled, in both forms; only without prompts."""
        self.batch.advance(sampled)
        self.inputs = token_ids


class Scheduler:
    """Waiting and running requests over the model and its slots. Used by one thread only."""

    def __init__(
        self,
        arch: Architecture,
        weights: EmbeddedWeights,
        cache: model.SlotCache,
        stop_strings: StopStrings,
        policy_version: int,
        max_num_seqs: int,
    ) -> None:
        self.policy_version = policy_version
        self.counts: Counter[str] = Counter()
        self.events: list[Event] = []  # since the last step, for the callers
        self.waiting: deque[EmbeddedRequest] = deque()
        self.running: dict[int, EmbeddedRequest] = {}  # by slot
        self.asleep = False
        self._arch, self._weights, self._cache = arch, weights, cache
        self._model = model.DecoderModel(arch, weights)
        self._stop_strings = stop_strings
        self._max_num_seqs = max_num_seqs
        self._device = weights.embed.device
        self._step: BatchStep | None = None  # the last one, if the next may have the same rows
        self._steps_to_grow = 0

    @property
    def idle(self) -> bool:
        """True when a step would do nothing."""
        return self.asleep or not (self.waiting or self.running)

    def submit(self, request: EmbeddedRequest) -> None:
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
        insort(self.waiting, request, key=lambda one: one.order)

    def cancel(self, request: EmbeddedRequest) -> None:
        """Forget a request; unknown and finished ones are ignored."""
        if self.running.get(request.slot) is request:
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def load_weights(self, source: Path, policy_version: int) -> None:
        """Replace the weights in place, and wake. If they do not fit, raises EngineError and keeps
        the old ones."""
        self.wake()
        self._weights.load(source)
        self._cache.forget_all()
        self.policy_version = policy_version
        self.counts["weight_updates"] += 1

    def sleep(self) -> None:
        """Free the memory of the cache and, on a GPU, of the weights. Running requests return to
        the head of the queue with their tokens."""
        if self.asleep:
            return
        for request in reversed(self.running.values()):
            request.requeue()
            self.waiting.appendleft(request)
        self.running.clear()
        self._step = None
        self._cache.clear()
        if self._device.type != "cpu":
            self._weights.release_memory()
            torch.cuda.empty_cache()
        self.asleep = True
        self.counts["sleeps"] += 1

    def wake(self) -> None:
        """Resume after a sleep."""
        if self.asleep and self._device.type != "cpu":
            self._weights.restore_memory()
        self.asleep = False

    def step(self) -> None:
        """Admit, compute one token of every running request, sample, release finished ones."""
        if self._steps_to_grow == 0:
            self._grow_slots()
        fresh = self._admit()
        if not self.running:
            return
        step = self._step
        if step is None:
            step = BatchStep(self._cache, self.running, fresh, self._arch.vocab_size, self._device)
            self._step, self._steps_to_grow = step, step.num_steps
        self._cache.append(step.slots, step.inputs)
        uniforms = [request.rng.random() for request in step.requests]
        sampled, logprobs, entropies = step.sampler.sample(
            self._model.forward(step.batch),
            torch.tensor(uniforms, dtype=torch.float64, device=self._device),
        )
        for request in fresh:
            self._cache.publish(request.slot, self.policy_version)
        self._steps_to_grow -= 1
        if fresh:
            self._step = None
        token_ids = sampled.tolist()
        figures = logprobs.tolist(), entropies.tolist()
        self._record(step.requests, token_ids, *figures, step.sampler.kept)
        if self._step is step:
            step.advance(sampled, token_ids)

    def _grow_slots(self) -> None:
        """Move the running slots whose rows are full to wider ones."""
        self._step = None
        for slot in self.running:
            length = int(self._cache.lengths[slot])
            if length == self._cache.place[slot][0].width:
                self._cache.grow(slot, length + 1)

    def _admit(self) -> list[EmbeddedRequest]:
        """Open slots for waiting requests, in order; returns those to prefill in this step."""
        fresh: list[EmbeddedRequest] = []
        held: list[EmbeddedRequest] = []
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
            self._open(request, source, common)
            fresh.append(request)
        self.waiting.extendleft(reversed(held))
        return fresh

    def _open(self, request: EmbeddedRequest, source: int | None, common: int) -> None:
        room = min(request.sampling.max_tokens - len(request.turn.token_ids), ROOM)
        request.slot, request.turn.num_cached_tokens = self._cache.open(
            request.context, request.session, source, common, room
        )
        self._model.reserve(len(request.prompt) + request.sampling.max_tokens)
        self.running[request.slot] = request
        self.events.append((request, None, None))
        self.counts["cached_tokens"] += request.turn.num_cached_tokens
        self._step = None

    def _record(
        self,
        requests: list[EmbeddedRequest],
        token_ids: list[int],
        logprobs: list[float],
        entropies: list[float],
        kept: list[list[int]],
    ) -> None:
        """Store each row's token, create the events, and release finished rows."""
        self.counts["steps"] += 1
        self.counts["sampled_tokens"] += len(token_ids)
        if not math.isfinite(sum(logprobs)):
            raise EngineError(f"the logits of policy version {self.policy_version} are not finite")
        done: list[EmbeddedRequest] = []
        for request, token, logprob, entropy, ids in zip(
            requests, token_ids, logprobs, entropies, kept, strict=True
        ):
            turn, completion = request.turn, None
            turn.token_ids.append(token)
            turn.logprobs.append(logprob)
            turn.entropies.append(entropy)
            if ids:
                turn.num_kept.append(len(ids))
                turn.kept_ids += ids
            num_tokens = len(turn.token_ids)
            span = VersionSpan(self.policy_version, num_tokens - 1, num_tokens)
            extend_spans(turn.version_spans, span)
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

    def _release(self, request: EmbeddedRequest) -> None:
        self._cache.close(request.slot, self.policy_version)
        del self.running[request.slot]
        self._step = None


def twin_prefix(request: EmbeddedRequest, others: list[EmbeddedRequest]) -> int:
    """Length of the longest prefix shared with a prompt of the same session among `others`."""
    longest = 0
    for other in others:
        if other.session == request.session:
            size = min(len(other.context), len(request.context))
            differs = other.context[:size] != request.context[:size]
            longest = max(longest, int(differs.argmax()) if differs.any() else size)
    return longest
