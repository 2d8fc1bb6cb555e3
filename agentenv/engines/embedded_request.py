"""One call of generate: what the engine thread keeps of it, and what the event loop keeps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from agentenv.engines.embedded_cache import IntArray
from agentenv.engines.stop_strings import StopMatcher
from agentenv.errors import EngineError
from agentenv.types import Chunk, Completion, SamplingParams, VersionSpan

MIN_TEMPERATURE = 1e-3  # below it logits / temperature could overflow; 0 is greedy


@dataclass(eq=False)
class Request:
    """One call of generate, as the engine thread sees it. `context` is what its slot begins with:
    the prompt, and the tokens that it had when the engine slept."""

    prompt: IntArray
    sampling: SamplingParams
    session: str
    chunk_size: int  # tokens of a Chunk, 0: no streaming
    rng: random.Random = field(init=False)
    context: IntArray = field(init=False)
    matcher: StopMatcher | None = None
    enders: frozenset[int] = frozenset()  # tokens that may end the request
    slot: int = -1
    num_cached: int = 0
    num_reported: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)  # (version, first token)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.sampling.seed)
        self.context = self.prompt

    def take_chunk(self) -> Chunk:
        """The tokens not reported yet."""
        start, self.num_reported = self.num_reported, len(self.token_ids)
        return Chunk(self.token_ids[start:], self.logprobs[start:], self.entropies[start:])

    def lie_down(self) -> None:
        """Give up the slot and begin once more behind the tokens so far."""
        self.slot = -1
        self.context = np.concatenate([self.prompt, np.array(self.token_ids, dtype=np.int32)])

    def enter_version(self, version: int) -> None:
        """Tokens from here on are chosen by `version`."""
        if self.versions and self.versions[-1][0] == version:
            return
        if self.versions and self.versions[-1][1] == len(self.token_ids):
            self.versions.pop()
        self.versions.append((version, len(self.token_ids)))

    def end(self, at_eos: bool) -> Completion | None:
        """The completion if the last token ended the request."""
        reason: Literal["stop", "length"] = "stop"
        stop = None
        if not at_eos:
            if self.matcher is not None and self.token_ids[-1] in self.matcher.candidates:
                stop = self.matcher.match(self.token_ids)
            if stop is None:
                if len(self.token_ids) < self.sampling.max_tokens:
                    return None
                reason = "length"
        ends = [start for _, start in self.versions[1:]] + [len(self.token_ids)]
        spans = zip(self.versions, ends, strict=True)
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            entropies=self.entropies,
            finish_reason=reason,
            version_spans=[VersionSpan(version, start, end) for (version, start), end in spans],
            stop=stop,
            num_cached_tokens=self.num_cached,
        )


Event = tuple[Request, Chunk | None, Completion | EngineError | None]


class Call:
    """One call of generate, as the event loop sees it."""

    def __init__(
        self, future: asyncio.Future[Completion], on_tokens: Callable[[Chunk], None] | None
    ) -> None:
        self.future, self._on_tokens = future, on_tokens
        self.over = False  # generate has returned or is about to

    def report(self, chunk: Chunk) -> None:
        """Hand out a chunk; if the callback raises, the call fails and the loop logs why."""
        if self.over or self._on_tokens is None:
            return
        failed = True
        try:
            self._on_tokens(chunk)
            failed = False
        finally:
            if failed:
                settle(self.future, EngineError("on_tokens raised; the request is aborted"))


def settle(future: asyncio.Future[Any], outcome: object) -> None:
    """Give the future its result or exception unless its caller is gone."""
    if future.done():
        return
    if isinstance(outcome, EngineError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def check_request(
    prompt_ids: Sequence[int], sampling: SamplingParams, vocab_size: int, max_length: int
) -> IntArray:
    """The prompt. Raises EngineError, which names what is wrong, for what cannot be served."""
    prompt = np.asarray(prompt_ids)
    if prompt.ndim != 1 or not len(prompt) or prompt.dtype.kind not in "iu":
        raise EngineError("the prompt must be a non-empty list of token ids")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise EngineError(
            f"the prompt has token ids from {prompt.min()} to {prompt.max()}, "
            f"the vocabulary {vocab_size}"
        )
    if sampling.max_tokens < 1:
        raise EngineError(f"max_tokens must be at least 1, found {sampling.max_tokens}")
    if len(prompt) + sampling.max_tokens > max_length:
        raise EngineError(
            f"{len(prompt)} prompt tokens and max_tokens {sampling.max_tokens} exceed "
            f"max_model_len {max_length}"
        )
    if not (
        (sampling.temperature == 0 or MIN_TEMPERATURE <= sampling.temperature < float("inf"))
        and 0 < sampling.top_p <= 1
        and (sampling.top_k == -1 or sampling.top_k >= 1)
        and 0 <= sampling.min_p <= 1
        and 0 < sampling.repetition_penalty < float("inf")
    ):
        raise EngineError(
            f"temperature, top_p, top_k, min_p or repetition_penalty is out of range: {sampling}"
        )
    return prompt.astype(np.int32)
