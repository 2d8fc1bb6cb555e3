"""Command line and environment of an engine server: scale-out and dev routes, log-probs of the
sampled distribution, and CPU workarounds.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import agentenv
from agentenv.assembly.serving.gpus import GIB, memory_of
from agentenv.base.errors import ConfigError
from agentenv.base.installation import CLONE
from agentenv.base.model_files import num_experts, num_positions, read_model_config
from agentenv.base.ports import LOOPBACK_DEVICE, is_loopback
from agentenv.contract.server_config import KEY_ENV, SGLANG_RESERVED, VLLM_IPC, LaunchConfig, Served
from agentenv.processes.supervisor import GPUS

VLLM_PLUGIN = Path(agentenv.__file__).parent / "engines" / "vllm_plugin"  # for PYTHONPATH
SERVER_KEY = VLLM_PLUGIN.with_name("server_key")  # likewise
VLLM_GATE = "AGENTENV_LEARNER_READY"  # variable that the plugin reads
SERVER_BYTES = 2 * GIB  # activations and graphs of a server, outside weights and cache
VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
VLLM_CPU_EXTENSION = "agentenv_vllm_cpu.WorkerExtension"  # repacks head and experts
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
MIN_BATCHED_TOKENS = 4096  # of one step of vLLM on the CPU
SGLANG_CPU_PLATFORM = "plaincpu"
CPU_CACHE_GIB = 1  # KV cache on the CPU
MAX_CPU_TOKENS = 65536  # of SGLang's cache on the CPU


def how_to_make(engine: str) -> str:
    """The commands that make an environment for an engine."""
    made = f"`python3 -m venv .venv-{engine} && .venv-{engine}/bin/pip install {engine}`"
    on_cpu = f" (for the CPU: `sh .ci/engine-{engine}`)" if CLONE.is_file() else ""
    return f"create one with {made}{on_cpu}"


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
        f"{how_to_make(engine)}; or set an interpreter with {key}.python"
    )


def command(python: str, served: Served, config: LaunchConfig) -> list[str]:
    """The whole command line. Raises ConfigError for a model that would crash the engine."""
    build = _vllm_arguments if served.engine == "vllm" else _sglang_arguments
    model_config = read_model_config(served.model)
    return [python, "-m", *build(served, config, model_config), *config.args]


def environment(served: Served, config: LaunchConfig) -> dict[str, str]:
    """The server's environment variables, in addition to ours."""
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if is_loopback(config.host):  # else gloo and vLLM listen at the machine's own address
        env |= {"GLOO_SOCKET_IFNAME": LOOPBACK_DEVICE, "VLLM_HOST_IP": "127.0.0.1"}
    paths = list[Path]()
    if served.key:
        env[KEY_ENV], paths = served.key, [SERVER_KEY]
    if served.engine == "vllm":
        env |= {"VLLM_NO_USAGE_STATS": "1"}
        if served.trained:
            paths.append(VLLM_PLUGIN)
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
    return env | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | config.env


def _vllm_arguments(served: Served, config: LaunchConfig, model: dict[str, Any]) -> list[str]:
    """vLLM's module and its arguments, after `python -m`."""
    # `vllm serve` is broken in the CPU wheel; the module works in all.
    found = ["vllm.entrypoints.openai.api_server", "--host", config.host]
    found += ["--port", str(served.port), "--model", str(served.model)]
    found += ["--served-model-name", served.name, "--uvicorn-log-level", "warning"]
    # With "auto", vLLM would run a float32 model in half precision.
    found += ["--dtype", _dtype(config, model)]
    if served.key:
        found += ["--middleware", "agentenv_key.Guard"]
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
        _, size = _heads(model)
        if size and size not in VLLM_CPU_HEAD_SIZES:
            raise ConfigError(
                f"{served.model}: its heads have size {size}; vLLM on the CPU starts with it but "
                "crashes at the first request. It supports "
                f"{', '.join(map(str, VLLM_CPU_HEAD_SIZES))}"
            )
        # The default there, blocks of 128 tokens, would not cache shorter prefixes.
        found += ["--enforce-eager", "--block-size", "32"]
        # A prompt that is computed in two parts crashes the engine if its request has a seed
        # (vLLM 0.32: "CPU Generator does not use offset"), so no prompt is split.
        length = served.max_model_len or num_positions(model)
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
    found = ["agentenv_key"] if served.key else []
    found += ["sglang.launch_server", "--host", config.host, "--port", str(served.port)]
    found += ["--model-path", str(served.model), "--served-model-name", served.name]
    found += ["--dtype", _dtype(config, model), "--enable-metrics", "--log-level-http", "warning"]
    if served.max_model_len:
        length = served.max_model_len + SGLANG_RESERVED
        of_model = num_positions(model) or length
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
        heads, size = _heads(model)  # the cache has keys and values in float32
        each = 2 * 4 * heads * size * int(model.get("num_hidden_layers") or 0)
        fitting = CPU_CACHE_GIB * 2**30 // each if each else MAX_CPU_TOKENS
        found += ["--max-total-tokens", str(min(MAX_CPU_TOKENS, fitting))]
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


def shared_cache(model: Path, config: LaunchConfig, gpu: str) -> int:
    """Bytes of the KV cache of a server on a GPU that other processes use while it starts; 0 if the
    size of the GPU is unknown. Without this, vLLM measures the free memory, and fails if that
    changes meanwhile."""
    parts = config.tensor_parallel_size
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors")) / parts
    return int(max(0.0, config.gpu_memory_share * memory_of(gpu) - weights - SERVER_BYTES))
