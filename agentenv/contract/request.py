"""A request to an engine server over HTTP, and its outcomes.

EnginePool (pool/pool.py)    choice of servers, retries, continuation after a loss, concurrency
    |
WeightSync (weight_sync.py)  one URL: one request, one abort, one load of weights; no retries
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from agentenv.base.errors import EngineError, InfraError
from agentenv.base.types import SamplingParams, VersionSpan


class ServerLostError(EngineError):
    """The server or the connection to it is lost, or it answered 5xx: the request may be sent
    again, to this or another server. All received tokens were reported to `on_chunk`.

    `kind` completes "5 requests ..." in messages.
    """

    kind = "were lost"


class BrokenConnectionError(ServerLostError):
    """An established connection was lost, before or during an answer. The server may be healthy,
    and may have executed the request.
    """

    kind = "were interrupted"


class BusyError(EngineError):
    """The server is healthy but full; it did not process the request. `retry_after_s`: the pause
    that it requests, 0 if unknown."""

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class NoDescriptorError(EngineError):
    """This process can open no more connections: not the server's fault, and nothing was sent."""


class RequestAbortedError(EngineError):
    """The request was aborted on purpose, for a change of the server. All received tokens were
    reported to `on_chunk`; the rest may be requested at once, and this does not count as a
    retry."""


FULL = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT}


def passes(error: BaseException | None) -> bool:
    """Whether the same command may succeed later: a service, or room on the machine, was missing,
    by the error or one of its causes."""
    lost = InfraError, ServerLostError, BusyError, NoDescriptorError, ConnectionError, TimeoutError
    if error is None or isinstance(error, lost) or getattr(error, "errno", None) in FULL:
        return error is not None
    return passes(error.__cause__)


class ForeignWeightsError(EngineError):
    """Tokens were sampled by weights that this client did not label: another process answers at the
    URL, or another run changed the weights. The tokens must not be used."""

    kind = "ran with different weights"


class ServerInfo(Struct, frozen=True):
    """Properties of a server from its probe. `model` is its served name, `max_model_len` the
    context length in tokens; `features` has the optional capabilities: "adapters" (as directories),
    "broadcast", "sleep".
    """

    engine: str
    version: str
    model: str
    max_model_len: int
    features: frozenset[str]


class ServerLoad(Struct, frozen=True):
    """The load that the engine reports; `kv_usage` is a share, 0 to 1.

    `num_preemptions` counts since the server's start.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    num_preemptions: int


class ServerRequest(Struct, frozen=True):
    """One turn to sample. The client chooses a unique `id`, so that the request can be aborted.

    After the first token, events may have `stream_interval` tokens, since each event costs both
    sides time. The turn also ends with one of `stop_token_ids`: the model's end-of-turn tokens, and
    tokens that contain a whole stop string, at which an engine can stop without decoding. Requests
    of one `session` share prefixes, so that a router should send them to the same cache; empty: no
    session. Without `with_entropies`, entropies are NaN: the log-probs of alternative tokens cost
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
