"""Starts and stops the engine servers of a run.

GPUs to servers, ports, logs in the run's directory, readiness with progress, restarts of servers
that died, and no process left over, even after kill -9 of the run (see server_guard.py).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from msgspec.structs import replace

from agentenv.engines.launch_config import LaunchConfig, ServersConfig
from agentenv.errors import ConfigError
from launchers.serving.gpus import GpuPlan
from launchers.serving.server_commands import (
    EngineName,
    Served,
    check_plugin,
    command,
    environment,
    find_python,
)
from launchers.serving.server_process import ServerProcess, ServerSpec

LOG_FOLDER = "servers"  # in the run's directory


class ServerFactory:
    """Starts servers for one run: their logs go to `folder`, `stack` stops them."""

    def __init__(self, folder: Path, stack: AsyncExitStack, say: Callable[[str], None]) -> None:
        self.gpus = GpuPlan()
        self.processes: list[ServerProcess] = []
        self._folder = folder.absolute() / LOG_FOLDER
        self._stack = stack
        self._say = say
        self._ports: set[int] = set()

    async def start(
        self,
        engine: EngineName,
        config: LaunchConfig,
        model: Path,
        *,
        name: str,
        key: str,
        max_model_len: int = 0,
        trained: bool = False,
        broadcast: bool = False,
        colocated: bool = False,
        lora_rank: int = 0,
    ) -> list[str]:
        """Start the servers of one role and wait for all; their URLs.

        `name` is the model name that they serve under, `key` the setting that errors name;
        `broadcast`, `colocated` and `lora_rank`: see Served.
        Raises ConfigError for what cannot work and EngineError for a server that does not come up.
        """
        number = config.num_servers if isinstance(config, ServersConfig) else 1
        served = Served(
            engine=engine,
            model=model,
            name=name,
            max_model_len=max_model_len,
            trained=trained,
            broadcast=broadcast,
            colocated=colocated,
            lora_rank=lora_rank,
        )
        specs = self._specs(served, config, key, number)
        if broadcast and engine == "vllm":
            await check_plugin(specs[0].command[0], key)
        started = [ServerProcess(spec, self._folder, self._say) for spec in specs]
        for process in started:
            self._stack.push_async_callback(process.close)
        self.processes += started
        async with asyncio.TaskGroup() as group:
            for process in started:
                group.create_task(process.start())
        return [spec.url for spec in specs]

    def _specs(
        self,
        wanted: Served,
        config: LaunchConfig,
        key: str,
        number: int,
    ) -> list[ServerSpec]:
        """One of each server; `wanted` lacks what differs between them."""
        if not wanted.model.is_dir():
            raise ConfigError(f"{key}: {wanted.model} is no model directory")
        python = find_python(wanted.engine, config, key)
        on_cpu = self._on_cpu(config, key)
        each = config.tensor_parallel_size * config.data_parallel_size
        gpus = []
        if not on_cpu:
            gpus = self.gpus.assign(
                f"{key}.gpus", config.gpus, each * number, borrows=wanted.colocated
            )
        specs = []
        for index in range(number):
            served = replace(
                wanted,
                model=wanted.model.absolute(),
                port=self._port(config, index, key),
                gpus=gpus[index * each : (index + 1) * each],
                on_cpu=on_cpu,
            )
            specs.append(
                ServerSpec(
                    name=f"{wanted.name}-{index}" if number > 1 else wanted.name,
                    command=command(python, served, config),
                    env=environment(served, config),
                    url=f"http://{_reachable(config.host)}:{served.port}",
                    start_timeout_s=config.start_timeout_s,
                    max_restarts=config.max_restarts,
                )
            )
        return specs

    def _on_cpu(self, config: LaunchConfig, key: str) -> bool:
        on_cpu = config.device == "cpu" or (config.device == "auto" and not self.gpus.visible)
        if not on_cpu:
            return False
        if config.gpus:
            raise ConfigError(
                f"{key}.gpus: {config.gpus} are named, but the server runs on the CPU "
                f"({'as asked' if config.device == 'cpu' else 'no GPU is visible'})"
            )
        if config.tensor_parallel_size * config.data_parallel_size > 1:
            raise ConfigError(
                f"{key}: tensor_parallel_size and data_parallel_size need GPUs; none is visible"
            )
        return True

    def _port(self, config: LaunchConfig, index: int, key: str) -> int:
        """The port of a server, found free. One that somebody takes in between shows in its log."""
        wanted = config.port + index if config.port else 0
        if wanted in self._ports:
            raise ConfigError(f"{key}.port: {wanted} already belongs to another server of this run")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.host, wanted))
            except OSError as error:
                raise ConfigError(
                    f"{key}.port: {config.host}:{wanted} cannot be used: {error.strerror}"
                ) from error
            port = int(probe.getsockname()[1])
        if port in self._ports:
            return self._port(config, index, key)
        self._ports.add(port)
        return port


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
