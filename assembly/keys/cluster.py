"""Keys of a run's processes: rollouts in the controller or in rollout workers, and the setup of a
worker; also the keys of `agentenv serve CONFIG`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Struct

from agentenv.assembly.keys.run import RunConfig
from agentenv.base.config import ESSENTIAL, about
from agentenv.base.errors import ConfigError
from agentenv.base.ports import is_loopback
from agentenv.contract.engine import EngineConfig
from agentenv.contract.server_config import ROLES, LaunchConfig, RoleConfig

if TYPE_CHECKING:
    from agentenv.processes.worker_group import WorkerSpec

FOLDER = "workers"  # of the workers' logs, in the run's directory


class LocalCluster(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="local"
):
    """Rollouts grow in the controller's process."""


class SpreadCluster(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="-"
):
    """Rollouts grow in rollout workers. Evaluations, and an engine without servers, stay in the
    controller's process. Concurrency limits of tools apply to each worker."""

    workers: Annotated[int, about("rollout workers", ge=1)] = 2
    silence_s: ClassVar[float] = 60.0  # a worker without a message for so long counts as hung
    start_timeout_s: ClassVar[float] = 300.0  # for a worker to start
    max_restarts: ClassVar[int] = 5  # consecutive ones without progress of any tree

    def processes(self) -> WorkerSpec:
        """The workers as processes."""
        from agentenv.processes.worker_group import WorkerSpec  # slow to load

        return WorkerSpec(
            "agentenv.training.workers.rollout_worker",
            "worker",
            "rollout worker",
            self.workers,
            self.start_timeout_s,
            self.max_restarts,
            "cluster",
        )


class ProcessesCluster(SpreadCluster, frozen=True, kw_only=True, tag="processes"):
    """Rollout workers are processes of this machine."""


class WideCluster(SpreadCluster, frozen=True, kw_only=True, tag="-wide"):
    """Rollout workers on many machines, which may join and leave."""

    min_workers: Annotated[
        int,
        about(
            "workers that must be connected before the run starts; others join when "
            "resources allow; 0: all",
            ge=0,
        ),
    ] = 0
    max_outage_s: ClassVar[float] = 600.0  # without a connected worker; then the run ends
    host: Annotated[
        str,
        about("address of this machine at which workers reach the controller; empty: looked up"),
    ] = ""
    port: Annotated[int, about("its port; 0: any free port", ge=0, le=65535)] = 0
    cpus_per_worker: Annotated[
        int, about("cores of a worker, for its event loop and its tools", ge=1)
    ] = 1

    def __post_init__(self) -> None:
        if self.min_workers > self.workers:
            raise ConfigError(
                f"cluster.min_workers = {self.min_workers} is above cluster.workers = "
                f"{self.workers}, the maximum number"
            )

    @property
    def least(self) -> int:
        """Number of workers required for the start of the run."""
        return self.min_workers or self.workers

    @property
    def is_far(self) -> bool:
        """Whether there may be workers on other machines."""
        return True

    def processes(self) -> WorkerSpec:
        found = super().processes()
        return found._replace(min_num=self.least, max_outage_s=self.max_outage_s, port=self.port)


class RayCluster(WideCluster, frozen=True, kw_only=True, tag="ray"):
    """Rollout workers are placed by Ray (extra `ray`)."""

    address: Annotated[
        str,
        about(
            "address of the Ray cluster, HOST:6379, or auto: that of this machine; "
            "empty: the run starts one on this machine alone"
        ),
    ] = ""
    engines: Annotated[bool, about("Ray places the servers of [engine.servers] too")] = False
    learner: Annotated[bool, about("Ray places the learner's ranks too")] = False
    gpus_per_rank: Annotated[
        int, about("GPUs of each learner rank; 0: it runs on the CPU", ge=0, le=1)
    ] = 1
    wait_for_nodes_s: Annotated[
        float,
        about(
            "wait for nodes to join, for instance of an autoscaling cluster, until the "
            "initial processes of the run fit",
            ge=0,
        ),
    ] = 0.0
    python: Annotated[str, about("interpreter on the nodes; empty: the same path as here")] = ""
    env: Annotated[
        list[str], about("environment variables for processes on nodes, such as SERPER_API_KEY")
    ] = []

    @property
    def is_far(self) -> bool:
        return bool(self.address)

    def of_worker(self) -> dict[str, float]:
        """The resources of a rollout worker on a node."""
        return {"CPU": float(self.cpus_per_worker)}

    def of_engine(self, launched: LaunchConfig) -> dict[str, float]:
        """The resources of an engine server."""
        gpus = 0 if launched.device == "cpu" else launched.gpus_each
        return {"CPU": 1.0, "GPU": gpus / launched.servers_per_gpu}

    def of_rank(self) -> dict[str, float]:
        """The resources of a learner rank."""
        return {"CPU": 1.0, "GPU": float(self.gpus_per_rank)}

    def processes(self) -> WorkerSpec:
        found = super().processes()
        return found._replace(env=self.env, resources=self.of_worker(), python=self.python)


class ExternalCluster(WideCluster, frozen=True, kw_only=True, tag="external"):
    """Rollout workers are started externally, on any machine that reaches the controller
    (docs/clusters.md): `python -m agentenv.training.workers.rollout_worker`."""

    host: Annotated[str, about("address to listen on for workers; 0.0.0.0: every one")]

    def token(self) -> str:
        """The shared secret of controller and workers. Raises ConfigError if it is not set."""
        from agentenv.processes.supervisor import TOKEN_VARIABLE  # slow to load

        found = os.environ.get(TOKEN_VARIABLE, "")
        if len(found) < MIN_TOKEN:
            raise ConfigError(
                f"cluster.kind = {self.__struct_config__.tag}: set {TOKEN_VARIABLE} to a secret of "
                f"at least {MIN_TOKEN} characters (openssl rand -hex 16), the same for this "
                "process and for the workers"
            )
        return found


MIN_TOKEN = 16


class JobCluster(ExternalCluster, frozen=True, kw_only=True, tag="-job"):
    """A job that --dry-run writes for `submit`."""

    submit: ClassVar[str]
    host: Annotated[str, about("address that the controller listens on")] = "0.0.0.0"
    port: Annotated[int, about("port of the controller", ge=1, le=65535)] = 29700
    gpus: Annotated[int, about("GPUs of the controller's node; 0: none", ge=0)] = 0
    script: Annotated[str, about("file that --dry-run writes; empty: print it")] = ""


class SlurmCluster(JobCluster, frozen=True, kw_only=True, tag="slurm"):
    """A Slurm job: the controller with its engine and learner on the first node, rollout workers on
    all nodes. --dry-run prints the script for sbatch."""

    submit: ClassVar[str] = "sbatch"
    nodes: Annotated[int, about("nodes of the job", ge=1)] = 2
    time: Annotated[str, about("time limit of the job in sbatch's format, 1-12:00:00")] = "24:00:00"
    options: Annotated[list[str], about("extra sbatch options, such as --partition=long")] = []
    setup: Annotated[list[str], about("commands to run first, such as 'module load cuda'")] = []

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(r"[0-9:-]+", self.time, "cluster.time", "a Slurm time, such as 24:00:00")
        for one in self.options:
            _check(
                r"--?[A-Za-z][^\n]*", one, "cluster.options", "an option, such as --partition=long"
            )


class KubernetesCluster(JobCluster, frozen=True, kw_only=True, tag="kubernetes"):
    """Two Kubernetes jobs: one for the controller with its engine and learner, one for rollout
    workers. --dry-run prints the manifests for kubectl apply."""

    submit: ClassVar[str] = "kubectl apply -f"
    image: Annotated[str, about("image in which agentenv is installed")] = ""
    claim: Annotated[
        str,
        about(
            "PersistentVolumeClaim (ReadWriteMany) with model, data, code and runs, "
            "mounted at `mount`, where relative paths begin"
        ),
    ] = ""
    mount: Annotated[str, about("mount point of the claim")] = "/shared"
    memory: Annotated[str, about("memory of the controller and of each worker")] = "8Gi"
    seccomp: Annotated[
        Literal["RuntimeDefault", "Unconfined"],
        about(
            "seccomp profile of the pods: RuntimeDefault fits a namespace with the "
            "profile restricted, and leaves Python code the sandbox's level landlock; programs "
            "need Unconfined"
        ),
    ] = "RuntimeDefault"
    secret: Annotated[
        str, about("Secret whose keys become environment variables of all pods; empty: none")
    ] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, name in (("claim", self.claim), ("secret", self.secret)):
            if name:
                _check(NAME, name, f"cluster.{key}", "a Kubernetes name, such as my-claim")
        _check(r"[0-9]+(\.[0-9]+)?([KMGT]i?)?", self.memory, "cluster.memory", "a size, as 8Gi")


NAME = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


def _check(pattern: str, text: str, key: str, what: str) -> None:
    if not re.fullmatch(pattern, text):
        raise ConfigError(f"{key} = {text!r}: expected {what}")


ClusterConfig = (
    LocalCluster
    | ProcessesCluster
    | RayCluster
    | ExternalCluster
    | SlurmCluster
    | KubernetesCluster
)


def check_reachable(
    cluster: LocalCluster | SpreadCluster, engine: EngineConfig, roles: Mapping[str, RoleConfig]
) -> None:
    """Raises ConfigError for servers on this machine that remote workers cannot reach."""
    if not isinstance(cluster, WideCluster) or not cluster.is_far:
        return
    started: dict[str, LaunchConfig] = {
        f"roles.{name}": role for name, role in roles.items() if role.is_launched
    }
    if engine.launched is not None and not getattr(cluster, "engines", False):
        started["engine.servers"] = engine.launched
    for key, launched in started.items():
        if is_loopback(launched.host):
            raise ConfigError(
                f"{key}.host = {launched.host}: rollout workers on other machines connect to this "
                f"server directly; set {key}.host = 0.0.0.0, which opens it to the networks of "
                "this machine, or an address of this machine that they can reach"
            )


class Setup(Struct, array_like=True, frozen=True):
    """The setup of a worker. `config`: the run's configuration as plain data. `folder`: that of the
    run. `model`: the model's directory. `urls`: those of roles, by name. `is_leased`: the worker
    sends its requests to the engine's servers itself. `key`: that of servers that the run started.
    `settings`, `incarnation`: see agentenv.rollout.journal."""

    config: dict[str, Any]
    folder: str
    model: str
    urls: dict[str, str]
    vocab_size: int
    is_leased: bool
    key: str
    settings: str
    incarnation: int


read_setup = msgspec.msgpack.Decoder(Setup).decode


class ServeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `agentenv serve`."""

    run: Annotated[RunConfig, about("folder of the logs; the seed is ignored")] = RunConfig()
    roles: Annotated[dict[str, RoleConfig], about("models by name, [roles.judge], ...")]

    def __post_init__(self) -> None:
        for name, role in self.roles.items():
            if name not in ROLES:
                raise ConfigError(f"roles.{name}: unknown role; known: {', '.join(ROLES)}")
            if role.url:
                raise ConfigError(
                    f"roles.{name}.url: this server already runs; set its model to start one"
                )
        if not self.roles:
            raise ConfigError("roles: nothing to start")


class ResourcesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The assignment of a machine's GPUs; numbers count the visible GPUs from 0. The GPUs of the
    engine's servers are set by engine.servers.gpus."""

    colocated: Annotated[
        bool | Literal["at_once"],
        about(
            "engine and learner share the same GPUs. true: alternating; all serve, "
            "sleep, all train, wake with the new weights; rollouts wait with their tokens "
            "meanwhile. 'at_once': both at the same time, the engine's servers with their "
            "gpu_memory_share, the learner with the rest, which suits small models",
            ESSENTIAL,
        ),
    ] = False
    learner_gpus: Annotated[
        list[int],
        about("one per learner rank; empty: the first ones, when the run also starts servers"),
    ] = []
    weights_dir: Annotated[
        str,
        about(
            "folder through which new weights pass from the learner to the engine, at most two "
            "copies of the model; empty: /dev/shm, or the run's folder if that has no room for them"
        ),
    ] = ""

    @property
    def in_turn(self) -> bool:
        """Whether engine and learner alternate on the GPUs, one asleep while the other works."""
        return self.colocated is True
