"""Calls that change or ask a vLLM server as a whole, sent to each API server behind one URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from agentenv.engines.client import FailedError, HttpClient, RefusedError, all_of
from agentenv.engines.server import Request, ServerInfo, ServerLoad, ServerLostError, top_k_entropy
from agentenv.engines.weights import Layout, read_layout
from agentenv.errors import ConfigError, EngineError
from agentenv.types import Chunk, Completion, SamplingParams, VersionSpan

# One request as vLLM takes it, and what it streams, read into chunks and a Completion.

NO_LOGPROB = -9999.0  # what vLLM writes for minus infinity, NaN, and for "not known"


class _Top(Struct):
    logprob: float


class _Position(Struct):
    logprob: float
    top_logprobs: list[_Top] = []


class _Logprobs(Struct):
    content: list[_Position]


class _Span(Struct):
    version: str
    start: int
    end: int


class _Choice(Struct):
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens_details: _Details | None = None


class _Failure(Struct):
    message: str = "no reason given"
    code: int = 500


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Failure | None = None


_decode = msgspec.json.Decoder(_Event).decode


def request_body(
    request_id: str, request: Request, entropy_top_k: int, cache_salt: str, adapter: str = ""
) -> dict[str, Any]:
    """What is posted; no default is left to the server, it may read them from the model."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": entropy_top_k,
    }
    if request.stream_interval > 1:
        params["stream_interval"] = request.stream_interval
    if sampling.seed is not None:
        params["seed"] = sampling.seed % 2**63  # -1 would mean none
    if sampling.stop:
        # A stop string may hold special tokens, and it is looked for in the decoded text.
        params |= {
            "stop": sampling.stop,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
    else:
        # Otherwise the API server decodes each token and its `logprobs` largest rivals.
        params["detokenize"] = False
    if request.stop_token_ids:
        # The engine stops at these by itself. Stop strings are found by the API server, and until
        # its abort arrives the engine samples on for nothing.
        params["stop_token_ids"] = request.stop_token_ids
    return {
        "request_id": request_id,
        **({"model": adapter} if adapter else {}),
        "token_ids": request.prompt_ids,
        "sampling_params": params,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": cache_salt,
    }


def entropy_kind(top_k: int, vocab_size: int) -> Literal["exact", "top_k"]:
    """What entropies from the `top_k` largest log-probs are; -1 stands for all."""
    return "exact" if top_k == -1 or top_k >= vocab_size else "top_k"


class Answer:
    """Grows with each event. Lists of `completion` and of the chunks are equally long."""

    def __init__(self, server: str, entropy_kind: Literal["exact", "top_k"]) -> None:
        self._server = server
        self._reason: str | None = None
        self.has_cached_tokens = False
        self.completion = Completion([], [], [], "abort", [], entropy_kind=entropy_kind)

    def add(self, event: bytes) -> Chunk | None:
        """Take one event; the new tokens, if it has any.

        Raises ServerLostError for an error of the engine, EngineError for a refusal or for
        tokens without a log-prob.
        """
        try:
            found = _decode(event)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self._server} streamed what vLLM 0.32 does not: {error}") from None
        if found.error is not None:
            text = f"{self._server} broke off: {found.error.message}"
            kind = FailedError if found.error.code >= 500 else RefusedError
            raise kind(text, found.error.code, found.error.message)
        if found.usage is not None and found.usage.prompt_tokens_details is not None:
            cached = found.usage.prompt_tokens_details.cached_tokens
            self.completion.num_cached_tokens = cached or 0
            self.has_cached_tokens = cached is not None
        return self._extend(found.choices[0]) if found.choices else None

    def finish(self) -> Completion:
        """The whole turn. ServerLostError if the stream ended without a finish reason."""
        done = self.completion
        if self._reason not in ("stop", "length", "abort"):
            raise ServerLostError(f"{self._server} ended the stream with {self._reason!r}")
        done.finish_reason = cast(Literal["stop", "length", "abort"], self._reason)
        spans = done.version_spans
        if [0, *(s.end for s in spans)] != [*(s.start for s in spans), len(done.token_ids)]:
            raise EngineError(
                f"{self._server} gave version spans {spans} for {len(done.token_ids)} tokens"
            )
        return done

    def _extend(self, choice: _Choice) -> Chunk | None:
        done = self.completion
        if choice.finish_reason is not None:
            self._reason = choice.finish_reason
            if isinstance(choice.stop_reason, str):
                done.stop = choice.stop_reason
            done.version_spans = [self._span(span) for span in choice.weight_versions or []]
        if not choice.token_ids:
            return None
        positions = choice.logprobs.content if choice.logprobs is not None else []
        logprobs = [position.logprob for position in positions]
        if len(logprobs) != len(choice.token_ids) or NO_LOGPROB in logprobs:
            raise EngineError(
                f"{self._server} sampled a token without telling its log-prob; "
                "its logits may be NaN"
            )
        entropies = [
            top_k_entropy([top.logprob for top in position.top_logprobs]) for position in positions
        ]
        done.token_ids += choice.token_ids
        done.logprobs += logprobs
        done.entropies += entropies
        return Chunk(choice.token_ids, logprobs, entropies)

    def _span(self, span: _Span) -> VersionSpan:
        try:
            return VersionSpan(int(span.version), span.start, span.end)
        except ValueError:
            raise EngineError(
                f"{self._server} names the weights of tokens {span.start} to {span.end} "
                f"{span.version!r}, not the number of a policy version: did someone else load "
                "weights into it?"
            ) from None


# What a vLLM server is and can do, found out before the first request.

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


ID_PREFIX = "generate-tokens-"  # what the engine puts before the request id that it was given
EMPTY_SHA = sha256(b"").hexdigest()
METRICS: dict[str, Callable[[list[float]], float]] = {
    "vllm:num_requests_running": sum,
    "vllm:num_requests_waiting": sum,
    "vllm:kv_cache_usage_perc": max,  # the fullest of data-parallel engines
    "vllm:num_preemptions_total": sum,
}


class Control:
    """The development routes of one or more API servers that hold the same weights."""

    def __init__(self, servers: Sequence[HttpClient]) -> None:
        self.servers = servers

    async def post(
        self,
        path: str,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """To all at once; the first error is raised when all have answered."""
        await all_of(s.call("POST", path, json, params, timeout_s) for s in self.servers)

    async def pause(self) -> None:
        """Requests stay where they are; new ones queue."""
        await self.post("/pause", params={"mode": "keep"})

    async def reload(self, facts: Facts, source: Path) -> None:
        """Read the weights from a directory, in each worker."""
        method = REPACK if facts.extension else "reload_weights"
        await self.post(
            "/collective_rpc",
            {"method": method, "kwargs": {"weights_path": str(source)}},
            timeout_s=self.servers[0].timeouts.load_s,
        )

    async def reset_prefix_cache(self) -> None:
        """Free what no running request holds; the salt keeps later requests from the rest."""
        await self.post("/reset_prefix_cache")

    async def name_version(self, policy_version: int) -> None:
        """Tokens from now on are labelled with it."""
        await self.post("/update_weight_version", {"new_version": str(policy_version)})

    async def resume(self) -> None:
        await self.post("/resume")

    async def abort(self, facts: Facts, request_ids: Sequence[str]) -> None:
        """Errors do not matter: the request is gone with its server, or it has just ended."""
        path = ABORT if f"POST {ABORT}" in facts.routes else OLD_ABORT
        with suppress(EngineError):
            await self.post(path, {"request_ids": [ID_PREFIX + each for each in request_ids]})

    async def resume_if_possible(self) -> None:
        """After a failure; each server for itself, errors are of no more use."""
        for server in self.servers:
            with suppress(EngineError):
                await server.call("POST", "/resume")

    async def wake(self, facts: Facts) -> None:
        """Resume those that were left paused, or asleep, which counts as paused."""
        paths = [path for path in ("/wake_up", "/resume") if f"POST {path}" in facts.routes]
        for server in self.servers:
            for path in paths:
                if (await server.call_json("GET", "/is_paused"))["is_paused"]:
                    await server.call("POST", path, timeout_s=server.timeouts.load_s)

    async def fall_asleep(self) -> None:
        """Weights go to main memory, the cache is dropped; on the CPU they only pause."""
        params = {"level": "1", "mode": "abort"}
        await self.post("/sleep", params=params, timeout_s=self.servers[0].timeouts.load_s)

    async def load_adapter(self, name: str, source: Path) -> None:
        """Serve an adapter of peft under a name of its own, and see that it does."""
        await self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(source)})
        for server in self.servers:
            models = (await server.call_json("GET", "/v1/models"))["data"]
            if not any(m["id"] == name and m["root"] == str(source) for m in models):
                raise ServerLostError(f"{server.name} does not list the adapter {name}")

    async def unload_adapter(self, name: str) -> None:
        """Errors do not matter: nothing asks for it any more."""
        with suppress(EngineError):
            await self.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def fingerprint(self) -> dict[str, str]:
        """SHA-256 per parameter and worker; empty if one of them is the checksum of nothing."""
        sums: dict[str, str] = {}
        for server in self.servers:
            found = await server.call_json("POST", "/weight_checker", {"action": "checksum"})
            sums.update(found["checksums"])
        return {} if EMPTY_SHA in sums.values() else sums

    async def load(self) -> ServerLoad:
        """Summed over API servers and data-parallel engines."""
        found: dict[str, list[float]] = {name: [] for name in METRICS}
        for server in self.servers:
            _read_metrics(await server.call("GET", "/metrics"), found)
        for name, values in found.items():
            if not values:
                raise ConfigError(
                    f"{self.servers[0].name}/metrics has no {name}: "
                    "start it without --disable-log-stats"
                )
        running, waiting, usage, preemptions = (f(found[name]) for name, f in METRICS.items())
        return ServerLoad(int(running), int(waiting), usage, int(preemptions))


def _read_metrics(body: bytes, found: dict[str, list[float]]) -> None:
    """Prometheus text: a line is NAME{LABELS} VALUE."""
    for line in body.decode().splitlines():
        if line.startswith("vllm:"):
            name = line.partition("{")[0]
            if name in found:
                found[name].append(float(line.rpartition(" ")[2]))
