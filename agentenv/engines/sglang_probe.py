"""What an SGLang server is and can do, asked once when the client connects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.engines.checkpoint_layout import Layout, read_layout
from agentenv.engines.http import HttpClient, RefusedError
from agentenv.engines.server import ServerInfo
from agentenv.engines.sglang_turn import Limits
from agentenv.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

TRIED = "0.5.23"
NEEDED = (
    "generate",
    "abort_request",
    "continue_generation",
    "update_weight_version",
    "flush_cache",
)
NEEDED_READS = ("model_info", "server_info", "v1/loads")
FEATURES = {
    "load_weights": ("pause_generation", "update_weights_from_disk"),
    "pause": ("pause_generation",),
    "fingerprint": ("weights_checker",),
    "broadcast": (
        "init_weights_update_group",
        "begin_weight_update",
        "update_weights_from_distributed",
        "end_weight_update",
        "destroy_weights_update_group",
    ),
}
MEMORY_SAVER = ("release_memory_occupation", "resume_memory_occupation")
FIELDS = ("rid", "cache_salt", "return_sampling_mask", "sampling_logprobs_mode")
SAMPLING_FIELDS = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop"}
MODEL_SLACK = 4  # tokens by which prompt and turn together may exceed the longest prompt
PROBE_TEMPERATURE = 2.0
PROBE_TOP_K = 4
MAX_RATIO = 0.75  # of the distances; 0.5 is right, 1 is not
LEAST_GAP = 0.02  # nats; below it rounding hides what the probe looks for


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


class Facts(Struct, frozen=True):
    """The outcome; `layout` is None if the model directory is not on this machine."""

    info: ServerInfo
    limits: Limits
    layout: Layout | None


async def probe(http: HttpClient, vocab_size: int | None, layout: Layout | None) -> Facts:
    """Reads routes, version, settings and limits; `layout`: of its model, if it is known already.

    Raises ConfigError for what the run cannot do without.
    """
    routes = await http.routes()
    missing = [f"POST /{name}" for name in NEEDED if f"POST /{name}" not in routes]
    missing += [f"GET /{name}" for name in NEEDED_READS if f"GET /{name}" not in routes]
    if missing:
        raise ConfigError(
            f"{http.name} lacks {', '.join(missing)}; expected SGLang {TRIED} or newer"
        )
    model: dict[str, Any] = await http.call_json("GET", "/model_info")
    try:
        args = msgspec.convert(await http.call_json("GET", "/server_info"), ServerArgs)
        served_name = str(model["served_model_name"])
        # The first follows updates, whose directories are often gone; the second does not.
        places = [Path(model["model_path"]), Path(model["tokenizer_path"])]
    except (msgspec.ValidationError, LookupError) as error:
        raise ConfigError(
            f"{http.name}: cannot read /server_info or /model_info ({error}); expected SGLang "
            f"{TRIED} or newer"
        ) from error
    await _check_fields(http, args)
    _check_args(http.name, args, model)
    layout = layout or await asyncio.to_thread(_find_layout, places)
    size = vocab_size or (layout.vocab_size if layout else None)
    if size is None:
        raise ConfigError(
            f"{http.name}: the vocabulary of {places[0]} is not known, since that directory is "
            "not on this machine; give vocab_size"
        )
    max_len = args.max_req_input_len + MODEL_SLACK
    limits = Limits(
        max_prompt=args.max_req_input_len - 1,
        max_model_len=max_len,
        vocab_size=size,
        max_top_k=args.sampling_mask_max_tokens,
        use_seed=args.enable_deterministic_inference,
    )
    features = frozenset(_features(routes, args))
    info = ServerInfo("sglang", args.version, served_name, max_len, features)
    return Facts(info, limits, layout)


def _features(routes: frozenset[str], args: ServerArgs) -> Iterator[str]:
    yield "versions"
    for feature, names in FEATURES.items():
        if all(f"POST /{name}" in routes for name in names):
            yield feature
    if args.enable_memory_saver and all(f"POST /{name}" in routes for name in MEMORY_SAVER):
        yield "sleep"  # without the flag these routes end the server
    if args.enable_deterministic_inference:
        yield "seed"


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


def _check_args(name: str, args: ServerArgs, model: dict[str, Any]) -> None:
    if not model.get("is_generation", True):
        raise ConfigError(f"{name} serves an embedding model, which samples nothing")
    if args.skip_tokenizer_init:
        raise ConfigError(f"{name} finds no stop strings; start it without --skip-tokenizer-init")
    preferred = args.preferred_sampling_params
    if preferred and not (isinstance(preferred, dict) and preferred.keys() <= SAMPLING_FIELDS):
        raise ConfigError(
            f"{name} changes requests by --preferred-sampling-params {preferred}; start it without"
        )
    if not args.incremental_streaming_output:
        logger.warning(
            "%s repeats the whole turn in every event; start it with "
            "--incremental-streaming-output",
            name,
        )
    if not args.enable_metrics:
        logger.warning(
            "%s does not count preemptions, to which its number of requests is fitted; start it "
            "with --enable-metrics",
            name,
        )
    if not args.enable_deterministic_inference:
        logger.info("%s ignores seeds; --enable-deterministic-inference makes it heed them", name)


def _find_layout(places: Iterable[Path]) -> Layout | None:
    """Of the first directory that is on this machine and holds a model."""
    for place in places:
        try:
            if place.is_dir():
                return read_layout(place)
        except EngineError as error:
            logger.debug("weights to load are not compared with those in %s: %s", place, error)
    return None


async def check_logprobs(http: HttpClient, facts: Facts) -> None:
    """Raises ConfigError unless log-probs are those after temperature.

    Temperature 2 halves the distance between two of them, against greedy sampling, which
    reports the distribution at temperature 1.
    """
    plain = await _ask(http, 0.0, facts.limits.vocab_size)
    scaled = await _ask(http, PROBE_TEMPERATURE, facts.limits.vocab_size)
    both = plain.keys() & scaled.keys()
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


async def _ask(http: HttpClient, temperature: float, vocab_size: int) -> dict[int, float]:
    """The largest log-probs behind a fixed prompt, by token id."""
    body = {
        "input_ids": [index % vocab_size for index in range(8)],
        "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": PROBE_TOP_K,
    }
    try:
        answer = await http.call_json("POST", "/generate", body)
        top = answer["meta_info"]["output_top_logprobs"][0]
        return {token: logprob for logprob, token, _ in top}
    except (RefusedError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{http.name}/generate tells no log-probs: {error}") from error
