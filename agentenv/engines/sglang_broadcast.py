"""Weights by broadcast into an SGLang server; NCCL and gloo are both its own."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from agentenv.engines.checkpoint_layout import check_manifest
from agentenv.engines.http import HttpClient, RefusedError, all_of
from agentenv.engines.served import Replace, Served
from agentenv.engines.server import ServerLostError
from agentenv.engines.sglang_control import Control, post
from agentenv.engines.transfer import Group, Manifest
from agentenv.errors import EngineError

JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
START, RECEIVE = "/begin_weight_update", "/update_weights_from_distributed"
FINISH = "/end_weight_update"
SLACK_S = 15.0  # an HTTP call outlives the collective call behind it by this


class SGLangReceiver:
    """See Receiver."""

    def __init__(self, control: Control, served: Served, replace: Replace) -> None:
        self._control, self._served, self._replace = control, served, replace

    async def num_ranks(self) -> int:
        return sum([await _num_workers(worker) for worker in self._control.servers])

    async def join(self, group: Group, first_rank: int) -> None:
        calls = []
        for worker in self._control.servers:
            body = {
                "master_address": group.address.host,
                "master_port": group.address.port,
                "rank_offset": first_rank,
                "world_size": group.world_size,
                "group_name": group.name,
                "backend": group.address.backend,
            }
            first_rank += await _num_workers(worker)
            calls.append(post(worker, JOIN, body, group.timeout_s + SLACK_S))
        await all_of(calls)

    async def receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        async with self._served.lock:
            check_manifest(manifest, self._served.layout)
            change = partial(self._receive, group, manifest, policy_version)
            await self._replace(change, policy_version)

    async def leave(self, group: Group) -> None:
        with suppress(EngineError):
            await self._control.post(LEAVE, {"group_name": group.name}, timeout_s=SLACK_S)

    async def _receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        try:
            await self._control.post(START, {})
        except RefusedError:  # an earlier update was broken off
            with suppress(EngineError):
                await self._control.post(FINISH, {})
            await self._control.post(START, {})
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
                await self._control.post(RECEIVE, body, timeout_s=timeout_s)
            await self._control.post(FINISH, {})
        except EngineError as error:
            with suppress(EngineError):  # an open session would refuse the next one
                await self._control.post(FINISH, {})
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
