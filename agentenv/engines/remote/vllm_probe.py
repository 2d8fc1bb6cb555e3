"""What a vLLM server is and can do, found out before the first request."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from agentenv.engines.remote.base import Facts, check_settings, vocabulary
from agentenv.engines.remote.client import Count, HttpClient, MalformedReplyError
from agentenv.engines.remote.server import PartEnd, Request, ServerInfo
from agentenv.engines.remote.weight_sync import TransferRoutes
from agentenv.engines.remote.weights import Layout, Wire, find_layout
from agentenv.errors import ConfigError
from agentenv.offload import in_thread
from agentenv.types import Chunk, SamplingParams, VersionSpan

TRIAL = Request("", [0], SamplingParams(max_tokens=1, top_k=1))
TRIED = "0.32"  # version of vLLM that this client was tested with
GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
# A tied output head and experts stay stale on the CPU (vLLM 0.32 packs them once and for all), so
# that a worker extension has to pack them again; this is the method by which it is recognised.
REPACK = "reload_and_repack"
EXTENSION = "agentenv_vllm_cpu.WorkerExtension"

# Of our plugin, which servers that a run starts have (vllm_plugin/agentenv_vllm.py):
ENTROPY = 1 << 32  # added to the rank of a token that holds the bits of an entropy, float32, nats
STOP_STRINGS = "stop_strings"  # of `extra_args`

NEWER = f"it takes vLLM {TRIED} or newer"
_DEV = "set VLLM_SERVER_DEV_MODE=1 in the environment of the server"
NEEDED = {
    f"POST {GENERATE}": f"{NEWER}, started with --enable-scale-out",
    f"POST {ABORT}": NEWER,
    "GET /v1/models": "is this a vLLM server?",
    "GET /health": "is this a vLLM server?",
    "GET /metrics": NEWER,
    "POST /pause": _DEV,
    "POST /resume": _DEV,
    "GET /is_paused": _DEV,
    "POST /collective_rpc": _DEV,
    "POST /reset_prefix_cache": _DEV,
    "GET /server_info": _DEV,
    "POST /update_weight_version": f"{NEWER}, and {_DEV}",
    "GET /weight_info": f"{NEWER}, and {_DEV}",
}
# Backends of weights by broadcast: vLLM's own, and that of the tests for the CPU.
WIRES: dict[str, Wire] = {"nccl": "nccl", "agentenv_gloo": "torch"}
TRANSFER = TransferRoutes(
    join="/init_weight_transfer_engine",
    start="/start_weight_update",
    receive="/update_weights",
    finish="/finish_weight_update",
    leave="/shutdown_weight_transfer_engine",
    empty=None,
)
ROUTES = {
    "broadcast": TRANSFER.posts - {f"POST {TRANSFER.leave}"},
    "adapters": {"POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"},
    "sleep": {"POST /sleep", "POST /wake_up"},
}


class VLLMFacts(Facts, frozen=True):
    """`extension` is of its workers, `transfer` is their backend of weights by broadcast; `plugin`:
    it has ours."""

    transfer: str
    extension: str
    routes: frozenset[str]
    plugin: bool = False


class _Model(Struct):
    id: str
    max_model_len: Count | None = None  # None: of an adapter
    root: str | None = None


class Models(Struct):
    data: Annotated[list[_Model], Meta(min_length=1)]


class _ModelSettings(Struct):
    logprobs_mode: str = ""
    max_logprobs: int = 20
    enable_sleep_mode: bool = False
    quantization: str | None = None


class _Settings(Struct):
    """What vLLM was started with, as far as it is read."""

    device_config: dict[str, Any]
    model_config: _ModelSettings
    scheduler_config: dict[str, Any]
    parallel_config: dict[str, Any]
    weight_transfer_config: dict[str, Any] | None = None
    speculative_config: dict[str, Any] | None = None


class _ServerInfo(Struct):
    vllm_config: _Settings


async def probe(http: HttpClient, vocab_size: int | None, entropy_top_k: int) -> VLLMFacts:
    """Ask the server. Raises ConfigError if it lacks something, ServerLostError if it is gone."""
    routes = await http.routes()
    for route, cure in NEEDED.items():
        if route not in routes:
            raise ConfigError(f"{http.name} has no route {route}: {cure}")
    try:
        version = await http.read(str, "GET", "/version", "version")
        model = (await http.call_as(Models, "GET", "/v1/models")).data[0]
        # The first answer takes seconds: vLLM looks at the packages of its whole environment.
        params = {"config_format": "json"}
        settings = await http.call_as(
            _ServerInfo, "GET", "/server_info", params=params, timeout_s=120
        )
    except MalformedReplyError as error:
        raise ConfigError(f"{error}; {NEWER}") from error
    info = settings.vllm_config
    cpu = "cpu" in str(info.device_config.get("device", ""))
    _check_logprobs(http.name, info.model_config, entropy_top_k)
    check_settings(
        http.name,
        speculative=info.speculative_config,
        flag="--speculative-config",
        quantization=info.model_config.quantization,
    )
    if cpu:
        _check_prefill(http.name, info.scheduler_config)
    root = model.root or ""
    layout = await in_thread(find_layout, [Path(root)])
    extension = str(info.parallel_config.get("worker_extension_cls") or "")
    if cpu and layout is not None and not extension:
        _check_packed(http.name, version, layout)
    transfer = str((info.weight_transfer_config or {}).get("backend"))
    able = {
        "broadcast": transfer in WIRES,
        "adapters": True,
        # On the CPU no memory is given back, but a server takes part in every other way.
        "sleep": cpu or info.model_config.enable_sleep_mode,
    }
    features = {name for name, wanted in ROUTES.items() if able[name] and routes >= wanted}
    return VLLMFacts(
        ServerInfo("vllm", version, model.id, model.max_model_len or 0, frozenset(features)),
        vocabulary(http.name, vocab_size, layout, root),
        layout,
        _num_ranks(info.parallel_config),
        transfer,
        extension,
        routes,
    )


def _num_ranks(settings: dict[str, Any]) -> int:
    """Data-parallel engines among which the server chooses; those of other hosts it cannot name."""
    several, elsewhere = settings.get("data_parallel_size"), ("external", "hybrid")
    if any(settings.get(f"data_parallel_{kind}_lb") for kind in elsewhere):
        return 1
    return several if isinstance(several, int) and several > 0 else 1


def _check_logprobs(name: str, settings: _ModelSettings, entropy_top_k: int) -> None:
    mode = settings.logprobs_mode
    if mode != "processed_logprobs":
        raise ConfigError(
            f"{name} reports log-probs of the mode {mode!r}, not those of the distribution it "
            "samples from: start it with --logprobs-mode processed_logprobs"
        )
    most = settings.max_logprobs
    if most != -1 and (entropy_top_k == -1 or entropy_top_k > most):
        raise ConfigError(
            f"{name} gives at most {most} log-probs a token, entropy_top_k is {entropy_top_k}: "
            f"start it with --max-logprobs {entropy_top_k}, or lower entropy_top_k"
        )


def _check_packed(name: str, version: str, layout: Layout) -> None:
    """What the CPU's kernels keep a packed copy of."""
    for is_there, model, what, other in (
        (layout.tied, "tied embeddings", "output head", "an untied model"),
        (layout.has_experts, "experts", "experts", "a model without"),
    ):
        if is_there:
            raise ConfigError(
                f"{name} runs a model with {model} on the CPU, where vLLM {version} keeps the old "
                f"{what} when weights are loaded: start it with --worker-extension-cls "
                f"{EXTENSION}, or use {other}"
            )


def _check_prefill(name: str, settings: dict[str, Any]) -> None:
    if settings.get("enable_chunked_prefill"):
        raise ConfigError(
            f"{name} runs on the CPU and computes long prompts in parts, of which vLLM {TRIED} "
            "dies when a request has a seed: start it with --no-enable-chunked-prefill"
        )


def check_trial(
    name: str, end: PartEnd, chunks: Sequence[Chunk], policy_version: int, *, counts_cached: bool
) -> None:
    """Raises ConfigError unless the answer to TRIAL has what every answer must have."""
    logprob, entropy = (chunks[0].logprobs[0], chunks[0].entropies[0]) if chunks else (nan, nan)
    if not (abs(logprob) <= 1e-3 and entropy <= 1e-2):
        raise ConfigError(
            f"{name} gives log-prob {logprob:.4f} to the only token it may sample: start "
            "it with --logprobs-mode processed_logprobs"
        )
    if end.version_spans != [VersionSpan(policy_version, 0, 1)]:
        raise ConfigError(f"{name} does not say which weights sampled a token: {NEWER}")
    if not counts_cached:
        raise ConfigError(
            f"{name} does not count cached tokens: start it with --enable-prompt-tokens-details"
        )
