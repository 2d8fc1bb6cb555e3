"""Which GPUs the policy's servers get and which the learner."""

from __future__ import annotations

from typing import Annotated, TypeVar

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from agentenv.engines.launch_config import ServersConfig
from agentenv.engines.remote_config import RemoteConfig
from agentenv.engines.scripted import ScriptedConfig
from agentenv.errors import ConfigError
from launchers.serving.gpus import GpuPlan
from learners.learner import LearnerConfig

T = TypeVar("T")

ENGINE, LEARNER = "resources.engine_gpus", "resources.learner_gpus"
COLOCATED = "resources.colocated"
MAX_SHARE = 0.9  # of a GPU's memory, for servers beside the CUDA context of a learner


class ResourcesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The split of a machine's GPUs; numbers count the visible ones from 0."""

    engine_gpus: Annotated[
        list[int],
        Meta(
            description="of the servers in [engine.servers], in place of its key gpus; empty: "
            "those that nobody else has"
        ),
    ] = field(default_factory=list)
    colocated: Annotated[
        bool,
        Meta(
            description="engine and learner have the same GPUs in turn: all serve, sleep, all "
            "train, wake with the new weights; rollouts wait with their tokens meanwhile"
        ),
    ] = False
    learner_gpus: Annotated[
        list[int],
        Meta(
            description="one a rank of the learner; empty: the first ones, when servers are "
            "started for the run beside it"
        ),
    ] = field(default_factory=list)


def divide(
    resources: ResourcesConfig, engine: T, learner: LearnerConfig, plan: GpuPlan
) -> tuple[T, list[str]]:
    """The engine's configuration with its GPUs, and the learner's as values of
    CUDA_VISIBLE_DEVICES, empty for all. Without GPUs nothing is divided.

    Raises ConfigError for keys that nobody reads, and for GPUs that are missing or claimed twice;
    servers and learner may claim the same ones where they are colocated.
    """
    if resources.colocated:
        _check_colocated(engine)
    starts = isinstance(engine, RemoteConfig) and not (engine.urls or engine.urls_file)
    local = learner.launch == "local"
    for key, asked, read, why in (
        (ENGINE, resources.engine_gpus, starts, "this run starts no servers for the policy"),
        (LEARNER, resources.learner_gpus, local, "the ranks are started elsewhere"),
    ):
        if asked and not read:
            raise ConfigError(f"{key}: {why}; remove it")
        if asked and not plan.visible:
            raise ConfigError(f"{key}: {asked} are named, but no GPU is visible")
        both = set(asked) & set(resources.learner_gpus if key == ENGINE else ())
        if both and not resources.colocated:
            raise ConfigError(
                f"{key}: {sorted(both)} are the learner's ({LEARNER}); with {COLOCATED} = true "
                "they have them in turn"
            )
    if isinstance(engine, RemoteConfig) and resources.engine_gpus:
        servers = engine.servers or ServersConfig()
        if servers.gpus:
            raise ConfigError(f"give only one of {ENGINE} and engine.servers.gpus")
        engine = replace(engine, servers=replace(servers, gpus=resources.engine_gpus))
    gpus: list[str] = []
    if resources.learner_gpus or (plan.visible and starts and local):
        asked = resources.learner_gpus or _first(engine, learner, plan, resources.colocated)
        gpus = plan.assign(LEARNER, asked, learner.num_ranks)
        if resources.colocated:
            plan.lend(LEARNER)
    return engine, gpus


def _check_colocated(engine: object) -> None:
    if isinstance(engine, ScriptedConfig):
        raise ConfigError(f"{COLOCATED}: engine.name = 'scripted' has no memory to give back")
    if not isinstance(engine, RemoteConfig):
        return
    if engine.weights == "broadcast":
        raise ConfigError(
            f'{COLOCATED}: engine.weights = "broadcast" needs servers that are awake while the '
            'learner sends; use "directory"'
        )
    share = (engine.servers or ServersConfig()).gpu_memory_share
    if share > MAX_SHARE:
        raise ConfigError(
            f"engine.servers.gpu_memory_share = {share:g}: beside a learner that sleeps on the "
            f"same GPU at most {MAX_SHARE:g} is left, since its CUDA context stays there"
        )


def _first(engine: object, learner: LearnerConfig, plan: GpuPlan, colocated: bool) -> list[int]:
    """The first GPUs that the servers do not name; colocated: those that they name first."""
    named: list[int] = []
    if isinstance(engine, RemoteConfig) and engine.servers is not None and colocated:
        rest = [n for n in range(len(plan.visible)) if n not in engine.servers.gpus]
        return [*engine.servers.gpus, *rest][: learner.num_ranks]
    if isinstance(engine, RemoteConfig) and engine.servers is not None:
        named = engine.servers.gpus
    left = [number for number in range(len(plan.visible)) if number not in named]
    if len(left) < learner.num_ranks:
        raise ConfigError(
            f"{LEARNER}: {learner.num_ranks} are needed, {len(left)} of {len(plan.visible)} are "
            "left beside the servers of the engine"
        )
    return left[: learner.num_ranks]
