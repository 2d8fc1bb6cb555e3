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

from agentenv.engines.remote import (
    ForeignWeightsError,
    NoDescriptorError,
    PartEnd,
    Request,
    ServerInfo,
    ServerLoad,
    ServerLostError,
)
from agentenv.engines.remote.client import (
    HttpClient,
    Ranks,
    RefusedError,
    routing,
)
from agentenv.engines.remote.weights import (
    Layout,
)
from agentenv.errors import ConfigError, EngineError
from agentenv.types import Chunk, Completion, VersionSpan

logger = logging.getLogger(__name__)

HEALTH_S = 5.0
NUM_LOOKS = 4  # questions by which several servers behind one URL show
LAST_S = 5.0  # for background calls when the client is closed
UpdateKV = Literal["recompute", "keep"]


def top_k_entropies(positions: Sequence[Sequence[float]]) -> list[float]:
    """A lower bound in nats of the entropy of each position, from its largest log-probs.

    -sum p ln p of those given, and -r ln min(q, r) for all that is left, r = 1 - sum p: none of the
    others is likelier than q, the second smallest p given (the smallest may be of a sampled token
    that is not among the largest). Exact if a position has the log-probs of the whole vocabulary.
    Tokens that cannot be sampled may be listed with -inf, or with a very low number in its place.
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
    """Tokens from `start` to `end` were sampled by the weights of a label."""

    version: str
    start: int
    end: int


class Answer(ABC):
    """The stream of a server for one request, event by event. `name_span` turns the label of
    weights into their version; see RemoteServer.
    """

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
        self._spans: list[LabeledSpan] = []
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
                f"{self._server} returned version spans {spans} for {self._num_tokens} tokens"
            )
        reason = cast(Literal["stop", "length", "abort"], self._reason)
        kind, num_cached = self._entropy_kind, self._num_cached_tokens
        return PartEnd(reason, spans, self._num_tokens, self._stop, kind, num_cached)

    def _chunk(
        self, token_ids: list[int], logprobs: list[float], entropies: Callable[[], list[float]]
    ) -> Chunk:
        """The turn goes on by these tokens; `entropies` are computed where they are wanted."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise EngineError(
                f"{self._server} sampled the token {max(token_ids)}, the vocabulary has "
                f"{self._vocab_size}"
            )
        self._num_tokens += len(token_ids)
        if not self._with_entropies:
            return Chunk(token_ids, logprobs, [nan] * len(token_ids))
        return Chunk(token_ids, logprobs, entropies())


class Facts(Struct, frozen=True):
    """The result of a probe. `layout` is of the directory that the server was started from, None
    if that cannot be read from here; `num_ranks` are data-parallel."""

    info: ServerInfo
    vocab_size: int
    layout: Layout | None
    num_ranks: int


F = TypeVar("F", bound=Facts)


class Handed(Struct, Generic[F], array_like=True, frozen=True):
    """See RemoteServer.handed; `nonce` is that with which all labels of the client begin."""

    facts: F
    salt: str
    nonce: str


async def _no_guests() -> None:
    """No other process has requests on the server."""


class RemoteServer(ABC, Generic[F]):
    """One engine server. All methods raise ServerLostError when it is gone or broken, and
    EngineError for what it refuses or what the client refuses on its behalf.

    `name` is the URL without credentials, `policy_version` that of the weights that choose its next
    token, as far as this client set it. `before_release` is awaited before a server goes on whose
    weights are half loaded: requests that other processes have on it would kill it. `on_named` is
    called when its weights have got another version, before it goes on.

    Entropies come from the `entropy_top_k` largest log-probs (-1: all). Without `vocab_size` it is
    read from the directory that the server was started from. `load_s` is the deadline in seconds of
    a load, and of a request that waits for one. `update_kv`: see weight_sync.py.
    """

    tried: ClassVar[str]  # what a version begins with that the contract tests ran with
    facts: ClassVar[type[Facts]]

    def __init__(
        self,
        url: str,
        *,
        entropy_top_k: int = 20,
        load_s: float = 600.0,
        vocab_size: int | None = None,
        api_key: str = "",
        update_kv: UpdateKV = "recompute",
    ) -> None:
        if entropy_top_k != -1 and entropy_top_k < 1:
            raise ConfigError(f"entropy_top_k must be -1 (all) or at least 1, not {entropy_top_k}")
        self.url = url
        self._http = HttpClient(url, api_key=api_key, wait_s=load_s, fresh_posts=True)
        self.name = self._http.name
        self._load_s = load_s
        self._top_k, self._given_vocab_size = entropy_top_k, vocab_size
        self._facts: F | None = None
        self._layout: Layout | None = None  # of the weights that it takes, if known
        self.policy_version = 0
        self._label = ""
        self._update_kv = update_kv
        self._run_salt = ""
        self._nonce = secrets.token_hex(8)  # in all labels of this client
        self._num_labels = 0
        self._doubt = "connect was not called"  # why its weights are unknown; empty: known
        self._is_asleep = False
        self._half_loaded = False  # since a load that was not completed: not to be sampled from
        self._changing = asyncio.Lock()  # held while the weights are changed
        self._open = asyncio.Event()  # cleared while they are being replaced
        self._open.set()
        self._ranks = Ranks()
        self._tasks: set[asyncio.Task[None]] = set()
        self.before_release: Callable[[], Awaitable[None]] = _no_guests
        self.on_named: Callable[[], None] = lambda: None

    async def connect(self, policy_version: int) -> ServerInfo:
        """Probe version, routes, model and limits, and name the weights it has `policy_version`.

        Raises ConfigError if it lacks what the run needs: what is missing, and which version or
        flag of the engine brings it.

        A server that was left paused goes on. After a load that was not completed it would
        sample nonsense, or die of a request: it serves nothing before
        load_weights has succeeded.
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
                self._doubt = ""
            return facts.info

    def handed(self) -> bytes:
        """What a client in another process needs to sample on it; see `take_over`. With the cache
        kept, salts change with each update, of which other processes learn too late: they must not
        be given such a server.
        """
        facts = replace(self._connected(), layout=None)
        return msgspec.msgpack.encode(Handed(facts, self._run_salt, self._nonce))

    def take_over(self, handed: bytes) -> None:
        """Sample on a server that the client which gave this keeps: only `generate`, `name` and
        `close` are used then. After each connection it is given anew.
        """
        found = msgspec.msgpack.decode(handed, type=Handed[self.facts])  # type: ignore[name-defined]
        self._facts, self._run_salt, self._nonce = found.facts, found.salt, found.nonce
        self._ranks.count, self._doubt = found.facts.num_ranks, ""

    @property
    def has_free_entropies(self) -> bool:
        """Whether exact entropies cost this server nothing, so that a turn is one request."""
        return False

    async def healthy(self) -> bool:
        """Whether it answers now; never raises for a server that is gone."""
        try:
            await self._check_health()
        except EngineError:
            return False
        return True

    async def _check_health(self) -> None:
        await self._http.call("GET", "/health", timeout_s=HEALTH_S)

    async def keeps_label(self) -> bool:
        """Whether the server gives back the label under which this client put its weights in
        place. False: another process answers at the URL, or another client labeled other weights.
        """
        if self._doubt:
            return False
        label = self._label
        found = await self._read_label()
        return label != self._label or found == label

    async def close(self) -> None:
        """Drop the connections, after background calls. Idempotent."""
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
        session: str,
        answer: Answer,
        on_chunk: Callable[[Chunk], None],
    ) -> None:
        """Read the whole answer to a request. One that is cancelled or fails is aborted at once: a
        server would notice a lost connection after seconds."""
        is_over = False
        try:
            with self._ranks.take(session) as rank:
                body |= self._of_rank(rank)
                async with self._http.stream(path, body, routing(session, rank)) as events:
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
        """Keys of a request that a rank is to take; most servers read the header alone."""
        return {}

    async def _known(self) -> F:
        """Wait while weights are being replaced. ServerLostError if they are unknown then."""
        await self._open.wait()
        if self._doubt:
            raise self._lost()
        return self._connected()

    @property
    def _salt(self) -> str:
        """Keeps a request from prefixes of other weights, and of other runs."""
        return self._label if self._update_kv == "keep" else self._run_salt

    def _connected(self) -> F:
        if self._facts is None:
            raise self._lost()
        return self._facts

    def _lost(self) -> ServerLostError:
        return ServerLostError(f"{self.name} cannot be used: {self._doubt}")

    def _span(self, label: str, start: int, end: int) -> VersionSpan:
        """The version that sampled the tokens from `start` to `end`. ForeignWeightsError if this
        client gave no weights of the server such a label."""
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
        """Give the weights in place, whatever they are, a label of this version."""
        self._num_labels += 1
        label = f"{policy_version}-{self._nonce}{self._num_labels}"
        await self._write_label(label)
        self._label, self.policy_version = label, policy_version
        self.on_named()

    async def _check_alone(self) -> None:
        """Raises ConfigError if several servers answer behind one URL, of which each update would
        reach one. Each question has a connection of its own, so that it may go elsewhere."""
        found = [await self._read_label(fresh=True) for _ in range(NUM_LOOKS)]
        if any(label != self._label for label in found):
            raise ConfigError(
                f"{self.name} does not return the label of its weights. Do several servers share "
                "this URL, or several API servers of one engine (--api-server-count)? List each "
                "under its own URL in engine.urls. Or does another run load weights into it?"
            )

    def _warn_untried(self, version: str) -> None:
        """Its routes are there, what they mean may differ."""
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
        """RefusedError also for an answer with success: false."""
        answer = await self._http.call_json("POST", path, body, params=params, timeout_s=timeout_s)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RefusedError(f"{self.name}{path} failed: {answer}", 200, str(answer))

    async def _abort(self, request_ids: Sequence[str]) -> None:
        """Errors do not matter: the request is gone with its server, or it has just ended."""
        for path, body in self._abort_calls(request_ids):
            with suppress(EngineError):
                await self._post(path, body)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work that no caller waits for: a cancelled caller must end at once."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # what differs

    @abstractmethod
    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        """Sample one turn by streaming; every token is in exactly one chunk, and kept nowhere else.
        While weights are being replaced a new request waits.

        Cancelling the call aborts the request on the server at once.
        """

    @abstractmethod
    async def load(self) -> ServerLoad:
        """Its own load figures."""

    @abstractmethod
    async def _probe(self) -> F:
        """Ask what the server is and can do. Raises ConfigError for what a run cannot do
        without."""

    @abstractmethod
    async def _unpause(self) -> None:
        """Resume a server that an earlier run left paused."""

    @abstractmethod
    async def _try_out(self) -> None:
        """Sample, since a probe does not show all. Raises ConfigError as `_probe`."""

    @abstractmethod
    def _abort_calls(self, request_ids: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Paths and bodies that abort these requests."""

    @abstractmethod
    async def _write_label(self, label: str) -> None:
        """Tokens from now on are labeled so."""

    @abstractmethod
    async def _read_label(self, *, fresh: bool = False) -> str:
        """The label of the weights on one server; `fresh`: asked on a connection of its own."""


async def sampled(
    server: RemoteServer[Any],
    request: Request,
    on_chunk: Callable[[Chunk], None] = lambda chunk: None,
) -> Completion:
    """One turn of a server with all its tokens; see RemoteServer.generate."""
    chunks: list[Chunk] = []

    def keep(chunk: Chunk) -> None:
        chunks.append(chunk)
        on_chunk(chunk)

    end = await server.generate(request, keep)
    return Completion(
        token_ids=[*chain.from_iterable(chunk.token_ids for chunk in chunks)],
        logprobs=[*chain.from_iterable(chunk.logprobs for chunk in chunks)],
        entropies=[*chain.from_iterable(chunk.entropies for chunk in chunks)],
        finish_reason=end.finish_reason,
        version_spans=end.version_spans,
        stop=end.stop,
        entropy_kind=end.entropy_kind,
        num_cached_tokens=end.num_cached_tokens,
    )
