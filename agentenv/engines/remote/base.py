"""The part that the clients of vLLM and SGLang share: requests, answers, changes of the weights.

load_weights, receive (a broadcast):
    check --> pause --> change --> drop old prefixes --> name --> resume
    requests that come meanwhile wait in `generate`, so that each starts on the new weights

Each change names the weights by a label, policy version and nonce ("17-ab12..."). The server writes
the label beside each token, gives it back when asked, and a process that has taken its place does
not know it. Labels of one client begin their nonces alike, so that a rollout worker, which samples
on the server in another process, knows them too.

No request meets keys and values of other weights, in one of two ways (`update_kv`):

recompute  the pause drops the whole cache, and running requests are computed again on the new
           weights; the salt of the prefix cache is one for all versions: prefixes are shared
keep       running requests keep theirs, which are of the old weights; so the label is the
           salt, and requests without a token are sent again under the new one. The version alone
           would not do, since a run that is resumed gives its number to other weights
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agentenv.engines.remote import (
    Answer,
    ForeignWeightsError,
    NoDescriptorError,
    ServerInfo,
    ServerLostError,
)
from agentenv.engines.remote.client import (
    FailedError,
    HttpClient,
    Ranks,
    RefusedError,
    all_of,
    routing,
)
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
NUM_LOOKS = 4  # questions by which several servers behind one URL show
LAST_S = 5.0  # for background calls when the client is closed
UpdateKV = Literal["recompute", "keep"]


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


async def _no_guests() -> None:
    """No other process has requests on the server."""


class RemoteServer(ABC, Generic[F]):
    """One engine server; see Server.

    `url` samples; `control_urls` are the API servers or workers behind it, which hold the same
    weights, if it is a router. Entropies come from the `entropy_top_k` largest log-probs (-1: all).
    Without `vocab_size` it is read from the directory that the server was started from. `load_s`
    is the deadline in seconds of a load, and of a request that waits for one. `update_kv`: see
    weight_sync.py.
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
        control_urls: Sequence[str] = (),
        update_kv: UpdateKV = "recompute",
    ) -> None:
        if entropy_top_k != -1 and entropy_top_k < 1:
            raise ConfigError(f"entropy_top_k must be -1 (all) or at least 1, not {entropy_top_k}")
        self.url = url
        self._http, *controls = (
            HttpClient(each, api_key=api_key, wait_s=load_s, fresh_posts=True)
            for each in (url, *control_urls)
        )
        self.name = self._http.name
        self._controls = controls or [self._http]
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
        self._half_loaded = False  # since a load that was not completed: not to be sampled from
        self._changing = asyncio.Lock()  # held while the weights are changed
        self._open = asyncio.Event()  # cleared while they are being replaced
        self._open.set()
        self._ranks = Ranks()
        self._tasks: set[asyncio.Task[None]] = set()
        self.before_release: Callable[[], Awaitable[None]] = _no_guests
        self.on_named: Callable[[], None] = lambda: None

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
            await self._unpause()
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
        """See Server.take_over."""
        found = msgspec.msgpack.decode(handed, type=Handed[self.facts])  # type: ignore[name-defined]
        self._facts, self._run_salt, self._nonce = found.facts, found.salt, found.nonce
        self._ranks.count, self._doubt = found.facts.num_ranks, ""

    async def healthy(self) -> bool:
        """See Server.healthy."""
        try:
            await self._check_health()
        except EngineError:
            return False
        return True

    async def _check_health(self) -> None:
        await self._http.call("GET", "/health", timeout_s=HEALTH_S)

    async def keeps_label(self) -> bool:
        """See Server.keeps_label; all servers behind the URL must give it back."""
        if self._doubt:
            return False
        label = self._label
        found = await all_of(self._read_label(each) for each in self._controls)
        return label != self._label or all(each == label for each in found)

    async def close(self) -> None:
        """Drop the connections, after background calls. Idempotent."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_S)
        for task in self._tasks:
            task.cancel()
        for http in {self._http, *self._controls}:
            await http.close()

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
                f"{self.name} sampled tokens {start} to {end} with weights labelled {label!r}, "
                "which this run did not load: was it restarted, or does someone else load weights "
                "into it?"
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
        for server in self._controls:
            found = [await self._read_label(server, fresh=True) for _ in range(NUM_LOOKS)]
            if any(label != self._label for label in found):
                raise ConfigError(
                    f"{server.name} does not give back the label of its weights. Are several "
                    "servers behind this URL, or several API servers of one (--api-server-count)? "
                    "Give each a URL of its own in engine.urls, or name those behind a router in "
                    "engine.control_urls. Or does another run load weights into it?"
                )

    def _warn_untried(self, version: str) -> None:
        """Its routes are there, what they mean may differ."""
        if not version.startswith(self.tried):
            logger.warning(
                "%s runs version %s, which was not tried (%s was, see docs/engines.md); watch "
                "parity/logprob_gap_max",
                self.name,
                version,
                self.tried.rstrip("."),
            )

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
        """Tokens from now on are labelled so."""

    @abstractmethod
    async def _read_label(self, server: HttpClient, *, fresh: bool = False) -> str:
        """The label of the weights on one server; `fresh`: asked on a connection of its own."""


async def post(
    server: HttpClient, path: str, body: Any = None, timeout_s: float | None = None, **params: str
) -> None:
    """To one server; RefusedError also for an answer with success: false."""
    answer = await server.call_json("POST", path, body, params=params, timeout_s=timeout_s)
    if isinstance(answer, dict) and answer.get("success") is False:
        raise RefusedError(f"{server.name}{path} failed: {answer}", 200, str(answer))


# Checks of probes.


def check_settings(name: str, *, speculative: Any, flag: str, quantization: str | None) -> None:
    """Raises ConfigError for what changes the samples of a server."""
    if speculative:
        raise ConfigError(
            f"{name} decodes speculatively, several tokens a step; its stop strings and log-probs "
            "were not verified then: start it without "
            f"{flag}"
        )
    if quantization:
        raise ConfigError(
            f"{name} runs quantized weights ({quantization}), which the learner's do not fit, and "
            "whose log-probs differ from its own: start it without, or only ask it, with "
            'engine.name = "openai"'
        )


def vocabulary(name: str, given: int | None, layout: Layout | None, model: str) -> int:
    """Size of the served vocabulary. Raises ConfigError if it is unknown."""
    size = given or (layout.vocab_size if layout is not None else None)
    if size is None:
        raise ConfigError(
            f"{name} serves {model!r}, whose config.json cannot be read from here: give the size "
            "of its vocabulary (vocab_size)"
        )
    return size


def read_metrics(body: bytes, names: Mapping[str, object]) -> dict[str, list[float]]:
    """Values of Prometheus text by name; a line is NAME{LABELS} VALUE. Raises EngineError for a
    value that is no finite number."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for line in body.decode(errors="replace").splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in found:
            try:
                value = float(line.rpartition(" ")[2])
            except ValueError:
                value = nan
            if not isfinite(value):
                raise EngineError(f"the metrics of a server hold no number: {line[:200]!r}")
            found[name].append(value)
    return found


SLACK_S = 15.0  # an HTTP call outlives its collective call by this


class TransferRoutes(Struct, frozen=True):
    """Paths by which an engine takes weights from a broadcast; `empty` is the body of a call
    without parameters."""

    join: str
    start: str
    receive: str
    finish: str
    leave: str
    empty: dict[str, Any] | None

    @property
    def posts(self) -> set[str]:
        """The routes, as HttpClient.routes names them."""
        paths = (self.join, self.start, self.receive, self.finish, self.leave)
        return {f"POST {path}" for path in paths}


class WeightSync(RemoteServer[F]):
    """A server whose weights can be replaced; see Server, and Receiver for weights by broadcast."""

    transfer: ClassVar[TransferRoutes]

    @property
    def wire(self) -> Wire:
        return "torch"

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """See Server.load_weights. The server must see `source` under the same path."""
        self._connected()
        async with self._changing:
            layout = await in_thread(read_layout, source)
            if self._layout is not None:
                check_layout(source, layout, self._layout)
            await self._replace(partial(self._reload, layout.directory), policy_version)
            self._layout = self._layout or layout

    async def sleep(self) -> None:
        """See Server.sleep."""
        async with self._changing:
            if self._tasks:  # of a load that was broken off: they resume it
                await asyncio.wait(self._tasks)
            self._doubt = "it sleeps"
            await self._fall_asleep()

    async def wake(self) -> None:
        """See Server.wake."""
        async with self._changing:
            await self._wake()

    async def _replace(self, change: Callable[[], Awaitable[None]], policy_version: int) -> None:
        """Pause, let `change` put other weights in place, drop old prefixes, name the weights,
        resume. A RefusedError of `change` says that nothing was touched; after any other failure
        the weights are unknown."""
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

    # broadcasts

    async def num_ranks(self) -> int:
        """See Receiver.num_ranks."""
        return sum([await self._num_workers(each) for each in self._controls])

    async def join(self, group: Group, first_rank: int) -> None:
        """See Receiver.join."""
        calls = []
        for each in self._controls:
            body = self._join_body(group, first_rank)
            first_rank += await self._num_workers(each)
            calls.append(post(each, self.transfer.join, body, group.timeout_s + SLACK_S))
        await all_of(calls)

    async def receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        """See Receiver.receive."""
        async with self._changing:
            check_manifest(manifest, self._layout)
            await self._replace(partial(self._receive, group, manifest), policy_version)

    async def leave(self, group: Group) -> None:
        """See Receiver.leave."""
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
            raise ServerLostError(f"its weights are unknown: {error}") from error

    # what differs

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
