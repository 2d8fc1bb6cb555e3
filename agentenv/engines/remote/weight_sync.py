"""What the clients of vLLM and SGLang share: the weights of a server behind HTTP.

load_weights, receive (a broadcast):
    check --> pause --> change --> drop old prefixes --> name --> resume
    requests that come meanwhile wait in `generate`, so that each starts on the new weights

Each change names the weights by a label, policy version and nonce ("17-ab12..."). The server writes
the label beside each token, gives it back when asked, and a process that has taken its place does
not know it. Labels of one client begin their nonces alike, so that whoever samples on the server
for it, in another process, knows them too.

No request meets keys and values of other weights, in one of two ways (`update_kv`):

recompute  the pause drops the whole cache, and running requests are computed again on the new
           weights; the salt of the prefix cache is one for all versions: prefixes are shared
keep       running requests keep what they have, which is of the old weights; so the label is the
           salt, and requests without a token are sent again under the new one. The version alone
           would not do, since a run that is resumed gives its number to other weights
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast
from urllib.parse import quote

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from agentenv.engines.remote.client import FailedError, HttpClient, RefusedError, all_of
from agentenv.engines.remote.server import ForeignWeightsError, PartEnd, ServerInfo, ServerLostError
from agentenv.engines.remote.weights import (
    Bucket,
    Group,
    Layout,
    Manifest,
    Wire,
    check_layout,
    check_manifest,
    read_layout,
)
from agentenv.errors import ConfigError, EngineError
from agentenv.offload import in_thread
from agentenv.types import Chunk, VersionSpan

logger = logging.getLogger(__name__)

HEALTH_S = 5.0
NUM_LOOKS = 4  # by which several servers behind one URL show
SPECULATIVE = (
    "{} decodes speculatively, several tokens a step, and nobody has shown that it ends turns at "
    "stop strings and tells log-probs as it does otherwise: start it without {}"
)
QUANTIZED = (
    "{} runs quantized weights ({}), which the learner's do not fit, and whose log-probs differ "
    'from its own: start it without, or only ask it, with engine.name = "openai"'
)
UpdateKV = Literal["recompute", "keep"]
LAST_S = 5.0  # for what is under way when the client is closed
SLACK_S = 15.0  # an HTTP call outlives the collective call behind it by this


class TransferRoutes(Struct, frozen=True):
    """Paths by which an engine takes weights from a broadcast; `empty` is the body of a call that
    has nothing to say."""

    join: str
    start: str
    receive: str
    finish: str
    leave: str
    empty: dict[str, Any] | None


# Entropy of a sampled-from distribution when only its largest log-probabilities are known.


def check_top_k(top_k: int) -> None:
    """Raises ConfigError for what is no number of largest log-probs to take entropies from."""
    if top_k != -1 and top_k < 1:
        raise ConfigError(f"entropy_top_k must be -1 (all) or at least 1, not {top_k}")


def top_k_entropies(positions: Sequence[Sequence[float]]) -> list[float]:
    """-sum p ln p - r ln r in nats of each position, r = 1 - sum p being all that is left, taken as
    one token.

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


class Answer:
    """What a server streams for one request, read event by event. Lists of a chunk are equally
    long."""

    def __init__(
        self,
        server: str,
        entropy_kind: Literal["exact", "top_k"],
        name_span: Callable[[str, int, int], VersionSpan],
        vocab_size: int,
        *,
        with_entropies: bool = True,
    ) -> None:
        """`name_span` turns the label of weights into their version; see RemoteServer."""
        self._with_entropies = with_entropies
        self._server, self._name_span, self._vocab_size = server, name_span, vocab_size
        self._reason: str | None = None  # why the turn ended
        self._spans: list[LabelledSpan] = []
        self._entropy_kind: Literal["exact", "top_k"] = entropy_kind
        self._stop: str | None = None
        self._num_cached_tokens = 0
        self._num_tokens = 0  # so far

    def finish(self) -> PartEnd:
        """How it ended. ServerLostError if the stream ended without a finish reason."""
        if self._reason not in ("stop", "length", "abort"):
            raise ServerLostError(f"{self._server} ended the stream with {self._reason!r}")
        spans = [self._name_span(span.version, span.start, span.end) for span in self._spans]
        if [0, *(s.end for s in spans)] != [*(s.start for s in spans), self._num_tokens]:
            raise EngineError(
                f"{self._server} gave version spans {spans} for {self._num_tokens} tokens"
            )
        return PartEnd(
            cast(Literal["stop", "length", "abort"], self._reason),
            spans,
            self._num_tokens,
            self._stop,
            self._entropy_kind,
            self._num_cached_tokens,
        )

    def _take(self, token_ids: list[int], logprobs: list[float], entropies: list[float]) -> Chunk:
        """The turn goes on by these tokens."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise EngineError(
                f"{self._server} sampled the token {max(token_ids)}, the vocabulary has "
                f"{self._vocab_size}"
            )
        self._num_tokens += len(token_ids)
        return Chunk(token_ids, logprobs, entropies)


SESSION_HEADER, RANK_HEADER = "X-Session-ID", "X-data-parallel-rank"
MAX_SESSIONS = 65536  # whose rank is remembered
MAX_SESSION_CHARS = 200  # servers and proxies take headers of some kB in all
PLAIN = re.compile(r"[!-$&-~]+( +[!-$&-~]+)*")  # what a header can hold, but for %


class Ranks:
    """Data-parallel ranks behind one URL, each with a prefix cache of its own: a session stays
    with one, the rank that was least loaded when the session began."""

    def __init__(self) -> None:
        self.count = 1
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._num_running: Counter[int] = Counter()

    @contextmanager
    def take(self, session: str) -> Iterator[int | None]:
        """The rank for a request; None where it is the server's to choose."""
        if self.count == 1 or not session:
            yield None
            return
        rank = self._homes.get(session, self.count)
        if rank >= self.count:
            rank = min(range(self.count), key=self._num_running.__getitem__)
        self._homes[session] = rank
        self._homes.move_to_end(session)
        if len(self._homes) > MAX_SESSIONS:
            self._homes.popitem(last=False)
        self._num_running[rank] += 1
        try:
            yield rank
        finally:
            self._num_running[rank] -= 1


def routing(session: str, rank: int | None) -> dict[str, str]:
    """Headers that tell routers, and a server with ranks, where the prefixes of a session are. A
    session may have any name: one that no header can hold is written as in a URL, a long one is
    known by its hash."""
    name = session
    if not PLAIN.fullmatch(session):
        name = quote(session, errors="surrogatepass")
    if len(name) > MAX_SESSION_CHARS:
        name = blake2b(name.encode(), digest_size=16).hexdigest()
    headers = {SESSION_HEADER: name} if session else {}
    return headers if rank is None else headers | {RANK_HEADER: str(rank)}


class Facts(Struct, frozen=True):
    """What a probe found out. `layout` is of the directory that the server was started from, None
    if that cannot be read from here; `num_ranks` are data-parallel."""

    info: ServerInfo
    vocab_size: int
    layout: Layout | None
    num_ranks: int


F = TypeVar("F", bound=Facts)


class Handed(Struct, Generic[F], array_like=True, frozen=True):
    """See Server.handed; `nonce` is that with which all labels of the client begin."""

    facts: F
    salt: str
    nonce: str


async def _nobody() -> None:
    """No other process has requests on it."""


class RemoteServer(ABC, Generic[F]):
    """One engine server; see Server, and Receiver for weights by broadcast.

    `url` samples; `control_urls` are the API servers or workers behind it, which hold the same
    weights, if it is a router. Entropies come from the `entropy_top_k` largest log-probs (-1: all).
    Without `vocab_size` it is read from the directory that the server was started from. `load_s`
    is the deadline in seconds of a load, and of a request that waits for one. `update_kv`: see
    above.
    """

    transfer: ClassVar[TransferRoutes]
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
        control_urls: Sequence[str] = (),
        update_kv: UpdateKV = "recompute",
    ) -> None:
        check_top_k(entropy_top_k)
        self.url = url
        self._http, *controls = (
            HttpClient(each, api_key=api_key, wait_s=load_s, fresh_posts=True)
            for each in (url, *control_urls)
        )
        self._controls = controls or [self._http]
        self._load_s = load_s
        self._top_k, self._given_vocab_size = entropy_top_k, vocab_size
        self._facts: F | None = None
        self._layout: Layout | None = None  # of the weights that it takes, if known
        self._policy_version = 0
        self._label = ""
        self._update_kv = update_kv
        self._run_salt = ""
        self._nonce = secrets.token_hex(8)  # in all labels of this client
        self._num_labels = 0
        self._doubt = "connect was not called"  # why nobody knows what it serves; empty: known
        self._half_loaded = False  # since a load that was not completed: not to be sampled from
        self._changing = asyncio.Lock()  # held by whoever changes the weights
        self._open = asyncio.Event()  # cleared while they are being replaced
        self._open.set()
        self._ranks = Ranks()
        self._tasks: set[asyncio.Task[None]] = set()
        self.before_release: Callable[[], Awaitable[None]] = _nobody
        self.on_named: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        return self._http.name

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def wire(self) -> Wire:
        return "torch"

    async def connect(self, policy_version: int) -> ServerInfo:
        """See Server.connect; a server that was left paused goes on. After a load that was not
        completed it would sample nonsense, or die of a request: it serves nothing before
        load_weights has succeeded."""
        async with self._changing:
            facts = self._facts = await self._probe()
            self._layout = facts.layout
            self._ranks.count = facts.num_ranks
            self._run_salt = secrets.token_hex(8)
            self._warn_untried(facts.info.version)
            await self._go_on()
            await self._name(policy_version)
            await self._check_alone()
            if not self._half_loaded:
                await self._try_out()
                self._doubt = ""
            return facts.info

    def handed(self) -> bytes:
        """See Server.handed. With the cache kept, salts change with each update, which other
        processes hear of too late: they must not be given such a server."""
        facts = replace(self._connected(), layout=None)
        return msgspec.msgpack.encode(Handed(facts, self._run_salt, self._nonce))

    def take_over(self, handed: bytes) -> None:
        found = msgspec.msgpack.decode(handed, type=Handed[self.facts])  # type: ignore[name-defined]
        self._facts, self._run_salt, self._nonce = found.facts, found.salt, found.nonce
        self._ranks.count, self._doubt = found.facts.num_ranks, ""

    async def healthy(self) -> bool:
        try:
            await self._http.call("GET", "/health", timeout_s=HEALTH_S)
        except EngineError:
            return False
        return True

    async def keeps_label(self) -> bool:
        """See Server.keeps_label; all servers behind the URL must give it back."""
        if self._doubt:
            return False
        label = self._label
        found = await all_of(self._read_label(each) for each in self._controls)
        return label != self._label or all(each == label for each in found)

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """See Server.load_weights. The server must see `source` under the same path."""
        async with self._changing:
            layout = await in_thread(read_layout, source)
            if self._layout is not None:
                check_layout(source, layout, self._layout)
            await self._replace(partial(self._reload, layout.directory), policy_version)
            self._layout = self._layout or layout

    async def sleep(self) -> None:
        async with self._changing:
            if self._tasks:  # of a load that was broken off: they resume it
                await asyncio.wait(self._tasks)
            self._doubt = "it sleeps"
            await self._fall_asleep()

    async def wake(self) -> None:
        async with self._changing:
            await self._wake()

    async def close(self) -> None:
        """Drop the connections, after what is under way in the background. Idempotent."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_S)
        for task in self._tasks:
            task.cancel()
        for http in {self._http, *self._controls}:
            await http.close()

    # weights by broadcast

    async def num_ranks(self) -> int:
        return sum([await self._num_workers(each) for each in self._controls])

    async def join(self, group: Group, first_rank: int) -> None:
        calls = []
        for each in self._controls:
            body = self._join_body(group, first_rank)
            first_rank += await self._num_workers(each)
            calls.append(post(each, self.transfer.join, body, group.timeout_s + SLACK_S))
        await all_of(calls)

    async def receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        async with self._changing:
            check_manifest(manifest, self._layout)
            await self._replace(partial(self._receive, group, manifest), policy_version)

    async def leave(self, group: Group) -> None:
        with suppress(EngineError):
            await self._post(self.transfer.leave, self._leave_body(group), SLACK_S)

    async def _receive(self, group: Group, manifest: Manifest) -> None:
        routes = self.transfer
        try:
            await self._post(routes.start, routes.empty)
        except (RefusedError, FailedError):  # an earlier update was broken off between two buckets
            with suppress(EngineError):
                await self._post(routes.finish, routes.empty)
            await self._post(routes.start, routes.empty)
        try:
            for bucket in manifest.buckets:
                body = self._bucket_body(group, bucket)
                await self._post(routes.receive, body, group.timeout_s + SLACK_S)
            await self._post(routes.finish, routes.empty, self._load_s)
        except EngineError as error:
            raise ServerLostError(f"nobody knows what weights it has: {error}") from error

    # a change of weights

    async def _replace(self, change: Callable[[], Awaitable[None]], policy_version: int) -> None:
        """Pause, let `change` put other weights in place, drop old prefixes, name the weights, go
        on. A RefusedError of `change` says that nothing was touched; after any other failure
        nobody knows what the server has."""
        before, self._doubt = self._doubt, "its weights are being replaced"
        self._open.clear()
        refused = False
        try:
            await self._pause()
            try:
                await change()
            except RefusedError:
                await self._resume()
                refused, self._doubt = True, before
                raise
            await self._drop_prefixes()
            await self._name(policy_version)
            await self._resume()
            self._doubt, self._half_loaded = "", False
        except BaseException as error:  # a cancellation too
            if refused:
                raise
            reason = str(error) or type(error).__name__
            self._doubt = f"a load of weights was not completed ({reason})"
            self._half_loaded = True
            if not isinstance(error, EngineError):
                raise
            raise self._lost() from error
        finally:
            self._open.set()

    async def _name(self, policy_version: int) -> None:
        """Give the weights in place, whatever they are, a label of this version."""
        self._num_labels += 1
        label = f"{policy_version}-{self._nonce}{self._num_labels}"
        await self._write_label(label)
        self._label, self._policy_version = label, policy_version
        self.on_named()

    async def _check_alone(self) -> None:
        """Raises ConfigError if several servers answer behind one URL, of which each update would
        reach one. Each question has a connection of its own, so that it may go elsewhere."""
        for server in self._controls:
            found = [await self._read_label(server, fresh=True) for _ in range(NUM_LOOKS)]
            if any(label != self._label for label in found):
                raise ConfigError(
                    f"{server.name} does not give back the label of its weights. Are several "
                    "servers behind this URL, or several API servers of one (--api-server-count)? "
                    "Give each a URL of its own in engine.urls, or name those behind a router in "
                    "engine.control_urls. Or does another run load weights into it?"
                )

    async def _known(self) -> None:
        """Wait while weights are being replaced. ServerLostError if nobody knows them then."""
        await self._open.wait()
        if self._doubt:
            raise self._lost()

    @property
    def _salt(self) -> str:
        """What keeps a request from prefixes of other weights, and of other runs."""
        return self._label if self._update_kv == "keep" else self._run_salt

    def _connected(self) -> F:
        if self._facts is None:
            raise self._lost()
        return self._facts

    def _warn_untried(self, version: str) -> None:
        """Tell of a version that nobody tried: its routes are there, what they mean may differ."""
        if not version.startswith(self.tried):
            logger.warning(
                "%s runs version %s, which was not tried (%s was, see docs/engines.md); watch "
                "parity/logprob_gap_max",
                self.name,
                version,
                self.tried.rstrip("."),
            )

    def _lost(self) -> ServerLostError:
        return ServerLostError(f"{self.name} cannot be used: {self._doubt}")

    def _span(self, label: str, start: int, end: int) -> VersionSpan:
        """The version that sampled the tokens from `start` to `end`. ForeignWeightsError if this
        client gave no weights of the server such a label."""
        version, _, nonce = label.rpartition("-")
        if not nonce.startswith(self._nonce):
            raise ForeignWeightsError(
                f"{self.name} sampled tokens {start} to {end} with weights labelled {label!r}, "
                "which this run did not load: was it restarted, or does someone else load weights "
                "into it?"
            )
        return VersionSpan(int(version), start, end)

    async def _post(
        self, path: str, body: Any = None, timeout_s: float | None = None, **params: str
    ) -> None:
        """To all API servers at once, until each has answered. RefusedError if all refused, else
        any failure is a ServerLostError: they may differ now."""
        calls = (post(each, path, body, timeout_s, **params) for each in self._controls)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in errors:
            if not isinstance(error, RefusedError):
                raise error
        if errors and len(errors) < len(outcomes):
            raise ServerLostError(f"not all servers did it: {errors[0]}") from errors[0]
        if errors:
            raise errors[0]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work that no caller waits for: a cancelled caller must end at once."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # what differs

    @abstractmethod
    async def _probe(self) -> F:
        """Ask what the server is and can do. Raises ConfigError for what a run cannot do
        without."""

    @abstractmethod
    async def _go_on(self) -> None:
        """Resume a server that an earlier run left paused."""

    @abstractmethod
    async def _try_out(self) -> None:
        """Sample, since a probe does not tell all. Raises ConfigError as `_probe`."""

    @abstractmethod
    async def _pause(self) -> None:
        """Nothing is sampled from here on; requests keep their tokens."""

    @abstractmethod
    async def _reload(self, directory: Path) -> None:
        """Read the weights from a directory; see `_replace` for errors."""

    @abstractmethod
    async def _drop_prefixes(self) -> None:
        """Free what no running request holds. With `update_kv` "recompute", after a pause, that
        is everything, else ServerLostError."""

    @abstractmethod
    async def _write_label(self, label: str) -> None:
        """Tokens from now on are labelled so."""

    @abstractmethod
    async def _read_label(self, server: HttpClient, *, fresh: bool = False) -> str:
        """The label of the weights on one server; `fresh`: asked on a connection of its own."""

    @abstractmethod
    async def _resume(self) -> None: ...

    @abstractmethod
    async def _fall_asleep(self) -> None: ...

    @abstractmethod
    async def _wake(self) -> None: ...

    @abstractmethod
    async def _num_workers(self, server: HttpClient) -> int:
        """Ranks that one server takes in a broadcast; EngineError if it cannot take part."""

    @abstractmethod
    def _join_body(self, group: Group, first_rank: int) -> dict[str, Any]: ...

    @abstractmethod
    def _bucket_body(self, group: Group, bucket: Bucket) -> dict[str, Any]: ...

    def _leave_body(self, group: Group) -> dict[str, Any] | None:
        return None


async def post(
    server: HttpClient,
    path: str,
    body: Any = None,
    timeout_s: float | None = None,
    **params: str,
) -> Any:
    """To one server; RefusedError also for an answer that says success: false."""
    answer = await server.call_json("POST", path, body, params, timeout_s)
    if isinstance(answer, dict) and answer.get("success") is False:
        raise RefusedError(f"{server.name}{path} failed: {answer}", 200, str(answer))
    return answer


def metric(line: str) -> float:
    """The value of a line of Prometheus text. Raises EngineError unless it is a finite number."""
    try:
        value = float(line.rpartition(" ")[2])
    except ValueError:
        value = nan
    if not isfinite(value):
        raise EngineError(f"the metrics of a server hold no number: {line[:200]!r}")
    return value


def vocabulary(name: str, given: int | None, layout: Layout | None, model: str) -> int:
    """Size of the served vocabulary. Raises ConfigError if nobody knows it."""
    size = given or (layout.vocab_size if layout is not None else None)
    if size is None:
        raise ConfigError(
            f"{name} serves {model!r}, whose config.json cannot be read from here: give the size "
            "of its vocabulary (vocab_size)"
        )
    return size
