"""LoRA adapters on a vLLM server: one at a time, each version under a name of its own.

The name is part of the key of vLLM's prefix cache, and requests name the adapter that they want,
so that versions cannot mix. Running requests are broken off, since one cannot change its adapter;
they go on from their tokens under the new one.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from agentenv.engines.adapter_layout import check_adapter, is_adapter
from agentenv.engines.checkpoint_layout import Layout
from agentenv.engines.running import Running
from agentenv.engines.server import ServerInfo
from agentenv.engines.vllm_control import Control
from agentenv.engines.vllm_probe import Facts
from agentenv.errors import EngineError

FEATURE = "adapters"
ROUTES = {"POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"}
SLEEP_ROUTES = {"POST /sleep", "POST /wake_up"}

Replace = Callable[[Callable[[], Awaitable[None]], int], Awaitable[None]]


class VLLMAdapters:
    """`name` is the adapter that is served; empty: the model itself. `served` tells what the
    server was started from, `replace` pauses it, lets weights be changed, names the version and
    resumes."""

    def __init__(
        self,
        control: Control,
        running: Running,
        served: Callable[[], Layout | None],
        replace: Replace,
    ) -> None:
        self.name = ""
        self._control, self._running = control, running
        self._served, self._replace = served, replace

    async def load(self, source: Path, facts: Facts, policy_version: int) -> None:
        """Serve an adapter, or the model that the server was started from without one; errors as
        of Server.load_weights."""
        old, directory = self.name, await asyncio.to_thread(source.absolute)
        if is_adapter(source):
            await asyncio.to_thread(check_adapter, source, self._served())
            new = f"{facts.model}-v{policy_version}-{secrets.token_hex(4)}"
        else:
            served, new = self._served(), ""
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
        ids = self._running.ids
        self._running.break_off(ids, on_purpose=True)
        await self._control.abort(facts, ids)
        self.name = name


def with_features(facts: Facts) -> ServerInfo:
    """What the server can do beyond what the probe found: load adapters, and sleep on the CPU,
    where it gives no memory back but takes part in every other way."""
    found = set(facts.features)
    if facts.cpu and facts.routes >= SLEEP_ROUTES:
        found.add("sleep")
    if facts.routes >= ROUTES:
        found.add(FEATURE)
    return replace(facts.info(), features=frozenset(found))
