"""Weights by broadcast into an SGLang server; NCCL and gloo are both its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from agentenv.engines.checkpoint_layout import Layout, check_manifest
from agentenv.engines.http import HttpClient, RefusedError
from agentenv.engines.server import ServerLostError
from agentenv.engines.transfer import Group, Manifest
from agentenv.errors import EngineError

JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
START, RECEIVE = "/begin_weight_update", "/update_weights_from_distributed"
FINISH = "/end_weight_update"
SLACK_S = 15.0  # an HTTP call outlives the collective call behind it by this

Served = Callable[[], Layout | None]
Replace = Callable[[Callable[[], Awaitable[None]], int], Awaitable[None]]


class Post(Protocol):
    """POST to all workers; RefusedError also for an answer that says success: false."""

    async def __call__(
        self, path: str, body: dict[str, Any], *, timeout_s: float | None = None
    ) -> Any: ...


class SGLangReceiver:
    """See Receiver. `served` tells what parameters the server has. `replace` is the server's: it
    pauses, changes the weights, flushes and goes on; `lock` is held meanwhile."""

    def __init__(
        self,
        workers: Sequence[HttpClient],
        post: Post,
        post_one: Callable[[HttpClient, str, dict[str, Any], float | None], Awaitable[Any]],
        lock: asyncio.Lock,
        served: Served,
        replace: Replace,
    ) -> None:
        self._workers, self._post, self._post_one = workers, post, post_one
        self._lock, self._served, self._replace = lock, served, replace

    async def num_ranks(self) -> int:
        return sum([await _num_workers(worker) for worker in self._workers])

    async def join(self, group: Group, first_rank: int) -> None:
        calls = []
        for worker in self._workers:
            body = {
                "master_address": group.address.host,
                "master_port": group.address.port,
                "rank_offset": first_rank,
                "world_size": group.world_size,
                "group_name": group.name,
                "backend": group.address.backend,
            }
            first_rank += await _num_workers(worker)
            calls.append(self._post_one(worker, JOIN, body, group.timeout_s + SLACK_S))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        async with self._lock:
            check_manifest(manifest, self._served())
            change = partial(self._receive, group, manifest, policy_version)
            await self._replace(change, policy_version)

    async def leave(self, group: Group) -> None:
        with suppress(EngineError):
            await self._post(LEAVE, {"group_name": group.name}, timeout_s=SLACK_S)

    async def _receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        try:
            await self._post(START, {})
        except RefusedError:  # an earlier update was broken off
            with suppress(EngineError):
                await self._post(FINISH, {})
            await self._post(START, {})
        try:
            for bucket in manifest.buckets:
                body = {
                    "names": bucket.names,
                    "dtypes": bucket.dtypes,
                    "shapes": bucket.shapes,
                    "group_name": group.name,
                    "flush_cache": False,  # done once, when all is there
                    "abort_all_requests": False,
                    "weight_version": str(policy_version),
                }
                timeout_s = group.timeout_s * len(bucket.names) + SLACK_S
                await self._post(RECEIVE, body, timeout_s=timeout_s)
            await self._post(FINISH, {})
        except EngineError as error:
            with suppress(EngineError):  # an open session would refuse the next one
                await self._post(FINISH, {})
            raise ServerLostError(f"nobody knows what weights it has: {error}") from error


async def _num_workers(worker: HttpClient) -> int:
    """Raises EngineError where SGLang's own workers would take the same rank."""
    info = await worker.call_json("GET", "/server_info")
    for name in ("dp_size", "pp_size"):
        if int(info.get(name, 1)) > 1:
            raise EngineError(
                f"{worker.name}: SGLang takes no broadcast with {name} = {info[name]}; use "
                'engine.weights = "directory"'
            )
    return int(info["tp_size"])
