"""How token losses become one number, and corrections for data that is not of this policy.

Both are weights on whole mini-batches (numpy only). A mode of aggregation is a coefficient c_i a
trajectory and a denominator over the mini-batch of N trajectories with lengths |y_i| (policy
tokens):

    loss = sum_i c_i sum_t l_it / denominator

    token-mean               c_i = 1         denominator sum |y_i|     DAPO, the default
    seq-mean-token-sum       c_i = 1         denominator N
    seq-mean-token-mean      c_i = 1/|y_i|   denominator N             GRPO and GSPO as printed
    seq-mean-token-sum-norm  c_i = 1         denominator N * L         Dr. GRPO, L a constant

A token shared by several trajectories takes the sum of their coefficients. Trajectories without
policy tokens count in none of the modes. The released code of ARPO differs: it aggregates each
micro-batch on its own and weights by rows, so that the result depends on the packing; and its last
mode divides by L without N.

Data of an older policy or another engine is corrected by

    rho = proximal / behaviour      per token; 1 when engine and learner agree and data is fresh

Truncation bounds rho from above (IMPALA, Espeholt 2018; decoupled PPO, Hilton 2022). Masks drop
what truncation cannot repair: a token mask outside a band of rho (IcePop, Ling team 2025), a
sequence mask outside a band of the geometric mean of rho over a trajectory. What is masked adds
nothing to the numerator and stays in the denominator: a step shrinks when much is refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from agentenv.errors import ConfigError
from learners.batch import LeafMap

Floats = NDArray[np.float64]
Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
KLKind = Literal["k1", "abs", "k2", "k3", "low_var_kl"]


def coefficients(mode: Aggregation, lengths: Floats) -> Floats:
    """c_i, float64 [trajectories]."""
    if mode == "seq-mean-token-mean":
        return 1.0 / np.maximum(lengths, 1.0)
    return np.ones_like(lengths)


def denominator(mode: Aggregation, lengths: Floats, norm_length: int) -> float:
    """What this rank's trajectories add to the denominator; `norm_length` is L."""
    if mode == "token-mean":
        return float(lengths.sum())
    num_sequences = float((lengths > 0).sum())
    return num_sequences * norm_length if mode == "seq-mean-token-sum-norm" else num_sequences


Metrics = dict[str, float]

MAX_LOG_RATIO = 20.0
WIDE = (0.5, 2.0)  # the band whose outside is reported when no mask is set


class Band(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ratios proximal / behaviour that are trusted, bounds included."""

    low: Annotated[float, Meta(ge=0, description="smallest trusted ratio")] = 0.5
    high: Annotated[float, Meta(gt=0, description="largest trusted ratio")] = 5.0

    def __post_init__(self) -> None:
        if not self.low < 1.0 < self.high:
            raise ConfigError("algorithm: a band of ratios must contain 1: low < 1 < high")

    def holds(self, ratio: Floats) -> NDArray[np.bool_]:
        return (ratio >= self.low) & (ratio <= self.high)


def ratios(proximal: Floats, behaviour: Floats) -> Floats:
    """exp(proximal - behaviour), the log-ratio clamped to +-20."""
    log_ratio = np.clip(proximal - behaviour, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    clamped: Floats = np.exp(log_ratio)
    return clamped


def token_importance(ratio: Floats, cap: float, mask: Band | None) -> Floats:
    """min(rho, cap), 0 outside the mask's band; float64 [tokens]."""
    kept = np.ones_like(ratio) if mask is None else mask.holds(ratio).astype(np.float64)
    weight: Floats = np.minimum(ratio, cap) * kept
    return weight


def sequence_ratios(log_ratio: Floats, leaves: LeafMap) -> Floats:
    """exp of the mean log-ratio of each trajectory's trained tokens, float64 [leaves]; 1 for a
    trajectory without one. Log-ratios are clamped to +-20."""
    sums = leaves.to_leaves(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    means: Floats = np.exp(sums / np.maximum(leaves.lengths, 1.0))
    return means


def sequence_weights(log_ratio: Floats, leaves: LeafMap, mask: Band | None) -> Floats:
    """1 for trajectories inside the band, 0 outside, float64 [leaves]."""
    if mask is None:
        return np.ones(leaves.num_leaves)
    return mask.holds(sequence_ratios(log_ratio, leaves)).astype(np.float64)


def ratio_moments(ratio: Floats, weight: Floats, mask: Band | None) -> Floats:
    """Sums of w, w rho, w rho^2, and of w where rho is out of band: float64 [4], to be added
    over ranks. w counts the trajectories through a token."""
    low, high = WIDE if mask is None else (mask.low, mask.high)
    outside = (ratio < low) | (ratio > high)
    terms = (weight, weight * ratio, weight * ratio**2, weight * outside)
    return np.array([float(term.sum()) for term in terms])


def ratio_metrics(moments: Floats) -> Metrics:
    """Share of tokens with rho out of band, and effective sample size as a share of the tokens:
    (sum w rho)^2 / (sum w * sum w rho^2), Kish's figure: 1 on-policy, towards 0 when few tokens
    carry the estimate. Without tokens: 0 and 1."""
    total, first, second, outside = moments.tolist()
    if total == 0.0:
        return {"ratio_out_of_band": 0.0, "effective_sample_size": 1.0}
    return {
        "ratio_out_of_band": outside / total,
        "effective_sample_size": first**2 / (total * second),
    }
