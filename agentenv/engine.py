"""The seam between actors and whatever samples tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from agentenv.types import Chunk, Completion, SamplingParams


class Engine(Protocol):
    """Token ids in, token ids out. All methods are called on the event loop and never block it."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that choose the next token."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 1,
    ) -> Completion:
        """Sample one turn.

        `session` names the tree: requests of one session share prefixes, so they should meet the
        same cache. `on_tokens` is called on the event loop with the tokens not yet reported each
        time at least `stream_interval` of them are known, and never after generate has returned;
        tokens of an incomplete last chunk appear only in the Completion. Cancelling the call
        aborts the request. Raises EngineError for a request the engine cannot serve (empty or
        too long prompt, ids outside the vocabulary, max_tokens < 1), and EngineDeadError when the
        engine is gone for good.
        """
        ...

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """Replace the weights by those of a Hugging Face directory while requests are running.

        Running requests keep their tokens and go on under the new weights, their version spans
        say where. No new request meets a prefix cache of another version. Raises EngineError and
        keeps the old weights and version if the directory does not fit.
        """
        ...

    def stats(self) -> dict[str, float]:
        """Counters since the start: sampled_tokens, prompt_tokens, cached_tokens, requests, ..."""
        ...

    async def close(self) -> None:
        """Stop; requests still running raise EngineDeadError. Idempotent."""
        ...


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """An engine that can give the memory of its device back for a while."""

    @property
    def outage_s(self) -> float:
        """Seconds so far in which it could not sample, asleep or gone; see agentenv/branch.py."""
        ...

    async def sleep(self) -> None:
        """Give back cache and weights. Requests that run keep their tokens and go on after
        `wake`, or after `load_weights`, which wakes it up too; so do those that come meanwhile."""
        ...

    async def wake(self) -> None:
        """Serve again, with the weights that it had. Without effect on one that is awake."""
        ...
