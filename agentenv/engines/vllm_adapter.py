"""LoRA adapters on a vLLM server: one at a time, each version under a name of its own.

The name is part of the key of vLLM's prefix cache, and requests name the adapter that they want,
so that versions cannot mix. Running requests are broken off, since one cannot change its adapter;
they go on from their tokens under the new one.
"""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from agentenv.engines.adapter_layout import check_adapter, is_adapter
from agentenv.engines.served import Replace, Served
from agentenv.engines.server import ServerInfo
from agentenv.engines.vllm_control import Control
from agentenv.engines.vllm_probe import Facts
from agentenv.engines.vllm_requests import VLLMRequests
from agentenv.errors import EngineError

FEATURE = "adapters"
ROUTES = {"POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"}
SLEEP_ROUTES = {"POST /sleep", "POST /wake_up"}


class VLLMAdapters:
    """Serves one after the other."""

    def __init__(
        self, control: Control, requests: VLLMRequests, served: Served, replace: Replace
    ) -> None:
        self._control, self._requests = control, requests
        self._served, self._replace = served, replace

    async def load(self, source: Path, facts: Facts, policy_version: int) -> None:
        """Serve an adapter, or the model that the server was started from without one; errors as
        of Server.load_weights."""
        served = self._served.layout
        old, directory = self._requests.adapter, await asyncio.to_thread(source.absolute)
        if is_adapter(source):
            await asyncio.to_thread(check_adapter, source, served)
            new = f"{facts.model}-v{policy_version}-{secrets.token_hex(4)}"
        else:
            new = ""
            if served is None or directory != served.directory:
                raise EngineError(
                    f"this server was started with --enable-lora: it takes adapters of its model, "
                    f"not the weights in {source}"
                )
        await self._replace(partial(self._change, new, directory, facts), policy_version)
        if old:
            await self._control.unload_adapter(old)

    async def _change(self, name: str, directory: Path, facts: Facts) -> None:
        if name:
            await self._control.load_adapter(name, directory)
        await self._requests.break_off_all(facts, on_purpose=True)
        self._requests.adapter = name


def with_features(facts: Facts) -> ServerInfo:
    """What the server can do beyond what the probe found: load adapters, and sleep on the CPU,
    where it gives no memory back but takes part in every other way."""
    found = set(facts.features)
    if facts.cpu and facts.routes >= SLEEP_ROUTES:
        found.add("sleep")
    if facts.routes >= ROUTES:
        found.add(FEATURE)
    return replace(facts.info(), features=frozenset(found))
