"""What an SGLang server is and can do, found out before the first request."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from msgspec import Struct

from agentenv.engines.remote.base import Facts, check_settings, vocabulary
from agentenv.engines.remote.client import HttpClient, Logprob, MalformedReplyError, RefusedError
from agentenv.engines.remote.server import ServerInfo
from agentenv.engines.remote.weight_sync import TransferRoutes
from agentenv.engines.remote.weights import Layout, find_layout
from agentenv.errors import ConfigError
from agentenv.offload import in_thread

logger = logging.getLogger(__name__)

TokenLogprob = tuple[Logprob | None, int, str | None]

TRIED = "0.5.23"
NEEDED = (
    "POST /generate",
    "POST /abort_request",
    "POST /pause_generation",
    "POST /continue_generation",
    "POST /update_weights_from_disk",
    "POST /update_weight_version",
    "POST /flush_cache",
    "GET /model_info",
    "GET /server_info",
    "GET /v1/loads",
)
TRANSFER = TransferRoutes(
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
PROBE_TEMPERATURE = 2.0
PROBE_TOP_K = 4
MAX_RATIO = 0.75  # of the distances; 0.5 is right, 1 is not
LEAST_GAP = 0.02  # nats; below it rounding hides the difference


class SGLangFacts(Facts, frozen=True):
    """Limits of a server: tokens of a prompt, the largest top_k for which it returns log-probs
    after truncation, and whether it uses seeds."""

    max_prompt: int
    max_top_k: int
    use_seed: bool


class ServerArgs(Struct, frozen=True):
    """The part of /server_info that is read."""

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
    """The part of /model_info that is read. `model_path` follows updates, whose directories are
    often gone; `tokenizer_path` does not."""

    served_model_name: str
    model_path: str
    tokenizer_path: str
    is_generation: bool = True


async def probe(http: HttpClient, vocab_size: int | None, layout: Layout | None) -> SGLangFacts:
    """Reads routes, version, settings and limits; `layout`: of its model, if it is known already.

    Raises ConfigError for what the run cannot do without.
    """
    routes = await http.routes()
    if missing := [route for route in NEEDED if route not in routes]:
        raise ConfigError(
            f"{http.name} lacks {', '.join(missing)}; expected SGLang {TRIED} or newer"
        )
    try:
        model = await http.call_as(ModelInfo, "GET", "/model_info")
        args = await http.call_as(ServerArgs, "GET", "/server_info")
    except MalformedReplyError as error:
        raise ConfigError(
            f"cannot read /server_info or /model_info: {error}; expected SGLang {TRIED} or newer"
        ) from error
    folders = [Path(model.model_path), Path(model.tokenizer_path)]
    await _check_fields(http, args)
    _check_args(http.name, args, model)
    layout = layout or await in_thread(find_layout, folders)
    features = {"broadcast"} if routes >= TRANSFER.posts else set()
    if args.enable_memory_saver and routes.issuperset(MEMORY_SAVER):
        features.add("sleep")  # without the flag these routes end the server
    max_len = args.max_req_input_len + MODEL_SLACK
    return SGLangFacts(
        ServerInfo("sglang", args.version, model.served_model_name, max_len, frozenset(features)),
        vocabulary(http.name, vocab_size, layout, str(folders[0])),
        layout,
        args.dp_size,
        max_prompt=args.max_req_input_len - 1,
        max_top_k=args.sampling_mask_max_tokens,
        use_seed=args.enable_deterministic_inference,
    )


async def _check_fields(http: HttpClient, args: ServerArgs) -> None:
    """Unknown fields of a request would be ignored in silence."""
    schema = await http.call_json("GET", "/openapi.json")
    try:
        known = schema["components"]["schemas"]["GenerateReqInput"]["properties"].keys()
    except (LookupError, TypeError, AttributeError):
        known = set()
    missing = [field for field in FIELDS if field not in known]
    if missing:
        raise ConfigError(
            f"{http.name}: POST /generate of SGLang {args.version} does not know "
            f"{', '.join(missing)}; expected SGLang {TRIED} or newer"
        )


def _check_args(name: str, args: ServerArgs, model: ModelInfo) -> None:
    """Raises ConfigError for a server that would change what is sampled."""
    if not model.is_generation:
        raise ConfigError(f"{name} serves an embedding model, which samples nothing")
    if args.skip_tokenizer_init:
        raise ConfigError(f"{name} finds no stop strings; start it without --skip-tokenizer-init")
    preferred = args.preferred_sampling_params
    if preferred and not (isinstance(preferred, dict) and preferred.keys() <= SAMPLING_FIELDS):
        raise ConfigError(
            f"{name} changes requests by --preferred-sampling-params {preferred}; start it without"
        )
    if not args.incremental_streaming_output:
        raise ConfigError(
            f"{name} repeats the whole turn in every event, which makes gigabytes of long turns; "
            "start it with --incremental-streaming-output"
        )
    check_settings(
        name,
        speculative=args.speculative_algorithm,
        flag="--speculative-algorithm",
        quantization=args.quantization,
    )
    if not args.enable_metrics:
        logger.warning(
            "%s does not count preemptions, to which its number of requests is fitted; start it "
            "with --enable-metrics",
            name,
        )
    if not args.enable_deterministic_inference:
        logger.info("%s ignores seeds; --enable-deterministic-inference makes it heed them", name)


async def check_logprobs(http: HttpClient, vocab_size: int) -> None:
    """Raises ConfigError unless log-probs are those after temperature.

    Temperature 2 halves the distance between two of them, against greedy sampling, which
    reports the distribution at temperature 1.
    """
    plain = await _ask(http, 0.0, vocab_size)
    scaled = await _ask(http, PROBE_TEMPERATURE, vocab_size)
    both = plain.keys() & scaled.keys()
    if not both:
        raise ConfigError(
            f"{http.name}/generate returned different tokens when only the temperature of the "
            "log-probs changed"
        )
    top, low = max(both, key=plain.__getitem__), min(both, key=plain.__getitem__)
    gap = plain[top] - plain[low]
    if gap < LEAST_GAP:
        logger.warning(
            "%s: the log-probs of a probe are all alike, so it is not known whether they are those "
            "after temperature",
            http.name,
        )
    elif (scaled[top] - scaled[low]) / gap > MAX_RATIO:
        raise ConfigError(
            f"{http.name} reports log-probs before temperature; start it without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB"
        )


class _TopLogprobs(Struct, frozen=True):
    output_top_logprobs: list[list[TokenLogprob] | None] | None = None


class _Probed(Struct, frozen=True):
    meta_info: _TopLogprobs


async def _ask(http: HttpClient, temperature: float, vocab_size: int) -> dict[int, float]:
    """The largest log-probs after a fixed prompt, by token id."""
    body = {
        "input_ids": [index % vocab_size for index in range(8)],
        "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": PROBE_TOP_K,
    }
    try:
        answer = await http.call_as(_Probed, "POST", "/generate", body)
        top = (answer.meta_info.output_top_logprobs or [])[0] or []
    except (RefusedError, MalformedReplyError, IndexError) as error:
        raise ConfigError(f"{http.name}/generate returns no log-probs: {error}") from error
    return {token: logprob for logprob, token, _ in top if logprob is not None}
