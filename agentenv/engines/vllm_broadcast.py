"""Weights by broadcast into a vLLM server whose workers have the backend `agentenv`
(vllm_plugin/agentenv_vllm_broadcast.py, an entry point of vLLM that is installed beside it)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from agentenv.engines.checkpoint_layout import Layout, check_manifest
from agentenv.engines.http import FailedError, HttpClient, RefusedError
from agentenv.engines.server import ServerLostError
from agentenv.engines.transfer import Group, Manifest
from agentenv.engines.vllm_control import Control
from agentenv.errors import EngineError

JOIN, LEAVE = "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"
START, RECEIVE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
SLACK_S = 15.0  # an HTTP call outlives the collective call behind it by this

Served = Callable[[], Layout | None]
Replace = Callable[[Callable[[], Awaitable[None]], int], Awaitable[None]]


class VLLMReceiver:
    """See Receiver. `served` tells what parameters the server has. `replace` is the server's: it
    pauses, changes the weights, names the version and resumes; `lock` is held meanwhile."""

    def __init__(
        self, control: Control, lock: asyncio.Lock, served: Served, replace: Replace
    ) -> None:
        self._control, self._lock, self._served, self._replace = control, lock, served, replace

    async def num_ranks(self) -> int:
        return sum([await _num_workers(server) for server in self._control.servers])

    async def join(self, group: Group, first_rank: int) -> None:
        calls = []
        for server in self._control.servers:
            info = {
                "master_address": group.address.host,
                "master_port": group.address.port,
                "rank_offset": first_rank,
                "world_size": group.world_size,
                "group_name": group.name,
                "backend": group.address.backend,
                "timeout_s": group.timeout_s,
            }
            first_rank += await _num_workers(server)
            timeout_s = group.timeout_s + SLACK_S
            calls.append(server.call("POST", JOIN, {"init_info": info}, timeout_s=timeout_s))
        await _all(calls)

    async def receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        async with self._lock:
            check_manifest(manifest, self._served())
            await self._replace(partial(self._receive, group, manifest), policy_version)

    async def leave(self, group: Group) -> None:
        with suppress(EngineError):
            await self._control.post(LEAVE, timeout_s=SLACK_S)

    async def _receive(self, group: Group, manifest: Manifest) -> None:
        try:
            await self._control.post(START)
        except FailedError:  # an earlier update was broken off between two buckets
            with suppress(EngineError):
                await self._control.post(FINISH)
            await self._control.post(START)
        try:
            for bucket in manifest.buckets:
                update = {
                    "names": bucket.names,
                    "dtype_names": bucket.dtypes,
                    "shapes": bucket.shapes,
                }
                timeout_s = group.timeout_s * len(bucket.names) + SLACK_S
                await self._control.post(RECEIVE, {"update_info": update}, timeout_s=timeout_s)
            timeout_s = self._control.servers[0].timeouts.load_s
            await self._control.post(FINISH, timeout_s=timeout_s)
        except RefusedError as error:
            raise ServerLostError(f"nobody knows what weights it has: {error}") from error


async def _num_workers(server: HttpClient) -> int:
    found = await server.call_json("GET", "/get_world_size", params={"include_dp": "true"})
    return int(found["world_size"])


async def _all(calls: list[Any]) -> None:
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
