"""Weight updates of a server over HTTP, from a directory or by broadcast.

load_weights, receive (a broadcast):
    check --> pause --> change --> drop old prefixes --> name --> resume
    new requests wait meanwhile in `generate`, so that each starts on the new weights

Each update gives the weights a label of policy version and nonce ("17-ab12..."). The server returns
it with tokens and on request; another process at the same URL does not know it. The nonces of one
client have a common beginning, so that rollout workers, which use the server from other processes,
recognize them too.

No request uses keys and values of other weights, in one of two ways (`update_kv`):

recompute  the pause drops the whole cache, and running requests are recomputed with the new
           weights; all versions have one salt of the prefix cache, so that prefixes are shared
keep       running requests keep their cache of the old weights; so the label is the salt, and
           requests without a token are sent again with the new one. The version is not enough,
           since a resumed run reuses its number for other weights
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

from agentenv.base.errors import EngineError, reported_as
from agentenv.base.offload import in_thread
from agentenv.contract.http_client import FailedError, RefusedError
from agentenv.contract.request import ServerLostError
from agentenv.contract.weights import (
    Bucket,
    Group,
    Manifest,
    SharedWeights,
    Wire,
    check_layout,
    check_manifest,
    read_layout,
)
from agentenv.engines.remote.base import F, RemoteServer

SLACK_S = 15.0  # an HTTP call outlives its collective call by this


class TransferRoutes(Struct, frozen=True):
    """Paths of an engine's broadcast protocol; `empty` is the body of a call without
    parameters."""

    join: str
    start: str
    receive: str
    finish: str
    leave: str
    empty: dict[str, Any] | None

    @property
    def posts(self) -> set[str]:
        """The routes, as ServerClient.routes names them."""
        paths = (self.join, self.start, self.receive, self.finish, self.leave)
        return {f"POST {path}" for path in paths}


class WeightSync(RemoteServer[F]):
    """A server whose weights can be replaced; by broadcast with the feature "broadcast" only."""

    transfer: ClassVar[TransferRoutes]
    pause_wait_s = 0.0  # duration of the last pause request, until all engines answered

    @property
    def wire(self) -> Wire:
        return "torch"

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """Pause keeping requests, load a Hugging Face directory, name the version, resume.

        No later request uses a prefix cache of another version. Raises EngineError if it refused:
        the old weights are served under the old version. Raises ServerLostError if its weights are
        unknown: it must not be used before another load has succeeded.

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
        """Free its memory: the cache, and the weights, since each way to wake it up loads some. No
        request may be running, and only `wake`, `take`, `healthy` and `close` are allowed
        afterwards. Feature "sleep" only.
        """
        async with self._changing:
            if self._tasks:  # of a load that was aborted: they resume it
                await asyncio.wait(self._tasks)
            self._unusable, self._is_asleep = "it sleeps", True
            await self._fall_asleep()

    async def wake(self) -> None:
        """Allocate the memory again, with an empty cache. The process may have been replaced, so
        that weights must be loaded before its use.
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
        """Read new weights from the learner's shared memory, as the server of this number (see
        SharedWeights.exports_of); see `load_weights` for errors. A sleeping server wakes up with
        them, and allocates its cache after `release`, which it calls after reading; one that is
        awake resumes at once. Feature "ipc" only."""
        async with self._changing:
            check_manifest([weights], self._layout)
            await self._replace(partial(self._take, weights, number, release), policy_version)
            self._is_asleep = False

    async def _replace(self, change: Callable[[], Awaitable[None]], policy_version: int) -> None:
        """Pause, replace the weights by `change`, drop old prefixes, label the weights, resume.
        After a RefusedError of `change` the weights are unchanged; after any other failure they are
        unknown."""
        before, self._unusable = self._unusable, "its weights are being replaced"
        self._open.clear()
        refused = False
        try:
            loop = asyncio.get_running_loop()
            requested_s = loop.time()
            if not self._is_asleep:  # otherwise it is paused
                await self._pause()
            self.pause_wait_s = loop.time() - requested_s
            try:
                await change()
            except RefusedError:
                await self._resume()
                refused, self._unusable = True, before
                raise
            await self._drop_prefixes()
            await self._name(policy_version)
            await self._resume()
            self._unusable, self._half_loaded = "", False
        except BaseException as error:  # including cancellations
            if refused:
                raise
            reason = str(error) or type(error).__name__
            self._unusable = f"a load of weights was not completed ({reason})"
            self._half_loaded = True
            if not isinstance(error, EngineError):
                raise
            raise self._lost() from error
        finally:
            self._open.set()

    # broadcasts

    async def join(self, group: Group, first_rank: int) -> None:
        """Join a group; returns when all its ranks have joined. The server's workers are blocked
        until then.
        """
        body = self._join_body(group, first_rank)
        await self._post(self.transfer.join, body, group.timeout_s + SLACK_S)

    async def receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        """Receive new weights while the sender sends; see `load_weights`.

        Raises ServerLostError if it may have received some of them: it must load all from a
        directory before it serves again.
        """
        async with self._changing:
            check_manifest(manifest, self._layout)
            await self._replace(partial(self._receive, group, manifest), policy_version)

    async def leave(self, group: Group) -> None:
        """Leave the group; a lost or busy server is skipped."""
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
        with reported_as(ServerLostError, "its weight version is unknown", EngineError):
            for bucket in manifest:
                body = self._bucket_body(group, bucket)
                await self._post(routes.receive, body, group.timeout_s + SLACK_S)
            await self._post(routes.finish, routes.empty, self._load_s)

    # what differs

    @abstractmethod
    async def _pause(self) -> None:
        """Stop sampling; requests keep their tokens."""

    @abstractmethod
    async def _reload(self, directory: Path) -> None:
        """Read the weights from a directory; see `_replace` for errors."""

    @abstractmethod
    async def _drop_prefixes(self) -> None:
        """Free the cache that running requests do not use. With `update_kv` "recompute", after a
        pause, that must be all of it; otherwise raises ServerLostError."""

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
        """Number of the server's ranks in a broadcast. Raises EngineError if it cannot
        participate."""

    @abstractmethod
    def _join_body(self, group: Group, first_rank: int) -> dict[str, Any]: ...

    @abstractmethod
    def _bucket_body(self, group: Group, bucket: Bucket) -> dict[str, Any]: ...

    def _leave_body(self, group: Group) -> dict[str, Any] | None:
        return None


Server = WeightSync[Any]  # of either engine
