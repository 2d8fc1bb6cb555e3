"""What a vLLM server is and can do, found out before the first request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from agentenv.engines.checkpoint_layout import Layout, read_layout
from agentenv.engines.http import HttpClient
from agentenv.engines.server import Request, ServerInfo
from agentenv.engines.vllm_stream import Answer
from agentenv.errors import ConfigError, EngineError
from agentenv.types import SamplingParams, VersionSpan

TRIED = "0.32"  # version of vLLM that this client was tested with
GENERATE = "/inference/v1/generate"
ABORT, OLD_ABORT = "/inference/v1/abort_requests", "/abort_requests"
# The tied output head stays stale on the CPU (vLLM 0.32 packs it once and for all), so that a
# worker extension has to pack it again; this is the method by which it is recognised.
REPACK = "reload_and_repack"
EXTENSION = "agentenv_vllm_cpu.WorkerExtension"

TRIAL = Request("", [0], SamplingParams(max_tokens=1, top_k=1))

_DEV = "set VLLM_SERVER_DEV_MODE=1 in the environment of the server"
NEEDED = {
    f"POST {GENERATE}": f"it takes vLLM {TRIED} or newer, started with --enable-scale-out",
    "GET /v1/models": "is this a vLLM server?",
    "GET /health": "is this a vLLM server?",
    "GET /metrics": f"it takes vLLM {TRIED} or newer",
    "POST /pause": _DEV,
    "POST /resume": _DEV,
    "GET /is_paused": _DEV,
    "POST /collective_rpc": _DEV,
    "POST /reset_prefix_cache": _DEV,
    "GET /server_info": _DEV,
    "POST /update_weight_version": f"it takes vLLM {TRIED} or newer, and {_DEV}",
}
BACKEND = "agentenv"  # of weights by broadcast: vllm_plugin registers it
_BROADCAST = {
    "POST /init_weight_transfer_engine",
    "POST /start_weight_update",
    "POST /update_weights",
    "POST /finish_weight_update",
}


class Facts(Struct, frozen=True):
    """What was found. `layout` is of the directory that the server was started from, None if it
    cannot be read from here; `cpu` and `extension` are of its workers."""

    version: str
    model: str
    max_model_len: int
    vocab_size: int
    layout: Layout | None
    cpu: bool
    extension: str
    routes: frozenset[str]
    features: frozenset[str]

    def info(self) -> ServerInfo:
        return ServerInfo("vllm", self.version, self.model, self.max_model_len, self.features)


async def probe(http: HttpClient, vocab_size: int | None, entropy_top_k: int) -> Facts:
    """Ask the server. Raises ConfigError if it lacks something, ServerLostError if it is gone."""
    routes = await http.routes()
    for route, cure in NEEDED.items():
        if route not in routes:
            raise ConfigError(f"{http.name} has no route {route}: {cure}")
    if f"POST {ABORT}" not in routes and f"POST {OLD_ABORT}" not in routes:
        raise ConfigError(f"{http.name} has no route POST {ABORT}: it takes vLLM {TRIED} or newer")
    version = (await http.call_json("GET", "/version"))["version"]
    model = (await http.call_json("GET", "/v1/models"))["data"][0]
    # The first answer takes seconds: vLLM looks at the packages of its whole environment.
    info = (
        await http.call_json("GET", "/server_info", params={"config_format": "json"}, timeout_s=120)
    )["vllm_config"]
    cpu = "cpu" in str(info["device_config"].get("device", ""))
    _check_settings(http.name, info["model_config"], entropy_top_k)
    if cpu:
        _check_prefill(http.name, info["scheduler_config"])
    layout = _layout(Path(str(model.get("root", ""))))
    size = vocab_size or (layout.vocab_size if layout is not None else None)
    if size is None:
        raise ConfigError(
            f"{http.name} serves {model.get('root')!r}, whose config.json cannot be read from "
            "here: give the size of its vocabulary (vocab_size)"
        )
    features = {"versions", "load_weights", "pause"}
    transfer = info.get("weight_transfer_config") or {}
    if routes >= _BROADCAST and transfer.get("backend") == BACKEND:
        features.add("broadcast")
    if "POST /sleep" in routes and info["model_config"].get("enable_sleep_mode"):
        features.add("sleep")
    if "POST /weight_checker" in routes and not cpu:
        features.add("fingerprint")
    return Facts(
        version=str(version),
        model=model["id"],
        max_model_len=model["max_model_len"],
        vocab_size=size,
        layout=layout,
        cpu=cpu,
        extension=info["parallel_config"].get("worker_extension_cls") or "",
        routes=routes,
        features=frozenset(features),
    )


def check_tied(name: str, facts: Facts) -> None:
    """Raises ConfigError if the server would go on with an old output head after an update."""
    tied = facts.layout is not None and facts.layout.tied
    if facts.cpu and tied and not facts.extension:
        raise ConfigError(
            f"{name} runs a model with tied embeddings on the CPU, where vLLM {facts.version} "
            "keeps the old output head when weights are loaded: start it with "
            f"--worker-extension-cls {EXTENSION}, or use an untied model"
        )


def check_trial(name: str, facts: Facts, answer: Answer, policy_version: int) -> None:
    """Raises ConfigError unless the answer to TRIAL tells what every answer has to tell."""
    done = answer.finish()
    if abs(done.logprobs[0]) > 1e-3 or done.entropies[0] > 1e-2:
        raise ConfigError(
            f"{name} gives log-prob {done.logprobs[0]:.4f} to the only token it may sample: start "
            "it with --logprobs-mode processed_logprobs"
        )
    if done.version_spans != [VersionSpan(policy_version, 0, 1)]:
        raise ConfigError(
            f"{name} does not say which weights sampled a token; vLLM {facts.version} is too old"
        )
    if not answer.has_cached_tokens:
        raise ConfigError(
            f"{name} does not count cached tokens: start it with --enable-prompt-tokens-details"
        )


def _check_settings(name: str, settings: dict[str, Any], entropy_top_k: int) -> None:
    mode = settings.get("logprobs_mode")
    if mode != "processed_logprobs":
        raise ConfigError(
            f"{name} reports log-probs of the mode {mode!r}, not those of the distribution it "
            "samples from: start it with --logprobs-mode processed_logprobs"
        )
    most = settings.get("max_logprobs", 20)
    if most != -1 and (entropy_top_k == -1 or entropy_top_k > most):
        raise ConfigError(
            f"{name} gives at most {most} log-probs a token, entropy_top_k is {entropy_top_k}: "
            f"start it with --max-logprobs {entropy_top_k}, or lower entropy_top_k"
        )


def _check_prefill(name: str, settings: dict[str, Any]) -> None:
    if settings.get("enable_chunked_prefill"):
        raise ConfigError(
            f"{name} runs on the CPU and computes long prompts in parts, of which vLLM {TRIED} "
            "dies when a request has a seed: start it with --no-enable-chunked-prefill"
        )


def _layout(root: Path) -> Layout | None:
    try:
        return read_layout(root)
    except EngineError:  # a name on a hub, another machine, or another format
        return None
