"""GPUs and memory of this machine, and which process gets which GPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from agentenv.assembly.keys.cluster import RayCluster, ResourcesConfig
from agentenv.base.errors import ConfigError
from agentenv.contract.engine import EngineConfig
from agentenv.learners.keys import LearnerConfig
from agentenv.processes.supervisor import GPUS

GIB = 2.0**30
ASSUMED_GPU_GIB = 80.0


_hidden: list[str] | None = None  # GPUs reserved for other processes


@contextmanager
def gpus_for_others(config: Any) -> Iterator[None]:
    """Inside, hide the GPUs from this process, and from children that are not assigned any, if
    engine and learner run in other processes: a library that opens a GPU may allocate most of its
    memory (JAX: three quarters). `visible_gpus` still returns them."""
    global _hidden
    engine = getattr(config, "engine", None)
    elsewhere = engine is not None and (engine.launched is not None or engine.runs_elsewhere)
    keeps = isinstance(getattr(config, "cluster", None), RayCluster)  # Ray detects GPUs itself
    if not elsewhere or keeps or encodes_on_gpu(config) or not visible_gpus():
        yield
        return
    before, _hidden = os.environ.get(GPUS), visible_gpus()
    os.environ[GPUS] = ""
    try:
        yield
    finally:
        _hidden = None
        os.environ.pop(GPUS)
        os.environ |= {} if before is None else {GPUS: before}


def encodes_on_gpu(config: Any) -> bool:
    """Whether environments encode search queries on a GPU."""
    found = [
        getattr(one, "search", None) for one in (config, *getattr(config, "sets", {}).values())
    ]
    devices = [getattr(getattr(one, "backend", None), "device", "") for one in found]
    return any(str(device).startswith("cuda") for device in devices)


def gpus_of_ranks() -> list[str]:
    """The GPUs to assign to ranks that use all of them; empty if they see them anyway."""
    return [] if _hidden is None else [*_hidden]


def visible_gpus() -> list[str]:
    """The GPUs of this process and its children: those in CUDA_VISIBLE_DEVICES, else all of the
    machine."""
    if _hidden is not None:
        return [*_hidden]
    named = os.environ.get(GPUS)
    if named is not None:
        return [part.strip() for part in named.split(",") if part.strip() not in ("", "-1")]
    count = sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))
    return [str(number) for number in range(count)]


def trains_on_gpu(config: Any) -> bool:
    """Whether the ranks of a run's learner have GPUs. Those on other machines are assumed to have
    some."""
    cluster = getattr(config, "cluster", None)
    elsewhere = isinstance(cluster, RayCluster) and cluster.learner
    return bool(elsewhere or config.learner.launch == "external" or visible_gpus())


class GpuPlan:
    """Assigns GPUs, each to one server; numbers count the visible ones from 0."""

    def __init__(self, visible: Sequence[str] | None = None) -> None:
        self.visible = visible_gpus() if visible is None else list(visible)
        self._owners: dict[int, str] = {}
        self._lent: dict[int, str] = {}  # GPU -> owner

    def lend(self, key: str) -> None:
        """Let one borrower share the GPUs of `key`."""
        self._lent |= {n: owner for n, owner in self._owners.items() if owner == key}

    def assign(
        self, key: str, requested: Sequence[int], needed: int, *, borrows: bool = False
    ) -> list[str]:
        """`needed` GPUs as values of CUDA_VISIBLE_DEVICES: those `requested`, else free ones. `key`
        names the setting in errors. A borrower gets lent GPUs first.

        Raises ConfigError for GPUs that are missing, taken, named twice, or of the wrong number.
        """
        if requested and len(requested) != needed:
            raise ConfigError(
                f"{key}: {needed} GPUs are needed, {len(requested)} are given: {requested}"
            )
        if borrows:
            for number in self._lent:
                self._owners.pop(number, None)
        free = [n for n in range(len(self.visible)) if n not in self._owners]
        free.sort(key=lambda number: number not in self._lent)
        chosen = list(requested) or free[:needed]
        if len(chosen) < needed:
            taken = ", ".join(f"{n}: {owner}" for n, owner in self._owners.items()) or "none"
            raise ConfigError(
                f"{key}: {needed} GPUs are needed, {len(free)} of {len(self.visible)} are free "
                f"(taken: {taken}){SHARED if LEARNER in self._owners.values() else ''}"
            )
        for number in chosen:
            if not 0 <= number < len(self.visible):
                raise ConfigError(
                    f"{key}: no GPU {number}; visible are {len(self.visible)} "
                    f"({', '.join(self.visible) or 'none'})"
                )
            if owner := self._owners.get(number):
                hint = SHARED if LEARNER in (key, owner) else ""
                raise ConfigError(f"{key}: GPU {number} already belongs to {owner}{hint}")
            self._owners[number] = key
        return [self.visible[number] for number in chosen]


SERVERS, LEARNER = "engine.servers.gpus", "resources.learner_gpus"
COLOCATED = "resources.colocated"
SHARED = f"; with {COLOCATED} = true learner and servers alternate on GPUs, 'at_once' shares them"


class PlannedMachine(Struct, frozen=True):
    """The machine of a planned run. `main_bytes`: its main memory, 0 if unknown. `name`: a
    description."""

    num_gpus: int
    gpu_bytes: float
    main_bytes: float
    name: str


def find_machine(num_gpus: int | None, gpu_memory_gib: float | None) -> PlannedMachine:
    """The machine with the requested GPUs, else this machine."""
    gib, name = gpu_memory_gib, f"{num_gpus or 'no'} GPU{'s' if num_gpus else ''}"
    number, main = num_gpus or 0, 0.0
    if num_gpus is None:
        here = visible_gpus()
        number, main = len(here), float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        name = f"the {number} GPUs of this machine" if here else "this machine, which has no GPU"
        gib = memory_of(here[0]) / GIB if here and gib is None else gib
    if not number:
        return PlannedMachine(0, 0.0, main, name)
    assumed = "" if gib else " (assumed, see --gpu-memory)"
    gib = gib or ASSUMED_GPU_GIB
    return PlannedMachine(number, gib * GIB, main, f"{name} with {gib:.4g} GiB each{assumed}")


def memory_of(gpu: str) -> float:
    """Memory of a GPU in bytes, from its driver; 0 if it cannot be queried."""
    command = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return float(answer.stdout.strip()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0.0


def learner_gpus(
    resources: ResourcesConfig, engine: EngineConfig, learner: LearnerConfig, plan: GpuPlan
) -> list[str]:
    """The GPUs of the learner's ranks as values of CUDA_VISIBLE_DEVICES, assigned before those of
    servers; empty (all GPUs) without servers or without GPUs.

    Raises ConfigError for an unused key, and for GPUs that are missing or claimed twice; only
    colocated servers and learners may claim the same ones.
    """
    requested, local = resources.learner_gpus, learner.launch == "local"
    named = [] if engine.launched is None else engine.launched.gpus
    if resources.colocated:
        engine.check_colocated(COLOCATED, resources.colocated)
    if engine.new_weights == "ipc" and not (resources.colocated and local):
        raise ConfigError(
            'engine.weights = "ipc": servers read the memory of ranks on their own GPUs; set '
            f"{COLOCATED}, with ranks that the run starts, or use another transport"
        )
    if requested and not local:
        raise ConfigError(f"{LEARNER}: the ranks are started externally; remove it")
    if requested and not plan.visible:
        raise ConfigError(f"{LEARNER}: {requested} are given, but no GPU is visible")
    both = set(named) & set(requested)
    if both and not resources.colocated:
        raise ConfigError(f"{SERVERS}: {sorted(both)} are the learner's ({LEARNER}){SHARED}")
    if not requested and not (plan.visible and engine.launched is not None and local):
        return []
    left = [number for number in range(len(plan.visible)) if number not in named]
    if resources.colocated:  # the GPUs of the servers first
        left = [*named, *left]
    elif not requested and len(left) < learner.num_ranks:
        raise ConfigError(
            f"{LEARNER}: {learner.num_ranks} are needed, {len(left)} of {len(plan.visible)} are "
            f"left besides the engine's servers{SHARED}"
        )
    gpus = plan.assign(LEARNER, requested or left[: learner.num_ranks], learner.num_ranks)
    if resources.colocated:
        plan.lend(LEARNER)
    return gpus
