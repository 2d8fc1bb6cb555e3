"""Refuses what a server would clamp, cut short, silently change or die of."""

from __future__ import annotations

from math import isfinite

from agentenv.engines.server import Request
from agentenv.errors import EngineError
from agentenv.types import SamplingParams

MIN_TEMPERATURE = 1e-2  # vLLM raises smaller ones to it; 0 is greedy


def check_request(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Raises EngineError, which names what is wrong, unless a server takes it as it is meant."""
    prompt, sampling = request.prompt_ids, request.sampling
    if not len(prompt):
        raise EngineError("the prompt is empty; it needs at least one token id")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        raise EngineError(
            f"the prompt has token ids from {low} to {high}, the vocabulary those from 0 to "
            f"{vocab_size - 1}; do tokenizer and served model belong together?"
        )
    if sampling.max_tokens < 1:
        raise EngineError(f"max_tokens must be at least 1, found {sampling.max_tokens}")
    if len(prompt) + sampling.max_tokens > max_model_len:
        raise EngineError(
            f"{len(prompt)} prompt tokens and max_tokens {sampling.max_tokens} exceed "
            f"max_model_len {max_model_len} of the server"
        )
    _check_sampling(sampling)


def _check_sampling(sampling: SamplingParams) -> None:
    temperature, penalty = sampling.temperature, sampling.repetition_penalty
    if temperature != 0 and not MIN_TEMPERATURE <= temperature < float("inf"):
        raise EngineError(
            f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, found {temperature}"
        )
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"top_p must be above 0 and at most 1, found {sampling.top_p}")
    if sampling.top_k != -1 and sampling.top_k < 1:
        raise EngineError(f"top_k must be -1 (off) or at least 1, found {sampling.top_k}")
    if not 0 <= sampling.min_p <= 1:
        raise EngineError(f"min_p must be from 0 to 1, found {sampling.min_p}")
    if not (isfinite(penalty) and penalty > 0):
        raise EngineError(f"repetition_penalty must be above 0, found {penalty}")
    if not all(sampling.stop):
        raise EngineError("a stop string is empty")
