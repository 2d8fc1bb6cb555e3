"""The processes of a run, their GPUs, and the memory needed on each GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from agentenv.assembly.checks import memory as estimates
from agentenv.assembly.keys.cluster import ResourcesConfig, ServeConfig, WideCluster
from agentenv.assembly.keys.evaluation import EvaluateConfig
from agentenv.assembly.keys.rl import MAX_TRAJECTORY_BYTES, TrainConfig
from agentenv.assembly.keys.supervised import SupervisedRunConfig
from agentenv.assembly.run.kept import find_checkpoint
from agentenv.assembly.serving.gpus import GIB, GpuPlan, PlannedMachine, learner_gpus
from agentenv.assembly.serving.server_command import CPU_CACHE_GIB, SERVER_BYTES
from agentenv.base.config import RUN, Resolve
from agentenv.base.errors import AgentEnvError, ConfigError
from agentenv.base.model_files import check_known
from agentenv.contract.engine import EngineConfig, LocalModel
from agentenv.contract.server_config import LaunchConfig, RoleConfig
from agentenv.learners.keys import LearnerConfig, check_heads

# A plan: a machine, its processes, and problems.


class Process(Struct, frozen=True):
    """A line of the plan: a process that is started `count` times, its GPUs, and its memory."""

    name: str
    count: int
    gpus: list[str] = []
    model: str = ""
    memory: estimates.Memory = estimates.Memory()
    note: str = ""

    @property
    def main_bytes(self) -> float:
        """Main memory of all `count` processes; without GPUs, it includes GPU memory."""
        on_gpu = 0.0 if self.gpus else self.memory.gpu_bytes
        return self.count * (self.memory.host_bytes + on_gpu)


class Plan(Struct):
    """The processes of a run. `problems`: reasons why they cannot run; `missing`: missing inputs;
    `made`: facts about output of the run. All are lines of text."""

    machine: PlannedMachine
    processes: list[Process] = []
    problems: list[str] = []
    missing: list[str] = []
    made: list[str] = []
    checkpoint_bytes: float = 0.0  # of one; 0: unknown
    serving: dict[str, float] = {}  # bytes by GPU, while rollouts run
    training: dict[str, float] = {}  # and while the learner trains

    @property
    def gpu_bytes(self) -> dict[str, float]:
        """The peak memory of each GPU over both phases, which differ only if engine and learner
        alternate."""
        return {gpu: max(self.serving[gpu], self.training[gpu]) for gpu in self.serving}

    @property
    def is_whole(self) -> bool:
        """Whether the memory of every process with a model is estimated."""
        return all(p.memory.gpu or p.memory.host for p in self.processes if p.model)

    def add(self, process: Process, *, serving: float, training: float) -> None:
        """Add a process with these bytes on each of its GPUs in each phase."""
        self.processes.append(process)
        for gpu in process.gpus:
            self.serving[gpu] = self.serving.get(gpu, 0.0) + serving
            self.training[gpu] = self.training.get(gpu, 0.0) + training


def check_memory(plan: Plan) -> None:
    """Add a problem for each GPU, or main memory, that is too small."""
    size = plan.machine.gpu_bytes
    exceeded = [one for one in sorted(plan.gpu_bytes.items()) if one[1] > size]
    for gpu, needed in exceeded[:1]:  # the others have the same problem
        names = [process.name for process in plan.processes if gpu in process.gpus]
        advice = "lower learner.max_tokens_per_microbatch, raise learner.num_ranks, "
        advice += "learner.zero_stage or learner.context_parallel, set "
        advice += "learner.activation_checkpointing or learner.offload"
        plan.problems.append(
            f"GPU {gpu} needs {needed / GIB:.1f} of {size / GIB:.0f} GiB ({' and '.join(names)})"
            + (f"; {advice}" if "learner rank" in names else "")
        )
    needed = sum(process.main_bytes for process in plan.processes)
    if plan.machine.main_bytes and needed > plan.machine.main_bytes:
        plan.problems.append(
            f"main memory: {needed / GIB:.1f} of {plan.machine.main_bytes / GIB:.1f} GiB are "
            "needed" + ("" if plan.machine.num_gpus else "; --gpus N plans for a machine with GPUs")
        )


NO_SHAPE = (
    "not found, and its memory cannot be estimated: the path names no known model "
    f"({', '.join(estimates.KNOWN)})"
)


AnyRun = TrainConfig | SupervisedRunConfig | EvaluateConfig | ServeConfig


HERE = "on this machine"
POLICY = "engine.servers"  # the keys of its servers


def make_plan(config: AnyRun, machine: PlannedMachine, resolve: Resolve, model: str = "") -> Plan:
    """The plan of a configuration. `model`: the path of the policy if the configuration does not
    contain it; "" for an endpoint. Raises ConfigError for GPUs that are missing or claimed
    twice."""
    plan = _Planner(config, machine, resolve, model).planned()
    check_memory(plan)
    return plan


def rollouts_of(config: AnyRun) -> tuple[int, int]:
    """Maximum number of tokens of a trajectory (prompt and response), and of in-flight
    trajectories; 0 for a command without rollouts."""
    if not isinstance(config, TrainConfig | EvaluateConfig):
        return 0, 0
    own = config.sets.values() if isinstance(config, EvaluateConfig) else ()
    limits = [one.limits for one in (config, *own)]
    longest = max(one.max_prompt_tokens + one.max_response_tokens for one in limits)
    if isinstance(config, EvaluateConfig):
        return longest, config.concurrency
    trees = config.queue.groups_per_step * (config.queue.max_staleness + 1)
    return longest, min(trees, config.queue.max_rollouts or trees) * config.algorithm.group_size


def files_of(config: TrainConfig) -> tuple[int, dict[str, float]]:
    """Maximum number of checkpoints on the disk (the last ones, the best, that of the cold start,
    and a partial one); and maximum bytes of other files, by the key that limits them."""
    kept = bool(config.checkpoint.best_metric) + (config.sft is not None)
    log = MAX_TRAJECTORY_BYTES * config.log.trajectories
    files = {"archive.max_gb": config.archive.max_gb * 1e9, "trajectories": log}
    return config.checkpoint.keep_last + kept + 1, files


def microbatch_tokens(learner: LearnerConfig, longest: int) -> int:
    """Tokens of a rank in the largest micro-batch: the learner's budget, or its share of the
    longest path if that is larger."""
    return max(learner.max_tokens_per_microbatch, -(-longest // learner.context_parallel))


class _Planner:
    def __init__(self, config: Any, machine: PlannedMachine, resolve: Resolve, model: str) -> None:
        self.config, self.machine, self.resolve = config, machine, resolve
        self.plan = Plan(machine)
        self.gpus = GpuPlan([str(number) for number in range(machine.num_gpus)])
        self.engine: EngineConfig | None = getattr(config, "engine", None)
        self.resources: ResourcesConfig = getattr(config, "resources", ResourcesConfig())
        self.colocated = self.resources.in_turn
        self.learner: LearnerConfig | None = getattr(config, "learner", None)
        if self.learner is not None:
            self.learner = self.learner.resolved(on_gpu=machine.num_gpus > 0)
        self.path: str = model if self.learner is None else config.model.path
        self.num_tokens, _ = rollouts_of(config)
        self.shape = self._policy_shape() if self.path else None

    def planned(self) -> Plan:
        """The plan of all processes, in the order in which a run assigns its GPUs."""
        if self.path or self.num_tokens:
            self._add_controller()
        if self.learner is not None:
            ranks: list[str] = []
            if self.engine is not None:
                ranks = learner_gpus(self.resources, self.engine, self.learner, self.gpus)
            self._add_learner(self.learner, ranks)
        for name, role in getattr(self.config, "roles", {}).items():
            self._add_role(name, role)
        if self.engine is not None:
            self._add_engine(self.engine)
        return self.plan

    # models

    def _policy_shape(self) -> estimates.ModelShape | None:
        place, key = self.resolve(self.path), f"model.path = {self.path}"
        setup = self.config.run.setup if self.learner is not None else ""
        if RUN in self.path and setup and not place.is_dir():
            self.plan.made.append(f"{key}: made by {setup} at the start")
            return None
        if place.is_dir():
            try:
                place = find_checkpoint(place)
            except AgentEnvError as error:
                self.plan.missing.append(f"{key}: {error}")
                return None
        if self.learner is not None and (place / "config.json").is_file():
            check_known(place)
        return self._shape(place, "model.path")

    def _shape(self, path: Path, key: str, quantization: str = "") -> estimates.ModelShape | None:
        """The shape of a model; adds a missing model to the plan."""
        shape = estimates.find_shape(path, quantization)
        if not path.is_dir():
            why = shape.source if shape is not None else NO_SHAPE
            self.plan.missing.append(f"{key} = {path}: {why}")
        return shape

    # processes

    def _add_controller(self) -> None:
        """Add the controller, with the two copies of weights in its shared memory, and workers."""
        host: dict[str, float] = {}
        if self.learner is not None and not self.resources.weights_dir:
            copies = estimates.passing_bytes(self.shape, self.learner, self.engine)
            if copies:
                host["weights in transfer (/dev/shm)"] = copies
        cluster = getattr(self.config, "cluster", None)
        num_workers = getattr(cluster, "workers", 0)
        is_wide = isinstance(cluster, WideCluster) and num_workers
        where = "on nodes of the cluster" if is_wide else HERE
        work = "rollouts, tools, graders"
        own = "queue, journal, evaluations" if num_workers else work
        self.plan.processes.append(
            Process("controller", 1, memory=estimates.Memory({}, host), note=own)
        )
        if num_workers:
            note = f"{work}; {where}"
            self.plan.processes.append(Process("rollout worker", num_workers, note=note))

    def _add_learner(self, learner: LearnerConfig, ranks: list[str]) -> None:
        """Add the learner's ranks, and lines on its files."""
        config, algorithm = self.config, getattr(self.config, "algorithm", None)
        reference = algorithm is not None and algorithm.needs_reference
        tokens = microbatch_tokens(learner, self.num_tokens or config.data.max_length)
        memory = estimates.Memory()
        if self.shape is not None:
            check_heads(self.shape.heads, learner.context_parallel)
            memory = estimates.learner_memory(
                self.shape, learner, tokens, has_reference=reference, teacher=self._teacher()
            )
            size = estimates.checkpoint_bytes(self.shape, learner, has_reference=reference)
            self.plan.checkpoint_bytes = size
            self.plan.made.append(saving_line(size, config.checkpoint.finish_s))
            if self.colocated:
                asleep = estimates.model_states(self.shape, learner).gpu_bytes
                memory = estimates.Memory(memory.gpu, memory.host | {"sleeping part": asleep})
        if self.machine.num_gpus and learner.launch == "local" and not ranks:
            if learner.num_ranks > self.machine.num_gpus:
                raise ConfigError(
                    f"learner.num_ranks: {learner.num_ranks} ranks need a GPU each; there are "
                    f"{self.machine.num_gpus}"
                )
            ranks = [str(number) for number in range(learner.num_ranks)]
        note = f"ZeRO {learner.zero_stage}, {learner.dtype}, {tokens} tokens at once"
        if learner.context_parallel > 1:
            note += f", paths over {learner.context_parallel} ranks"
        note += "; started externally" if learner.launch == "external" else ""
        process = Process("learner rank", learner.num_ranks, ranks, self.path, memory, note=note)
        serving = (
            min(estimates.RESERVE_BYTES, memory.gpu_bytes) if self.colocated else memory.gpu_bytes
        )
        self.plan.add(process, serving=serving, training=memory.gpu_bytes)

    def _teacher(self) -> estimates.ModelShape | None:
        """The shape of a teacher on the learner's ranks."""
        role = getattr(self.config, "roles", {}).get("teacher")
        if role is None or role.engine != "learner":
            return None
        return self._shape(find_checkpoint(self.resolve(role.model)), "roles.teacher.model")

    def _add_engine(self, engine: EngineConfig) -> None:
        """Add the processes of the engine."""
        if engine.runs_elsewhere:
            self.plan.processes.append(Process("policy server", 0, note="already running"))
            return
        local, servers = engine.local_model, engine.launched
        if local is None and servers is None:
            return
        needed = self.num_tokens
        of_model = self.shape.context if self.shape is not None else 0
        context = min(filter(None, (engine.max_model_len, of_model)), default=0)
        if context and needed > context:
            self.plan.problems.append(
                f"limits: max_prompt_tokens + max_response_tokens = {needed} exceed the context of "
                f"{context} tokens"
            )
        if local is not None:
            self._add_local(local, needed)
        if servers is not None:
            self._add_server(POLICY, servers, self.shape, context or needed)

    def _add_local(self, local: LocalModel, num_tokens: int) -> None:
        on_gpu = self.machine.num_gpus > 0 and local.device != "cpu"
        memory = estimates.Memory()
        if self.shape is not None:
            size = estimates.bytes_of(local.dtype)
            memory = estimates.embedded_memory(self.shape, size, local.num_sequences, num_tokens)
        note = "in the controller; its cache grows with use"
        place = ["0"] if on_gpu else []
        process = Process("embedded engine", 1, place, self.path, memory, note=note)
        cache = memory.gpu.get("engine cache", 0.0) if self.colocated else 0.0
        self.plan.add(process, serving=memory.gpu_bytes, training=memory.gpu_bytes - cache)

    def _add_role(self, name: str, role: RoleConfig) -> None:
        if role.url:
            note = f"already running at {role.url}"
            self.plan.processes.append(Process(f"{name} server", 0, note=note))
            return
        if not role.is_launched:
            self.plan.processes.append(Process(name, 0, note="a model on the learner's ranks"))
            return
        key = f"roles.{name}"
        shape = self._shape(self.resolve(role.model), f"{key}.model", role.quantization)
        context = role.max_model_len or (shape.context if shape is not None else 0)
        self._add_server(key, role, shape, context)

    def _add_server(
        self, key: str, config: LaunchConfig, shape: estimates.ModelShape | None, context: int
    ) -> None:
        """Add the servers of an engine or role, with their memory."""
        number, policy = config.num_servers, key == POLICY
        name = "policy server" if policy else f"{key.removeprefix('roles.')} server"
        path = config.model if isinstance(config, RoleConfig) else self.path
        b, size = estimates.bytes_of(config.dtype), self.machine.gpu_bytes
        if not self.machine.num_gpus or config.device == "cpu":
            weights = 0.0 if shape is None else shape.served_bytes(b)
            host = estimates.Memory({}, {"weights": weights, "cache": CPU_CACHE_GIB * GIB})
            self.plan.processes.append(Process(name, number, [], path, host, note="on the CPU"))
            return
        sleeps = policy and self.colocated
        gpus = self.gpus.assign(
            f"{key}.gpus",
            config.gpus,
            config.num_gpus,
            borrows=policy and bool(self.resources.colocated),
        )
        budget = config.gpu_memory_share * size
        on_each = min(number, config.servers_per_gpu)  # servers per GPU, each with its budget
        serving = on_each * budget
        awake = on_each * (SERVER_BYTES if sleeps else budget)  # during training
        memory, note = estimates.Memory(), ""
        if shape is not None:
            memory, tokens = estimates.server_memory(shape, config, size)
            weights = memory.gpu["weights"]
            if sleeps:
                assert self.engine is not None
                drops = self.engine.kind == "vllm" and self.engine.new_weights != "adapter"
                sleeping = {} if drops else {"sleeping part": weights * config.gpus_each}
                memory = estimates.Memory(memory.gpu, sleeping)
            note = f"tensor parallel {config.tensor_parallel_size}, "
            if config.data_parallel_size > 1:
                note += f"data parallel {config.data_parallel_size}, "
            note += f"{config.gpu_memory_share:g} of each GPU; keys and values of {tokens} tokens"
            if tokens < context:
                self.plan.problems.append(
                    f"{key}: {config.gpu_memory_share:g} of a GPU with {size / GIB:.0f} GiB are "
                    f"{budget / GIB:.1f} GiB; weights of {weights / GIB:.1f} GiB leave room for "
                    f"{tokens} tokens, one request may need {context}; raise gpu_memory_share or "
                    "tensor_parallel_size, or lower max_model_len"
                )
        process = Process(name, number, gpus, path, memory, note)
        self.plan.add(process, serving=serving, training=awake)


SAVED_PER_S = 1e9  # bytes per second of an NVMe disk, or a cluster's network file system


def saving_line(size: float, finish_s: float) -> str:
    """A line on the duration of a checkpoint, with a warning if finish_s is too short."""
    needed_s = size / SAVED_PER_S
    line = f"a checkpoint takes {size / GIB:.1f} GiB: about {needed_s:.0f} s at 1 GB/s"
    if needed_s <= finish_s:
        return line
    return (
        f"{line}, more than checkpoint.finish_s = {finish_s:g}: an interrupted run would not save "
        f"its last steps on such a disk; set it to {2 * needed_s:.0f} or more"
    )
