"""Requests to an engine server behind HTTP, how they end, and answers read into chunks.

EnginePool (pool/pool.py)    which server, retries, continuation after a loss, concurrency, versions
    |
WeightSync (weight_sync.py)  one URL: one request, one abort, one load of weights; no policy
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Literal, cast

import numpy as np
from msgspec import Struct

from agentenv.errors import EngineError
from agentenv.types import Chunk, SamplingParams, VersionSpan


class ServerLostError(EngineError):
    """The server or the connection to it is gone, or it answered 5xx: the request may be sent
    again, here or elsewhere. Tokens received until then were all reported to `on_chunk`.

    `kind` completes "5 requests ..." where they are counted.
    """

    kind = "were lost"


class BrokenConnectionError(ServerLostError):
    """A connection that was there has gone, before or within an answer. The server may be well,
    and may have done what it was asked for."""

    kind = "broke off"


class BusyError(EngineError):
    """The server is well and takes no more requests now; nothing of this one was done.
    `retry_after_s`: for how long it asks to be left alone, 0 where it does not say."""

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class NoDescriptorError(EngineError):
    """This process can open no more connections: no fault of the server, and nothing was sent."""


class BrokenOffError(EngineError):
    """The request was ended on purpose, for a change of the server. Tokens received until then
    were all reported to `on_chunk`; the rest may be asked for at once, and no retry is used up."""


class ForeignWeightsError(EngineError):
    """Tokens were sampled by weights that this client did not label: another process answers at the
    URL, or another run changed the weights. None of them may be used."""

    kind = "met other weights"


class ServerInfo(Struct, frozen=True):
    """What a server said of itself when it was probed.

    `model` is the name it serves under, `max_model_len` tokens of prompt and turn together;
    `features` are the names of what not every server can do: "adapters" (as directories),
    "broadcast", "sleep".
    """

    engine: str
    version: str
    model: str
    max_model_len: int
    features: frozenset[str]


class ServerLoad(Struct, frozen=True):
    """Load figures that the engine itself reports; `kv_usage` is a share, 0 to 1.

    `num_preemptions` counts since the server's start.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    num_preemptions: int


class Request(Struct, frozen=True):
    """One turn to sample. `id` is ours and unique, so that the request can be aborted.

    After the first token, `stream_interval` of them may come together: each event costs both sides
    time. The turn also ends with one of `stop_token_ids`: those that end a turn of the model, and
    those that hold a stop string whole, at which an engine can stop without decoding anything.
    Requests of one `session` share prefixes, so that a router should bring them to the same cache;
    empty: of none. Without `with_entropies` those are NaN: the log-probs of a token's rivals cost
    both sides time.
    """

    id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    stream_interval: int = 1
    stop_token_ids: tuple[int, ...] = ()
    session: str = ""
    with_entropies: bool = True


class PartEnd(Struct, frozen=True):
    """How a request came to its end; its `num_tokens` tokens were in the chunks. See Completion."""

    finish_reason: Literal["stop", "length", "abort"]
    version_spans: list[VersionSpan]
    num_tokens: int
    stop: str | None = None
    entropy_kind: Literal["exact", "top_k"] = "exact"
    num_cached_tokens: int = 0


def top_k_entropies(positions: Sequence[Sequence[float]]) -> list[float]:
    """-sum p ln p - r ln r in nats of each position, from its largest log-probs; r = 1 - sum p, all
    that is left, is taken as one token.

    A lower bound of the entropy: splitting the remainder can only add to it. Exact if a position
    has the log-probs of the whole vocabulary. Tokens that cannot be sampled may be listed with
    -inf, or with a very low number in its place.
    """
    if not positions:
        return []
    width = max(map(len, positions))
    logprobs = np.array([[*one, *(-inf,) * (width - len(one))] for one in positions])
    p = np.exp(logprobs)
    parts = np.where(p > 0.0, logprobs, 0.0)
    rest = np.maximum(1.0 - p.sum(1), 0.0)
    entropies = -(p * parts).sum(1) - rest * np.log(np.where(rest > 0.0, rest, 1.0))
    found: list[float] = np.maximum(entropies, 0.0).tolist()
    return found


class LabelledSpan(Struct, frozen=True):
    """Tokens from `start` to `end` were sampled by the weights of a label."""

    version: str
    start: int
    end: int


class Answer(ABC):
    """What a server streams for one request, event by event. `name_span` turns the label of weights
    into their version; see RemoteServer."""

    def __init__(
        self,
        server: str,
        entropy_kind: Literal["exact", "top_k"],
        name_span: Callable[[str, int, int], VersionSpan],
        vocab_size: int,
        *,
        with_entropies: bool = True,
    ) -> None:
        self._with_entropies = with_entropies
        self._server, self._name_span, self._vocab_size = server, name_span, vocab_size
        self._reason: str | None = None  # why the turn ended
        self._spans: list[LabelledSpan] = []
        self._entropy_kind: Literal["exact", "top_k"] = entropy_kind
        self._stop: str | None = None
        self._num_cached_tokens = 0
        self._num_tokens = 0  # so far

    @abstractmethod
    def add(self, event: bytes) -> Chunk | None:
        """The new tokens of an event, if it has any. Raises ServerLostError for an error of the
        engine, EngineError for a refusal or for tokens without a log-prob."""

    def finish(self) -> PartEnd:
        """The end. ServerLostError if the stream ended without a finish reason."""
        if self._reason not in ("stop", "length", "abort"):
            raise ServerLostError(f"{self._server} ended the stream with {self._reason!r}")
        spans = [self._name_span(span.version, span.start, span.end) for span in self._spans]
        if [0, *(s.end for s in spans)] != [*(s.start for s in spans), self._num_tokens]:
            raise EngineError(
                f"{self._server} gave version spans {spans} for {self._num_tokens} tokens"
            )
        reason = cast(Literal["stop", "length", "abort"], self._reason)
        kind, num_cached = self._entropy_kind, self._num_cached_tokens
        return PartEnd(reason, spans, self._num_tokens, self._stop, kind, num_cached)

    def _chunk(
        self, token_ids: list[int], logprobs: list[float], rivals: Sequence[Sequence[float]]
    ) -> Chunk:
        """The turn goes on by these tokens; `rivals` are the largest log-probs of each position."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise EngineError(
                f"{self._server} sampled the token {max(token_ids)}, the vocabulary has "
                f"{self._vocab_size}"
            )
        self._num_tokens += len(token_ids)
        if not self._with_entropies:
            return Chunk(token_ids, logprobs, [nan] * len(token_ids))
        return Chunk(token_ids, logprobs, top_k_entropies(rivals))
