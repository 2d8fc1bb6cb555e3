"""Environments in processes of their own (`env.workers`), for those that compute.

Whatever a configuration says of environments is made there as it would be here; the host has
agentenv/cluster/envs.py in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.cluster.envs import EnvWorkers, WorkerEnv
from agentenv.config import build_config, to_plain
from agentenv.pipelines.cluster.processes import Kind, WorkerProcesses
from agentenv.pipelines.config.rl import EnvConfig, GraderTable, PythonTable, SearchTable
from agentenv.pipelines.setup.data import EnvMaker, Say, tables_of
from agentenv.prompt import PromptConfig
from agentenv.types import Limits, Task

START_TIMEOUT_S = 300.0
MAX_RESTARTS = 5  # in a row of one that answered nothing


class Asked(Struct, frozen=True, kw_only=True):
    """What environments depend on, as a configuration has it."""

    env: EnvConfig
    limits: Limits
    prompt: PromptConfig
    python: PythonTable = None
    search: SearchTable = None
    grader: GraderTable = None


class EnvSetup(Struct, array_like=True, frozen=True):
    """What a process is told: an `Asked`, plain, and the run's folder."""

    asked: dict[str, Any]
    folder: str


read_env_setup = msgspec.msgpack.Decoder(EnvSetup).decode


def asked_of(setup: EnvSetup) -> Asked:
    """What a process was told. Raises ConfigError."""
    return build_config(Asked, setup.asked, "the host")


def maker_of(asked: Asked, resolve: Callable[[str], Path]) -> EnvMaker:
    """What makes environments in a process."""
    return EnvMaker(asked.env, tables_of(asked), resolve, asked.limits, asked.prompt)


class EnvProcesses:
    """The processes of one configuration of environments; `logs` is where theirs go. A shared
    resource (agentenv/env.py), so that their counts are reported with those of this process."""

    def __init__(self, asked: Asked, folder: Path, logs: Path, tell: Say) -> None:
        self._workers = EnvWorkers(held_s=asked.env.held_s, tell=tell)
        setup = EnvSetup(to_plain(asked), str(folder.absolute()))
        kind = Kind(
            "agentenv.pipelines.workers.env_worker",
            "env-worker",
            "process for environments",
            asked.env.workers,
            START_TIMEOUT_S,
            MAX_RESTARTS,
        )
        self._processes = WorkerProcesses(kind, self._workers, setup, logs, tell)

    async def start(self) -> None:
        """Returns when all are there. Raises WorkerError, and what they find wrong."""
        await self._processes.start()

    def make(self, task: Task) -> WorkerEnv:
        """An env of the task, in one of the processes."""
        return self._workers.make(task)

    def stats(self) -> dict[str, float]:
        """What environments have counted."""
        return self._workers.stats()

    async def close(self) -> None:
        """Idempotent."""
        await self._processes.close()
