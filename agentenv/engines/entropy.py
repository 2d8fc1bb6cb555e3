"""Entropy of a sampled-from distribution when only its largest log-probabilities are known."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log

from agentenv.errors import ConfigError


def check_top_k(top_k: int) -> None:
    """Raises ConfigError for what is no number of largest log-probs to take entropies from."""
    if top_k != -1 and top_k < 1:
        raise ConfigError(f"entropy_top_k must be -1 (all) or at least 1, not {top_k}")


def top_k_entropy(logprobs: Iterable[float]) -> float:
    """-sum p ln p - r ln r in nats, r = 1 - sum p being all that is left, taken as one token.

    A lower bound of the entropy: splitting the remainder can only add to it. Exact if `logprobs`
    hold the whole vocabulary. Tokens that cannot be sampled may be listed with -inf, or with a
    very low number in its place.
    """
    total = entropy = 0.0
    for logprob in logprobs:
        p = exp(logprob)
        if p > 0.0:
            total += p
            entropy -= p * logprob
    rest = 1.0 - total
    if rest > 0.0:
        entropy -= rest * log(rest)
    return max(entropy, 0.0)
