"""Environments in separate processes (`env.workers`), for CPU-bound environments. A process makes
them from the host's configuration; the host has proxies (agentenv/cluster/envs.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.assembly.parts.environments import EnvSettings
from agentenv.assembly.serving.gpus import encodes_on_gpu
from agentenv.base.config import Reporter
from agentenv.base.types import Task
from agentenv.cluster.envs import EnvWorkers, WorkerEnv
from agentenv.processes.supervisor import Supervisor
from agentenv.processes.worker_group import WorkerSpec

HELD_S = 300.0  # minimum time after which a process that an environment blocks is killed
START_TIMEOUT_S = 300.0
MAX_RESTARTS = 5  # consecutive, of a process that answered no request


class EnvSetup(Struct, array_like=True, frozen=True):
    """The setup of a process: `EnvSettings` as plain data, and the run's folder."""

    settings: dict[str, Any]
    folder: str


read_env_setup = msgspec.msgpack.Decoder(EnvSetup).decode


class EnvProcesses(Supervisor):
    """The processes of one configuration of environments, with logs in `logs`. A shared resource
    (agentenv/contract/env.py): its counters are reported with those of this process."""

    def __init__(self, settings: EnvSettings, folder: Path, logs: Path, report: Reporter) -> None:
        self._workers = EnvWorkers(held_s=max(HELD_S, settings.limits.env_timeout_s), report=report)
        setup = EnvSetup(msgspec.to_builtins(settings), str(folder.absolute()))
        spec = WorkerSpec(
            "agentenv.training.workers.env_worker",
            "env-worker",
            "environment process",
            settings.env.workers,
            START_TIMEOUT_S,
            MAX_RESTARTS,
            sees_gpus=encodes_on_gpu(settings),
        )
        super().__init__(spec, self._workers, setup, logs, report)

    def make(self, task: Task) -> WorkerEnv:
        """An env of the task, in one of the processes."""
        return self._workers.make(task)

    def stats(self) -> dict[str, float]:
        """The counters of the environments."""
        return self._workers.stats()
