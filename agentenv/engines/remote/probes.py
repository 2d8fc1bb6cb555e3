"""Probes of a vLLM or SGLang server: its version and features, before the first request."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Any

from msgspec import Struct

from agentenv.base.errors import ConfigError, EngineError, reported_as
from agentenv.base.offload import in_thread
from agentenv.base.types import Chunk, SamplingParams, VersionSpan
from agentenv.contract.http_client import Logprob, MalformedReplyError, ServerClient, beginning
from agentenv.contract.request import PartEnd, ServerInfo, ServerRequest
from agentenv.contract.server_config import VLLM_IPC
from agentenv.contract.weights import Layout, Wire, find_layout
from agentenv.engines.remote.base import Facts
from agentenv.engines.remote.weight_sync import TransferRoutes
from agentenv.text.endpoint import Models

TRIAL = ServerRequest("", [0], SamplingParams(max_tokens=1, top_k=1))
VLLM_TRIED = "0.32"  # tested version of vLLM
GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
# On the CPU, vLLM 0.32 packs a tied output head and experts only once, so that a worker extension
# must repack them after updates; this method identifies it.
REPACK = "reload_and_repack"
EXTENSION = "agentenv_vllm_cpu.WorkerExtension"

# Constants of the plugin in servers that a run starts (vllm_plugin/agentenv_vllm.py):
ENTROPY = 1 << 32  # a rank with this bit has the bits of an entropy below it, float32, nats
STOP_STRINGS = "stop_strings"  # key of `extra_args`

NEWER = f"this requires vLLM {VLLM_TRIED} or newer"
_DEV = "set VLLM_SERVER_DEV_MODE=1 in the environment of the server"
VLLM_NEEDED = {
    f"POST {GENERATE}": f"{NEWER}, started with --enable-scale-out", f"POST {ABORT}": NEWER,
    "GET /v1/models": "is this a vLLM server?", "GET /health": "is this a vLLM server?",
    "GET /metrics": NEWER, "POST /pause": _DEV, "POST /resume": _DEV, "GET /is_paused": _DEV,
    "POST /collective_rpc": _DEV, "POST /reset_prefix_cache": _DEV, "GET /server_info": _DEV,
    "POST /update_weight_version": f"{NEWER}, and {_DEV}",
    "GET /weight_info": f"{NEWER}, and {_DEV}",
}  # fmt: skip
# Backends for broadcasts of weights: vLLM's own, and the tests' one for the CPU.
WIRES: dict[str, Wire] = {"nccl": "nccl", "agentenv_gloo": "torch"}
VLLM_TRANSFER = TransferRoutes(
    join="/init_weight_transfer_engine",
    start="/start_weight_update",
    receive="/update_weights",
    finish="/finish_weight_update",
    leave="/shutdown_weight_transfer_engine",
    empty=None,
)
VLLM_ROUTES = {
    "broadcast": VLLM_TRANSFER.posts - {f"POST {VLLM_TRANSFER.leave}"},
    "ipc": {f"POST {path}" for path in ("/start_weight_update", "/finish_weight_update")},
    "adapters": {"POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"},
    "sleep": {"POST /sleep", "POST /wake_up"},
}


class VLLMFacts(Facts, frozen=True):
    """`extension` is its worker extension, `transfer` its backend for broadcasts; `plugin`: it has
    the plugin."""

    transfer: str
    extension: str
    routes: frozenset[str]
    plugin: bool = False


class _ModelSettings(Struct):
    logprobs_mode: str = ""
    max_logprobs: int = 20
    enable_sleep_mode: bool = False
    quantization: str | None = None


class _Settings(Struct):
    """The used part of vLLM's start-up arguments."""

    device_config: dict[str, Any]
    model_config: _ModelSettings
    parallel_config: dict[str, Any]
    weight_transfer_config: dict[str, Any] | None = None
    speculative_config: dict[str, Any] | None = None


class _ServerInfo(Struct):
    vllm_config: _Settings


async def probe_vllm(http: ServerClient, vocab_size: int, entropy_top_k: int) -> VLLMFacts:
    """Probe the server. Raises ConfigError for missing features, ServerLostError if it is lost."""
    routes = await http.routes()
    for route, cure in VLLM_NEEDED.items():
        if route not in routes:
            raise ConfigError(f"{http.name} has no route {route}: {cure}")
    with reported_as(ConfigError, "", MalformedReplyError, ValueError, end=f"; {NEWER}"):
        version = await http.read(str, "GET", "/version", "version")
        model, *_ = (await http.call_as(Models, "GET", "/v1/models")).data  # ValueError: none
        # The first answer takes seconds: vLLM lists the packages of its whole environment.
        params = {"config_format": "json"}
        settings = await http.call_as(
            _ServerInfo, "GET", "/server_info", params=params, timeout_s=120
        )
    info = settings.vllm_config
    cpu = "cpu" in str(info.device_config.get("device", ""))
    _check_logprobs(http.name, info.model_config, entropy_top_k)
    check_settings(
        http.name,
        speculative=info.speculative_config,
        flag="--speculative-config",
        quantization=info.model_config.quantization,
    )
    layout = await in_thread(find_layout, [Path(model.root or "")])
    extension = str(info.parallel_config.get("worker_extension_cls") or "")
    if cpu and layout is not None and not extension:
        _check_packed(http.name, version, layout)
    transfer = str((info.weight_transfer_config or {}).get("backend"))
    able = {
        "broadcast": transfer in WIRES,
        "ipc": transfer == VLLM_IPC,
        "adapters": True,
        # On the CPU no memory is freed, but the server supports the protocol.
        "sleep": cpu or info.model_config.enable_sleep_mode,
    }
    features = {name for name, wanted in VLLM_ROUTES.items() if able[name] and routes >= wanted}
    return VLLMFacts(
        ServerInfo("vllm", version, model.id, model.max_model_len or 0, frozenset(features)),
        vocab_size,
        layout,
        _num_ranks(info.parallel_config),
        transfer,
        extension,
        routes,
    )


def _num_ranks(settings: dict[str, Any]) -> int:
    """Data-parallel engines among which the server chooses; it cannot name those of other hosts."""
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
            f"{name} returns at most {most} log-probs per token, entropy_top_k is {entropy_top_k}: "
            f"start it with --max-logprobs {entropy_top_k}, or lower entropy_top_k"
        )


def _check_packed(name: str, version: str, layout: Layout) -> None:
    """Reject models whose weights the CPU kernels keep as a stale packed copy."""
    for is_there, model, what, other in (
        (layout.tied, "tied embeddings", "output head", "an untied model"),
        (layout.has_experts, "experts", "experts", "a model without"),
    ):
        if is_there:
            raise ConfigError(
                f"{name} runs a model with {model} on the CPU, where vLLM {version} keeps the old "
                f"{what} after new weights are loaded: start it with --worker-extension-cls "
                f"{EXTENSION}, or use {other}"
            )


def check_trial(
    name: str, end: PartEnd, chunks: Sequence[Chunk], policy_version: int, *, counts_cached: bool
) -> None:
    """Raises ConfigError if the answer to TRIAL lacks required fields."""
    logprob, entropy = (chunks[0].logprobs[0], chunks[0].entropies[0]) if chunks else (nan, nan)
    if not (abs(logprob) <= 1e-3 and entropy <= 1e-2):
        raise ConfigError(
            f"{name} returns log-prob {logprob:.4f} for the only allowed token: start it with "
            "--logprobs-mode processed_logprobs"
        )
    if end.version_spans != [VersionSpan(policy_version, 0, 1)]:
        raise ConfigError(f"{name} does not report which weights sampled a token: {NEWER}")
    if not counts_cached:
        raise ConfigError(
            f"{name} does not report cached tokens: start it with --enable-prompt-tokens-details"
        )


logger = logging.getLogger(__name__)

TokenLogprob = tuple[Logprob | None, int, str | None]

SGLANG_TRIED = "0.5.23"
SGLANG_NEWER = f"expected SGLang {SGLANG_TRIED} or newer"
SGLANG_NEEDED = (
    "POST /generate", "POST /abort_request", "POST /pause_generation", "POST /continue_generation",
    "POST /update_weights_from_disk", "POST /update_weight_version", "POST /flush_cache",
    "GET /model_info", "GET /server_info", "GET /v1/loads",
)  # fmt: skip
SGLANG_TRANSFER = TransferRoutes(
    join="/init_weights_update_group",
    start="/begin_weight_update",
    receive="/update_weights_from_distributed",
    finish="/end_weight_update",
    leave="/destroy_weights_update_group",
    empty={},
)
MEMORY_SAVER = ("POST /release_memory_occupation", "POST /resume_memory_occupation")
FIELDS = ("rid", "cache_salt", "return_sampling_mask", "sampling_logprobs_mode")
SAMPLING_FIELDS = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop"}
MODEL_SLACK = 4  # tokens by which prompt and turn together may exceed the longest prompt


class SGLangFacts(Facts, frozen=True):
    """Limits of a server: prompt tokens, the largest top_k with log-probs after truncation, and
    whether it uses seeds."""

    max_prompt: int
    max_top_k: int
    use_seed: bool


class ServerArgs(Struct, frozen=True):
    """The used part of /server_info."""

    version: str
    max_req_input_len: int
    sampling_mask_max_tokens: int = 0
    skip_tokenizer_init: bool = False
    incremental_streaming_output: bool = False
    enable_deterministic_inference: bool = False
    enable_memory_saver: bool = False
    enable_metrics: bool = False
    preferred_sampling_params: Any = None
    speculative_algorithm: str | None = None
    quantization: str | None = None
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1


class ModelInfo(Struct, frozen=True):
    """The used part of /model_info. `model_path` follows updates, whose directories may have been
    removed; `tokenizer_path` does not."""

    served_model_name: str
    model_path: str
    tokenizer_path: str
    is_generation: bool = True


async def probe_sglang(http: ServerClient, vocab_size: int, layout: Layout | None) -> SGLangFacts:
    """Read routes, version, settings and limits; `layout` is its model's, if known.

    Raises ConfigError for missing requirements.
    """
    routes = await http.routes()
    if missing := [route for route in SGLANG_NEEDED if route not in routes]:
        raise ConfigError(f"{http.name} lacks {', '.join(missing)}; {SGLANG_NEWER}")
    problem = "cannot read /server_info or /model_info"
    with reported_as(ConfigError, problem, MalformedReplyError, end=f"; {SGLANG_NEWER}"):
        model = await http.call_as(ModelInfo, "GET", "/model_info")
        args = await http.call_as(ServerArgs, "GET", "/server_info")
    folders = [Path(model.model_path), Path(model.tokenizer_path)]
    await _check_fields(http, args)
    _check_args(http.name, args, model)
    layout = layout or await in_thread(find_layout, folders)
    features = {"broadcast"} if routes >= SGLANG_TRANSFER.posts else set()
    if args.enable_memory_saver and routes.issuperset(MEMORY_SAVER):
        features.add("sleep")  # without the flag, these routes crash the server
    max_len = args.max_req_input_len + MODEL_SLACK
    return SGLangFacts(
        ServerInfo("sglang", args.version, model.served_model_name, max_len, frozenset(features)),
        vocab_size,
        layout,
        args.dp_size,
        max_prompt=args.max_req_input_len - 1,
        max_top_k=args.sampling_mask_max_tokens,
        use_seed=args.enable_deterministic_inference,
    )


async def _check_fields(http: ServerClient, args: ServerArgs) -> None:
    """Raises ConfigError for unsupported request fields, which would be ignored silently."""
    schema = await http.call_json("GET", "/openapi.json")
    try:
        known = schema["components"]["schemas"]["GenerateReqInput"]["properties"].keys()
    except (LookupError, TypeError, AttributeError):
        known = set()
    missing = [field for field in FIELDS if field not in known]
    if missing:
        raise ConfigError(
            f"{http.name}: POST /generate of SGLang {args.version} does not know "
            f"{', '.join(missing)}; {SGLANG_NEWER}"
        )


def _check_args(name: str, args: ServerArgs, model: ModelInfo) -> None:
    """Raises ConfigError for a server that would change the sampling."""
    if not model.is_generation:
        raise ConfigError(f"{name} serves an embedding model, which cannot sample")
    if args.skip_tokenizer_init:
        raise ConfigError(
            f"{name} does not match stop strings; start it without --skip-tokenizer-init"
        )
    preferred = args.preferred_sampling_params
    if preferred and not (isinstance(preferred, dict) and preferred.keys() <= SAMPLING_FIELDS):
        raise ConfigError(
            f"{name} changes requests through --preferred-sampling-params {preferred}; start it "
            "without"
        )
    if not args.incremental_streaming_output:
        raise ConfigError(
            f"{name} repeats the whole turn in every event, which adds up to gigabytes for long "
            "turns; start it with --incremental-streaming-output"
        )
    check_settings(
        name,
        speculative=args.speculative_algorithm,
        flag="--speculative-algorithm",
        quantization=args.quantization,
    )
    if not args.enable_metrics:
        logger.warning(
            "%s does not report preemptions, which limit its number of requests; start it with "
            "--enable-metrics",
            name,
        )
    if not args.enable_deterministic_inference:
        logger.info("%s ignores seeds; --enable-deterministic-inference makes it honor them", name)


# Checks of probes.


def check_settings(name: str, *, speculative: Any, flag: str, quantization: str | None) -> None:
    """Raises ConfigError for settings that change a server's samples."""
    if speculative:
        raise ConfigError(
            f"{name} uses speculative decoding (several tokens per step); stop strings and "
            f"log-probs are unverified in this mode: start it without {flag}"
        )
    if quantization:
        raise ConfigError(
            f"{name} runs quantized weights ({quantization}), into which the learner's cannot be "
            "loaded and whose log-probs differ from the learner's: start it without quantization, "
            "or only evaluate it, with "
            'engine.name = "openai"'
        )


def read_metrics(body: bytes, names: Mapping[str, object]) -> dict[str, list[float]]:
    """Values of Prometheus text by name; a line is NAME{LABELS} VALUE. Raises EngineError for a
    value that is not a finite number."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for line in body.decode(errors="replace").splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in found:
            try:
                value = float(line.rpartition(" ")[2])
            except ValueError:
                value = nan
            if not isfinite(value):
                raise EngineError(f"the metrics of a server hold no number: {beginning(line)!r}")
            found[name].append(value)
    return found
