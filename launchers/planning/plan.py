"""The processes of a run, their GPUs, and what each GPU has to hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentenv.engines.embedded_config import EmbeddedConfig
from agentenv.engines.launch_config import LaunchConfig, RoleConfig, ServersConfig
from agentenv.engines.remote_config import RemoteConfig
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.limits import Limits
from launchers.checkpoints import find_checkpoint
from launchers.planning.memory import (
    GIB,
    Memory,
    bytes_of,
    embedded_memory,
    learner_memory,
    server_room,
)
from launchers.planning.processes import Machine, Plan, Process, check_memory
from launchers.planning.shapes import KNOWN, ModelShape, find_shape
from launchers.serving.gpus import GpuPlan
from launchers.serving.resources import divide
from learners.learner import LearnerConfig

Resolve = Callable[[str], Path]
NO_SHAPE = (
    f"not here, and no estimate of its memory: the path names no known model ({', '.join(KNOWN)})"
)


def make_plan(config: Any, machine: Machine, resolve: Resolve, model: str = "") -> Plan:
    """The plan of a configuration with some of model, learner, engine, roles and resources.

    `model`: the path of the policy where the configuration does not hold it. Raises ConfigError
    for GPUs that are missing or claimed twice and for a model whose sizes nobody knows.
    """
    plan = Plan(machine)
    gpus = GpuPlan([str(number) for number in range(machine.num_gpus)])
    path = model or getattr(getattr(config, "model", None), "path", "")
    if path or hasattr(config, "limits"):
        plan.processes.append(Process("controller", 1, note="rollouts, tools, graders"))
    shape = _policy_shape(config, path, resolve, plan) if path else None
    engine, learner = getattr(config, "engine", None), getattr(config, "learner", None)
    ranks: list[str] = []
    if learner is not None:
        resources = getattr(config, "resources", None)
        if resources is not None:
            engine, ranks = divide(resources, engine, learner, gpus)
        _add_learner(plan, config, learner, shape, ranks, path)
    for name, role in getattr(config, "roles", {}).items():
        _add_role(plan, name, role, gpus, resolve)
    if engine is not None:
        _add_engine(plan, config, engine, shape, gpus, path)
    check_memory(plan)
    return plan


def largest_microbatch(config: Any) -> int:
    """Tokens: the learner's budget, or one path where that is longer."""
    budget = int(config.learner.max_tokens_per_microbatch)
    has_rollouts = hasattr(config, "limits")
    return max(budget, longest_path(config) if has_rollouts else int(config.data.max_length))


def longest_path(config: Any) -> int:
    """Most tokens of prompt and response, in the evaluation's sets with limits of their own too."""
    own = [one.limits for one in getattr(config, "sets", {}).values() if one.limits is not None]
    limits: list[Limits] = [config.limits, *own]
    return max(one.max_prompt_tokens + one.max_response_tokens for one in limits)


def _policy_shape(config: Any, path: str, resolve: Resolve, plan: Plan) -> ModelShape | None:
    place = resolve(path)
    if "{run}" in path and config.run.setup and not place.is_dir():
        plan.missing.append(f"model.path = {path}: made by {config.run.setup} at the start")
        return None
    if place.is_dir():
        try:
            place = find_checkpoint(place)
        except AgentEnvError as error:
            plan.missing.append(f"model.path = {path}: {error}")
            return None
    return _shape(place, "model.path", plan)


def _shape(path: Path, key: str, plan: Plan, quantization: str = "") -> ModelShape | None:
    """What is not here, or of an unknown size, is told as missing."""
    shape = find_shape(path, quantization)
    if not path.is_dir():
        why = shape.source if shape is not None else NO_SHAPE
        plan.missing.append(f"{key} = {path}: {why}")
    return shape


def _add_learner(
    plan: Plan, config: Any, learner: LearnerConfig, shape: ModelShape | None, ranks: list[str],
    path: str,
) -> None:  # fmt: skip
    algorithm = getattr(config, "algorithm", None)
    reference = algorithm is not None and algorithm.needs_reference
    tokens = largest_microbatch(config)
    memory = Memory()
    if shape is not None:
        memory = learner_memory(shape, learner, tokens, has_reference=reference)
    on_gpu = plan.machine.num_gpus > 0 and learner.launch == "local"
    if on_gpu and not ranks:
        if learner.num_ranks > plan.machine.num_gpus:
            raise ConfigError(
                f"learner.num_ranks: {learner.num_ranks} ranks need a GPU each; there are "
                f"{plan.machine.num_gpus}"
            )
        ranks = [str(number) for number in range(learner.num_ranks)]
    note = f"ZeRO {learner.zero_stage}, {learner.dtype}, {tokens} tokens at once"
    if learner.launch == "external":
        note += "; started elsewhere"
    plan.add(
        Process("learner rank", learner.num_ranks, ranks, path, memory, note=note),
        memory.gpu_bytes,
    )


def _add_engine(
    plan: Plan, config: Any, engine: Any, shape: ModelShape | None, gpus: GpuPlan, path: str
) -> None:
    if isinstance(engine, RemoteConfig) and (engine.urls or engine.urls_file):
        plan.processes.append(Process("policy server", 0, note="runs already"))
        return
    needed = longest_path(config)
    of_model = shape.context if shape is not None else 0
    context = min(filter(None, (int(getattr(engine, "max_model_len", 0)), of_model)), default=0)
    if context and needed > context:
        plan.problems.append(
            f"limits: max_prompt_tokens + max_response_tokens = {needed} exceed the context of "
            f"{context} tokens"
        )
    if isinstance(engine, EmbeddedConfig):
        on_gpu = plan.machine.num_gpus > 0 and engine.device != "cpu"
        memory = Memory()
        if shape is not None:
            number = engine.max_num_seqs + engine.num_cached_seqs
            memory = embedded_memory(shape, bytes_of(engine.dtype), number, needed)
        place = ["0"] if on_gpu else []
        note = "in the controller; its cache grows as it is used"
        plan.add(Process("embedded engine", 1, place, path, memory, note=note), memory.gpu_bytes)
    elif isinstance(engine, RemoteConfig):
        servers = engine.servers or ServersConfig()
        where = context or needed
        _add_server(plan, "policy server", "engine.servers", servers, shape, where, gpus, path)


def _add_role(plan: Plan, name: str, role: RoleConfig, gpus: GpuPlan, resolve: Resolve) -> None:
    if role.url:
        plan.processes.append(Process(f"{name} server", 0, note=f"runs already at {role.url}"))
        return
    key = f"roles.{name}"
    shape = _shape(resolve(role.model), f"{key}.model", plan, role.quantization)
    context = role.max_model_len or (shape.context if shape is not None else 0)
    _add_server(plan, f"{name} server", key, role, shape, context, gpus, role.model)


def _add_server(
    plan: Plan, name: str, key: str, config: LaunchConfig, shape: ModelShape | None, context: int,
    gpus: GpuPlan, path: str,
) -> None:  # fmt: skip
    number = config.num_servers if isinstance(config, ServersConfig) else 1
    if not plan.machine.num_gpus or config.device == "cpu":
        b = bytes_of(config.dtype)
        weights = 0.0 if shape is None else shape.served_bytes(b)
        host = Memory({}, {"weights": weights, "cache": config.kv_cache_gb * GIB})
        plan.processes.append(Process(name, number, [], path, host, note="on the CPU"))
        return
    each = config.tensor_parallel_size * config.data_parallel_size
    taken = gpus.assign(f"{key}.gpus", config.gpus, each * number)
    if shape is None:
        plan.add(
            Process(name, number, taken, path), config.gpu_memory_share * plan.machine.gpu_bytes
        )
        return
    room = server_room(shape, config, context, plan.machine.gpu_bytes)
    memory = Memory({"weights": room.weights, "cache": max(0.0, room.cache)})
    note = f"tensor parallel {config.tensor_parallel_size}, "
    if config.data_parallel_size > 1:
        note += f"data parallel {config.data_parallel_size}, "
    note += f"{config.gpu_memory_share:g} of each GPU"
    if room.sequences < 1:
        plan.problems.append(
            f"{key}: {config.gpu_memory_share:g} of a GPU with {plan.machine.gpu_bytes / GIB:.0f} "
            f"GiB are {room.budget / GIB:.1f} GiB; weights of {room.weights / GIB:.1f} GiB leave "
            f"room for {room.tokens} tokens, one request may need {context}; raise "
            "gpu_memory_share or tensor_parallel_size, or lower max_model_len"
        )
    plan.add(Process(name, number, taken, path, memory, room, note), room.budget)
