"""Weights by broadcast into a vLLM server whose workers have the backend `agentenv`
(vllm_plugin/agentenv_vllm_broadcast.py, an entry point of vLLM that is installed beside it)."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from agentenv.engines.checkpoint_layout import check_manifest
from agentenv.engines.http import FailedError, HttpClient, RefusedError, all_of
from agentenv.engines.served import Replace, Served
from agentenv.engines.server import ServerLostError
from agentenv.engines.transfer import Group, Manifest
from agentenv.engines.vllm_control import Control
from agentenv.errors import EngineError

JOIN, LEAVE = "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"
START, RECEIVE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
SLACK_S = 15.0  # an HTTP call outlives the collective call behind it by this


class VLLMReceiver:
    """See Receiver."""

    def __init__(self, control: Control, served: Served, replace: Replace) -> None:
        self._control, self._served, self._replace = control, served, replace

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
        await all_of(calls)

    async def receive(self, group: Group, manifest: Manifest, policy_version: int) -> None:
        async with self._served.lock:
            check_manifest(manifest, self._served.layout)
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
