"""Calls that change or ask a vLLM server as a whole, sent to each API server behind one URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from agentenv.engines.http import HttpClient, all_of
from agentenv.engines.server import ServerLoad, ServerLostError
from agentenv.engines.vllm_probe import ABORT, OLD_ABORT, REPACK, Facts
from agentenv.errors import ConfigError, EngineError

ID_PREFIX = "generate-tokens-"  # what the engine puts before the request id that it was given
EMPTY_SHA = sha256(b"").hexdigest()
METRICS: dict[str, Callable[[list[float]], float]] = {
    "vllm:num_requests_running": sum,
    "vllm:num_requests_waiting": sum,
    "vllm:kv_cache_usage_perc": max,  # the fullest of data-parallel engines
    "vllm:num_preemptions_total": sum,
}


class Control:
    """The development routes of one or more API servers that hold the same weights."""

    def __init__(self, servers: Sequence[HttpClient]) -> None:
        self.servers = servers

    async def post(
        self,
        path: str,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """To all at once; the first error is raised when all have answered."""
        await all_of(s.call("POST", path, json, params, timeout_s) for s in self.servers)

    async def pause(self) -> None:
        """Requests stay where they are; new ones queue."""
        await self.post("/pause", params={"mode": "keep"})

    async def reload(self, facts: Facts, source: Path) -> None:
        """Read the weights from a directory, in each worker."""
        method = REPACK if facts.extension else "reload_weights"
        await self.post(
            "/collective_rpc",
            {"method": method, "kwargs": {"weights_path": str(source)}},
            timeout_s=self.servers[0].timeouts.load_s,
        )

    async def reset_prefix_cache(self) -> None:
        """Free what no running request holds; the salt keeps later requests from the rest."""
        await self.post("/reset_prefix_cache")

    async def name_version(self, policy_version: int) -> None:
        """Tokens from now on are labelled with it."""
        await self.post("/update_weight_version", {"new_version": str(policy_version)})

    async def resume(self) -> None:
        await self.post("/resume")

    async def abort(self, facts: Facts, request_ids: Sequence[str]) -> None:
        """Errors do not matter: the request is gone with its server, or it has just ended."""
        path = ABORT if f"POST {ABORT}" in facts.routes else OLD_ABORT
        with suppress(EngineError):
            await self.post(path, {"request_ids": [ID_PREFIX + each for each in request_ids]})

    async def resume_if_possible(self) -> None:
        """After a failure; each server for itself, errors are of no more use."""
        for server in self.servers:
            with suppress(EngineError):
                await server.call("POST", "/resume")

    async def wake(self, facts: Facts) -> None:
        """Resume those that were left paused, or asleep, which counts as paused."""
        paths = [path for path in ("/wake_up", "/resume") if f"POST {path}" in facts.routes]
        for server in self.servers:
            for path in paths:
                if (await server.call_json("GET", "/is_paused"))["is_paused"]:
                    await server.call("POST", path, timeout_s=server.timeouts.load_s)

    async def fall_asleep(self) -> None:
        """Weights go to main memory, the cache is dropped; on the CPU they only pause."""
        params = {"level": "1", "mode": "abort"}
        await self.post("/sleep", params=params, timeout_s=self.servers[0].timeouts.load_s)

    async def load_adapter(self, name: str, source: Path) -> None:
        """Serve an adapter of peft under a name of its own, and see that it does."""
        await self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(source)})
        for server in self.servers:
            models = (await server.call_json("GET", "/v1/models"))["data"]
            if not any(m["id"] == name and m["root"] == str(source) for m in models):
                raise ServerLostError(f"{server.name} does not list the adapter {name}")

    async def unload_adapter(self, name: str) -> None:
        """Errors do not matter: nothing asks for it any more."""
        with suppress(EngineError):
            await self.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def fingerprint(self) -> dict[str, str]:
        """SHA-256 per parameter and worker; empty if one of them is the checksum of nothing."""
        sums: dict[str, str] = {}
        for server in self.servers:
            found = await server.call_json("POST", "/weight_checker", {"action": "checksum"})
            sums.update(found["checksums"])
        return {} if EMPTY_SHA in sums.values() else sums

    async def load(self) -> ServerLoad:
        """Summed over API servers and data-parallel engines."""
        found: dict[str, list[float]] = {name: [] for name in METRICS}
        for server in self.servers:
            _read_metrics(await server.call("GET", "/metrics"), found)
        for name, values in found.items():
            if not values:
                raise ConfigError(
                    f"{self.servers[0].name}/metrics has no {name}: "
                    "start it without --disable-log-stats"
                )
        running, waiting, usage, preemptions = (f(found[name]) for name, f in METRICS.items())
        return ServerLoad(int(running), int(waiting), usage, int(preemptions))


def _read_metrics(body: bytes, found: dict[str, list[float]]) -> None:
    """Prometheus text: a line is NAME{LABELS} VALUE."""
    for line in body.decode().splitlines():
        if line.startswith("vllm:"):
            name = line.partition("{")[0]
            if name in found:
                found[name].append(float(line.rpartition(" ")[2]))
