"""Where the rollouts of a run grow: in the controller's process, or in rollout workers, and what a
worker is told.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from launchers.workers.processes import Kind

FOLDER = "workers"  # of their logs, in the run's directory


class LocalCluster(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="local"
):
    """Rollouts grow in the controller's process."""


class ProcessesCluster(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="processes"
):
    """Rollouts grow in processes of this machine. Evaluations, and an engine that is no server,
    stay in the controller's. Limits on how much a tool does at a time hold for each worker."""

    workers: Annotated[int, Meta(ge=1, description="rollout workers")] = 2
    silence_s: Annotated[
        float,
        Meta(
            ge=5,
            description="a worker that says nothing for so long hangs: it is killed and started "
            "again, and its trees go on elsewhere",
        ),
    ] = 60.0
    start_timeout_s: Annotated[
        float, Meta(gt=0, description="deadline for a worker to come up")
    ] = 300.0
    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="times in a row that a worker which died is started again without having "
            "ended a tree",
        ),
    ] = 5

    def processes(self) -> Kind:
        return Kind(
            "launchers.workers.rollout_worker",
            "worker",
            "rollout worker",
            self.workers,
            self.start_timeout_s,
            self.max_restarts,
            "cluster",
        )


ClusterConfig = LocalCluster | ProcessesCluster


class Setup(Struct, array_like=True, frozen=True):
    """What a worker is built from: the plain configuration of the run, the run's folder, model
    directory, URLs of roles; whether it asks the engine's servers itself; then what names frames of
    the journal."""

    config: dict[str, Any]
    folder: str
    model: str
    urls: dict[str, str]
    vocab_size: int
    is_leased: bool
    settings: str
    incarnation: int


read_setup = msgspec.msgpack.Decoder(Setup).decode
