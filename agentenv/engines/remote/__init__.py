"""Requests to an engine server over HTTP, and their outcomes.

EnginePool (pool/pool.py)    which server, retries, continuation after a loss, concurrency, versions
    |
WeightSync (weight_sync.py)  one URL: one request, one abort, one load of weights; no policy
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from agentenv.errors import EngineError
from agentenv.types import SamplingParams, VersionSpan


class ServerLostError(EngineError):
    """The server or the connection to it is gone, or it answered 5xx: the request may be sent
    again, here or elsewhere. Tokens received until then were all reported to `on_chunk`.

    `kind` completes "5 requests ..." where they are counted.
    """

    kind = "were lost"


class BrokenConnectionError(ServerLostError):
    """An established connection was lost, before or within an answer. The server may be healthy,
    and may have executed the request.
    """

    kind = "were interrupted"


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

    kind = "ran with different weights"


class ServerInfo(Struct, frozen=True):
    """Properties of a server from its probe. `model` is its served name, `max_model_len` tokens of
    prompt and turn together; `features` are the names of what not every server can do: "adapters"
    (as directories), "broadcast", "sleep".
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
    """The end of a request; its `num_tokens` tokens were in the chunks. See Completion."""

    finish_reason: Literal["stop", "length", "abort"]
    version_spans: list[VersionSpan]
    num_tokens: int
    stop: str | None = None
    entropy_kind: Literal["exact", "top_k"] = "exact"
    num_cached_tokens: int = 0
