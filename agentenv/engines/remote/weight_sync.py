"""Weight updates of a server over HTTP, from a directory or by broadcast.

load_weights, receive (a broadcast):
    check --> pause --> change --> drop old prefixes --> name --> resume
    requests that come meanwhile wait in `generate`, so that each starts on the new weights

Each change names the weights by a label, policy version and nonce ("17-ab12..."). The server writes
the label of each token, returns it on request, and a process that has taken its place does
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
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from msgspec import Struct

from agentenv.engines.remote import ServerLostError
from agentenv.engines.remote.base import F, RemoteServer
from agentenv.engines.remote.client import (
    FailedError,
    RefusedError,
)
from agentenv.engines.remote.weights import (
    Bucket,
    Group,
    Manifest,
    SharedWeights,
    Wire,
    check_layout,
    check_manifest,
    read_layout,
)
from agentenv.errors import EngineError
from agentenv.offload import in_thread

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
    """A server whose weights can be replaced; by broadcast with the feature "broadcast" only."""

    transfer: ClassVar[TransferRoutes]
    pause_wait_s = 0.0  # the last pause, from asking for it until all had answered

    @property
    def wire(self) -> Wire:
        return "torch"

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """Pause keeping requests, load a Hugging Face directory, name the version, resume.

        No later request meets a prefix cache of another version. EngineError: refused, the old
        weights are served under the old version. ServerLostError: its weights are unknown,
        it must not be used before another load has succeeded.

        The server must see `source` under the same path.
        """
        self._connected()
        async with self._changing:
            layout = await in_thread(read_layout, source)
            if self._layout is not None:
                check_layout(source, layout, self._layout)
            await self._replace(partial(self._reload, layout.directory), policy_version)
            self._layout = self._layout or layout

    async def sleep(self) -> None:
        """Give its memory back: no cache, and no weights, since each way to wake it up brings
        some. Nothing may be running on it, and nothing may be asked of it but `wake`, `take`,
        `healthy` and `close`. Feature "sleep" only.
        """
        async with self._changing:
            if self._tasks:  # of a load that was aborted: they resume it
                await asyncio.wait(self._tasks)
            self._doubt, self._is_asleep = "it sleeps", True
            await self._fall_asleep()

    async def wake(self) -> None:
        """Take the memory again, with an empty cache. The process may be another one than the one
        that fell asleep, so that weights have to be loaded before it is used.
        """
        async with self._changing:
            await self._wake()
            self._is_asleep = False

    async def take(
        self,
        weights: SharedWeights,
        number: int,
        policy_version: int,
        release: Callable[[], Awaitable[None]],
    ) -> None:
        """Read new weights from memory that the learner shares with the server of this number (see
        SharedWeights.exports_of); see `load_weights` for errors. A server that sleeps wakes up with
        them, and takes the memory of its cache after `release`, which it calls when it has read
        all; one that is awake resumes at once. Feature "ipc" only."""
        async with self._changing:
            check_manifest(weights.manifest, self._layout)
            await self._replace(partial(self._take, weights, number, release), policy_version)
            self._is_asleep = False

    async def _replace(self, change: Callable[[], Awaitable[None]], policy_version: int) -> None:
        """Pause, let `change` put other weights in place, drop old prefixes, name the weights,
        resume. A RefusedError of `change` says that nothing was touched; after any other failure
        the weights are unknown."""
        before, self._doubt = self._doubt, "its weights are being replaced"
        self._open.clear()
        refused = False
        try:
            loop = asyncio.get_running_loop()
            asked_s = loop.time()
            if not self._is_asleep:  # which is paused
                await self._pause()
            self.pause_wait_s = loop.time() - asked_s
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

    async def join(self, group: Group, first_rank: int) -> None:
        """Returns when all ranks of the group have joined. Its workers serve nothing until
        then.
        """
        body = self._join_body(group, first_rank)
        await self._post(self.transfer.join, body, group.timeout_s + SLACK_S)

    async def receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        """Take new weights while the sender sends; see `load_weights`.

        ServerLostError: it may have some of them, and must load all from a directory before it
        serves again.
        """
        async with self._changing:
            check_manifest(manifest, self._layout)
            await self._replace(partial(self._receive, group, manifest), policy_version)

    async def leave(self, group: Group) -> None:
        """End its part of the group; a server that is gone or busy has none."""
        with suppress(EngineError):
            await self._post(self.transfer.leave, self._leave_body(group), SLACK_S)

    async def _receive(self, group: Group, manifest: Manifest) -> None:
        routes = self.transfer
        try:
            await self._post(routes.start, routes.empty)
        except (RefusedError, FailedError):  # an earlier update was aborted between two buckets
            with suppress(EngineError):
                await self._post(routes.finish, routes.empty)
            await self._post(routes.start, routes.empty)
        try:
            for bucket in manifest.buckets:
                body = self._bucket_body(group, bucket)
                await self._post(routes.receive, body, group.timeout_s + SLACK_S)
            await self._post(routes.finish, routes.empty, self._load_s)
        except EngineError as error:
            raise ServerLostError(f"its weight version is unknown: {error}") from error

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

    async def _take(
        self, weights: SharedWeights, number: int, release: Callable[[], Awaitable[None]]
    ) -> None:
        raise NotImplementedError

    @abstractmethod
    async def num_ranks(self) -> int:
        """Ranks that the server takes in a broadcast; EngineError if it cannot take part."""

    @abstractmethod
    def _join_body(self, group: Group, first_rank: int) -> dict[str, Any]: ...

    @abstractmethod
    def _bucket_body(self, group: Group, bucket: Bucket) -> dict[str, Any]: ...

    def _leave_body(self, group: Group) -> dict[str, Any] | None:
        return None


Server = WeightSync[Any]  # of either engine
