"""Environments in processes of their own (`env.workers`), for environments that compute.

A process makes them from the same configuration as the host would; the host has the stand-ins of
agentenv/cluster/envs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.cluster.envs import EnvWorkers, WorkerEnv
from agentenv.config import build_config, to_plain
from agentenv.pipelines.config.rl import EnvConfig, GraderTable, PythonTable, SearchTable
from agentenv.pipelines.setup.data import EnvMaker, Say, tables_of
from agentenv.renderer import PromptConfig
from agentenv.supervisor import (
    Supervisor,
)
from agentenv.types import Limits, Task
from agentenv.worker_group import WorkerSpec

START_TIMEOUT_S = 300.0
MAX_RESTARTS = 5  # in a row, of a process that answered nothing


class Asked(Struct, frozen=True, kw_only=True):
    """The part of a configuration that environments depend on."""

    env: EnvConfig
    limits: Limits
    prompt: PromptConfig
    python: PythonTable = None
    search: SearchTable = None
    grader: GraderTable = None


class EnvSetup(Struct, array_like=True, frozen=True):
    """The setup of a process: an `Asked`, plain, and the run's folder."""

    asked: dict[str, Any]
    folder: str


read_env_setup = msgspec.msgpack.Decoder(EnvSetup).decode


def asked_of(setup: EnvSetup) -> Asked:
    """The configuration in a setup. Raises ConfigError."""
    return build_config(Asked, setup.asked, "the host")


def maker_of(asked: Asked, resolve: Callable[[str], Path]) -> EnvMaker:
    """The maker of environments in a process."""
    return EnvMaker(asked.env, tables_of(asked), resolve, asked.limits, asked.prompt)


class EnvProcesses:
    """The processes of one configuration of environments, with their logs in `logs`. A shared
    resource (agentenv/env.py): their counters are reported with those of this process."""

    def __init__(self, asked: Asked, folder: Path, logs: Path, report: Say) -> None:
        self._workers = EnvWorkers(held_s=asked.env.held_s, report=report)
        setup = EnvSetup(to_plain(asked), str(folder.absolute()))
        spec = WorkerSpec(
            "agentenv.pipelines.workers.env_worker",
            "env-worker",
            "process for environments",
            asked.env.workers,
            START_TIMEOUT_S,
            MAX_RESTARTS,
        )
        self._supervisor = Supervisor(spec, self._workers, setup, logs, report)

    async def start(self) -> None:
        """Returns when all processes are ready. Raises WorkerError, and their own errors."""
        await self._supervisor.start()

    def make(self, task: Task) -> WorkerEnv:
        """An env of the task, in one of the processes."""
        return self._workers.make(task)

    def stats(self) -> dict[str, float]:
        """The counters of the environments."""
        return self._workers.stats()

    async def close(self) -> None:
        """Idempotent."""
        await self._supervisor.close()
