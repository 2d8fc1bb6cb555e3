"""Common base of the vLLM and SGLang clients: connections, requests, labels of weights.

Changes of the weights themselves: weight_sync.py.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from math import inf, nan
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from agentenv.base.errors import ConfigError, EngineError
from agentenv.base.types import Chunk, Completion, VersionSpan
from agentenv.contract.http_client import RefusedError, ServerClient
from agentenv.contract.request import (
    ForeignWeightsError,
    NoDescriptorError,
    PartEnd,
    ServerInfo,
    ServerLoad,
    ServerLostError,
    ServerRequest,
)
from agentenv.contract.weights import Layout
from agentenv.engines.remote.routing import Ranks, routing

logger = logging.getLogger(__name__)

NUM_LOOKS = 4  # requests to detect several servers behind one URL
LAST_S = 5.0  # for background calls when the client closes
UpdateKV = Literal["recompute", "keep"]


def top_k_entropies(positions: Sequence[Sequence[float]]) -> list[float]:
    """A lower bound in nats of the entropy of each position, from its largest log-probs.

    It is -sum p ln p over the given ones, and -r ln min(q, r) for the rest, r = 1 - sum p: no other
    token is likelier than q, the second smallest given p (the smallest may be that of a sampled
    token that is not among the largest). Exact if a position has the log-probs of the whole
    vocabulary. Tokens that cannot be sampled may have -inf or a very low number.
    """
    if not positions:
        return []
    width = max(map(len, positions))
    logprobs = np.array([[*one, *(-inf,) * (width - len(one))] for one in positions])
    p = np.exp(logprobs)
    parts = np.where(p > 0.0, logprobs, 0.0)
    rest = np.maximum(1.0 - p.sum(1), 0.0)
    known = np.sort(np.where(p > 0.0, p, 1.0), axis=1)
    most = np.minimum(known[:, 1] if width > 1 else 1.0, rest)
    entropies = -(p * parts).sum(1) - rest * np.log(np.where(rest > 0.0, most, 1.0))
    found: list[float] = np.maximum(entropies, 0.0).tolist()
    return found


class LabeledSpan(Struct, frozen=True):
    """Tokens [start, end) were sampled by the weights with this label."""

    version: str
    start: int
    end: int


class AnswerParser(ABC):
    """The parser of a server's stream for one request. `name_span` converts the label of weights to
    their version; see RemoteServer. `is_exact`: whether entropies are exact.
    """

    def __init__(
        self,
        server: str,
        is_exact: bool,
        name_span: Callable[[str, int, int], VersionSpan],
        vocab_size: int,
        *,
        with_entropies: bool = True,
    ) -> None:
        self._with_entropies = with_entropies
        self._server, self._name_span, self._vocab_size = server, name_span, vocab_size
        self._reason: str | None = None  # the finish reason
        self._spans: list[LabeledSpan] = []
        self._entropy_kind: Literal["exact", "top_k"] = "exact" if is_exact else "top_k"
        self._stop: str | None = None
        self._num_cached_tokens = 0
        self._num_tokens = 0  # so far

    @abstractmethod
    def add(self, event: bytes) -> Chunk | None:
        """The new tokens of an event, if any. Raises ServerLostError for an error of the engine,
        EngineError for a rejection or for tokens without a log-prob."""

    def finish(self) -> PartEnd:
        """The end of the request. Raises ServerLostError if the stream had no finish reason."""
        if self._reason not in ("stop", "length", "abort"):
            raise ServerLostError(f"{self._server} ended the stream with {self._reason!r}")
        spans = [self._name_span(span.version, span.start, span.end) for span in self._spans]
        if [0, *(s.end for s in spans)] != [*(s.start for s in spans), self._num_tokens]:
            raise EngineError(
                f"{self._server} returned version spans {spans} for {self._num_tokens} tokens"
            )
        reason = cast(Literal["stop", "length", "abort"], self._reason)
        kind, num_cached = self._entropy_kind, self._num_cached_tokens
        return PartEnd(reason, spans, self._num_tokens, self._stop, kind, num_cached)

    def _chunk(
        self,
        token_ids: list[int],
        logprobs: list[float],
        entropies: Callable[[], list[float]],
        kept: list[list[int]] | None = None,
    ) -> Chunk:
        """A chunk of these tokens; `entropies` computes theirs if they are requested."""
        ids = (*token_ids, *chain.from_iterable(kept or ()))
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise EngineError(
                f"{self._server} sampled the token {max(ids)}, the vocabulary has "
                f"{self._vocab_size}"
            )
        self._num_tokens += len(token_ids)
        found = entropies() if self._with_entropies else [nan] * len(token_ids)
        return Chunk(token_ids, logprobs, found, kept or [])


class Facts(Struct, frozen=True):
    """The result of a probe. `layout` is that of the server's original model directory, None if
    this machine cannot read it; `num_ranks` counts data-parallel ranks."""

    info: ServerInfo
    vocab_size: int
    layout: Layout | None
    num_ranks: int


F = TypeVar("F", bound=Facts)


async def _no_guests() -> None:
    """The default: no other process uses the server."""


class RemoteServer(ABC, Generic[F]):
    """One engine server. All methods raise ServerLostError when it is lost or broken, and
    EngineError for requests that it, or the client on its behalf, rejects.

    `name` is the URL without credentials, `policy_version` that of the weights that sample its next
    token, as far as this client set it. `before_release` is awaited before a server with
    half-loaded weights resumes, since requests of other processes would crash it. `on_named` is
    called after a change of its version, before it resumes.

    `vocab_size` is the model's number of token ids. Entropies come from the `entropy_top_k` largest
    log-probs (-1: all). `load_s` is the deadline in seconds of a load, and of a request that waits
    for one. `update_kv`: see weight_sync.py.
    """

    tried: ClassVar[str]  # prefix of the versions for which the contract tests ran
    facts: ClassVar[type[Facts]]
    health = "/health"  # a route that answers while its scheduler does

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int,
        entropy_top_k: int = 20,
        load_s: float = 600.0,
        api_key: str = "",
        update_kv: UpdateKV = "recompute",
    ) -> None:
        if entropy_top_k != -1 and entropy_top_k < 1:
            raise ConfigError(f"entropy_top_k must be -1 (all) or at least 1, not {entropy_top_k}")
        self.url = url
        self._http = ServerClient(url, api_key=api_key, wait_s=load_s, fresh_posts=True)
        self.name = self._http.name
        self._load_s = load_s
        self._top_k, self._vocab_size = entropy_top_k, vocab_size
        self._facts: F | None = None
        self._layout: Layout | None = None  # of the weights that it accepts, if known
        self.policy_version = 0
        self._label = ""
        self._update_kv = update_kv
        self._run_salt = ""
        self._nonce = secrets.token_hex(8)  # in all labels of this client
        self._num_labels = 0
        self._unusable = "connect was not called"  # why its weights are unknown; empty: known
        self._is_asleep = False
        self._half_loaded = False  # after an incomplete load, when it must not be used
        self._changing = asyncio.Lock()  # held while the weights are changed
        self._open = asyncio.Event()  # cleared during a replacement of weights
        self._open.set()
        self._ranks = Ranks()
        self._tasks: set[asyncio.Task[None]] = set()
        self.before_release: Callable[[], Awaitable[None]] = _no_guests
        self.on_named: Callable[[], None] = lambda: None

    async def connect(self, policy_version: int) -> ServerInfo:
        """Probe version, routes, model and limits, and label its present weights `policy_version`.

        Raises ConfigError for a missing requirement, with the necessary version or flag of the
        engine.

        A server that was left paused resumes. After an incomplete load it would sample nonsense, or
        crash: it must not serve before load_weights has succeeded.
        """
        async with self._changing:
            facts = self._facts = await self._probe()
            self._layout = facts.layout
            self._ranks.count = facts.num_ranks
            self._run_salt = secrets.token_hex(8)
            self._warn_untried(facts.info.version)
            await self._unpause()
            self._is_asleep = False
            await self._name(policy_version)
            await self._check_alone()
            if not self._half_loaded:
                await self._try_out()
                self._unusable = ""
            return facts.info

    def handed(self) -> bytes:
        """The connection data for a client in another process; see `take_over`: the facts, the
        salt, and the beginning of all labels. With the cache kept, salts change with each update,
        which other processes learn too late: they must not use such a server.
        """
        facts = replace(self._connected(), layout=None)
        return msgspec.msgpack.encode((facts, self._run_salt, self._nonce))

    def take_over(self, handed: bytes) -> None:
        """Use a server that another client manages; only `generate`, `name` and `close` are then
        allowed. New data is necessary after each connection.
        """
        kind = tuple[self.facts, str, str]  # type: ignore[name-defined]
        facts, self._run_salt, self._nonce = msgspec.msgpack.decode(handed, type=kind)
        self._facts, self._ranks.count, self._unusable = facts, facts.num_ranks, ""

    @property
    def has_free_entropies(self) -> bool:
        """Whether exact entropies are free on this server, so that a turn needs only one
        request."""
        return False

    @abstractmethod
    async def scores(self, ids: Sequence[int], start: int) -> list[float]:
        """The log-probs in nats of the tokens from `start` on, if any text may be written, at
        temperature 1."""

    async def healthy(self) -> bool:
        """Whether it answers now; does not raise for a lost server."""
        return await self._http.answers(self.health)

    async def keeps_label(self) -> bool:
        """Whether the server returns the label that this client gave its weights. False: another
        process answers at the URL, or another client changed the weights.
        """
        if self._unusable:
            return False
        label = self._label
        found = await self._read_label()
        return label != self._label or found == label

    async def close(self) -> None:
        """Drop the connections after the background calls. Idempotent."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_S)
        for task in self._tasks:
            task.cancel()
        await self._http.close()

    # requests

    async def _stream(
        self,
        path: str,
        request_id: str,
        body: dict[str, Any],
        request: ServerRequest,
        answer: AnswerParser,
        on_chunk: Callable[[Chunk], None],
    ) -> None:
        """Read the whole answer to a request. A cancelled or failed request is aborted at once,
        since a server would notice a lost connection only after seconds."""
        is_over, session = False, request.session
        of_token = max(self._top_k, getattr(self._facts, "max_top_k", 0))
        of_token = self._vocab_size if self._top_k == -1 else of_token
        bounds = (request.sampling.max_tokens, of_token, request.stream_interval)
        try:
            with self._ranks.take(session) as rank:
                body |= self._of_rank(rank)
                sending = self._http.stream(path, body, routing(session, rank), *bounds)
                async with sending as events:
                    async for event in events:
                        if (chunk := answer.add(event)) is not None:
                            on_chunk(chunk)
            is_over = True
        except NoDescriptorError:
            is_over = True  # nothing was sent
            raise
        finally:
            if not is_over:
                self._spawn(self._abort([request_id]))

    def _of_rank(self, rank: int | None) -> dict[str, Any]:
        """Keys of a request for a certain rank; most servers use only the header."""
        return {}

    async def _known(self) -> F:
        """Wait while weights are replaced. Raises ServerLostError if they are unknown then."""
        await self._open.wait()
        if self._unusable:
            raise self._lost()
        return self._connected()

    @property
    def _salt(self) -> str:
        """The cache salt, which prevents the use of prefixes of other weights and other runs."""
        return self._label if self._update_kv == "keep" else self._run_salt

    def _connected(self) -> F:
        if self._facts is None:
            raise self._lost()
        return self._facts

    def _lost(self) -> ServerLostError:
        return ServerLostError(f"{self.name} cannot be used: {self._unusable}")

    def _span(self, label: str, start: int, end: int) -> VersionSpan:
        """The version that sampled tokens [start, end). Raises ForeignWeightsError for a label that
        is not this client's."""
        version, _, nonce = label.rpartition("-")
        if not nonce.startswith(self._nonce):
            raise ForeignWeightsError(
                f"{self.name} sampled tokens {start} to {end} with weights labeled {label!r}, "
                "which this run did not load: was it restarted, or does another process load "
                "weights into it?"
            )
        return VersionSpan(int(version), start, end)

    # Labels, and calls to all servers of the URL.

    async def _name(self, policy_version: int) -> None:
        """Label the present weights with this version."""
        self._num_labels += 1
        label = f"{policy_version}-{self._nonce}{self._num_labels}"
        await self._write_label(label)
        self._label, self.policy_version = label, policy_version
        self.on_named()

    async def _check_alone(self) -> None:
        """Raises ConfigError if several servers answer behind one URL, since an update would reach
        only one. Each request uses a new connection, so that it may reach another server."""
        found = [await self._read_label(fresh=True) for _ in range(NUM_LOOKS)]
        if any(label != self._label for label in found):
            raise ConfigError(
                f"{self.name} does not return the label of its weights. Do several servers share "
                "this URL, or several API servers of one engine (--api-server-count)? List each "
                "under its own URL in engine.urls. Or does another run load weights into it?"
            )

    def _warn_untried(self, version: str) -> None:
        """Warn about an untested version: its routes exist, but may behave differently."""
        if not version.startswith(self.tried):
            logger.warning(
                "%s runs version %s, which is untested (%s is tested, see docs/engines.md); watch "
                "parity/logprob_gap_max",
                self.name,
                version,
                self.tried.rstrip("."),
            )

    async def _post(
        self, path: str, body: Any = None, timeout_s: float | None = None, **params: str
    ) -> None:
        """POST; raises RefusedError also for an answer with success: false."""
        answer = await self._http.call_json("POST", path, body, params=params, timeout_s=timeout_s)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RefusedError(f"{self.name}{path} failed: {answer}", 200, str(answer))

    async def _abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests; ignores errors, since a request may have ended, possibly with its
        server."""
        for path, body in self._abort_calls(request_ids):
            with suppress(EngineError):
                await self._post(path, body)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start background work, so that a cancelled caller can end at once."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # what differs

    @abstractmethod
    async def generate(self, request: ServerRequest, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        """Sample one turn by streaming; every token is in exactly one chunk. A new request waits
        while weights are being replaced.

        Cancelling the call aborts the request on the server at once.
        """

    @abstractmethod
    async def load(self) -> ServerLoad:
        """The load that it reports."""

    @abstractmethod
    async def _probe(self) -> F:
        """Determine the server's properties. Raises ConfigError for missing requirements."""

    @abstractmethod
    async def _unpause(self) -> None:
        """Resume a server that an earlier run left paused."""

    async def _try_out(self) -> None:
        """Sample for a test, if a probe does not show everything. Raises ConfigError as
        `_probe`."""

    @abstractmethod
    def _abort_calls(self, request_ids: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Paths and bodies that abort these requests."""

    @abstractmethod
    async def _write_label(self, label: str) -> None:
        """Label the tokens from now on."""

    @abstractmethod
    async def _read_label(self, *, fresh: bool = False) -> str:
        """The label of the weights on one server; `fresh`: uses a new connection."""


async def sampled(server: RemoteServer[Any], request: ServerRequest) -> Completion:
    """One turn of a server, with all its tokens; see RemoteServer.generate."""
    chunks: list[Chunk] = []
    end = await server.generate(request, chunks.append)
    return Completion(
        token_ids=[*chain.from_iterable(chunk.token_ids for chunk in chunks)],
        logprobs=[*chain.from_iterable(chunk.logprobs for chunk in chunks)],
        entropies=[*chain.from_iterable(chunk.entropies for chunk in chunks)],
        num_kept=[len(ids) for chunk in chunks for ids in chunk.kept],
        kept_ids=[token for chunk in chunks for ids in chunk.kept for token in ids],
        finish_reason=end.finish_reason,
        version_spans=end.version_spans,
        stop=end.stop,
        entropy_kind=end.entropy_kind,
        num_cached_tokens=end.num_cached_tokens,
    )
